"""Scorers that read no queries: StreamingLLM, KeyDiff, random."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..event import Event
from .base import Scorer, require_int


@dataclass
class StreamingLLMPress(Scorer):
    """StreamingLLM: the first entries and the most recent ones.

    https://arxiv.org/abs/2309.17453. Differs from kvpress: sinks survive every event, since entries keep their order;
    keys are not rotated again.

    Parameters
    ----------
    n_sink : int, default 4
    """

    n_sink: int = 4

    def __post_init__(self):
        super().__post_init__()
        require_int("n_sink", self.n_sink, 0)

    def protected(self, entries: int, keep: int) -> tuple[int, int]:
        first = min(self.n_sink, keep)
        return first, keep - first

    def scores(self, event: Event) -> Tensor:
        index = torch.arange(event.keys.shape[2], device=event.keys.device, dtype=torch.float32)
        return index.expand(*event.keys.shape[:3])


@dataclass
class KeyDiffPress(Scorer):
    """KeyDiff: keys least similar to the mean key direction are kept.

    https://arxiv.org/abs/2504.15364. The paper protects nothing; the fields offer it.

    Parameters
    ----------
    n_sink, n_recent : int, default 0
        Entries protected in front and at the end.
    """

    n_sink: int = 0
    n_recent: int = 0

    def __post_init__(self):
        super().__post_init__()
        require_int("n_sink", self.n_sink, 0)
        require_int("n_recent", self.n_recent, 0)

    def protected(self, entries: int, keep: int) -> tuple[int, int]:
        return self.n_sink, self.n_recent

    def scores(self, event: Event) -> Tensor:
        keys = F.normalize(event.keys.float(), dim=-1)
        anchor = F.normalize(keys.mean(dim=2, keepdim=True), dim=-1)
        return -(keys * anchor).sum(dim=-1)


@dataclass
class RandomPress(Scorer):
    """Random scores, drawn anew at every event and layer, the same in every run with the same seed.

    Rows of the same length draw alike, so that a row does not depend on its neighbours.

    Parameters
    ----------
    seed : int, default 0
    """

    seed: int = 0

    def __post_init__(self):
        super().__post_init__()
        require_int("seed", self.seed, 0)

    def scores(self, event: Event) -> Tensor:
        drawn = {length: self._draw(event, length) for length in set(event.lengths)}
        return torch.stack([drawn[length] for length in event.lengths])

    def _draw(self, event: Event, length: int) -> Tensor:
        key = f"{self.seed}/{event.layer_idx}/{length}".encode()
        generator = torch.Generator(device=event.keys.device).manual_seed(zlib.crc32(key))
        return torch.rand(event.keys.shape[1:3], generator=generator, device=event.keys.device)
