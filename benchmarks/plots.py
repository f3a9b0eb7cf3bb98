"""Pictures of what presses do."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from ..presses import Trace

matplotlib.use("Agg")


def held_positions(trace: Trace, layers: int, total: int) -> np.ndarray:
    """Share (layers, total) of KV heads that hold each original position at the end of a single sequence: what the last
    event kept, and everything after it."""
    held = np.ones((layers, total))
    for layer in range(layers):
        events = trace.layer(layer)
        if not events:
            continue
        last = events[-1]
        held[layer, : last.seen] = 0
        kept = last.kept[0]  # (H, K)
        for head in kept.tolist():
            held[layer, head] += 1 / len(kept)
    return held


def wiped_regions(trace: Trace, layers: int, total: int, region: int) -> np.ndarray:
    """Share (regions,) of (layer, KV head) pairs that hold nothing of each region of ``region`` tokens."""
    count = -(-total // region)
    empty = np.zeros(count)
    for layer in range(layers):
        events = trace.layer(layer)
        if not events:
            continue
        last = events[-1]
        for head in last.kept[0]:
            positions = np.concatenate([head.numpy(), np.arange(last.seen, total)])
            missing = np.setdiff1d(np.arange(count), np.unique(positions // region))
            empty[missing] += 1 / (len(last.kept[0]) * layers)
    return empty


def retention_map(held: dict[str, np.ndarray], wiped: dict[str, np.ndarray], *, region: int, prompt: int) -> Figure:
    """A panel per method: which original positions each layer still holds, and below it the regions that were lost."""
    names = list(held)
    figure = Figure(figsize=(11, 1.0 + 1.9 * len(names)), layout="constrained")
    grid = figure.subplots(2 * len(names), 1, sharex=True, height_ratios=[6, 1] * len(names), squeeze=False)[:, 0]
    for i, name in enumerate(names):
        top, strip = grid[2 * i], grid[2 * i + 1]
        total = held[name].shape[1]
        image = top.imshow(
            held[name],
            aspect="auto",
            cmap="Blues",
            vmin=0,
            vmax=1,
            extent=(0, total, len(held[name]), 0),
            interpolation="nearest",
        )
        top.set_title(name, loc="left", fontsize=10)
        top.set_ylabel("layer")
        top.axvline(prompt, color="black", linewidth=0.8, linestyle=":")
        strip.imshow(
            wiped[name][None], aspect="auto", cmap="Reds", vmin=0, vmax=1, extent=(0, len(wiped[name]) * region, 1, 0)
        )
        strip.set_yticks([])
        strip.set_ylabel("lost", rotation=0, ha="right", va="center")
        top.set_xlim(0, total)
    grid[-1].set_xlabel("original position (dotted: end of the prompt)")
    figure.colorbar(image, ax=list(grid), label="share of KV heads that hold the position", shrink=0.6)
    figure.suptitle(
        f"What is still cached. Red: share of layers and heads with nothing left of {region} tokens", fontsize=11
    )
    return figure


def save(figure: Figure, path: Path) -> None:
    """Write a picture at once or not at all; the ending says which kind."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, scratch = tempfile.mkstemp(prefix=".plot-", suffix=path.suffix, dir=path.parent)
    os.close(handle)
    try:
        figure.savefig(scratch, dpi=130)
        Path(scratch).chmod(0o644)
        os.replace(scratch, path)
    finally:
        Path(scratch).unlink(missing_ok=True)
