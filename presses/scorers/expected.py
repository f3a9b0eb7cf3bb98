"""Expected Attention at true positions."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..event import Event
from .base import Scorer, require, require_int


def rotate_mean(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply a mean rotation to (..., D); cos, sin broadcast, of width at most D (the rest is not rotated)."""
    width = cos.shape[-1]
    turned, rest = states[..., :width], states[..., width:]
    half = torch.cat([-turned[..., width // 2 :], turned[..., : width // 2]], dim=-1)
    return torch.cat([turned * cos + half * sin, rest], dim=-1)


@dataclass
class ExpectedAttentionPress(Scorer):
    """Expected Attention: the attention that queries like the last ones will pay over the next positions.

    https://arxiv.org/abs/2510.00636. Mean and covariance of the last queries before rotation, the model's rotation
    averaged over the next positions. Differs from kvpress: the next position is the true one, not the number of
    buffered states, and no buffered query is left out.

    Parameters
    ----------
    n_future_positions : int, default 512
        Positions the rotation is averaged over.
    n_sink : int, default 4
        Entries protected in front.
    epsilon : float, default 0.01
        Added to the expected attention before it is multiplied by the value norm (0 in the paper, 0.01 in AMS).
    n_queries : int, default 256
        Last queries that give the statistics.
    use_covariance, use_vnorm : bool, default True
    """

    n_future_positions: int = 512
    n_sink: int = 4
    epsilon: float = 1e-2
    n_queries: int = 256
    use_covariance: bool = True
    use_vnorm: bool = True

    def __post_init__(self):
        super().__post_init__()
        require_int("n_future_positions", self.n_future_positions, 1)
        require_int("n_sink", self.n_sink, 0)
        require_int("n_queries", self.n_queries, 1)
        require("epsilon", self.epsilon, self.epsilon >= 0, "a number of at least 0")

    def query_window(self) -> int:
        return self.n_queries

    def protected(self, entries: int, keep: int) -> tuple[int, int]:
        return self.n_sink, 0

    def scores(self, event: Event) -> Tensor:
        queries = event.queries(self.n_queries, rotated=False).float()  # (B, Hq, n, D)
        kv_heads, dim = event.keys.shape[1], event.keys.shape[3]
        steps = torch.arange(self.n_future_positions, device=queries.device)
        cos, sin = event.rotation(event.next_position.to(queries.device)[:, None] + steps)
        cos, sin = (x.float().mean(dim=1)[:, None, None].to(queries.device) for x in (cos, sin))  # (B, 1, 1, D)
        mean = queries.mean(dim=2, keepdim=True)
        mu = rotate_mean(mean, cos, sin).unflatten(1, (kv_heads, -1)).squeeze(3)  # (B, H, G, D)
        keys = event.keys.float()
        logits = torch.matmul(mu, keys.transpose(2, 3)) / math.sqrt(dim)  # (B, H, G, T)
        if self.use_covariance:
            # k' R S R' k = mean over the queries of (k . R(q - mean))^2
            spread = rotate_mean(queries - mean, cos, sin)
            covariance = torch.matmul(spread.transpose(2, 3), spread) / queries.shape[2]
            covariance = covariance.unflatten(1, (kv_heads, -1))  # (B, H, G, D, D)
            turned = torch.matmul(keys[:, :, None], covariance)  # (B, H, G, T, D)
            logits = logits + (turned * keys[:, :, None]).sum(dim=-1) / (2 * dim)
        scores = logits.softmax(dim=-1).mean(dim=2)
        if self.use_vnorm:
            scores = (scores + self.epsilon) * event.values.float().norm(dim=-1)
        return scores
