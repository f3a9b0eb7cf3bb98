"""How many entries each segment keeps."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..dispatch import choose
from ..rows import column, require_shape, require_size
from ..segments import Segments
from . import reference


class Quotas(NamedTuple):
    """Entries to keep, int64.

    Attributes
    ----------
    quota : Tensor
        (..., S) per segment, padded with 0; sums to ``min(keep, T - start)``.
    n_sink, n_recent : Tensor
        (...) first and last entries that stay whatever their score, inside the quotas of their segments.
    floors_dropped : Tensor
        (...) segments whose floor the budget could not pay.
    keep : int
        The budget they were made for.
    """

    quota: Tensor
    n_sink: Tensor
    n_recent: Tensor
    floors_dropped: Tensor
    keep: int


def segment_quotas(
    segments: Segments,
    *,
    keep: int,
    n_sink: int | Tensor,
    n_recent: int | Tensor,
    min_keep: int,
    by_mass: bool = True,
    start: Tensor | None = None,
    backend: str | None = None,
) -> Quotas:
    """Share ``keep`` entries among segments: a floor each, protected entries inside, the rest by mass; exact.

    A budget too small for all of it gives up, in this order: floors above one, protected recent entries from the far
    end, floors one by one from the lightest segment on.

    Parameters
    ----------
    segments : Segments
        Of rows ``...`` with S slots.
    keep : int
        Entries to keep per row; a row with fewer keeps all it has.
    n_sink, n_recent : int or Tensor
        First and last entries protected, the same for all rows or one number per row.
    min_keep : int
        Floor of each segment.
    by_mass : bool, default True
        Share by mass, else by length.

    Raises
    ------
    ValueError
        For a parameter outside its range.
    """
    choose("segment_quotas", backend)
    require_size("keep", keep, 1)
    require_size("min_keep", min_keep, 0)
    ends = segments.ends
    lead, slots = tuple(ends.shape[:-1]), ends.shape[-1]
    require_shape("segments.weight", segments.weight, tuple(ends.shape), "that of ends")
    rows = ends.numel() // slots
    quota, sink, recent, dropped = reference.segment_quotas(
        ends.reshape(-1, slots),
        segments.weight.reshape(-1, slots),
        keep,
        min_keep,
        by_mass,
        column("n_sink", n_sink, lead, rows, ends.device),
        column("n_recent", n_recent, lead, rows, ends.device),
        column("start", 0 if start is None else start, lead, rows, ends.device),
    )
    return Quotas(quota.view(ends.shape), sink.view(lead), recent.view(lead), dropped.view(lead), keep)
