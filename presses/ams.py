"""AMS: regional quotas from attention mass, around any scorer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from kvpress import ScorerPress
from kvpress.utils import compute_n_kept
from torch import Tensor

from ..kernels import (
    compact,
    fixed_segments,
    mass_of,
    mass_segments,
    mix_credit,
    segment_quotas,
    segmented_topk,
    single_segment,
    window_usage,
)
from .event import Event
from .scorers import ScorerWrapper, adapt, at_least, base_scores, require, require_int, require_odd

PRESETS: dict[str, dict] = {
    "paper": {},
    "released": {
        "window_size": 32,
        "window_kernel_size": 5,
        "segment_mass": 0.02,
        "min_seg_len": 32,
        "max_seg_len": 1024,
        "min_keep_per_segment": 8,
        "n_sink": 4,
        "always_keep_last": 32,
        "use_credit": True,
        "credit_decay": 0.8,
        "mix_beta": 0.7,
    },
}


@dataclass
class AMSPress(ScorerWrapper):
    """Adaptive mass segmentation: attention decides where capacity goes, a scorer decides who gets it.

    The attention of recent queries is a mass along the cache. Cuts at equal mass give regions, regions get quotas (a
    floor and a share by mass), and the base scorer's entries compete inside each region only, so that no region is
    wiped out while the budget can pay for its floor. https://arxiv.org/abs/2605.23200. Differs from the authors' code:
    exact quotas with sinks and suffix inside them, integer cuts, true query positions; the README has the list.

    Parameters
    ----------
    base_press : ScorerPress
        Any scorer; it is not changed.
    window_size : int, default 128
        Decode queries the mass is measured with.
    window_kernel_size : int, default 5
        Width of the average pooling of the mass, odd.
    segment_mass : float, default 0.1
        Share of the mass per region, in (0, 1].
    min_seg_len, max_seg_len : int, default 16, 256
        Bounds of a region's length in entries; the second at least twice the first.
    min_keep_per_segment : int, default 1
        Floor of each region.
    n_sink, always_keep_last : int, default 4, 32
        First and last entries always kept; they count inside their region's quota.
    use_credit : bool, default True
        Smooth the mass by an average over events.
    credit_decay, mix_beta : float, default 0.9, 0.9
        Weight of the past in that average; weight of the present mass in the mix.
    credit_init : {"zero", "mass"}
        What new entries start with.
    segmentation : {"mass", "fixed", "none"}
        Regions of equal mass, of ``fixed_seg_len`` entries, or a single one.
    use_mass_quotas : bool, default True
        Share by mass; else by length.
    suffix_usage : {"max", "observed", "max_no_sink"}
        Usage of the last ``window_size`` entries, which few queries have seen.

    Raises
    ------
    ValueError
        For a field outside its range, or a base press that is no scorer.
    """

    window_size: int = 128
    window_kernel_size: int = 5
    segment_mass: float = 0.1
    min_seg_len: int = 16
    max_seg_len: int = 256
    min_keep_per_segment: int = 1
    n_sink: int = 4
    always_keep_last: int = 32
    use_credit: bool = True
    credit_decay: float = 0.9
    mix_beta: float = 0.9
    credit_init: str = "zero"
    segmentation: str = "mass"
    fixed_seg_len: int = 128
    use_mass_quotas: bool = True
    suffix_usage: str = "max"

    def __post_init__(self):
        require("compression_ratio", self.compression_ratio, 0 <= self.compression_ratio < 1, "a number in [0, 1)")
        self.base_press = adapt(self.base_press)
        self.refuse_sets()
        require("base_press", self.base_press, not isinstance(self.base_press, AMSPress), "a scorer that is not AMS")
        for name in ("window_size", "min_seg_len", "max_seg_len", "fixed_seg_len"):
            require_int(name, getattr(self, name), 1)
        for name in ("min_keep_per_segment", "n_sink", "always_keep_last"):
            require_int(name, getattr(self, name), 0)
        require_odd("window_kernel_size", self.window_kernel_size)
        require("segment_mass", self.segment_mass, 0 < self.segment_mass <= 1, "a number in (0, 1]")
        allowed = f"at least 2 * min_seg_len = {2 * self.min_seg_len}"
        require("max_seg_len", self.max_seg_len, self.max_seg_len >= 2 * self.min_seg_len, allowed)
        for name in ("credit_decay", "mix_beta"):
            require(name, getattr(self, name), 0 <= getattr(self, name) <= 1, "a number in [0, 1]")
        choices = {
            "credit_init": ("zero", "mass"),
            "segmentation": ("mass", "fixed", "none"),
            "suffix_usage": ("max", "observed", "max_no_sink"),
        }
        for name, values in choices.items():
            require(name, getattr(self, name), getattr(self, name) in values, " | ".join(values))

    @classmethod
    def preset(cls, name: str, base_press: ScorerPress, **overrides) -> AMSPress:
        """AMS with the values of the ``paper`` or of the authors' ``released`` code."""
        require("preset", name, name in PRESETS, " | ".join(PRESETS))
        return cls(base_press, **{**PRESETS[name], **overrides})

    @property
    def entry_state(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("credit", *super().entry_state)

    def query_window(self) -> int:
        return max(self.window_size, super().query_window())

    def select(self, event: Event, keep: int, n_sink: int | Tensor = 0) -> Tensor:
        event.keep, event.front = keep, at_least(self.n_sink, n_sink)
        scores = base_scores(self.base_press, event, keep)
        start = None if event.start is None else event.start.to(scores.device)
        mass = self._mass(event, start)
        segments = self._segments(mass, start)
        quotas = segment_quotas(
            segments,
            keep=keep,
            n_sink=event.front,
            n_recent=self.always_keep_last,
            min_keep=self.min_keep_per_segment,
            by_mass=self.use_mass_quotas,
            start=start,
        )
        event.report |= {"segments": segments, "quotas": quotas, "mass": mass}
        return segmented_topk(scores, segments, quotas, start)

    def _mass(self, event: Event, start: Tensor | None) -> Tensor:
        entries = event.keys.shape[2]
        usage = window_usage(
            event.queries(min(self.window_size, max(entries - 1, 1))),
            event.keys,
            kernel_size=self.window_kernel_size,
            scaling=event.scaling,
            suffix=self.suffix_usage,
            n_sink=self.n_sink,
            start=start,
            available=event.counts,
        )
        if not self.use_credit:
            return mass_of(usage, start=start)
        mass, event.scratch["credit"] = mix_credit(
            usage,
            event.state.get("credit"),
            decay=self.credit_decay,
            mix=self.mix_beta,
            init=self.credit_init,
            start=start,
        )
        return mass

    def _segments(self, mass: Tensor, start: Tensor | None):
        if self.segmentation == "mass":
            return mass_segments(
                mass, segment_mass=self.segment_mass, min_len=self.min_seg_len, max_len=self.max_seg_len, start=start
            )
        if self.segmentation == "fixed":
            return fixed_segments(mass, length=self.fixed_seg_len, start=start)
        return single_segment(mass, start=start)

    def after_select(self, event: Event, kept: Tensor) -> dict[str, Tensor]:
        state = super().after_select(event, kept)
        if self.use_credit:
            credit = event.scratch["credit"].gather(-1, kept)
            if event.evicted is not None:  # rows that lost nothing have had no event: no credit yet
                credit = credit.masked_fill(~event.evicted.to(credit.device)[:, None, None], torch.nan)
            state["credit"] = credit
        return state

    # -- kvpress: scores whose top-k is the selection, and credit kept on the cache layer -----------------------------

    def score(self, module, hidden_states, keys, values, attentions, kwargs) -> Tensor:
        event = self._kvpress_event(module, hidden_states, keys, values, kwargs)
        keep = compute_n_kept(keys.shape[2], self.compression_ratio)
        kept = self.select(event, keep)
        rank = base_scores(self.base_press, event, keep).argsort(dim=-1, stable=True).argsort(dim=-1)
        score = rank.float() / keys.shape[2]
        return score.scatter_add(-1, kept, torch.ones_like(kept, dtype=score.dtype))

    def compress(self, module, hidden_states, keys, values, attentions, kwargs) -> tuple[Tensor, Tensor]:
        if self.compression_ratio == 0:
            return keys, values
        event = self._kvpress_event(module, hidden_states, keys, values, kwargs)
        kept = self.select(event, compute_n_kept(keys.shape[2], self.compression_ratio))
        layer = event.scratch.get("layer")
        if layer is not None:
            layer.ams_credit = self.after_select(event, kept).get("credit")
        return compact(keys, values, kept)

    def _kvpress_event(self, module, hidden_states, keys, values, kwargs) -> Event:
        event = Event.from_kvpress(module, hidden_states, keys, values, kwargs)
        credit = getattr(event.scratch.get("layer"), "ams_credit", None)
        if credit is not None and credit.shape[-1] <= keys.shape[2]:
            event.state["credit"] = credit
        event.entry_state = self.entry_state
        event.state = self.absorb(event)
        return event
