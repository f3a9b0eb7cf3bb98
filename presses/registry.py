"""Method names, and the press each stands for."""

from __future__ import annotations

import difflib
from contextlib import contextmanager
from dataclasses import dataclass, field, fields

from kvpress import BasePress, LagKVPress

from .ams import PRESETS, AMSPress
from .decoding import DecodingPress, SequenceAccount
from .scorers import (
    ExpectedAttentionPress,
    H2OPress,
    KeyDiffPress,
    KnormPress,
    RandomPress,
    RPCPress,
    SnapKVPress,
    StreamingLLMPress,
    TOVAPress,
    UsagePress,
)
from .trace import Trace

SCORERS: dict[str, type] = {
    "streaming_llm": StreamingLLMPress,
    "random": RandomPress,
    "knorm": KnormPress,
    "usage": UsagePress,
    "tova": TOVAPress,
    "h2o": H2OPress,
    "rpc": RPCPress,
    "expected": ExpectedAttentionPress,
    "expected_e0": ExpectedAttentionPress,
    "lagkv": LagKVPress,
    "keydiff": KeyDiffPress,
    "snapkv": SnapKVPress,
}
_DEFAULTS: dict[str, dict] = {"expected_e0": {"epsilon": 0.0}}
ABLATIONS: dict[str, dict] = {
    "global_head": {"segmentation": "none", "n_sink": 0, "always_keep_last": 0, "min_keep_per_segment": 0},
    "no_segments": {"segmentation": "none"},
    "fixed_segment": {"segmentation": "fixed"},
    "no_credit": {"use_credit": False},
    "no_mass": {"use_mass_quotas": False},
}
_DECODING = {"hidden_states_buffer_size", "protect_prompt", "compress_prompt"}


@dataclass
class FullKVPress(BasePress):
    """No compression, with the interface of a press, so that every method is used alike."""

    account: list[SequenceAccount] = field(default_factory=list, init=False, repr=False)

    @contextmanager
    def __call__(self, model):
        yield self

    @contextmanager
    def record(self):
        yield Trace()

    def next_position(self, cache) -> int:
        return cache.get_seq_length()


def names() -> list[str]:
    """Every method that :func:`build` knows."""
    plain = ["full_kv", *SCORERS, "random_prompt"]
    ams = [f"ams_{scorer}" for scorer in SCORERS]
    return plain + ams + [f"ablation_{kind}_{scorer}" for kind in ABLATIONS for scorer in SCORERS]


def build(
    name: str, *, target_size: int | None = None, compression_interval: int = 512, preset: str = "paper", **overrides
):
    """A fresh press by its method name.

    Parameters
    ----------
    name : str
        ``full_kv``, a scorer (``tova``, ``snapkv``, ...), ``random_prompt``, ``ams_<scorer>``, or
        ``ablation_<kind>_<scorer>``; :func:`names` lists them.
    target_size : int
        Entries kept per layer and head; every method but ``full_kv`` needs it.
    compression_interval : int, default 512
        Tokens between events.
    preset : {"paper", "released"}
        Values of AMS.
    **overrides
        Fields of the press, of AMS or of the scorer.

    Raises
    ------
    ValueError
        For an unknown name (with close ones), a missing budget, or a field that the method does not have.
    """
    if name == "full_kv":
        return FullKVPress()
    known = names()
    if name not in known:
        close = difflib.get_close_matches(str(name), known, n=3, cutoff=0.5)
        hint = f"; close: {', '.join(close)}" if close else ""
        raise ValueError(f"name: got {name!r}, allowed: {', '.join(known[:10])}, ams_<scorer>, ...{hint}")
    if target_size is None:
        raise ValueError(f"target_size: got None, allowed: an integer of at least 1; {name} needs a budget")
    if preset not in PRESETS:
        raise ValueError(f"preset: got {preset!r}, allowed: {' | '.join(PRESETS)}")
    decoding = {key: overrides.pop(key) for key in list(overrides) if key in _DECODING}
    kind, scorer_name = _parse(name)
    if name == "random_prompt":
        decoding.setdefault("protect_prompt", True)
    scorer_fields = {f.name for f in fields(SCORERS[scorer_name]) if f.init} - {"compression_ratio"}
    ams = {}
    if kind is not None:
        ams_fields = {f.name for f in fields(AMSPress) if f.init} - {"base_press", "compression_ratio"}
        ams = {key: overrides.pop(key) for key in list(overrides) if key in ams_fields}
    unknown = sorted(set(overrides) - scorer_fields)
    if unknown:
        allowed = sorted(scorer_fields | _DECODING)
        raise ValueError(f"{unknown[0]}: not a field of {name}, allowed: {', '.join(allowed)}")
    press = SCORERS[scorer_name](**{**_DEFAULTS.get(scorer_name, {}), **overrides})
    if kind is not None:
        press = AMSPress.preset(preset, press, **{**ABLATIONS.get(kind, {}), **ams})
    return DecodingPress(press, compression_interval=compression_interval, target_size=target_size, **decoding)


def _parse(name: str) -> tuple[str | None, str]:
    """Kind (None, "ams" or an ablation) and scorer of a known name."""
    if name == "random_prompt":
        return None, "random"
    if name.startswith("ams_"):
        return "ams", name.removeprefix("ams_")
    for kind in ABLATIONS:
        if name.startswith(f"ablation_{kind}_"):
            return kind, name.removeprefix(f"ablation_{kind}_")
    return None, name
