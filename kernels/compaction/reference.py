"""Compaction in plain torch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

BLOCK = 128  # entries moved at a time, or more where rows are few: what an event needs beside the storage
BLOCK_BYTES = 2**20


def gather(states: Tensor, indices: Tensor) -> Tensor:
    """(..., T, D) at (..., K)."""
    flat, rows = _flat(states, indices)
    return flat.index_select(0, rows.reshape(-1)).view(*indices.shape, states.shape[-1])


def move(states: Tensor, indices: Tensor, out: Tensor) -> None:
    """Write the entries at ``indices`` to the front of ``out``. Ascending indices make it safe in place: an entry's
    destination never lies behind its source, so a block overwrites only what earlier blocks have read or nobody
    wants."""
    flat, rows = _flat(states, indices)
    entry = math.prod(indices.shape[:-1]) * states.shape[-1] * states.element_size()
    size = max(BLOCK, BLOCK_BYTES // entry)
    for begin in range(0, indices.shape[-1], size):
        block = rows[..., begin : begin + size]
        moved = flat.index_select(0, block.reshape(-1))
        out[..., begin : begin + block.shape[-1], :] = moved.view(*block.shape, states.shape[-1])


def _flat(states: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """All entries as a matrix, and which of its rows each index means. A view where rows lie at equal distances, as in
    a slice of preallocated storage; else a copy."""
    *lead, entries, dim = states.shape
    capacity = states.stride(-3) // dim if lead else entries
    strides = [dim, 1]
    for size in [capacity, *lead[:0:-1]]:
        strides.insert(0, strides[0] * size)
    if capacity < entries or list(states.stride()) != strides[-states.ndim :]:
        states, capacity = states.contiguous(), entries
    rows = math.prod(lead)
    flat = states.as_strided(((rows - 1) * capacity + entries, dim), (dim, 1))
    first = torch.arange(rows, device=states.device).view(*lead, 1) * capacity
    return flat, first + indices
