"""The ``fidelity`` command: every method on every text, one row at a time, resumed where it was left."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from ..presses import DecodingPress, FullKVPress, build
from . import models, teacher_forcing
from .metrics import REGION
from .store import Results
from .texts import Text, load_texts

SCORERS = ["streaming_llm", "random", "random_prompt", "usage", "tova", "expected", "keydiff", "snapkv"]
AMS = ["ams_usage", "ams_tova", "ams_expected", "ams_keydiff", "ams_snapkv"]
PRESETS = ["paper", "released"]
OUTPUT = Path("outputs") / "fidelity"
FILE = "results.jsonl"
SETTING: dict[str, str] = {
    "dtype": "float32",  # what is measured is the method, not rounding
    "device": "cuda" if torch.cuda.is_available() else "cpu",
    "attention": "sdpa",
}
WIDTH = 150  # of tables that do not go to a terminal
NOTES = (
    f"KL(full || pressed) in nats per token, with its standard error over the stretches between events; NLL in nats "
    f"per token; both and top-1 agreement over the tokens after the first event. Regions of {REGION} and the overlap "
    f"are defined here, the papers define neither. Wiped (a): regions of one event's cache with nothing kept, the "
    f"method's own segments where it has several, else runs of {REGION} entries: do not compare (a) across the two "
    f"kinds. Wiped (b): regions of {REGION} tokens of the whole sequence, with the least share that the budget allows. "
    "IoU: overlap of consecutive kept sets. Entries: after an event, and at most."
)


def main(
    *,
    model: str | None = None,
    texts: str | Path | None = None,
    methods: list[str] | None = None,
    budget: int = 256,
    interval: int = 512,
    tokens: int = 5120,
    prompt_tokens: int = 128,
    output: str | Path | None = None,
) -> None:
    """Measure, write ``results.jsonl`` into ``output``, print a table a text and one line of JSON.

    Rows that are there already with the same configuration and versions are not computed again. A method that fails
    is recorded with its error, and tried again next time.

    Parameters
    ----------
    model : str, optional
        As in :func:`models.load`.
    texts : path, optional
        As in :func:`texts.load_texts`.
    methods : list of str, optional
        Names for :func:`pressroom.presses.build`; those of AMS are run with both presets.
    budget, interval : int
        Entries kept per layer and head, and tokens between events.
    tokens : int
        At most that many tokens of each text.
    prompt_tokens : int
        Of those, the prompt.
    output : path, optional
        Default ``outputs/fidelity``.

    Raises
    ------
    ValueError, FileNotFoundError
        For arguments that cannot work, before anything is computed.
    SystemExit
        With code 1, at the end, if a method failed.
    """
    for name, value in {"tokens": tokens, "prompt_tokens": prompt_tokens}.items():
        if value < 1:
            raise ValueError(f"{name}: got {value}, allowed: an integer of at least 1")
    log = Console(stderr=True)
    cells = [(name, preset) for name in _chosen(methods, budget, prompt_tokens, log) for preset in _presets(name)]
    for name, preset in cells:
        _press(name, preset, budget, interval)  # an unknown name is found before any work
    results = Results((OUTPUT if output is None else Path(output)) / FILE)
    run = {"model": model or models.PACKAGED, "budget": budget, "interval": interval} | SETTING
    run |= {"tokens": tokens, "prompt_tokens": prompt_tokens}
    chosen = load_texts(texts)
    plan = {text.id: [_config(run, text, name, preset) for name, preset in cells] for text in chosen}
    missing = {i: [config for config in configs if not results.has(config)] for i, configs in plan.items()}
    if any(missing.values()):
        _compute(model, [text for text in chosen if missing[text.id]], missing, results, log)

    rows = [row for configs in plan.values() for row in map(results.find, configs) if row is not None]
    _print(plan, rows)
    failed = sum(row["status"] != "done" for row in rows)
    computed = sum(map(len, missing.values()))
    summary = {"results": str(results.path), "computed": computed, "reused": len(rows) - computed, "failed": failed}
    print(json.dumps({**summary, "rows": rows}))
    if failed:
        raise SystemExit(1)


def _chosen(methods: list[str] | None, budget: int, prompt_tokens: int, log: Console) -> list[str]:
    if methods is not None:
        if not methods:
            raise ValueError("methods: got none, allowed: at least one name")
        return list(dict.fromkeys(methods))
    if prompt_tokens < budget:
        return SCORERS + AMS
    log.print(
        f"random_prompt is left out: it keeps the {prompt_tokens} prompt tokens, which a budget of {budget} does not "
        "pay; pass --prompt-tokens or --budget to include it"
    )
    return [name for name in SCORERS + AMS if name != "random_prompt"]


def _presets(name: str) -> list[str | None]:
    return [*PRESETS] if name.startswith(("ams_", "ablation_")) else [None]


def _press(name: str, preset: str | None, budget: int, interval: int) -> DecodingPress | FullKVPress:
    options = {} if preset is None else {"preset": preset}
    return build(name, target_size=budget, compression_interval=interval, **options)


def _config(run: dict, text: Text, name: str, preset: str | None) -> dict[str, Any]:
    digest = hashlib.sha256(text.text.encode()).hexdigest()[:16]
    return {**run, "text": text.id, "text_sha256": digest, "method": name, "preset": preset}


def _compute(name: str | None, texts: list[Text], missing: dict, results: Results, log: Console) -> None:
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens")]
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=log) as bar:
        task = bar.add_task("loading the model", total=None)
        model, tokenizer = models.load(
            name,
            dtype=getattr(torch, SETTING["dtype"]),
            device=SETTING["device"],
            attn_implementation=SETTING["attention"],
        )
        ids = {text.id: _tokenize(model, tokenizer, text, missing[text.id][0]) for text in texts}
        bar.update(task, total=sum(x.shape[1] * (len(missing[i]) + 1) for i, x in ids.items()), completed=0)
        done = 0
        for text in texts:
            configs = missing[text.id]
            bar.update(task, description=escape(f"{text.id} full cache"))
            full = teacher_forcing.full_run(
                model, ids[text.id], start=_first_event(configs[0]), progress=lambda n: bar.advance(task, n)
            )
            done += ids[text.id].shape[1]
            for config in configs:
                label = " ".join(filter(None, (text.id, config["method"], config["preset"])))
                bar.update(task, description=escape(label))
                try:
                    press = _press(config["method"], config["preset"], config["budget"], config["interval"])
                    result = teacher_forcing.fidelity(
                        model,
                        ids[text.id],
                        press,
                        prompt_tokens=config["prompt_tokens"],
                        full=full,
                        progress=lambda n: bar.advance(task, n),
                    )
                except Exception as error:  # the others go on
                    results.add(config, "failed", error=f"{type(error).__name__}: {error}")
                    bar.console.print(f"{label}: failed: {type(error).__name__}: {error}", markup=False)
                else:
                    results.add(config, "done", figures=result.figures())
                    bar.console.print(f"{label}: KL {result.kl:.4f} in {result.seconds:.0f} s", markup=False)
                done += ids[text.id].shape[1]
                bar.update(task, completed=done)


def _first_event(config: dict) -> int:
    press = _press("streaming_llm", None, config["budget"], config["interval"])
    return teacher_forcing.first_event(press, config["prompt_tokens"])


def _tokenize(model: Any, tokenizer: Any, text: Text, config: dict) -> torch.Tensor:
    ids = tokenizer(text.text, return_tensors="pt", verbose=False).input_ids[:, : config["tokens"]]
    total, needed = ids.shape[1], _first_event(config) + 2
    if total < needed:
        raise ValueError(
            f"texts: {text.id} has {total} tokens (tokens={config['tokens']}), allowed: at least {needed}, so that an "
            f"event happens (prompt_tokens={config['prompt_tokens']}, interval={config['interval']}, "
            f"budget={config['budget']})"
        )
    positions = getattr(model.config, "max_position_embeddings", None)
    if positions is not None and total > positions:
        raise ValueError(f"tokens: got {total} of {text.id}, allowed: at most {positions}, the positions of the model")
    return ids


def _print(plan: dict[str, list[dict]], rows: list[dict]) -> None:
    out = Console(file=sys.stdout) if sys.stdout.isatty() else Console(file=sys.stdout, width=WIDTH)
    for text, configs in plan.items():
        first = configs[0]
        table = Table(
            title=f"{escape(text)}: at most {first['tokens']} tokens, prompt {first['prompt_tokens']}, budget "
            f"{first['budget']}, interval {first['interval']}"
        )
        table.add_column("method")
        table.add_column("preset")
        for header in ("KL", "top-1", "NLL", "full", "wiped (a)", "(b)", "(b) least", "IoU", "events", "entries", "s"):
            table.add_column(header, justify="right")
        for row in (row for row in rows if row["config"]["text"] == text):
            names = [row["config"]["method"], row["config"]["preset"] or "-"]
            if row["status"] != "done":
                table.add_row(*names, "[red]failed[/red]")
                continue
            f = row["figures"]
            table.add_row(
                *names,
                f"{_number(f['kl'])} ± {_number(f['kl_stderr'])}",
                *(_number(f[key]) for key in ("agreement", "nll_pressed", "nll_full")),
                *(_number(f[f"wipe_out_{key}"]) for key in ("event", "cumulative", "bound")),
                _number(f["iou"]),
                str(f["events"]),
                f"{f['kept']}, {f['peak']}",
                f"{f['seconds']:.1f}",
            )
        out.print(table)
    out.print(NOTES)
    for row in rows:
        if row["status"] != "done":
            out.print(f"failed: {row['config']['text']} {row['config']['method']}: {row['error']}", markup=False)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
