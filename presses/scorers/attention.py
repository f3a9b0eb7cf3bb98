"""Scorers that read the attention of the last queries: SnapKV, TOVA, and the usage of AMS itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from ...kernels import window_attention, window_usage
from ..event import Event
from .base import Scorer, require_int, require_odd


def observed_attention(event: Event, window: int) -> Tensor:
    """Mean attention (B, Hq, T) of the last ``window`` queries on each entry, at true positions."""
    entries = event.keys.shape[2]
    queries = event.queries(min(window, max(entries - 1, 1)))
    return window_attention(queries, event.keys, scaling=event.scaling)


def group_mean(per_query_head: Tensor, kv_heads: int) -> Tensor:
    """(B, Hq, T) to (B, H, T)."""
    return per_query_head.unflatten(1, (kv_heads, -1)).mean(dim=2)


@dataclass
class SnapKVPress(Scorer):
    """SnapKV: attention of an observation window, pooled along the sequence.

    https://arxiv.org/abs/2404.14469. Differs from kvpress: every query of the window is rotated at its own position,
    pooling runs over entries in position order, and the window is protected by declaration.

    Parameters
    ----------
    window_size : int, default 64
        Queries observed; as many recent entries are protected.
    kernel_size : int, default 5
        Width of the average pooling, odd.
    """

    window_size: int = 64
    kernel_size: int = 5

    def __post_init__(self):
        super().__post_init__()
        require_int("window_size", self.window_size, 1)
        require_odd("kernel_size", self.kernel_size)

    def query_window(self) -> int:
        return self.window_size

    def protected(self, entries: int, keep: int) -> tuple[int, int]:
        return 0, self.window_size

    def scores(self, event: Event) -> Tensor:
        entries = event.keys.shape[2]
        window = min(self.window_size, event.available, max(entries - 1, 1))
        attention = observed_attention(event, window)
        before = attention[..., : entries - window]
        if before.shape[-1]:
            before = F.avg_pool1d(before, self.kernel_size, stride=1, padding=self.kernel_size // 2)
        return F.pad(group_mean(before, event.keys.shape[1]), (0, window))


@dataclass
class TOVAPress(Scorer):
    """TOVA: attention of the last query, averaged over all heads; the newest entry is protected.

    https://arxiv.org/abs/2401.06104. Differs from kvpress: entries stay in position order, rows are independent.
    """

    def query_window(self) -> int:
        return 1

    def protected(self, entries: int, keep: int) -> tuple[int, int]:
        return 0, 1

    def scores(self, event: Event) -> Tensor:
        attention = observed_attention(event, 1).mean(dim=1, keepdim=True)  # (B, 1, T)
        return attention.expand(-1, event.keys.shape[1], -1)


@dataclass
class UsagePress(Scorer):
    """The usage that AMS computes its regions from, taken as a score by itself.

    It shows what regional quotas add to the attention they are made of. Window, pooling and suffix as in
    :class:`~pressroom.presses.AMSPress`.

    Parameters
    ----------
    window_size : int, default 128
    kernel_size : int, default 5
    """

    window_size: int = 128
    kernel_size: int = 5

    def __post_init__(self):
        super().__post_init__()
        require_int("window_size", self.window_size, 1)
        require_odd("kernel_size", self.kernel_size)

    def query_window(self) -> int:
        return self.window_size

    def scores(self, event: Event) -> Tensor:
        entries = event.keys.shape[2]
        queries = event.queries(min(self.window_size, max(entries - 1, 1)))
        return window_usage(queries, event.keys, kernel_size=self.kernel_size, scaling=event.scaling)
