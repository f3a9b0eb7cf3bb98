"""Segmentation in plain torch. Rows (R, T); everything after the fixed point is int64."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

SCALE = 2**40


def fixed_point(mass: Tensor) -> Tensor:
    """Mass in units of 2**-40, rounded down."""
    return (mass.double() * SCALE).nan_to_num_(nan=0.0, posinf=SCALE).clamp_(min=0, max=SCALE).long()


def mass_segments(
    mass: Tensor, segment_mass: float, min_len: int, max_len: int, start: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    rows, entries = mass.shape
    prefix = fixed_point(mass).cumsum(dim=-1)
    first = torch.zeros((rows, 1), dtype=torch.int64, device=mass.device) if start is None else start

    # cuts: nodes (R, n) are the start, each threshold's cut, the end; they ascend, with repetitions
    steps = torch.arange(1, _thresholds(segment_mass) + 1, device=mass.device, dtype=torch.float64)
    thresholds = (steps * segment_mass * prefix[:, -1:].double()).ceil().long()
    cuts = (torch.searchsorted(prefix, thresholds) + 1).maximum(first + 1)
    nodes = torch.cat([first, cuts, torch.full_like(first, entries)], dim=-1)

    # merge: from each node the segment reaches the first one far enough; follow that from the start by doubling
    last = nodes.shape[-1] - 1
    follow = torch.searchsorted(nodes, nodes + min_len).clamp(max=last)
    follow = torch.where(nodes.gather(-1, follow) == entries, last, follow)
    reached = torch.zeros_like(nodes)
    reached[:, 0] = 1
    for _ in range(last.bit_length()):
        reached = reached.scatter_reduce(-1, follow, reached, "amax")
        follow = follow.gather(-1, follow)
    inner = nodes <= entries - min_len  # a later one would leave a short last segment
    inner[:, 0] = False
    inner[:, -1] = True
    is_end = reached.bool() & inner

    # split: how many parts each segment has, and which part each output slot is
    marked = torch.where(is_end, nodes, first)
    begins = F.pad(marked.cummax(dim=-1).values[:, :-1], (1, 0)).maximum(first)
    lengths = torch.where(is_end, nodes - begins, 0)
    parts = (lengths + max_len - 1) // max_len
    upto = parts.cumsum(dim=-1)
    slots = max(1, min(entries // min_len, last + entries // max_len))
    slot = torch.arange(slots, device=mass.device).expand(rows, slots).contiguous()
    owner = torch.searchsorted(upto, slot, right=True).clamp(max=last)
    n_parts = parts.gather(-1, owner).clamp(min=1)
    part = slot - upto.gather(-1, owner) + n_parts
    ends = begins.gather(-1, owner) + (part + 1) * lengths.gather(-1, owner) // n_parts
    count = upto[:, -1]
    ends = torch.where(slot < count[:, None], ends, entries)
    return ends, count, _weights(prefix, ends)


def fixed_segments(mass: Tensor, length: int, start: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    rows, entries = mass.shape
    prefix = fixed_point(mass).cumsum(dim=-1)
    slots = -(-entries // length)
    ends = (length * torch.arange(1, slots + 1, device=mass.device)).expand(rows, -1)
    first = torch.zeros((rows, 1), dtype=torch.int64, device=mass.device) if start is None else start
    count = ((entries - first + length - 1) // length)[:, 0]
    ends = (ends + first).clamp(max=entries)
    return ends, count, _weights(prefix, ends)


def _thresholds(segment_mass: float) -> int:
    """How many multiples of ``segment_mass`` lie below 1."""
    count = math.ceil(1 / segment_mass) + 1
    while count and count * segment_mass >= 1:
        count -= 1
    return count


def _weights(prefix: Tensor, ends: Tensor) -> Tensor:
    return F.pad(prefix, (1, 0)).gather(-1, ends).diff(dim=-1, prepend=torch.zeros_like(prefix[:, :1]))
