"""What works where: the same few uses of kvpress's DecodingPress and of ours. Where a line about kvpress fails after an
upgrade, kvpress has been mended: update the table of the README."""

import io

import kvpress
import pytest
import torch
from helpers import tiny, token_ids
from peft import LoraConfig, get_peft_model
from transformers import DynamicCache, QuantizedCache

from pressroom.presses import DecodingPress

PRESSES = {"kvpress": kvpress.DecodingPress, "pressroom": DecodingPress}
IDS = token_ids(1, 30)

pytestmark = [pytest.mark.parametrize("where", ["kvpress", "pressroom"]), pytest.mark.filterwarnings("ignore")]


def press(where, base=None):
    return PRESSES[where](base or kvpress.KeyDiffPress(), target_size=24, compression_interval=8)


def greedy(model, ids, with_press, new=60, **more):
    with with_press(model):
        return model.generate(ids, max_new_tokens=new, do_sample=False, pad_token_id=0, **more)


def test_a_left_padded_row_is_as_alone(where):
    model, short = tiny("llama"), token_ids(1, 17, seed=1)
    ids = torch.cat([torch.cat([torch.zeros(1, 13, dtype=torch.long), short], dim=1), IDS])
    mask = torch.ones_like(ids)
    mask[0, :13] = 0
    row = greedy(model, ids, press(where), attention_mask=mask)[0, 30:]
    alone = greedy(model, short, press(where))[0, 17:]
    assert torch.equal(row, alone) == (where == "pressroom")


def test_a_second_generation_in_one_context_is_a_fresh_one(where):
    model, second = tiny("llama"), token_ids(1, 17, seed=1)
    fresh = greedy(model, second, press(where, kvpress.SnapKVPress(window_size=4)))
    with press(where, kvpress.SnapKVPress(window_size=4))(model):
        model.generate(IDS, max_new_tokens=61, do_sample=False)
        again = model.generate(second, max_new_tokens=60, do_sample=False)
    assert torch.equal(again, fresh) == (where == "pressroom")


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
def test_many_tokens_after_an_event_are_as_one_by_one(where, attn):
    model, ids = tiny("llama", attn), token_ids(1, 86)

    def run(sizes):
        cache = DynamicCache(config=model.config)
        with press(where)(model):
            return torch.cat([model(part, past_key_values=cache).logits for part in ids.split(sizes, dim=1)], dim=1)

    difference = (run([30] + [1] * 56) - run([30] + [1] * 24 + [8] * 4)).abs().max()
    assert (difference < 1e-3) == (where == "pressroom")


def test_the_next_position_is_the_true_one(where):
    model = tiny("llama")
    cache = DynamicCache(config=model.config)
    greedy(model, IDS, press(where), past_key_values=cache)
    assert (cache.get_seq_length() == 89) == (where == "pressroom")


def test_a_peft_model(where):
    model = get_peft_model(tiny("llama"), LoraConfig(r=4, target_modules=["q_proj"]))
    if where == "kvpress":
        with pytest.raises(AttributeError):
            greedy(model, IDS, press(where))
    else:
        assert greedy(model, IDS, press(where)).shape == (1, 90)


def test_a_compressed_cache_is_saved_and_loaded(where):
    model, file = tiny("llama"), io.BytesIO()
    cache = DynamicCache(config=model.config)
    greedy(model, IDS, press(where), past_key_values=cache)
    torch.save(cache, file)
    file.seek(0)
    assert (torch.load(file).get_seq_length() == 89) == (where == "pressroom")


def test_a_model_with_sliding_layers(where):
    model = tiny("gemma3")
    if where == "kvpress":
        with pytest.raises(RuntimeError):
            greedy(model, IDS, press(where))
    else:
        assert greedy(model, IDS, press(where)).shape == (1, 90)


def test_sinks_survive_the_second_event(where):
    model = tiny("llama")
    cache = DynamicCache(config=model.config)
    with press(where, kvpress.StreamingLLMPress())(model):
        model(IDS, past_key_values=cache)
        first = cache.layers[0].keys[:, :, :4].clone()
        for token in token_ids(1, 24, seed=2).split(1, dim=1):
            model(token, past_key_values=cache)
    held = [bool((cache.layers[0].keys == first[:, :, i : i + 1]).all(dim=-1).any()) for i in range(4)]
    assert all(held) == (where == "pressroom")


def test_nothing_is_left_on_the_model(where):
    model = tiny("llama")
    before = [name for name, _ in model.named_modules()]
    greedy(model, IDS, press(where))
    assert ([name for name, _ in model.named_modules()] == before) == (where == "pressroom")


class Newest(kvpress.ScorerPress):
    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        return torch.arange(keys.shape[2]).expand(keys.shape[:3]).float()


def test_a_quantised_cache_loses_no_token(where):
    pytest.importorskip("optimum.quanto")
    model, ids = tiny("llama"), token_ids(1, 38)
    full = DynamicCache(config=model.config)
    model(ids, past_key_values=full)
    cache = QuantizedCache("quanto", model.config, q_group_size=16, residual_length=64)
    with press(where, Newest())(model):
        for part in ids.split([30] + [1] * 8, dim=1):
            model(part, past_key_values=cache)
    layer = cache.layers[0]
    held = layer.contents()[0] if where == "pressroom" else layer._dequantize(layer._quantized_keys)
    assert held.shape[2] == 24
    newest = full.layers[0].keys[:, :, -8:, None]  # (1, H, 8, 1, D)
    found = (held[:, :, None] - newest).abs().amax(dim=-1).amin(dim=-1) < 0.4  # 4 bits of values up to 3
    assert found.all() == (where == "pressroom")
    assert found.any() == (where == "pressroom")
