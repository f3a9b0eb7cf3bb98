"""The selection of AMS as one would first write it: a Python loop over rows and segments. The measure for the ops."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def select(
    mass: Tensor,
    scores: Tensor,
    *,
    keep: int,
    segment_mass: float,
    min_len: int,
    max_len: int,
    n_sink: int,
    n_recent: int,
    min_keep: int,
) -> Tensor:
    """Kept indices (B, H, keep) from mass and scores (B, H, T), for budgets that pay for all floors."""
    batch, heads, entries = mass.shape
    out = torch.empty(batch, heads, keep, dtype=torch.int64, device=mass.device)
    for b in range(batch):
        for h in range(heads):
            weights = (mass[b, h].double() * 2**40).floor().long()
            ends = _segments(weights.cumsum(0), segment_mass, min_len, max_len)
            quota = _quotas(ends, weights, keep, n_sink, n_recent, min_keep)
            row = scores[b, h].clone()
            row[:n_sink] = torch.inf
            row[entries - n_recent :] = torch.inf
            kept = []
            for begin, end, count in zip([0, *ends[:-1]], ends, quota, strict=True):
                order = row[begin:end].argsort(descending=True, stable=True)
                kept.append(order[:count].sort().values + begin)
            out[b, h] = torch.cat(kept)
    return out


def gather(states: Tensor, indices: Tensor) -> Tensor:
    """Row by row."""
    rows = [
        torch.stack([states[b, h].index_select(0, indices[b, h]) for h in range(states.shape[1])])
        for b in range(states.shape[0])
    ]
    return torch.stack(rows)


def _segments(prefix: Tensor, segment_mass: float, min_len: int, max_len: int) -> list[int]:
    entries, total = len(prefix), int(prefix[-1])
    cuts: list[int] = []
    k = 1
    while k * segment_mass < 1:
        threshold = math.ceil(k * segment_mass * total)
        cut = int((prefix >= threshold).nonzero()[0]) + 1
        if not cuts or cuts[-1] != cut:
            cuts.append(cut)
        k += 1
    if not cuts or cuts[-1] != entries:
        cuts.append(entries)
    merged, begin = [], 0
    for end in cuts:
        if end - begin >= min_len:
            merged.append(end)
            begin = end
    if not merged:
        merged = [entries]
    merged[-1] = entries
    ends: list[int] = []
    begin = 0
    for end in merged:
        length = end - begin
        parts = -(-length // max_len)
        ends += [begin + (j + 1) * length // parts for j in range(parts)]
        begin = end
    return ends


def _quotas(ends: list[int], weights: Tensor, keep: int, n_sink: int, n_recent: int, min_keep: int) -> list[int]:
    begins, entries = [0, *ends[:-1]], ends[-1]
    mass = [int(weights[a:b].sum()) for a, b in zip(begins, ends, strict=True)]
    high = [b - a for a, b in zip(begins, ends, strict=True)]
    floor = [min(min_keep, length) for length in high]
    must = [
        max(0, min(b, n_sink) - a) + max(0, b - max(a, entries - n_recent)) for a, b in zip(begins, ends, strict=True)
    ]
    low = [max(m, f) for m, f in zip(must, floor, strict=True)]
    quota, free, budget = [0] * len(ends), list(range(len(ends))), keep
    while True:
        total = sum(mass[i] for i in free)
        rest = budget - sum(floor[i] for i in free)
        exact = {i: floor[i] * total + rest * mass[i] for i in free}
        balance = sum(min(max(exact[i], low[i] * total), high[i] * total) for i in free) - budget * total
        raised = [i for i in free if balance >= 0 and exact[i] < low[i] * total]
        lowered = [i for i in free if balance <= 0 and exact[i] > high[i] * total]
        if not raised and not lowered:
            break
        for i in raised + lowered:
            quota[i] = low[i] if i in raised else high[i]
            budget -= quota[i]
            free.remove(i)
    for i in free:
        quota[i] = exact[i] // total
    left = budget - sum(quota[i] for i in free)
    for i in sorted(free, key=lambda i: (-(exact[i] % total), i))[:left]:
        quota[i] += 1
    return quota
