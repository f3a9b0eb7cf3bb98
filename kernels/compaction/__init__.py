"""Keys and values of the kept entries, moved together."""

from __future__ import annotations

from torch import Tensor

from ..dispatch import choose
from ..rows import require
from . import reference


def compact(
    keys: Tensor,
    values: Tensor,
    indices: Tensor,
    *,
    out: tuple[Tensor, Tensor] | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Gather cache entries.

    Parameters
    ----------
    keys, values : Tensor
        (..., T, D), any strides; head sizes may differ.
    indices : Tensor
        (..., K) int64; ascending if ``out`` is the memory of ``keys`` and ``values`` itself.
    out : pair of Tensor, optional
        Storage (..., n, D) with n of at least K, written from the front. It may be the storage that ``keys`` and
        ``values`` are views of: then entries move in place, block by block, and never overtake one another.

    Returns
    -------
    keys, values : Tensor
        (..., K, D): new tensors, or views of ``out``.

    Raises
    ------
    ValueError
        For shapes that do not fit.
    """
    choose("compact", backend)
    lead, kept = tuple(keys.shape[:-2]), indices.shape[-1]
    require("values.shape", tuple(values.shape), values.shape[:-1] == keys.shape[:-1], f"{tuple(keys.shape[:-1])} + D")
    require("indices.shape", tuple(indices.shape), tuple(indices.shape[:-1]) == lead, f"{lead} + K")
    if out is None:
        return reference.gather(keys, indices), reference.gather(values, indices)
    for name, store, source in (("out[0]", out[0], keys), ("out[1]", out[1], values)):
        fits = tuple(store.shape[:-2]) == lead and store.shape[-1] == source.shape[-1] and store.shape[-2] >= kept
        require(f"{name}.shape", tuple(store.shape), fits, f"{lead} + (at least {kept}, {source.shape[-1]})")
    reference.move(keys, indices, out[0])
    reference.move(values, indices, out[1])
    return out[0][..., :kept, :], out[1][..., :kept, :]
