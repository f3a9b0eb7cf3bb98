"""The base of our scorers: one method to write, protection declared instead of scored."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

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

    #: Whether :meth:`select` or :meth:`layer_budgets` choose more than a top-k of scores, which AMS cannot wrap.
    chooses_sets: ClassVar[bool] = False
    #: State with one number per entry: (B, H, T).
    entry_state: ClassVar[tuple[str, ...]] = ()

    @property
    def reads_hidden_states(self) -> bool:
        """Whether hidden states must be buffered (kvpress scorers project them by themselves)."""
        return False

    @property
    def accumulates(self) -> bool:
        """Whether :meth:`absorb` must see every query, those of the prompt included."""
        return False

    def query_window(self) -> int:
        """How many of the last decode queries :meth:`scores` reads."""
        return 0

    def absorb(self, event: Event) -> dict[str, Tensor]:
        """New state from the old one and the last ``event.unread`` queries, which come once each: after a prompt or
        another input of many tokens, and at each event, before scores are asked for. Rows may have padding."""
        return event.state

    def protected(self, entries: int, keep: int) -> tuple[int, int]:
        """Entries kept whatever their score: (first, last). What exceeds ``keep`` is taken off the last."""
        return 0, 0

    def protection(self, event: Event, keep: int) -> tuple[int | Tensor, int]:
        """:meth:`protected` for the rows of an event; the first number may be a tensor (B, 1)."""
        return self.protected(event.keys.shape[2], keep)

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
        """State, float and batch first, to carry to the next event. What has one number per entry follows ``kept``
        (B, H, K)."""
        return {
            name: event.accumulated(name).gather(-1, kept) if name in event.entry_state else value
            for name, value in event.state.items()
        }

    # -- kvpress ------------------------------------------------------------------------------------------------------

    def score(self, module, hidden_states, keys, values, attentions, kwargs) -> Tensor:
        event = Event.from_kvpress(module, hidden_states, keys, values, kwargs)
        event.keep = compute_n_kept(keys.shape[2], self.compression_ratio)
        event.front, _ = self.protection(event, event.keep)
        event.entry_state, event.state = self.entry_state, self.absorb(event)
        return self.scores(event)

    def compress(self, module, hidden_states, keys, values, attentions, kwargs) -> tuple[Tensor, Tensor]:
        if self.compression_ratio == 0:
            return keys, values
        keep = compute_n_kept(keys.shape[2], self.compression_ratio)
        event = Event.from_kvpress(module, hidden_states, keys, values, kwargs)
        event.entry_state, event.state = self.entry_state, self.absorb(event)
        return compact(keys, values, self.select(event, keep))


@dataclass
class ScorerWrapper(Scorer):
    """A press that makes its own choice from the scores of another, whose needs and state it passes on.

    Parameters
    ----------
    base_press : ScorerPress
        Any scorer; it is not changed.
    """

    compression_ratio: float = field(default=0.0, kw_only=True)
    base_press: ScorerPress = None

    def post_init_from_model(self, model) -> None:
        self.base_press.post_init_from_model(model)

    @property
    def base(self) -> Scorer | None:
        """The wrapped scorer if it is one of ours."""
        return self.base_press if isinstance(self.base_press, Scorer) else None

    @property
    def reads_hidden_states(self) -> bool:
        return self.base is None or self.base.reads_hidden_states

    @property
    def accumulates(self) -> bool:
        return self.base is not None and self.base.accumulates

    @property
    def entry_state(self) -> tuple[str, ...]:  # type: ignore[override]
        return () if self.base is None else self.base.entry_state

    def query_window(self) -> int:
        return 0 if self.base is None else self.base.query_window()

    def absorb(self, event: Event) -> dict[str, Tensor]:
        return event.state if self.base is None else self.base.absorb(event)

    def protection(self, event: Event, keep: int) -> tuple[int | Tensor, int]:
        return (0, 0) if self.base is None else self.base.protection(event, keep)

    def after_select(self, event: Event, kept: Tensor) -> dict[str, Tensor]:
        return super().after_select(event, kept) if self.base is None else self.base.after_select(event, kept)

    def refuse_sets(self) -> None:
        """Raise ``ValueError`` for a base that chooses more than a top-k of its scores."""
        name = type(self.base_press).__name__
        if self.base is not None and self.base.chooses_sets:
            raise ValueError(f"base_press: got {name}, allowed: a scorer; {name} chooses more than a top-k of scores")


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
    start = event.start
    if start is None:
        uniform = event.counts is None or bool((event.counts >= event.available).all())
        if uniform:
            return _checked_scores(press, event, keep)
        start = torch.zeros(event.keys.shape[0], dtype=torch.int64)  # rows whose windows differ
    batch, heads, entries, _ = event.keys.shape
    out = event.keys.new_full((batch, heads, entries), -torch.inf, dtype=torch.float32)
    for row, starts in enumerate(start.tolist()):  # start lies on the CPU
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


def at_least(declared: int | Tensor, n_sink: int | Tensor) -> int | Tensor:
    """The larger of a declared number and one asked for, per row (B, 1) where one is a tensor."""
    if isinstance(declared, Tensor):
        return declared.maximum(torch.as_tensor(n_sink, device=declared.device))
    return n_sink.clamp(min=declared) if isinstance(n_sink, Tensor) else max(declared, n_sink)


def select_top(press: ScorerPress, event: Event, keep: int, n_sink: int | Tensor = 0) -> Tensor:
    """The ``keep`` best entries of any scorer, its protected ones first, ascending: (B, H, keep)."""
    first, last = press.protection(event, keep) if isinstance(press, Scorer) else (0, 0)
    event.keep, event.front = keep, at_least(first, n_sink)
    scores = base_scores(press, event, keep)
    start = None if event.start is None else event.start.to(scores.device)
    return top_indices(scores, keep=keep, n_sink=event.front, n_recent=last, start=start)
