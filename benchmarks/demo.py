"""The ``demo`` command: a real model answers a problem with a full and with bounded caches, side by side."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from transformers import DynamicCache
from transformers.generation.streamers import BaseStreamer

from ..presses import FullKVPress, build
from . import models
from .metrics import REGION, repetition_rate
from .plots import held_positions, retention_map, save, wiped_regions
from .store import versions
from .teacher_forcing import fidelity, full_run

PROMPT = (
    "A school orders 12 boxes of notebooks. Each box holds 24 notebooks. One third of the notebooks go to grade 5, and "
    "half of the rest go to grade 6. Every student of grade 5 gets 4 notebooks, and every student of grade 6 gets 3. "
    "How many students are there in the two grades together? Think step by step, check each step, and then solve the "
    "problem again in a different way."
)
OUTPUT = Path("outputs") / "demo"
EVENTS = 3  # fewer show nothing
SAMPLING = {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 0}


@dataclass
class Answer:
    """Figures of one method."""

    method: str
    events: int
    entries: int
    peak_entries: int
    bytes: int
    peak_bytes: int
    tokens_per_second: float
    agreement: float
    kl: float
    repetition: float
    text: str


class Meter(BaseStreamer):
    """Watches generation: advances the bar, takes the time, and the bytes that the cache really holds."""

    def __init__(self, cache: DynamicCache, progress: Progress, task: Any) -> None:
        self.cache, self.progress, self.task = cache, progress, task
        self.times: list[float] = []
        self.entries = self.bytes = 0

    def put(self, value) -> None:
        held = [layer for layer in self.cache.layers if layer.keys is not None]
        self.bytes = max(self.bytes, cache_bytes(self.cache))
        self.entries = max([self.entries, *(layer.keys.shape[-2] for layer in held)])
        if value.numel() == 1:  # the first call brings the prompt
            self.times.append(time.perf_counter())
            self.progress.advance(self.task)

    def end(self) -> None:
        pass


def cache_bytes(cache: DynamicCache) -> int:
    """Bytes of the storage behind a cache's keys and values."""
    held = [layer for layer in cache.layers if layer.keys is not None]
    return sum(x.untyped_storage().nbytes() for layer in held for x in (layer.keys, layer.values))


