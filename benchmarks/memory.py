"""The ``memory`` command: what a method needs while a prompt is computed and while it decodes, measured."""

from __future__ import annotations

import ctypes
import gc
import json
import multiprocessing
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from transformers import DynamicCache

from ..presses import build
from . import models
from .demo import cache_bytes
from .store import versions

METHODS = ["full_kv", "streaming_llm", "tova", "snapkv", "expected", "keydiff", "ams_tova"]
STATUS = Path("/proc/self/status")
M_MMAP_THRESHOLD = -3  # glibc's malloc.h


def main(
    *,
    model: str | None = None,
    methods: list[str] | None = None,
    budget: int = 256,
    interval: int = 128,
    tokens: int = 300,
    prompt_tokens: int = 2048,
    batch: int = 4,
) -> None:
    """Print a table and one line of JSON: peaks above the loaded model, first-token time, bytes of the cache.

    Each method runs in a process of its own. On a GPU the allocator's peak is read, else the resident set of the
    process, which Linux alone can reset. There glibc is told to give blocks of a megabyte or more back when they are
    freed: as it is set, it keeps them and fragments, which adds up to a gigabyte that no tensor holds.

    Parameters
    ----------
    model : str, optional
        As in :func:`models.load`.
    methods : list of str, optional
        Names for :func:`pressroom.presses.build`.
    budget, interval, tokens, prompt_tokens, batch : int
        Entries kept, tokens between events, tokens to generate, tokens of the random prompt, rows.

    Raises
    ------
    ValueError
        For an unknown method, or where there is neither a GPU nor ``/proc``.
    """
    names = methods or METHODS
    for name in names:
        build(name, target_size=budget, compression_interval=interval)
    if not torch.cuda.is_available() and not STATUS.exists():
        raise ValueError(f"device: got a CPU without {STATUS}, allowed: Linux, or a CUDA device")
    setting = {"budget": budget, "interval": interval, "tokens": tokens, "prompt_tokens": prompt_tokens, "batch": batch}
    models.load(model)  # whatever is converted once, is converted now
    rows = []
    context = multiprocessing.get_context("spawn")
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("methods", total=len(names))
        for name in names:
            with context.Pool(1) as pool:
                rows.append({"method": name} | pool.apply(_measure, (model, name, setting)))
            progress.advance(task)
    Console(width=None if Console().is_terminal else 130).print(_table(rows, setting))
    print(json.dumps({"model": model or "smollm2", **setting, "versions": versions(), "methods": rows}))


def _measure(name: str | None, method: str, setting: dict[str, int]) -> dict[str, Any]:
    _return_large_blocks()
    model, _ = models.load(name, device="cuda" if torch.cuda.is_available() else "cpu")
    press = build(method, target_size=setting["budget"], compression_interval=setting["interval"])
    generator = torch.Generator().manual_seed(0)
    shape = (setting["batch"], setting["prompt_tokens"])
    ids = torch.randint(1000, model.config.vocab_size, shape, generator=generator).to(model.device)
    model(ids[:, :8])  # what is allocated once
    cache = DynamicCache(config=model.config)
    with press(model), torch.no_grad():
        _reset_peak()
        before = _peak()
        began = time.perf_counter()
        token = model(ids, past_key_values=cache, logits_to_keep=1).logits[:, -1:].argmax(dim=-1)
        first = time.perf_counter() - began
        prefill = _peak() - before
        _reset_peak()
        smallest = cache_bytes(cache)
        began = time.perf_counter()
        for _ in range(setting["tokens"]):
            token = model(token, past_key_values=cache).logits.argmax(dim=-1)
            smallest = min(smallest, cache_bytes(cache))
        seconds = time.perf_counter() - began
        decode = _peak() - before
    return {
        "prefill_peak": prefill,
        "decode_peak": decode,
        "first_token_seconds": first,
        "tokens_per_second": setting["batch"] * setting["tokens"] / seconds,
        "cache_after_event": smallest,
        "cache_at_end": cache_bytes(cache),
        "events": press.account[0].events if press.account else 0,
    }


def _return_large_blocks() -> None:
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(M_MMAP_THRESHOLD, 1 << 20)


def _reset_peak() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return
    if hasattr(libc := ctypes.CDLL(None), "malloc_trim"):  # what was freed while the model loaded is no longer resident
        libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def _peak() -> int:
    """Bytes, at most since the last reset."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])


def _table(rows: list[dict[str, Any]], setting: dict[str, int]) -> Table:
    title = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in setting.items())
    table = Table(title=f"MB above the loaded model ({title})", title_justify="left")
    columns = [
        "method",
        "prefill peak",
        "decode peak",
        "cache after event",
        "cache at end",
        "first token s",
        "tokens/s",
    ]
    for name in columns:
        table.add_column(name, justify="left" if name == "method" else "right")
    for row in rows:
        sizes = [row[key] / 1e6 for key in ("prefill_peak", "decode_peak", "cache_after_event", "cache_at_end")]
        times = [row["first_token_seconds"], row["tokens_per_second"]]
        table.add_row(row["method"], *(f"{x:.0f}" for x in sizes), *(f"{x:.1f}" for x in times))
    return table
