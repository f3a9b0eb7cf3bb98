"""Attention of the last queries on every entry, as a mean, a sum, or the usage that AMS divides the cache by."""

from __future__ import annotations

from torch import Tensor

from ..dispatch import choose
from ..rows import per_row, require, require_size
from . import reference

SUFFIXES = ("max", "observed", "max_no_sink")


def window_attention(
    queries: Tensor,
    keys: Tensor,
    *,
    scaling: float | None = None,
    start: Tensor | None = None,
    available: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Mean probability that each query head gives to each entry, over a window of last queries.

    Parameters
    ----------
    queries : Tensor
        (B, Hq, W, D), rotated. Query ``j`` (0 is the oldest) sees entries ``0 .. T-W+j``. A row uses its last
        ``min(W, available, T - start - 1)``.
    keys : Tensor
        (B, H, T, D), any strides; ``Hq`` is a multiple of ``H``.
    scaling : float, optional
        Factor of the logits, default ``D ** -0.5``.
    start : Tensor, optional
        (B,) first real entry; those before get 0.
    available : Tensor, optional
        (B,) queries that count, default all.

    Returns
    -------
    Tensor
        (B, Hq, T), fp32.

    Raises
    ------
    ValueError
        For shapes that do not fit.
    """
    first, last = _check(queries, keys, start, available)
    choose("window_attention", backend)
    return reference.window_attention(queries, keys, scaling, first, last)


def window_usage(
    queries: Tensor,
    keys: Tensor,
    *,
    kernel_size: int = 5,
    scaling: float | None = None,
    suffix: str = "max",
    n_sink: int = 4,
    start: Tensor | None = None,
    available: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Attention usage of each entry per KV head: window mean, pooled along the sequence, mean over the query group.

    Parameters
    ----------
    queries, keys, scaling, start, available
        As in :func:`window_attention`.
    kernel_size : int, default 5
        Width of the average pooling (odd, zero padding, padding counted) over the entries before the window.
    suffix : {"max", "observed", "max_no_sink"}
        What the entries inside the window get: the row's maximum, the mean over the queries that see them, or the
        maximum over entries that are no sinks.
    n_sink : int, default 4
        Sinks that ``"max_no_sink"`` leaves out.

    Returns
    -------
    Tensor
        (B, H, T), fp32.

    Raises
    ------
    ValueError
        For shapes that do not fit, or a parameter outside its range.
    """
    first, last = _check(queries, keys, start, available)
    require_size("kernel_size", kernel_size, 1)
    require("kernel_size", kernel_size, kernel_size % 2 == 1, "an odd integer")
    require("suffix", suffix, suffix in SUFFIXES, " | ".join(SUFFIXES))
    require_size("n_sink", n_sink, 0)
    choose("window_usage", backend)
    return reference.window_usage(queries, keys, scaling, first, last, kernel_size, suffix, n_sink)


def attention_sums(
    queries: Tensor,
    keys: Tensor,
    *,
    scaling: float | None = None,
    start: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Sum of the probabilities that a run of last queries gives to each entry, in blocks of bounded memory.

    Parameters
    ----------
    queries : Tensor
        (B, Hq, n, D), rotated, ``n`` at most T. Query ``j`` (0 is the oldest) sees entries ``0 .. T-n+j``; those at
        entries before ``start`` are padding and count nothing.
    keys : Tensor
        (B, H, T, D), any strides; ``Hq`` is a multiple of ``H``.
    scaling : float, optional
        Factor of the logits, default ``D ** -0.5``.
    start : Tensor, optional
        (B,) or (B, H) first real entry; those before get 0.

    Returns
    -------
    Tensor
        (B, Hq, T), fp32.

    Raises
    ------
    ValueError
        For shapes that do not fit.
    """
    _check(queries, keys, None, None)
    batch, heads, entries, _ = keys.shape
    require("queries.shape", tuple(queries.shape), queries.shape[2] <= entries, f"at most {entries} queries")
    first = per_row("start", start, (batch, heads), keys.device)
    choose("attention_sums", backend)
    return reference.attention_sums(queries, keys, scaling, first)


def _check(
    queries: Tensor, keys: Tensor, start: Tensor | None, available: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    require("keys.shape", tuple(keys.shape), keys.ndim == 4 and min(keys.shape) > 0, "(B, H, T, D), nothing empty")
    batch, heads, _, dim = keys.shape
    fits = queries.ndim == 4 and queries.shape[0] == batch and queries.shape[3] == dim
    fits = fits and queries.shape[1] > 0 and queries.shape[1] % heads == 0
    require("queries.shape", tuple(queries.shape), fits, f"({batch}, a multiple of {heads}, W, {dim})")
    require("queries.device", queries.device, queries.device == keys.device, f"{keys.device}, that of keys")
    rows = (batch,)
    return per_row("start", start, rows, keys.device), per_row("available", available, rows, keys.device)
