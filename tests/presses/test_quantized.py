"""Presses on a quantised cache: selection among dequantised entries, kept ones packed again."""

import copy
import io

import pytest
import torch
from helpers import tiny, token_ids
from transformers import DynamicCache, QuantizedCache
from transformers.cache_utils import QuantoQuantizedLayer

from pressroom.presses import DecodingPress, TOVAPress, build

SETTINGS = {"target_size": 32, "compression_interval": 16}


def quantized(model, backend="quanto", **options):
    pytest.importorskip({"quanto": "optimum.quanto"}.get(backend, backend))
    axis = 1 if backend == "hqq" else 0
    settings = {"q_group_size": 16, "residual_length": 8, "axis_key": axis, "axis_value": axis}
    return QuantizedCache(backend, model.config, **{**settings, **options})


def generate(model, ids, cache, name="ams_tova", tokens=60):
    press = build(name, **SETTINGS)
    with press(model):
        out = model.generate(ids, max_new_tokens=tokens, do_sample=False, past_key_values=cache)
    return out, press


@pytest.mark.parametrize("name", ["tova", "ams_expected", "keydiff"])
@pytest.mark.parametrize("beams", [1, 3])
def test_with_lossless_packing_it_is_a_dynamic_cache(monkeypatch, name, beams):
    model, ids = tiny("llama"), token_ids(2, 30)
    cache = quantized(model)
    packed = []
    monkeypatch.setattr(
        QuantoQuantizedLayer, "_quantize", lambda self, tensor, axis: packed.append(1) or tensor.clone()
    )
    monkeypatch.setattr(QuantoQuantizedLayer, "_dequantize", lambda self, tensor: tensor)
    with (press := build(name, **SETTINGS))(model):
        out = model.generate(ids, max_new_tokens=60, do_sample=False, num_beams=beams, past_key_values=cache)
    assert press.account[0].events == 3
    assert packed
    with build(name, **SETTINGS)(model):
        plain = model.generate(ids, max_new_tokens=60, do_sample=False, num_beams=beams)
    assert torch.equal(out, plain)


@pytest.mark.parametrize("backend", ["quanto", "hqq"])
def test_events_choose_among_the_dequantised_entries(backend):
    model, ids = tiny("llama"), token_ids(2, 40)
    full = DynamicCache(config=model.config)
    model(ids, past_key_values=full)
    cache = quantized(model, backend)
    seen = []

    class Watching(TOVAPress):
        def scores(self, event):
            seen.append((event.layer_idx, event.keys))
            return super().scores(event)

    press = DecodingPress(Watching(), **SETTINGS)
    with press(model), press.record() as trace:
        model.generate(ids, max_new_tokens=17, do_sample=False, past_key_values=cache)
    keys = next(keys for layer, keys in seen if layer == 0)  # keys of the first layer do not depend on the cache
    backend_layer = cache.layers[0].backend
    backend_layer.keys = full.layers[0].keys
    axis = backend_layer.axis_key
    packed = backend_layer._dequantize(backend_layer._quantize(full.layers[0].keys.contiguous(), axis=axis))
    assert torch.equal(keys[:, :, :40], packed)
    assert (packed - full.layers[0].keys).abs().max() > 1e-3
    event = trace.layer(0)[0]
    assert event.kept.shape[-1] == 32
    assert cache.layers[0].length == 32
    held = cache.layers[0].contents()[0]
    chosen = keys.gather(2, event.indices[..., None].expand(-1, -1, -1, 16))
    assert (held - chosen).abs().max() < 0.5 * chosen.abs().max()  # packed once more
    assert not torch.equal(held, chosen)


@pytest.mark.parametrize("backend", ["quanto", "hqq"])
def test_no_token_is_lost(backend):
    model, ids = tiny("llama"), token_ids(2, 30)
    cache = quantized(model, backend)
    out, press = generate(model, ids, cache)
    assert out.shape[1] == 90
    assert press.account[0].events == 3
    assert press.next_position(cache) == 89
    positions = cache.layers[1].positions()
    assert positions.shape[-1] == 32 + 11
    assert torch.equal(positions[..., -11:], torch.arange(78, 89).expand(2, 2, -1))
    assert (positions.diff(dim=-1) > 0).all()


def test_long_residual_is_full_precision():
    model, ids = tiny("qwen3"), token_ids(1, 30)
    out, _ = generate(model, ids, quantized(model, residual_length=4096))
    assert torch.equal(out, generate(model, ids, None)[0])


def test_a_prefilled_quantised_cache_is_adopted():
    model, ids = tiny("llama"), token_ids(1, 50)
    cache = quantized(model)
    model(ids[:, :40], past_key_values=cache)
    for i in range(40, 45):
        model(ids[:, i : i + 1], past_key_values=cache)
    out, press = generate(model, ids, cache)
    assert press.account[0].events == 3
    assert press.account[0].prompt == 50
    assert cache.layers[0].seen == out.shape[1] - 1


def test_a_failed_forward_is_taken_back():
    model, ids = tiny("llama"), token_ids(1, 40)
    cache, same = quantized(model), quantized(model)
    with build("tova", **SETTINGS)(model):
        model(ids, past_key_values=cache)
        model(ids, past_key_values=same)
        handle = model.model.layers[2].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(ids[:, :3], past_key_values=cache)
        handle.remove()
        assert cache.get_seq_length() == 40
        for step in range(20):
            got = model(ids[:, step : step + 1], past_key_values=cache).logits
            assert torch.equal(got, model(ids[:, step : step + 1], past_key_values=same).logits)


def test_copies_and_files_go_on():
    model, ids = tiny("llama"), token_ids(1, 30)
    cache = quantized(model, residual_length=64)  # nothing is packed twice: the copy holds the same numbers
    with build("tova", **SETTINGS)(model):
        model.generate(ids, max_new_tokens=40, do_sample=False, past_key_values=cache)
        copied = copy.deepcopy(cache)
        buffer = io.BytesIO()
        torch.save(cache, buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=False)
        token = ids[:, :1]
        expected = model(token, past_key_values=cache).logits
        assert torch.equal(model(token, past_key_values=copied).logits, expected)
        assert torch.equal(model(token, past_key_values=loaded).logits, expected)
    assert copied.get_seq_length() == cache.get_seq_length() == 70
