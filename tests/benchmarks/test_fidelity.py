import json

import pytest
import tokenizers
from helpers import tiny
from tokenizers import decoders, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.testing import CliRunner

from pressroom.benchmarks import fidelity, models, store, teacher_forcing
from pressroom.benchmarks.__main__ import app
from pressroom.benchmarks.texts import Text, load_texts
from pressroom.presses import TOVAPress

TEXT = "The quick brown fox jumps over the lazy dog. " * 4  # 180 bytes, a token each
RUN = {"budget": 32, "interval": 32, "tokens": 150, "prompt_tokens": 20}
METHODS = ["tova", "ams_keydiff"]
ROWS = [("tova", None), ("ams_keydiff", "paper"), ("ams_keydiff", "released")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model with a tokenizer of single bytes."""
    path = tmp_path_factory.mktemp("model")
    tiny("llama").save_pretrained(path)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({token: i for i, token in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=alphabet[0]).save_pretrained(path)
    return str(path)


@pytest.fixture
def run(folder, tmp_path, capsys):
    """Run the command and return what its last line says, and everything it printed."""
    (tmp_path / "fox.txt").write_text(TEXT)

    def call(**options):
        options = {"model": folder, "texts": tmp_path / "fox.txt", "methods": METHODS, **RUN, **options}
        try:
            fidelity.main(output=tmp_path / "out", **options)
            code = 0
        except SystemExit as error:
            code = error.code
        printed = capsys.readouterr().out
        return code, json.loads(printed.splitlines()[-1]), printed

    return call


def lines(tmp_path):
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["results.jsonl"]
    return [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]


def test_every_method_has_a_row(run, tmp_path):
    code, result, printed = run()
    assert code == 0
    assert (result["computed"], result["reused"], result["failed"]) == (3, 0, 0)
    assert result["rows"] == lines(tmp_path)
    assert [(row["config"]["method"], row["config"]["preset"]) for row in result["rows"]] == ROWS
    for row in result["rows"]:
        assert {"text": "fox", "budget": 32, "interval": 32, "tokens": 150}.items() <= row["config"].items()
        assert row["versions"].keys() == {"pressroom", "torch", "transformers", "kvpress", "python", "code"}
        figures = row["figures"]
        assert (figures["tokens"], figures["scored"], figures["events"]) == (150, 98, 4)
        assert (figures["kept"], figures["peak"]) == (32, 64)
        assert figures["kl"] > 0
    for expected in ("fox: at most 150 tokens", "ams_keydiff", "released", "Regions of 64", "(b) least"):
        assert expected in printed


def test_a_second_run_computes_nothing(run, tmp_path, monkeypatch):
    _, first, _ = run()
    for module, name in ((teacher_forcing, "fidelity"), (teacher_forcing, "full_run"), (models, "load")):
        monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("computed again"))
    before = (tmp_path / "out" / "results.jsonl").stat()
    code, second, _ = run()
    assert (code, second["computed"], second["reused"]) == (0, 0, 3)
    assert second["rows"] == first["rows"]
    assert (tmp_path / "out" / "results.jsonl").stat() == before


@pytest.mark.parametrize(
    "change", [{"budget": 31}, {"interval": 33}, {"tokens": 149}, {"prompt_tokens": 21}, "text", "versions"]
)
def test_what_a_row_depends_on(run, tmp_path, monkeypatch, change):
    run(methods=["tova"])
    options = {"methods": ["tova"]}
    if change == "text":
        (tmp_path / "fox.txt").write_text(TEXT.upper())
    elif change == "versions":
        monkeypatch.setattr(store, "versions", lambda: {"code": "another"})
    else:
        options |= change
    _, result, _ = run(**options)
    assert (result["computed"], result["reused"]) == (1, 0)
    assert len(lines(tmp_path)) == 2


def test_a_new_method_is_added(run, tmp_path):
    run(methods=["tova"])
    _, result, _ = run(methods=["keydiff", "tova"])
    assert (result["computed"], result["reused"]) == (1, 1)
    assert [row["config"]["method"] for row in result["rows"]] == ["keydiff", "tova"]
    assert [row["config"]["method"] for row in lines(tmp_path)] == ["tova", "keydiff"]


def test_a_failing_method_does_not_lose_the_others(run, tmp_path, monkeypatch):
    def broken(self, event):
        raise RuntimeError("no scores [today]")

    with monkeypatch.context() as patch:
        patch.setattr(TOVAPress, "scores", broken)
        code, result, printed = run()
    assert code == 1
    assert (result["computed"], result["failed"]) == (3, 1)
    assert [row["status"] for row in lines(tmp_path)] == ["failed", "done", "done"]
    assert lines(tmp_path)[0]["error"] == "RuntimeError: no scores [today]"
    assert "failed: fox tova: RuntimeError: no scores [today]" in printed

    code, result, _ = run()  # only that one is tried again
    assert (code, result["computed"], result["reused"], result["failed"]) == (0, 1, 2, 0)
    assert [row["status"] for row in lines(tmp_path)] == ["done"] * 3


def test_an_interrupt_keeps_what_is_finished(run, tmp_path, monkeypatch):
    original, calls = teacher_forcing.fidelity, []

    def interrupted(*args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(teacher_forcing, "fidelity", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run()
    assert [row["config"]["method"] for row in lines(tmp_path)] == ["tova"]
    _, result, _ = run()
    assert (result["computed"], result["reused"]) == (2, 1)


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    results = store.Results(tmp_path / "out" / "results.jsonl")
    results.add({"method": "a"}, "done", figures={})
    monkeypatch.setattr(store.os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        results.add({"method": "b"}, "done", figures={})
    assert [row["config"]["method"] for row in lines(tmp_path)] == ["a"]


def test_default_methods(capsys):
    log = fidelity.Console(stderr=True)
    assert fidelity._chosen(None, 256, 128, log) == fidelity.SCORERS + fidelity.AMS
    assert capsys.readouterr().err == ""
    assert "random_prompt" not in fidelity._chosen(None, 256, 256, log)
    assert "random_prompt is left out" in capsys.readouterr().err
    assert fidelity._chosen(["random_prompt", "tova", "tova"], 256, 256, log) == ["random_prompt", "tova"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"methods": ["tovo"]}, "name: got 'tovo', .*close: .*tova"),
        ({"methods": []}, "methods: got none"),
        ({"budget": 0}, "target_size: got 0"),
        ({"tokens": 0}, "tokens: got 0"),
        ({"prompt_tokens": 0}, "prompt_tokens: got 0"),
        ({"interval": 150}, "fox has 150 tokens .*, allowed: at least 172, .*interval=150"),
        ({"budget": 148}, "allowed: at least 182, .*budget=148"),
    ],
)
def test_bad_arguments_are_refused_at_once(run, tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        run(**options)
    assert not (tmp_path / "out").exists()


def test_a_text_longer_than_the_model_can_read(run, tmp_path):
    (tmp_path / "fox.txt").write_text(TEXT * 50)
    with pytest.raises(ValueError, match="tokens: got 9000 of fox, allowed: at most 8192"):
        run(tokens=10000)


@pytest.mark.parametrize("line", ["{", "[]", '{"config": {}}'])
def test_another_file_in_the_place_of_results_is_left_alone(run, tmp_path, line):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "results.jsonl").write_text(line + "\n")
    with pytest.raises(ValueError, match="line 1 is no result of this command"):
        run()
    assert (tmp_path / "out" / "results.jsonl").read_text() == line + "\n"


@pytest.mark.real_model
def test_command_line(tmp_path):
    (tmp_path / "fox.txt").write_text("".join(f"The fox number {i} jumps over {i * i} lazy dogs. " for i in range(20)))
    options = {"texts": tmp_path / "fox.txt", "methods": "streaming_llm,ams_snapkv", **RUN, "output": tmp_path / "out"}
    arguments = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    result = CliRunner().invoke(app, ["fidelity", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout.splitlines()[-1])
    assert summary["rows"] == lines(tmp_path)
    assert [row["config"]["model"] for row in summary["rows"]] == ["smollm2"] * 3
    for row in summary["rows"]:
        assert 0.001 < row["figures"]["kl"] < 10
        assert 0.1 < row["figures"]["agreement"] < 1
    assert "fox ams_snapkv released: KL" in result.stderr
    assert "fox ams_snapkv released: KL" not in result.stdout


# -- texts -------------------------------------------------------------------------------------------------------------


def test_texts_from_files_and_folders(tmp_path):
    (tmp_path / "b.txt").write_text("bé\n", encoding="utf-8")
    (tmp_path / "a.jsonl").write_text('{"id": "x", "text": "one\u2028line"}\n\n{"id": "y", "text": "two", "more": 1}\n')
    (tmp_path / "README.md").write_text("not a text")
    (tmp_path / "empty.txt").write_text(" \n")
    assert load_texts(tmp_path / "b.txt") == [Text("b", "bé\n")]
    assert load_texts(str(tmp_path / "a.jsonl")) == [Text("x", "one\u2028line"), Text("y", "two")]
    assert load_texts(tmp_path) == [Text("x", "one\u2028line"), Text("y", "two"), Text("b", "bé\n")]

    (tmp_path / "x.txt").write_text("again")
    with pytest.raises(ValueError, match="has x more than once"):
        load_texts(tmp_path)
    with pytest.raises(ValueError, match=r"got README\.md, allowed: \.txt or \.jsonl"):
        load_texts(tmp_path / "README.md")
    with pytest.raises(ValueError, match="holds no text"):
        load_texts(tmp_path / "empty.txt")
    with pytest.raises(FileNotFoundError, match=r"none does not exist; pass a \.txt file"):
        load_texts(tmp_path / "none")


@pytest.mark.parametrize("line", ["{", "3", '{"id": "x"}', '{"id": 1, "text": "a"}', '{"id": "x", "text": " "}'])
def test_lines_that_are_no_texts(tmp_path, line):
    (tmp_path / "a.jsonl").write_text('{"id": "x", "text": "one"}\n' + line)
    with pytest.raises(ValueError, match=r"a\.jsonl, line 2: .*allowed: "):
        load_texts(tmp_path / "a.jsonl")


def write(file, rows):
    file.write_text(
        "".join(json.dumps({"id": str(i), "text": f"text {i}", **row}) + "\n" for i, row in enumerate(rows))
    )


def test_default_texts(tmp_path):
    write(tmp_path / "texts.jsonl", [{"kind": "prose"}, {"kind": "mathematics"}, {"kind": "mathematics"}])
    trace = {"model": "DeepSeek-R1", "complete": True, "problem": "why?", "tokens_smollm2": 6000}
    rows = [trace, trace | {"tokens_smollm2": 5000}, trace | {"tokens_smollm2": 400, "complete": False}]
    rows += [trace | {"tokens_smollm2": 300, "model": "QwQ-32B"}]
    write(tmp_path / "reasoning_traces.jsonl", rows)
    assert load_texts(data=tmp_path) == [Text("1", "text 1"), Text("1", "why?\n\ntext 1")]


def test_default_texts_that_are_not_there(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"texts\.jsonl, which is not there; pass --texts"):
        load_texts(data=tmp_path)
    write(tmp_path / "texts.jsonl", [{"kind": "mathematics"}])
    with pytest.raises(FileNotFoundError, match=r"reasoning_traces\.jsonl, which is not there; pass --texts"):
        load_texts(data=tmp_path)
    trace = {"model": "DeepSeek-R1", "complete": True, "problem": "why?", "tokens_smollm2": 9000}
    write(tmp_path / "reasoning_traces.jsonl", [trace])
    with pytest.raises(ValueError, match="no finished DeepSeek-R1 trace within 8192 tokens; pass --texts"):
        load_texts(data=tmp_path)
    write(tmp_path / "texts.jsonl", [{"kind": "code"}])
    with pytest.raises(ValueError, match="no row of kind 'mathematics'; pass --texts"):
        load_texts(data=tmp_path)
