"""Every scorer of kvpress, alone and under AMS: it works while decoding, or it is refused with the reason."""

import inspect

import kvpress
import pytest
from helpers import tiny, token_ids
from transformers import DynamicCache

from pressroom.presses import AMSPress, DecodingPress

SCORERS = sorted(
    (cls for cls in vars(kvpress).values() if inspect.isclass(cls) and issubclass(cls, kvpress.ScorerPress)),
    key=lambda cls: cls.__name__,
)
REFUSED = {
    "CapPress",
    "CompactorPress",
    "ExpectedAttentionStatsPress",
    "KVzapPress",
    "LeverageScorePress",
    "NonCausalAttnPress",
    "ObservedAttentionPress",
    "PyramidKVPress",
}
ELSEWHERE = {"QFilterPress"}  # downloads what it needs
NO_SCORER = {"ScorerPress"}


def default(cls):
    return cls(kvpress.KnormPress()) if cls is kvpress.CriticalKVPress else cls()


@pytest.mark.parametrize("wrap", [lambda base: base, AMSPress], ids=["alone", "ams"])
@pytest.mark.parametrize(
    "cls", [c for c in SCORERS if c.__name__ not in ELSEWHERE | NO_SCORER], ids=lambda c: c.__name__
)
def test_works_or_is_refused(cls, wrap):
    if cls.__name__ in REFUSED:
        with pytest.raises(ValueError, match=rf"base_press: got {cls.__name__}, which does not work while decoding: "):
            wrap(default(cls)) if wrap is AMSPress else DecodingPress(default(cls))
        return
    model, ids = tiny("llama"), token_ids(2, 30)
    press = DecodingPress(wrap(default(cls)), target_size=24, compression_interval=8)
    for _ in range(2):
        cache = DynamicCache(config=model.config)
        with press(model):
            model.generate(ids, max_new_tokens=40, do_sample=False, past_key_values=cache)
        assert press.account[0].events == 4
        assert {layer.keys.shape[-2] for layer in cache.layers} == {24 + 7}


@pytest.mark.parametrize("name", ["AdaKVPress", "ChunkKVPress", "FinchPress", "KVzipPress"])
def test_wrappers_that_are_no_scorers_are_refused(name):
    cls = getattr(kvpress, name)
    press = cls(kvpress.KnormPress()) if name in ("AdaKVPress", "ChunkKVPress") else cls()
    with pytest.raises(ValueError, match=r"^base_press: got .*, allowed: a ScorerPress"):
        DecodingPress(press)


@pytest.mark.parametrize("name", ["ComposedPress", "PerLayerCompressionPress"])
def test_prefill_wrappers_take_our_scorers(name):
    from pressroom.presses import SnapKVPress

    model, ids = tiny("llama"), token_ids(2, 60)
    press = {
        "ComposedPress": lambda: kvpress.ComposedPress(
            [SnapKVPress(compression_ratio=0.5), AMSPress(kvpress.KnormPress())]
        ),
        "PerLayerCompressionPress": lambda: kvpress.PerLayerCompressionPress(SnapKVPress(), [0.5] * 3),
    }[name]()
    cache = DynamicCache(config=model.config)
    with press(model):
        model(ids, past_key_values=cache)
    assert {layer.keys.shape[-2] for layer in cache.layers} == {30}
