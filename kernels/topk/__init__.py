"""Which entries stay."""

from __future__ import annotations

from torch import Tensor

from ..dispatch import choose
from ..quotas import Quotas
from ..rows import column, per_row, require, require_shape, require_size
from ..segments import Segments
from . import reference


def segmented_topk(
    scores: Tensor,
    segments: Segments,
    quotas: Quotas,
    start: Tensor | None = None,
    *,
    backend: str | None = None,
) -> Tensor:
    """The best entries of each segment, as many as its quota, protected ones first.

    Parameters
    ----------
    scores : Tensor
        (..., T), higher is better; ties go to the earlier entry, NaN is lowest.
    segments, quotas
        Of the same rows.
    start : Tensor, optional
        First real entry; a row with ``T - start <= keep`` keeps its last ``keep`` entries, padding in front.

    Returns
    -------
    Tensor
        (..., keep) indices, ascending, of the ``keep`` the quotas were made for (all T if there are no more).

    Raises
    ------
    ValueError
        For shapes that do not fit.
    """
    choose("segmented_topk", backend)
    keep = min(quotas.keep, scores.shape[-1])
    rows, first = _rows(scores, start, keep)
    lead = tuple(scores.shape[:-1])
    slots = segments.ends.shape[-1]
    require_shape("segments.ends", segments.ends, (*lead, slots), "rows of scores, S")
    require_shape("quotas.quota", quotas.quota, (*lead, slots), "rows of scores, S")
    indices = reference.segmented_topk(
        rows,
        segments.ends.reshape(-1, slots),
        quotas.quota.reshape(-1, slots),
        quotas.n_sink.reshape(-1, 1),
        quotas.n_recent.reshape(-1, 1),
        first,
        keep,
    )
    return indices.view(*lead, keep)


def top_indices(
    scores: Tensor,
    *,
    keep: int,
    n_sink: int | Tensor = 0,
    n_recent: int | Tensor = 0,
    start: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """The ``keep`` best entries of each row, its first ``n_sink`` and last ``n_recent`` before all others.

    ``n_sink`` counts up to ``keep``, ``n_recent`` up to what is left then. Otherwise as :func:`segmented_topk`.
    """
    choose("top_indices", backend)
    rows, first = _rows(scores, start, keep)
    lead = tuple(scores.shape[:-1])
    sink = column("n_sink", n_sink, lead, rows.shape[0], scores.device)
    recent = column("n_recent", n_recent, lead, rows.shape[0], scores.device)
    return reference.top_indices(rows, keep, sink, recent, first).view(*lead, keep)


def _rows(scores: Tensor, start: Tensor | None, keep: int) -> tuple[Tensor, Tensor | None]:
    require("scores.shape", tuple(scores.shape), scores.ndim >= 1 and scores.shape[-1] > 0, "(..., T), T at least 1")
    require("scores.dtype", scores.dtype, scores.is_floating_point(), "floating point")
    require_size("keep", keep, 1, scores.shape[-1])
    first = per_row("start", start, tuple(scores.shape[:-1]), scores.device)
    return scores.reshape(-1, scores.shape[-1]), first
