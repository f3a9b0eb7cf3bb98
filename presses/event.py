"""What a press may look at when it compresses one layer."""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


def project_queries(module: nn.Module, raw: Tensor, head_dim: int) -> Tensor:
    """Projected states (B, q, Hq * D) to queries before rotation (B, Hq, q, D), query norm included."""
    norm = getattr(module, "q_norm", None)
    if norm is not None and norm.weight.numel() != head_dim:  # normalised over all heads at once
        raw = norm(raw)
    queries = raw.unflatten(-1, (-1, head_dim)).transpose(1, 2)
    if norm is not None and norm.weight.numel() == head_dim:
        queries = norm(queries)
    return queries


def rotate(module: nn.Module, states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding by the model's own function. states (B, h, q, D); cos, sin (B, q, D)."""
    own = getattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb", None)
    if own is None:
        raise ValueError(
            f"{type(module).__name__} has no apply_rotary_pos_emb in its module: presses need a model with rotary "
            "positions (Llama, Mistral, Phi3, Qwen2, Qwen3, Gemma3)"
        )
    return own(states, states[:, :1], cos, sin)[0]


@dataclass
class Event:
    """One compression of one layer: keys, values and the last queries at their true positions.

    Attributes
    ----------
    keys, values : Tensor
        (B, H, T, D), in position order.
    start : Tensor or None
        (B,), or (B, H) where heads hold different numbers: first real entry; None where all are. On the CPU.
    raw, cos, sin : Tensor or None
        The last ``n`` projected queries (B, n, Hq * D), and their rotation (B, n, D).
    next_position : Tensor
        (B,) logical position of each row's next token.
    counts : Tensor or None
        (B,) how many of the queries count, where rows differ.
    head : int or None
        The KV head this is a view of, where heads are scored one by one.
    lengths, prompts : tuple of int
        Tokens each row has seen, and of those the prompt; padding excluded.
    keep, budget : int
        Entries to keep in this layer, and per layer on average.
    front : int or Tensor
        First entries that are kept whatever their score, (B, 1) where rows differ.
    unread : int
        How many of the last queries no event has absorbed yet, see :meth:`~pressroom.presses.Scorer.absorb`.
    evicted : Tensor or None
        (B,) rows that are about to lose entries, on the CPU; None: all.
    state : dict
        What scorers stored at the event before; read only. New state goes to ``after_select``.
    entry_state : tuple of str
        Which of it has one number per entry.
    report : dict
        What a press tells the trace.
    kwargs : dict
        The arguments of the attention layer where kvpress asks for scores; empty otherwise.
    """

    module: Any
    keys: Tensor
    values: Tensor
    next_position: Tensor
    lengths: tuple[int, ...]
    raw: Tensor | None = None
    cos: Tensor | None = None
    sin: Tensor | None = None
    hidden: Tensor | None = None
    start: Tensor | None = None
    counts: Tensor | None = None
    head: int | None = None
    prompts: tuple[int, ...] = ()
    keep: int = 0
    budget: int = 0
    front: int | Tensor = 0
    unread: int = 0
    evicted: Tensor | None = None
    entry_state: tuple[str, ...] = ()
    state: dict[str, Tensor] = field(default_factory=dict)
    scratch: dict[str, Any] = field(default_factory=dict)
    report: dict[str, Any] = field(default_factory=dict)
    rotary: Any = None
    kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def scaling(self) -> float:
        return getattr(self.module, "scaling", self.keys.shape[-1] ** -0.5)

    @property
    def layer_idx(self) -> int:
        return self.module.layer_idx

    @property
    def available(self) -> int:
        """How many queries there are."""
        return 0 if self.raw is None else self.raw.shape[1]

    def queries(self, window: int, *, rotated: bool = True) -> Tensor:
        """The last ``min(window, available)`` queries (B, Hq, W, D), each rotated at its own position."""
        if self.raw is None or self.cos is None or self.sin is None:
            raise ValueError(
                f"{type(self.module).__name__} layer {self.layer_idx}: no decode query was seen before this event; "
                "a scorer that reads queries needs the press to be on the model while tokens are fed"
            )
        last = slice(self.available - min(window, self.available), None)
        queries = self.of_view(project_queries(self.module, self.raw[:, last], self.keys.shape[-1]))
        if not rotated:
            return queries
        cos, sin = (x[:, last].to(queries.device) for x in (self.cos, self.sin))
        return rotate(self.module, queries, cos, sin)

    def of_view(self, per_query_head: Tensor) -> Tensor:
        """What belongs to the heads of this view, of (B, Hq, ...)."""
        if self.head is None:
            return per_query_head
        group = self.module.num_key_value_groups
        return per_query_head[:, self.head * group : (self.head + 1) * group]

    def real_queries(self, count: int) -> Tensor | None:
        """(B, count) bool, which of the last ``count`` queries belong to tokens and not to padding; None: all."""
        if self.start is None:
            return None
        start = self.start if self.start.ndim == 1 else self.start.amin(dim=1)
        own = torch.arange(self.keys.shape[2] - count, self.keys.shape[2])
        return (own >= start[:, None]).to(self.keys.device)

    def candidates(self, last: int = 0) -> Tensor:
        """(B, 1, T) bool: entries that compete, neither kept in front nor among the ``last``."""
        entries = self.keys.shape[2]
        position = torch.arange(entries, device=self.keys.device)
        front = torch.as_tensor(self.front, device=self.keys.device).expand(self.keys.shape[0], 1)
        return ((position >= front) & (position < entries - last))[:, None]

    def accumulated(self, name: str) -> Tensor:
        """A state with one number per entry (B, H, T); 0 for new entries and where there is none."""
        value = self.state.get(name)
        if value is None:
            return torch.zeros(self.keys.shape[:3], device=self.keys.device)
        return torch.nn.functional.pad(value, (0, self.keys.shape[2] - value.shape[-1]))

    def rotation(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The model's cos and sin (B, n, D) in fp32 at logical positions (B, n)."""
        example = self.keys.float()[:, 0, :1]
        if "layer_type" in inspect.signature(self.rotary.forward).parameters:
            return self.rotary(example, positions, layer_type=self.module.layer_type)
        return self.rotary(example, positions)

    def row(self, index: int, start: int, head: int | None = None) -> Event:
        """Row ``index`` alone, or one of its KV heads, without what lies before ``start``."""
        pick = slice(index, index + 1)
        heads = slice(None) if head is None else slice(head, head + 1)
        entries = self.keys.shape[2] - start
        available = self.available if self.counts is None else min(self.available, int(self.counts[index]))
        available = min(available, entries)  # a prompt's window may reach into the padding
        last = slice(self.available - available, None)
        state = {
            name: value[pick, heads, start:] if name in self.entry_state else value[pick]
            for name, value in self.state.items()
        }
        return Event(
            module=self.module,
            keys=self.keys[pick, heads, start:],
            values=self.values[pick, heads, start:],
            raw=None if self.raw is None else self.raw[pick, last],
            cos=None if self.cos is None else self.cos[pick, last],
            sin=None if self.sin is None else self.sin[pick, last],
            hidden=None if self.hidden is None else self.hidden[pick, last],
            next_position=self.next_position[pick],
            lengths=self.lengths[pick],
            prompts=self.prompts[pick],
            keep=self.keep,
            budget=self.budget,
            front=self.front[pick] if isinstance(self.front, Tensor) else self.front,
            entry_state=self.entry_state,
            state=state,
            rotary=self.rotary,
            kwargs=self.kwargs,
            head=head,
        )

    @classmethod
    def from_kvpress(cls, module, hidden_states, keys, values, kwargs) -> Event:
        """The same view built from the arguments of kvpress's ``score``: queries are projected again, and rotated at
        the true positions of the last tokens."""
        n = min(hidden_states.shape[1], keys.shape[2])
        hidden = hidden_states[:, -n:]
        head_dim = keys.shape[-1]
        projection = getattr(module, "q_proj", None) or module.qkv_proj
        raw = projection(hidden)[..., : module.config.num_attention_heads * head_dim]
        cos, sin = kwargs["position_embeddings"]
        cache_position = kwargs.get("cache_position")
        rotary = getattr(module, "rotary_emb", None)
        position = int(cache_position[-1]) + 1 if cache_position is not None else hidden_states.shape[1]
        if "position_ids" in kwargs and kwargs["position_ids"] is not None:
            following = kwargs["position_ids"][:, -1] + 1
        else:
            following = torch.tensor([position], device=keys.device)
        following = following.to(keys.device).expand(keys.shape[0])
        lengths = (position,) * keys.shape[0]
        event = cls(module, keys, values, following, lengths, raw=raw, hidden=hidden, rotary=rotary, unread=n)
        event.prompts = (0,) * keys.shape[0]  # unknown
        if cos.shape[1] >= n:
            event.cos, event.sin = cos[:, -n:], sin[:, -n:]
        else:  # kvpress passes the current token's rotation only
            where = following[:, None] - torch.arange(n, 0, -1, device=keys.device)
            event.cos, event.sin = (x.to(raw.dtype) for x in event.rotation(where.clamp(min=0)))
        event.cos = event.cos.expand(keys.shape[0], -1, -1)
        event.sin = event.sin.expand(keys.shape[0], -1, -1)
        event.kwargs = kwargs
        layers = getattr(kwargs.get("past_key_values"), "layers", None)
        if layers is not None and len(layers) > module.layer_idx:
            event.scratch["layer"] = layers[module.layer_idx]
        return event
