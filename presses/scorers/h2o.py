"""H2O: attention accumulated over all queries, exact and without eager attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ...kernels import attention_sums
from ..event import Event
from .base import Scorer, require


@dataclass
class H2OPress(Scorer):
    """H2O: the entries that all queries so far, summed, gave most attention to, and the most recent ones.

    https://arxiv.org/abs/2306.14048. Nothing is evicted between two events, so the attention of all queries since the
    last one, computed at the event, is what a sum at every step would be. The prompt's queries are summed once, in
    blocks. Differs from the authors' code: rows of a batch are apart, sums are fp32, query groups are summed.

    Parameters
    ----------
    recent_ratio : float, default 0.5
        Share of the budget that goes to the most recent entries, in [0, 1].
    """

    recent_ratio: float = 0.5

    entry_state: ClassVar[tuple[str, ...]] = ("attention_sum",)

    def __post_init__(self):
        super().__post_init__()
        require("recent_ratio", self.recent_ratio, 0 <= self.recent_ratio <= 1, "a number in [0, 1]")

    @property
    def accumulates(self) -> bool:
        return True

    def protected(self, entries: int, keep: int) -> tuple[int, int]:
        return 0, int(keep * self.recent_ratio)

    def absorb(self, event: Event) -> dict[str, Tensor]:
        entries = event.keys.shape[2]
        if event.kwargs and event.unread < entries:
            raise ValueError(
                f"hidden_states: got those of {event.unread} tokens, allowed: those of all {entries}; H2O sums every "
                "query, which pressroom's DecodingPress hands it"
            )
        if not event.unread:
            return event.state
        queries = event.queries(event.unread)
        sums = attention_sums(queries, event.keys, scaling=event.scaling, start=event.start)
        sums = sums.unflatten(1, (event.keys.shape[1], -1)).sum(dim=2)
        return event.state | {"attention_sum": event.accumulated("attention_sum") + sums}

    def scores(self, event: Event) -> Tensor:
        return event.accumulated("attention_sum")
