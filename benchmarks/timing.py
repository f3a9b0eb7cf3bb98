"""Timing that compares: interleaved repetitions in one process, medians and quartiles."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Mapping

import torch
from rich.progress import Progress

from .store import versions


def interleaved(
    stages: Mapping[str, Callable[[], object]], *, repeats: int, progress: Progress | None = None, label: str = ""
) -> dict[str, list[float]]:
    """Seconds of each repetition of each stage. The stages take turns, so that a slow moment of the machine hits all of
    them; the first round warms up and does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in stages}
    task = progress.add_task(label, total=(repeats + 1) * len(stages)) if progress else None
    for round_ in range(repeats + 1):
        for name, stage in stages.items():
            begin = time.perf_counter()
            stage()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if round_:
                seconds[name].append(time.perf_counter() - begin)
            if progress and task is not None:
                progress.advance(task)
    return seconds


def milliseconds(seconds: list[float]) -> dict[str, float]:
    """Median and quartiles."""
    if len(seconds) < 2:
        return dict.fromkeys(("median", "low", "high"), 1000 * seconds[0])
    low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return {"median": 1000 * median, "low": 1000 * low, "high": 1000 * high}


def ratio(a: list[float], b: list[float]) -> float:
    """Median over the repetitions of a / b, each taken in the same round."""
    return statistics.median(x / y for x, y in zip(a, b, strict=True))


def machine(threads: int | None) -> dict:
    """What a time depends on."""
    if threads is not None:
        torch.set_num_threads(threads)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    return {"threads": torch.get_num_threads(), "device": device, "versions": versions()}
