"""Scorers that are right while decoding, and how kvpress's own are taken in."""

from __future__ import annotations

import kvpress
from kvpress import KnormPress, ScorerPress

from .attention import SnapKVPress, TOVAPress, UsagePress
from .base import (
    HeadSelection,
    Scorer,
    ScorerWrapper,
    at_least,
    base_scores,
    require,
    require_int,
    require_odd,
    select_top,
)
from .expected import ExpectedAttentionPress
from .geometry import KeyDiffPress, RandomPress, StreamingLLMPress
from .h2o import H2OPress
from .rpc import RPCPress

__all__ = [
    "ExpectedAttentionPress",
    "H2OPress",
    "HeadSelection",
    "KeyDiffPress",
    "KnormPress",
    "RPCPress",
    "RandomPress",
    "Scorer",
    "ScorerWrapper",
    "SnapKVPress",
    "StreamingLLMPress",
    "TOVAPress",
    "UsagePress",
    "adapt",
    "at_least",
    "base_scores",
    "require",
    "require_int",
    "require_odd",
    "select_top",
]

_REPLACED = {
    kvpress.SnapKVPress: (SnapKVPress, ("window_size", "kernel_size")),
    kvpress.TOVAPress: (TOVAPress, ()),
    kvpress.StreamingLLMPress: (StreamingLLMPress, ("n_sink",)),
    kvpress.KeyDiffPress: (KeyDiffPress, ()),
    kvpress.ExpectedAttentionPress: (
        ExpectedAttentionPress,
        ("n_future_positions", "n_sink", "epsilon", "use_covariance", "use_vnorm"),
    ),
}
_REFUSED = {
    "PyramidKVPress": "it gives each layer its own budget, which score() alone loses",
    "ObservedAttentionPress": "it needs the attention weights of every query, which decoding does not keep",
    "NonCausalAttnPress": "it scores a prompt and has no meaning for a cache while decoding",
    "LeverageScorePress": "it scores a prompt and has no meaning for a cache while decoding",
    "CompactorPress": "it scores a prompt and has no meaning for a cache while decoding",
    "CapPress": "it takes the number of buffered states for the next position; use ExpectedAttentionPress",
    "ExpectedAttentionStatsPress": "it takes the number of buffered states for the next position; use "
    "ExpectedAttentionPress",
    "KVzapPress": "it scores new states only",
}


def adapt(press, field: str = "base_press"):
    """A scorer that is right while decoding: ours as it is, kvpress's where we have a right one replaced by it.

    Raises
    ------
    ValueError
        If ``press`` is no scorer, or a kind that cannot score a cache while decoding.
    """
    if not isinstance(press, ScorerPress):
        raise ValueError(f"{field}: got {press!r}, allowed: a ScorerPress instance")
    for cls in type(press).__mro__:
        if cls.__name__ in _REFUSED and cls.__module__.startswith("kvpress"):
            raise ValueError(
                f"{field}: got {cls.__name__}, which does not work while decoding: {_REFUSED[cls.__name__]}"
            )
    replacement = _REPLACED.get(type(press))
    if replacement is None:
        return press
    ours, fields = replacement
    return ours(compression_ratio=press.compression_ratio, **{name: getattr(press, name) for name in fields})
