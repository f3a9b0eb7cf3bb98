"""Consecutive regions of the cache."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..dispatch import choose
from ..rows import per_row, require, require_size
from . import reference


class Segments(NamedTuple):
    """Consecutive segments of each row, int64.

    Attributes
    ----------
    ends : Tensor
        (..., S) end of each segment (exclusive), padded with T.
    count : Tensor
        (...) number of segments.
    weight : Tensor
        (..., S) mass of each in units of 2**-40, padded with 0.
    """

    ends: Tensor
    count: Tensor  # type: ignore[assignment]  # hides tuple.count, which nobody needs here
    weight: Tensor


def mass_segments(
    mass: Tensor,
    *,
    segment_mass: float,
    min_len: int,
    max_len: int,
    start: Tensor | None = None,
    backend: str | None = None,
) -> Segments:
    """Segments of about equal mass and bounded length.

    A cut comes after the first entry that reaches each multiple of ``segment_mass`` of the row's mass, in integer
    arithmetic (units of 2**-40), so that every backend and batch gives the same ones. Then segments shorter than
    ``min_len`` absorb the next, a short last one joins the one before, and those longer than ``max_len`` are split
    evenly.

    Parameters
    ----------
    mass : Tensor
        (..., T), a distribution over each row's real entries; NaN and negative values count as 0.
    segment_mass : float
        In (0, 1].
    min_len, max_len : int
        Bounds in entries, ``max_len >= 2 * min_len``.
    start : Tensor, optional
        First real entry; segments cover what follows.

    Raises
    ------
    ValueError
        For a parameter outside its range.
    """
    choose("mass_segments", backend)
    require("segment_mass", segment_mass, 0 < segment_mass <= 1, "a number in (0, 1]")
    require_size("min_len", min_len, 1)
    require_size("max_len", max_len, 1)
    require("max_len", max_len, max_len >= 2 * min_len, f"at least 2 * min_len = {2 * min_len}")
    rows, first = _rows(mass, start)
    return _shaped(reference.mass_segments(rows, segment_mass, min_len, max_len, first), mass)


def fixed_segments(mass: Tensor, *, length: int, start: Tensor | None = None, backend: str | None = None) -> Segments:
    """Segments of ``length`` entries, the last one shorter; ``mass`` (..., T) gives their weights."""
    choose("fixed_segments", backend)
    require_size("length", length, 1)
    rows, first = _rows(mass, start)
    return _shaped(reference.fixed_segments(rows, length, first), mass)


def single_segment(mass: Tensor, *, start: Tensor | None = None, backend: str | None = None) -> Segments:
    """The whole row as one segment; ``mass`` (..., T) gives its weight."""
    choose("single_segment", backend)
    rows, first = _rows(mass, start)
    return _shaped(reference.fixed_segments(rows, mass.shape[-1], first), mass)


def _rows(mass: Tensor, start: Tensor | None) -> tuple[Tensor, Tensor | None]:
    require("mass.shape", tuple(mass.shape), mass.ndim >= 1 and mass.shape[-1] > 0, "(..., T) with T of at least 1")
    require("mass.dtype", mass.dtype, mass.is_floating_point(), "floating point")
    return mass.reshape(-1, mass.shape[-1]), per_row("start", start, tuple(mass.shape[:-1]), mass.device)


def _shaped(parts: tuple[torch.Tensor, ...], mass: Tensor) -> Segments:
    ends, count, weight = parts
    lead = mass.shape[:-1]
    return Segments(ends.view(*lead, -1), count.view(lead), weight.view(*lead, -1))