def main(
    *,
    model: str | None = None,
    methods: list[str] | None = None,
    prompt: str = PROMPT,
    budget: int = 128,
    interval: int = 128,
    tokens: int = 768,
    seed: int = 0,
    output: str | Path | None = None,
) -> None:
    """Generate with every method, print answers and a table, write a retention map and one line of JSON.

    All methods sample with the same seed and none may stop early, so that they generate equally many tokens. Texts
    diverge as soon as one token differs; agreement is therefore measured on the tokens of the full cache: the share of
    positions after the first event at which a method would have put the same token first.

    Parameters
    ----------
    model : str, optional
        As in :func:`models.load`.
    methods : list of str, optional
        Names for :func:`pressroom.presses.build`, default ``full_kv``, ``tova``, ``ams_tova``.
    prompt : str
        What to ask.
    budget, interval : int
        Entries kept per layer and head, and tokens between events.
    tokens : int
        Tokens to generate: at least three events.
    seed : int
        Seed of the sampling.
    output : path, optional
        Folder of the picture, default ``outputs/demo``.

    Raises
    ------
    ValueError
        For an unknown method, or numbers that give fewer than three events.
    """
    names = methods or ["full_kv", "tova", "ams_tova"]

    def fresh(name: str):
        return build(name, target_size=budget, compression_interval=interval)

    presses = {name: fresh(name) for name in names}
    if (tokens - 1) // interval < EVENTS:
        raise ValueError(
            f"tokens: got {tokens}, allowed: at least {EVENTS * interval + 1} for {EVENTS} events, interval {interval}"
        )
    console = Console(width=None if Console().is_terminal else 120)
    console.print(f"Loading {model or 'SmolLM2-135M-Instruct'} ...")
    lm, tokenizer = models.load(model)
    encoded = encode(tokenizer, prompt)
    ids = encoded["input_ids"]
    length = ids.shape[1]
    if length + EVENTS * interval <= budget:
        raise ValueError(
            f"budget: got {budget}, allowed: below {length + EVENTS * interval}, or nothing is ever evicted"
        )
    console.print(Panel(escape(prompt), title=f"the problem, {length} tokens with the chat template"))

    answers, traces = {}, {}
    reference = None
    bar = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
    order = sorted(names, key=lambda name: name != "full_kv")  # the others are compared with its tokens
    for name in order:
        with Progress(*bar, console=Console(stderr=True), transient=True) as progress:
            task = progress.add_task(name, total=tokens)
            out, cache, trace, meter = generate(lm, encoded, presses[name], tokens, seed, progress, task)
        new = out[0, length:]
        events = len(trace.layer(trace.layers[0])) if trace.events else 0
        if not isinstance(presses[name], FullKVPress) and events < EVENTS:
            raise RuntimeError(f"{name}: {events} events, expected at least {EVENTS}; raise --tokens or lower --budget")
        text = tokenizer.decode(new, skip_special_tokens=True)
        console.print(Panel(escape(text.strip()), title=f"{name}, {len(new)} tokens"))
        if reference is None:  # the tokens of full_kv, or of the first method where that is left out
            reference = full_run(lm, out[0], start=length)
        close = fidelity(lm, reference.ids, fresh(name), prompt_tokens=length, full=reference)
        traces[name] = trace
        answers[name] = Answer(
            method=name,
            events=events,
            entries=max(layer.keys.shape[-2] for layer in cache.layers),
            peak_entries=max([meter.entries, *(account.peak_entries for account in presses[name].account)]),
            bytes=cache_bytes(cache),
            peak_bytes=meter.bytes,
            tokens_per_second=(len(meter.times) - 1) / (meter.times[-1] - meter.times[0]),
            agreement=close.agreement,
            kl=close.kl,
            repetition=repetition_rate(new),
            text=text,
        )
    console.print(table_of([answers[name] for name in names]))

    total = length + tokens - 1  # the last token is never fed
    layers = lm.config.get_text_config().num_hidden_layers
    path = Path(output or OUTPUT) / "retention.png"
    figure = retention_map(
        {name: held_positions(traces[name], layers, total) for name in names},
        {name: wiped_regions(traces[name], layers, total, REGION) for name in names},
        region=REGION,
        prompt=length,
    )
    save(figure, path)
    console.print(f"Retention map: {path}")
    result = {
        "model": model or "smollm2",
        "budget": budget,
        "interval": interval,
        "tokens": tokens,
        "prompt_tokens": length,
        "seed": seed,
        "sampling": SAMPLING,
        "retention_map": str(path),
        "versions": versions(),
        "methods": [asdict(answers[name]) for name in names],
    }
    print(json.dumps(result))


def encode(tokenizer, prompt: str):
    """Prompt with the model's chat template where it has one."""
    if tokenizer.chat_template is None:
        return tokenizer(prompt, return_tensors="pt")
    chat = [{"role": "user", "content": prompt}]
    return tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")


def generate(model, encoded, press, tokens: int, seed: int, progress: Progress, task) -> tuple[Any, ...]:
    """Ids (1, prompt + tokens), the cache as it is at the end, the trace, and the meter."""
    cache = DynamicCache(config=model.config)
    meter = Meter(cache, progress, task)
    torch.manual_seed(seed)
    with press(model), press.record() as trace:
        out = model.generate(
            **encoded, past_key_values=cache, streamer=meter, min_new_tokens=tokens, max_new_tokens=tokens, **SAMPLING
        )
    return out, cache, trace, meter


def table_of(answers: list[Answer]) -> Table:
    """Figures beside each other."""
    table = Table(
        title="Cache per layer and KV head; bytes of all layers as allocated; agreement on the tokens of the first row "
        "after the first event",
        title_justify="left",
    )
    columns = [
        "method",
        "events",
        "entries: peak",
        "final",
        "MB: peak",
        "final",
        "tokens/s",
        "agreement",
        "KL",
        "loops",
    ]
    for name in columns:
        table.add_column(name, justify="left" if name == "method" else "right")
    for a in answers:
        table.add_row(
            a.method,
            str(a.events),
            str(a.peak_entries),
            str(a.entries),
            f"{a.peak_bytes / 1e6:.1f}",
            f"{a.bytes / 1e6:.1f}",
            f"{a.tokens_per_second:.1f}",
            f"{a.agreement:.3f}",
            f"{a.kl:.3f}",
            f"{a.repetition:.2f}",
        )
    return table
