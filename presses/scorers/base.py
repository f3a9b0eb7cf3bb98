"""The base of our scorers: one method to write, protection declared instead of scored."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import NamedTuple

import torch
from kvpress import ScorerPress
from kvpress.utils import compute_n_kept
from torch import Tensor

from ...kernels import compact, top_indices
from ..event import Event


class HeadSelection(NamedTuple):
    """A choice in which heads keep different numbers.

    Attributes
    ----------
    indices : Tensor
        (B, H, K) with K the most that any head keeps; a head that keeps n has its n ascending indices at the end, and
        anything valid before them.
    start : Tensor
        (B, H) where each head's indices begin, ``K - n``.
    """

    indices: Tensor
    start: Tensor


@dataclass
class Scorer(ScorerPress):
    """A scorer that reads an :class:`~pressroom.presses.event.Event`.

    Subclasses implement :meth:`scores`. They also work wherever kvpress takes a ``ScorerPress``: ``score`` and
    ``compress`` build the event from kvpress's arguments.

    Parameters
    ----------
    compression_ratio : float, default 0.0
        Share of entries to remove, used at prefill only; inside a ``DecodingPress`` the integer budget decides.
    """

    @property
    def reads_hidden_states(self) -> bool:
        """Whether hidden states must be buffered (kvpress scorers project them by themselves)."""
        return False

    def query_window(self) -> int:
        """How many of the last decode queries :meth:`scores` reads."""
        return 0

    def protected(self, entries: int, keep: int) -> tuple[int, int]:
        """Entries kept whatever their score: (first, last). What exceeds ``keep`` is taken off the last."""
        return 0, 0

    def layer_budgets(self, layers: int, keep: int) -> list[int]:
        """Entries to keep in each of ``layers`` full-attention layers, for a budget of ``keep`` a layer."""
        return [keep] * layers

    def scores(self, event: Event) -> Tensor:
        """Scores (B, H, T), higher is kept; no row has padding here."""
        raise TypeError(f"{type(self).__name__} does not define scores(event)")

    def select(self, event: Event, keep: int, n_sink: int | Tensor = 0) -> Tensor:
        """Indices (B, H, keep) of the entries to keep, ascending. ``n_sink`` entries at least are kept in front."""
        return select_top(self, event, keep, n_sink)

    def after_select(self, event: Event, kept: Tensor) -> dict[str, Tensor]:
        """State, float and batch first, to carry to the next event, aligned with ``kept`` (B, H, K); it comes back as
        NaN for rows that had no event yet."""
        return {}

    # -- kvpress ------------------------------------------------------------------------------------------------------

    def score(self, module, hidden_states, keys, values, attentions, kwargs) -> Tensor:
        event = kwargs.get("event") or Event.from_kvpress(module, hidden_states, keys, values, kwargs)
        return self.scores(event)

    def compress(self, module, hidden_states, keys, values, attentions, kwargs) -> tuple[Tensor, Tensor]:
        if self.compression_ratio == 0:
            return keys, values
        keep = compute_n_kept(keys.shape[2], self.compression_ratio)
        event = Event.from_kvpress(module, hidden_states, keys, values, kwargs)
        return compact(keys, values, self.select(event, keep))


def require(name: str, value, condition: bool, allowed: str) -> None:
    """Raise ``ValueError`` naming field, value and what is allowed."""
    if not condition:
        raise ValueError(f"{name}: got {value!r}, allowed: {allowed}")


def require_odd(name: str, value) -> None:
    require_int(name, value, 1)
    require(name, value, value % 2 == 1, "an odd integer")


def require_int(name: str, value, minimum: int) -> None:
    ok = isinstance(value, int) and not isinstance(value, bool) and value >= minimum
    require(name, value, ok, f"an integer of at least {minimum}")


def base_scores(press: ScorerPress, event: Event, keep: int) -> Tensor:
    """Scores (B, H, T) in fp32 of any scorer; rows with padding, and heads that hold different numbers, are scored one
    by one on their real entries.

    Raises
    ------
    ValueError
        If the scorer returns another shape, no floating point, or another device.
    """
    if event.start is None:
        return _checked_scores(press, event, keep)
    batch, heads, entries, _ = event.keys.shape
    out = event.keys.new_full((batch, heads, entries), -torch.inf, dtype=torch.float32)
    for row, starts in enumerate(event.start.tolist()):  # start lies on the CPU
        if isinstance(starts, int):
            if starts < entries:
                out[row : row + 1, :, starts:] = _checked_scores(press, event.row(row, starts), keep)
            continue
        for head, start in enumerate(starts):
            if start < entries:
                part = event.row(row, start, head)
                out[row : row + 1, head : head + 1, start:] = _checked_scores(press, part, keep)
    return out


def _checked_scores(press: ScorerPress, event: Event, keep: int) -> Tensor:
    batch, heads, entries, _ = event.keys.shape
    if isinstance(press, Scorer):
        scores = press.scores(event)
    else:  # a kvpress scorer: the ratio it may read, and rotations that belong to the states it gets
        hidden = event.hidden
        kwargs = {**event.kwargs, "position_embeddings": (event.cos, event.sin)}
        press.compression_ratio, before = 1 - min(keep, entries) / entries, press.compression_ratio
        try:
            scores = press.score(event.module, hidden, event.keys, event.values, None, kwargs)
        finally:
            press.compression_ratio = before
    name = type(press).__name__
    if not isinstance(scores, Tensor) or tuple(scores.shape) != (batch, heads, entries):
        got = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
        raise ValueError(f"{name}.score: got {got}, allowed: a tensor of shape {(batch, heads, entries)}")
    if not scores.is_floating_point() or scores.device != event.keys.device:
        raise ValueError(
            f"{name}.score: got {scores.dtype} on {scores.device}, allowed: floating point on {event.keys.device}"
        )
    scores = scores.float()
    if scores.device.type == "cpu" and bool(scores.isnan().any()):  # elsewhere asking would stall the device
        warnings.warn(f"{name}.score: got NaN, which counts as lower than every number", stacklevel=2)
    return scores


def at_least(declared: int, n_sink: int | Tensor) -> int | Tensor:
    """The larger of a declared number and one asked for, per row (B, 1) where that is a tensor."""
    return n_sink.clamp(min=declared) if isinstance(n_sink, Tensor) else max(declared, n_sink)


def select_top(press: ScorerPress, event: Event, keep: int, n_sink: int | Tensor = 0) -> Tensor:
    """The ``keep`` best entries of any scorer, its protected ones first, ascending: (B, H, keep)."""
    scores = base_scores(press, event, keep)
    first, last = press.protected(scores.shape[-1], keep) if isinstance(press, Scorer) else (0, 0)
    start = None if event.start is None else event.start.to(scores.device)
    return top_indices(scores, keep=keep, n_sink=at_least(first, n_sink), n_recent=last, start=start)
