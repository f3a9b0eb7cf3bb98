"""The ``speed`` command: suites of timings, each a function that returns a result with its ratios and targets."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import DynamicCache

from ..kernels import compact, mass_segments, mix_credit, segment_quotas, segmented_topk, top_indices, window_usage
from ..kernels.quotas import Quotas
from ..kernels.segments import Segments
from ..presses import PressLayer, build
from . import loop, models
from .timing import interleaved, machine, milliseconds, ratio

# the paper's values of AMS
SEGMENTS = {"segment_mass": 0.1, "min_len": 16, "max_len": 256}
QUOTAS = {"n_sink": 4, "n_recent": 32, "min_keep": 1}


def ams_event(*, smoke: bool = False, threads: int | None = None) -> dict[str, Any]:
    """One AMS event of a layer shaped like those of Qwen2.5-7B, stage by stage.

    Beside it in the same run: the bare product of queries and keys, plain top-k and gather into new tensors, and the
    selection written as a loop over rows. Compaction is measured in place, as decoding does it, and to new tensors.
    """
    result: dict[str, Any] = {"suite": "ams-event", **machine(threads), "cases": []}
    cases = (
        [(1, 128, 64), (2, 128, 64)] if smoke else [(1, 1024, 512), (8, 1024, 512), (1, 4096, 2048), (8, 4096, 2048)]
    )
    shape = {"heads": 4, "group": 7, "dim": 128, "window": 128}
    if smoke:
        shape |= {"heads": 2, "group": 2, "dim": 16, "window": 8}
    with Progress(console=Console(stderr=True)) as progress:
        for batch, entries, keep in cases:
            repeats = 1 if smoke else (15 if entries * batch < 16_000 else 7)
            result["cases"].append(_event(batch, entries, keep, **shape, repeats=repeats, progress=progress))
    return result


def _event(batch, entries, keep, *, heads, group, dim, window, repeats, progress) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(device)

    queries = draw(batch, heads * group, window, dim)
    storage = tuple(draw(batch, heads, entries + 16, dim) for _ in range(2))
    keys, values = (x[:, :, :entries] for x in storage)
    credit = draw(batch, heads, keep).abs()
    scores = draw(batch, heads, entries)
    usage = window_usage(queries, keys)
    mass, _ = mix_credit(usage, credit, decay=0.9, mix=0.9)
    segments = mass_segments(mass, **SEGMENTS)
    quotas = segment_quotas(segments, keep=keep, **QUOTAS)
    indices = segmented_topk(scores, segments, quotas)
    settings = {"keep": keep, **SEGMENTS, **QUOTAS}

    def plan() -> tuple[Segments, Quotas]:
        found = mass_segments(mass, **SEGMENTS)
        return found, segment_quotas(found, keep=keep, **QUOTAS)

    def plain():
        best = scores.topk(keep, dim=-1).indices[..., None].expand(-1, -1, -1, dim)
        return keys.gather(2, best), values.gather(2, best)

    def by_loop():
        chosen = loop.select(mass, scores, **settings)
        return loop.gather(keys, chosen), loop.gather(values, chosen)

    if not torch.equal(loop.select(mass, scores, **settings), indices):
        raise RuntimeError("the loop and the ops choose different entries: no time is worth reporting")
    seconds = interleaved(
        {
            "window_usage": lambda: window_usage(queries, keys),
            "q k^T alone": lambda: torch.matmul(queries.view(batch, heads, -1, dim), keys.transpose(2, 3)),
            "mix_credit": lambda: mix_credit(usage, credit, decay=0.9, mix=0.9),
            "mass_segments": lambda: mass_segments(mass, **SEGMENTS),
            "segment_quotas": lambda: segment_quotas(segments, keep=keep, **QUOTAS),
            "segmented_topk": lambda: segmented_topk(scores, segments, quotas),
            "compact in place": lambda: compact(keys, values, indices, out=storage),
            "compact to new": lambda: compact(keys, values, indices),
            "selection": lambda: compact(keys, values, segmented_topk(scores, *plan()), out=storage),
            "selection to new": lambda: compact(keys, values, segmented_topk(scores, *plan())),
            "top_indices": lambda: top_indices(scores, keep=keep),
            "plain top-k and gather": plain,
            "selection as a loop": by_loop,
        },
        repeats=repeats,
        progress=progress,
        label=f"batch {batch}, {entries} to {keep}",
    )
    ratios = {
        "usage / q k^T": (ratio(seconds["window_usage"], seconds["q k^T alone"]), "at most", 2.0),
        "selection / plain": (ratio(seconds["selection"], seconds["plain top-k and gather"]), "at most", 1.0),
        "selection to new / plain": (ratio(seconds["selection to new"], seconds["plain top-k and gather"]), None, None),
        "loop / selection": (
            ratio(seconds["selection as a loop"], seconds["selection"]),
            *(("at least", 10.0) if batch >= 8 else (None, None)),
        ),
    }
    return {
        "case": {"batch": batch, "entries": entries, "keep": keep, "heads": heads, "group": group, "dim": dim}
        | {"window": window, "repeats": repeats},
        "milliseconds": {name: milliseconds(times) for name, times in seconds.items()},
        "ratios": {name: _judged(*parts) for name, parts in ratios.items()},
    }


def _judged(value: float, direction: str | None, target: float | None) -> dict[str, Any]:
    judged: dict[str, Any] = {"value": value}
    if direction is not None and target is not None:
        met = value <= target if direction == "at most" else value >= target
        judged |= {"target": f"{direction} {target:g}", "met": met}
    return judged


class GrowingLayer(PressLayer):
    """A press layer without storage of its own: every step copies the whole cache, as ``DynamicCache`` does."""

    keys: Any
    values: Any

    def evict(self, indices, capacity, **rest) -> None:
        super().evict(indices, capacity, **rest)
        self.keys, self.values = (x.clone() for x in (self.keys, self.values))
        self._storage = None
        self._pointer = self.keys.data_ptr()


def decode(*, smoke: bool = False, threads: int | None = None) -> dict[str, Any]:
    """Decode steps of SmolLM2 under one press: bounded storage beside the same press on a cache that is concatenated,
    and beside a full cache of 8k tokens.

    Steps take turns, half an interval after an event. The press is TOVA: what is measured is the cache, not the scorer.
    The full cache is filled with random keys and values.
    """
    budget, interval, context = (32, 16, 128) if smoke else (512, 512, 8192)
    result: dict[str, Any] = {"suite": "decode", **machine(threads), "cases": []}
    model, _ = models.load()
    batches = [1] if smoke else [1, 8]
    with Progress(console=Console(stderr=True)) as progress, torch.no_grad():
        for batch in batches:
            repeats = 2 if smoke else 20
            seconds = _steps(model, batch, budget, interval, context, repeats, progress)
            target = ("at most", 0.93) if batch >= 8 else (None, None)
            faster = ("at least", 8.0) if batch >= 8 else (None, None)
            bounded = seconds["bounded storage"]
            result["cases"].append(
                {
                    "case": {"batch": batch, "budget": budget, "interval": interval, "context": context},
                    "milliseconds": {name: milliseconds(times) for name, times in seconds.items()},
                    "ratios": {
                        "bounded / concatenated": _judged(ratio(bounded, seconds["concatenated"]), *target),
                        "full / bounded": _judged(ratio(seconds["full cache"], bounded), *faster),
                    },
                }
            )
    return result


def _steps(model, batch, budget, interval, context, repeats, progress) -> dict[str, list[float]]:
    config = model.config
    press = build("tova", target_size=budget, compression_interval=interval)
    caches = {"bounded storage": DynamicCache(config=config), "concatenated": DynamicCache(config=config)}
    caches["concatenated"].layers = [GrowingLayer() for _ in range(config.num_hidden_layers)]
    full = DynamicCache(config=config)
    shape = (batch, config.num_key_value_heads, context - repeats - 1, config.head_dim)
    for index in range(config.num_hidden_layers):
        full.update(torch.randn(shape), torch.randn(shape), index)
    token = torch.full((batch, 1), 100)
    prompt = torch.randint(1000, 40_000, (batch, budget), generator=torch.Generator().manual_seed(0))
    with press(model):
        for cache in caches.values():
            for part in prompt, prompt[:, :interval], prompt[:, : interval // 2]:  # an event after the second
                model(part, past_key_values=cache, logits_to_keep=1)

        def bounded_step(name: str) -> None:
            model(token, past_key_values=caches[name])

        stages = {name: functools.partial(bounded_step, name) for name in caches}
        seconds = interleaved(stages, repeats=repeats, progress=progress, label=f"batch {batch}, bounded")
    if press.account[0].events != 1 or press.account[0].entries >= budget + interval:
        raise RuntimeError(f"the steps were to lie after one event: {press.account}")
    plain = {"full cache": lambda: model(token, past_key_values=full)}
    seconds |= interleaved(plain, repeats=repeats, progress=progress, label=f"batch {batch}, full")
    return seconds


def print_table(result: dict[str, Any]) -> None:
    """Medians in milliseconds with quartiles, and the ratios with their targets, a column per case."""
    console = Console(width=None if Console().is_terminal else 150)
    cases = result["cases"]
    table = Table(title=f"{result['suite']}: median ms (quartiles), {result['threads']} threads", title_justify="left")
    table.add_column("")
    for case in cases:
        table.add_column(
            ", ".join(f"{name} {case['case'][name]}" for name in ("batch", "entries", "budget") if name in case["case"])
        )
    for name in cases[0]["milliseconds"]:
        times = [case["milliseconds"][name] for case in cases]
        table.add_row(name, *(f"{t['median']:.2f} ({t['low']:.2f}-{t['high']:.2f})" for t in times))
    table.add_section()
    for name in cases[0]["ratios"]:
        cells = []
        for ratio_ in (case["ratios"][name] for case in cases):
            target = f" [{'met' if ratio_['met'] else 'MISSED'}: {ratio_['target']}]" if "target" in ratio_ else ""
            cells.append(f"{ratio_['value']:.2f}" + target.replace("[", "\\["))
        table.add_row(name, *cells)
    console.print(table)


SUITES: dict[str, Callable[..., dict[str, Any]]] = {"ams-event": ams_event, "decode": decode}
