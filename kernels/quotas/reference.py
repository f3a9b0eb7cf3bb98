"""Exact integer water-filling in plain torch. Rows (R, S), columns (R, 1), int64."""

from __future__ import annotations

import torch
from torch import Tensor

from ..rows import worth


def segment_quotas(
    ends: Tensor,
    weight: Tensor,
    keep: int,
    min_keep: int,
    by_mass: bool,
    n_sink: Tensor,
    n_recent: Tensor,
    start: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    begins = torch.cat([start, ends[:, :-1]], dim=-1)
    lengths = ends - begins
    entries = ends[:, -1:]
    real = entries - start
    budget = real.clamp(max=keep)
    sink = n_sink.minimum(budget)
    recent = n_recent.minimum(budget - sink).minimum(real - sink)

    in_sink = _overlap(begins, ends, start, start + sink)
    floor = lengths.clamp(max=min_keep)
    wanted = floor
    must = in_sink + _overlap(begins, ends, entries - recent, entries)
    over = must.maximum(floor).sum(dim=-1, keepdim=True) > budget
    if worth(over):
        poor, fewer = _afford(begins, ends, weight, floor.clamp(max=1), in_sink, sink, recent, budget)
        floor = torch.where(over, poor, floor)
        recent = torch.where(over, fewer, recent)
        must = in_sink + _overlap(begins, ends, entries - recent, entries)
    quota = _share(weight if by_mass else lengths, floor, must.maximum(floor), lengths, budget)
    dropped = ((floor == 0) & (wanted > 0)).sum(dim=-1, keepdim=True)
    return quota, sink, recent, dropped


def _overlap(begins: Tensor, ends: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """Entries of [left, right) in each segment."""
    return (ends.minimum(right) - begins.maximum(left)).clamp(min=0)


def _afford(
    begins: Tensor,
    ends: Tensor,
    weight: Tensor,
    floor: Tensor,
    in_sink: Tensor,
    sink: Tensor,
    recent: Tensor,
    budget: Tensor,
) -> tuple[Tensor, Tensor]:
    """Floors (at most one each) and recent entries that the budget can pay for: floors fall, lightest first, only when
    no recent entry is left; then as many recent entries as still fit."""
    alone = floor * (in_sink == 0)  # a segment with sinks pays no extra for its floor
    missing = sink + alone.sum(dim=-1, keepdim=True) - budget
    order = weight.argsort(dim=-1, stable=True)
    ordered = alone.gather(-1, order)
    falls = ordered.cumsum(dim=-1) - ordered < missing
    floor = floor.masked_fill(torch.zeros_like(falls).scatter(-1, order, falls), 0)

    # r recent entries that reach into segment i cost sink + r + the floors before it
    alone = floor * (in_sink == 0)
    reach = budget - sink - (alone.cumsum(dim=-1) - alone)
    entries = ends[:, -1:]
    reach = reach.minimum(entries - begins).minimum(recent)
    fits = (reach > entries - ends) & (ends > begins)
    return floor, torch.where(fits, reach, 0).amax(dim=-1, keepdim=True)


def _share(weight: Tensor, floor: Tensor, low: Tensor, high: Tensor, budget: Tensor) -> Tensor:
    """Integers that sum to the budget: the floor plus a share by weight, held between low and high."""
    free = torch.ones_like(weight, dtype=torch.bool)
    quota = torch.zeros_like(weight)
    exact, total = _exact(weight, floor, high, budget, free)
    for _ in range(weight.shape[-1]):
        excess = exact.clamp(low * total, high * total) - exact  # above 0 where raised to low, below where cut to high
        balance = (excess * free).sum(dim=-1, keepdim=True)
        settled = free & ((excess > 0) & (balance >= 0) | (excess < 0) & (balance <= 0))
        if not worth(settled):
            break
        quota = torch.where(settled, torch.where(excess > 0, low, high), quota)
        free = free & ~settled
        exact, total = _exact(weight, floor, high, budget - quota.sum(dim=-1, keepdim=True), free)
    whole = exact // total
    part = (exact - whole * total).masked_fill(~free, -1)
    quota = torch.where(free, whole, quota)
    left = budget - quota.sum(dim=-1, keepdim=True)
    order = part.argsort(dim=-1, descending=True, stable=True)
    rank = torch.arange(weight.shape[-1], device=weight.device).expand_as(order)
    return quota.scatter_add(-1, order, (rank < left).long())


def _exact(weight: Tensor, floor: Tensor, high: Tensor, budget: Tensor, free: Tensor) -> tuple[Tensor, Tensor]:
    """Shares of the free segments in units of 1 / total (they sum to budget * total), and the total."""
    shares = weight * free
    total = shares.sum(dim=-1, keepdim=True)
    if worth(total == 0):
        room = (high - floor) * free
        room = torch.where(room.sum(dim=-1, keepdim=True) > 0, room, free)
        shares = torch.where(total > 0, shares, room)
        total = shares.sum(dim=-1, keepdim=True)
    total = total.clamp(min=1)  # no segment free
    floor = floor * free
    return floor * total + (budget - floor.sum(dim=-1, keepdim=True)) * shares, total
