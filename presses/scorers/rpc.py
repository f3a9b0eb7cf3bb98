"""RPC: reasoning path compression."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..event import Event
from .attention import group_mean
from .base import Scorer, require, require_int, require_odd

PRESETS: dict[str, dict[str, Any]] = {
    "paper": {},
    "ams": {"heads": "group", "softmax": "all", "keeps_prompt": False},
}


@dataclass
class RPCPress(Scorer):
    """RPC: decoded entries that the last queries attend to, pooled; the whole prompt stays.

    https://arxiv.org/abs/2505.13866. The original lets the cache grow by a share of what is decoded; here the budget is
    fixed, and the prompt is kept if it fits beside the window. Differs from the authors' code: the window has R
    distinct queries, nothing survives into the next prompt.

    Parameters
    ----------
    window_size : int, default 32
        Queries that choose (R); as many recent entries are protected.
    kernel_size : int, default 7
        Width of the average pooling, odd.
    heads : {"all", "group"}
        Mean over all query heads, or over those of each KV head.
    softmax : {"candidates", "all"}
        Whether attention is normalised over the entries that compete, or over all.
    keeps_prompt : bool, default True
        Protect the whole prompt if it and the window are below the budget; else ``n_sink`` entries.
    n_sink : int, default 4
    """

    window_size: int = 32
    kernel_size: int = 7
    heads: str = "all"
    softmax: str = "candidates"
    keeps_prompt: bool = True
    n_sink: int = 4

    def __post_init__(self):
        super().__post_init__()
        require_int("window_size", self.window_size, 1)
        require_odd("kernel_size", self.kernel_size)
        require("heads", self.heads, self.heads in ("all", "group"), "all | group")
        require("softmax", self.softmax, self.softmax in ("candidates", "all"), "candidates | all")
        require("keeps_prompt", self.keeps_prompt, isinstance(self.keeps_prompt, bool), "True or False")
        require_int("n_sink", self.n_sink, 0)

    @classmethod
    def preset(cls, name: str, **overrides) -> RPCPress:
        """The values of the ``paper``, or of the comparison in the ``ams`` authors' code."""
        require("preset", name, name in PRESETS, " | ".join(PRESETS))
        return cls(**{**PRESETS[name], **overrides})

    def query_window(self) -> int:
        return self.window_size

    def protected(self, entries: int, keep: int) -> tuple[int, int]:
        return self.n_sink, self.window_size

    def protection(self, event: Event, keep: int) -> tuple[int | Tensor, int]:
        if not self.keeps_prompt:
            return self.protected(event.keys.shape[2], keep)
        fits = [prompt if prompt + self.window_size < keep else self.n_sink for prompt in event.prompts]
        return torch.tensor(fits, device=event.keys.device)[:, None], self.window_size

    def scores(self, event: Event) -> Tensor:
        kv_heads, entries = event.keys.shape[1:3]
        window = min(self.window_size, event.available, max(entries - 1, 1))
        queries = event.queries(window).float() * event.scaling
        logits = torch.matmul(queries.unflatten(1, (kv_heads, -1)).flatten(2, 3), event.keys.float().transpose(2, 3))
        logits = logits.unflatten(2, (-1, window))  # (B, H, G, W, T)
        candidates = event.candidates(last=window)[:, :, None, None]
        future = torch.ones(window, entries, dtype=torch.bool, device=logits.device).triu(entries - window + 1)
        hidden = future if self.softmax == "all" else ~candidates
        attention = logits.masked_fill(hidden, -torch.inf).softmax(dim=-1)
        attention = attention.masked_fill(~candidates, 0).sum(dim=3).flatten(1, 2)  # (B, Hq, T); 0 where none competes
        pooled = F.avg_pool1d(attention, self.kernel_size, stride=1, padding=self.kernel_size // 2)
        if self.heads == "all":
            return pooled.mean(dim=1, keepdim=True).expand(-1, kv_heads, -1)
        return group_mean(pooled, kv_heads)
