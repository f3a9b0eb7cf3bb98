"""Local top-k in plain torch: one sort of int64 keys. Rows (R, T), columns (R, 1)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_INT32 = torch.iinfo(torch.int32)


def segmented_topk(
    scores: Tensor,
    ends: Tensor,
    quota: Tensor,
    n_sink: Tensor,
    n_recent: Tensor,
    start: Tensor | None,
    keep: int,
) -> Tensor:
    rows, entries = scores.shape
    position = torch.arange(entries, device=scores.device)
    begins = F.pad(ends[:, :-1], (1, 0)) if start is None else torch.cat([start, ends[:, :-1]], dim=-1)
    # slots beyond the last segment also end at T: their mark lies beyond the row
    marks = torch.zeros((rows, entries + 1), dtype=torch.int64, device=scores.device)
    owner = marks.scatter_add_(-1, ends, torch.ones_like(ends)).cumsum(dim=-1)[:, :entries]  # segment of each entry
    rank = _rank_keys(scores, n_sink, n_recent, start)
    if start is not None:
        owner = owner - (position < start).long()
    # segments are consecutive, so after sorting by (segment, best first) slot t still belongs to segment owner[t]
    order = ((owner << 33) - rank).argsort(dim=-1, stable=True)
    safe = owner.clamp(min=0)
    chosen = position - begins.gather(-1, safe) < quota.gather(-1, safe)
    if start is not None:
        chosen = chosen & (owner >= 0)
    kept = torch.zeros_like(chosen).scatter_(-1, order, chosen)
    if start is not None:
        short = entries - start <= keep
        kept = torch.where(short, position >= entries - keep, kept)
    return _positions(kept, keep)


def top_indices(scores: Tensor, keep: int, n_sink: Tensor, n_recent: Tensor, start: Tensor | None) -> Tensor:
    entries = scores.shape[-1]
    real = entries if start is None else entries - start
    n_sink = n_sink.clamp(max=keep).clamp(max=real)
    n_recent = n_recent.minimum(keep - n_sink).minimum(real - n_sink)
    rank = _rank_keys(scores, n_sink, n_recent, start)
    position = torch.arange(entries, device=scores.device)
    unique = (rank << 31) - position  # ties to the earlier entry, whatever topk does with them
    best = unique.topk(keep, dim=-1, sorted=False).indices
    return _positions(torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, best, True), keep)


def _rank_keys(scores: Tensor, n_sink: Tensor, n_recent: Tensor, start: Tensor | None) -> Tensor:
    """Integers (R, T) that order like the scores: NaN lowest, protected entries above all, padding below all but in
    its own order (the later pad first, so that pads stay in front of what is kept)."""
    entries = scores.shape[-1]
    bits = (scores.float() + 0.0).view(torch.int32)  # + 0.0 makes one zero of two
    rank = torch.where(bits < 0, bits ^ _INT32.max, bits)
    rank = rank.masked_fill(scores.isnan(), _INT32.min + 1).long()
    position = torch.arange(entries, device=scores.device)
    first = 0 if start is None else start
    protected = (position < first + n_sink) | (position >= entries - n_recent)
    rank = rank.masked_fill(protected, _INT32.max)
    if start is None:
        return rank
    return torch.where(position < start, _INT32.min - entries + position, rank)


def _positions(kept: Tensor, keep: int) -> Tensor:
    """Indices (R, keep), ascending, of the ``keep`` true entries of each row."""
    rows, entries = kept.shape
    slot = torch.where(kept, kept.cumsum(dim=-1) - 1, keep)
    position = torch.arange(entries, device=kept.device).expand(rows, entries)
    return torch.zeros((rows, keep + 1), dtype=torch.int64, device=kept.device).scatter_(-1, slot, position)[:, :keep]
