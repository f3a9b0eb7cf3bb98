"""Optional recording of what presses decide."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class EventRecord:
    """One compression of one layer. Tensors lie on the CPU.

    Attributes
    ----------
    layer, index : int
        Layer, and number of the event in its sequence (0 is the first).
    seen : int
        Tokens fed so far, prompt and padding included.
    prompt_length : int
        Tokens of the prompt.
    present : Tensor
        (B, H, T) original positions before the event; negative: padding or unknown.
    kept : Tensor
        (B, H, K) original positions after it; -1 in front where heads keep different numbers.
    indices : Tensor
        (B, H, K) cache indices of ``kept``.
    segment_ends, segment_count, quota : Tensor or None
        (B, H, S), (B, H), (B, H, S) for presses with regions.
    n_sink, n_recent, floors_dropped : Tensor or None
        (B, H) what was protected in the end, and floors the budget could not pay.
    window_share : Tensor or None
        (B, H) share of the mass that lies in the query window.
    """

    layer: int
    index: int
    seen: int
    prompt_length: int
    present: Tensor
    kept: Tensor
    indices: Tensor
    segment_ends: Tensor | None = None
    segment_count: Tensor | None = None
    quota: Tensor | None = None
    n_sink: Tensor | None = None
    n_recent: Tensor | None = None
    floors_dropped: Tensor | None = None
    window_share: Tensor | None = None

    @classmethod
    def of(cls, layer_idx: int, layer, event, indices: Tensor, start: Tensor | None, window: int) -> EventRecord:
        """What is about to happen to a cache layer."""
        present = layer.positions()
        kept = present.gather(-1, indices)
        if start is not None:
            kept = kept.masked_fill(
                torch.arange(kept.shape[-1], device=kept.device) < start.to(kept.device)[..., None], -1
            )
        record = cls(
            layer=layer_idx,
            index=layer.events,
            seen=layer.seen,
            prompt_length=layer.prompt_length,
            present=present.cpu(),
            kept=kept.cpu(),
            indices=indices.cpu(),
        )
        segments, quotas, mass = (event.report.get(name) for name in ("segments", "quotas", "mass"))
        if segments is not None:
            record.segment_ends, record.segment_count = segments.ends.cpu(), segments.count.cpu()
        if quotas is not None:
            rows = indices.shape[:2]
            record.quota = quotas.quota.cpu()
            for name in ("n_sink", "n_recent", "floors_dropped"):
                setattr(record, name, getattr(quotas, name).expand(rows).cpu())
        if mass is not None:
            record.window_share = mass[..., -min(window, event.available) :].sum(-1).cpu()
        return record


@dataclass
class Trace:
    """Everything recorded between entering and leaving ``press.record()``."""

    events: list[EventRecord] = field(default_factory=list)

    def layer(self, index: int) -> list[EventRecord]:
        """Events of one layer, in order."""
        return [event for event in self.events if event.layer == index]

    @property
    def layers(self) -> list[int]:
        return sorted({event.layer for event in self.events})
