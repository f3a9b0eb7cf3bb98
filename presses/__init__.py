"""Presses: KV-cache compression while a model decodes."""

import sys
from importlib import import_module

if __name__ == "presses":  # imported from the root of a checkout
    try:
        sys.modules[__name__] = import_module("pressroom.presses")
    except ModuleNotFoundError as error:
        raise ImportError(
            "install the checkout with `pip install -e .` and write `from pressroom.presses import ...`"
        ) from error

_HOME = {
    "AMSPress": "ams",
    "DecodingPress": "decoding",
    "Event": "event",
    "ExpectedAttentionPress": "scorers",
    "FullKVPress": "registry",
    "H2OPress": "scorers",
    "KeyDiffPress": "scorers",
    "KnormPress": "scorers",
    "PressLayer": "cache",
    "RPCPress": "scorers",
    "RandomPress": "scorers",
    "Scorer": "scorers",
    "SnapKVPress": "scorers",
    "StreamingLLMPress": "scorers",
    "TOVAPress": "scorers",
    "Trace": "trace",
    "UsagePress": "scorers",
    "build": "registry",
    "names": "registry",
}
__all__ = sorted(_HOME)


def __getattr__(name: str):
    if name in _HOME:
        import_module(".versions", __name__).check_versions()
        return getattr(import_module(f".{_HOME[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
