"""Ways to generate, kinds of caches, wrapped models."""

import pytest
import torch
from accelerate import cpu_offload, dispatch_model
from helpers import tiny, token_ids
from oracles.eviction import masked_logits
from peft import LoraConfig, get_peft_model
from transformers import DynamicCache, StaticCache, StoppingCriteria, StoppingCriteriaList

from pressroom.presses import build

SETTINGS = {"target_size": 24, "compression_interval": 8}


@pytest.mark.parametrize("name", ["ams_expected", "snapkv"])
def test_a_peft_model_is_its_base(name):
    model, ids = tiny("llama"), token_ids(1, 30)
    with build(name, **SETTINGS)(model):
        expected = model.generate(ids, max_new_tokens=40, do_sample=False)
    wrapped = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    with (press := build(name, **SETTINGS))(wrapped):
        assert torch.equal(wrapped.generate(input_ids=ids, max_new_tokens=40, do_sample=False), expected)
    assert press.account[0].events == 4
    for layer in wrapped.base_model.model.model.layers:  # an adapter that does something
        torch.nn.init.normal_(layer.self_attn.q_proj.lora_B["default"].weight)
    with build(name, **SETTINGS)(wrapped), torch.no_grad():
        changed = wrapped.generate(input_ids=ids, max_new_tokens=40, do_sample=False)
    merged = wrapped.merge_and_unload()
    with build(name, **SETTINGS)(merged):
        assert torch.equal(merged.generate(ids, max_new_tokens=40, do_sample=False), changed)


def test_a_model_that_accelerate_dispatched():
    model, ids = tiny("llama"), token_ids(1, 30)
    with build("ams_expected", **SETTINGS)(model):
        expected = model.generate(ids, max_new_tokens=40, do_sample=False)
    cpu_offload(model, execution_device="cpu")  # its weights come and go around each module's forward
    assert next(model.parameters()).device.type == "meta"
    with (press := build("ams_expected", **SETTINGS))(model):
        assert torch.equal(model.generate(ids, max_new_tokens=40, do_sample=False), expected)
    assert press.account[0].events == 4


@pytest.mark.gpu
def test_a_model_on_two_devices():
    model, ids = tiny("llama"), token_ids(1, 30)
    with build("ams_expected", **SETTINGS)(model):
        expected = model(ids).logits
    places = {"model.embed_tokens": 0, "model.rotary_emb": 0, "model.layers.0": 0, "model.layers.1": "cpu"}
    dispatch_model(model, places | {"model.layers.2": 0, "model.norm": 0, "lm_head": 0}, main_device=0)
    with (press := build("ams_expected", **SETTINGS))(model):
        assert (model(ids).logits.cpu() - expected).abs().max() < 1e-3
        model.generate(ids.cuda(), max_new_tokens=40, do_sample=False)
    assert press.account[0].events == 4


def test_assisted_generation_is_refused_before_the_first_token():
    model, ids = tiny("llama"), token_ids(1, 30)
    seen = []
    model.model.register_forward_hook(lambda *_: seen.append(1))
    with build("tova", **SETTINGS)(model):
        with pytest.raises(ValueError, match="assistant_model: got 'LlamaForCausalLM', allowed: None"):
            model.generate(ids, max_new_tokens=9, assistant_model=tiny("llama", num_hidden_layers=1))
        with pytest.raises(ValueError, match="prompt_lookup_num_tokens: got 3, allowed: None"):
            model.generate(ids, max_new_tokens=9, prompt_lookup_num_tokens=3)
        assert not seen
        model.generate(ids, max_new_tokens=9)
    assert "generate" not in vars(model)


def test_a_generate_that_someone_else_wrapped_is_left_alone():
    model, ids = tiny("llama"), token_ids(1, 30)
    own = model.generate
    model.generate = lambda *args, **kwargs: own(*args, **kwargs)
    before = model.generate
    with build("tova", **SETTINGS)(model):
        model.generate(ids, max_new_tokens=9)
    assert model.generate is before


@pytest.mark.parametrize("kind", ["static", "offloaded"])
def test_caches_that_cannot_be_bounded_are_refused(kind):
    model, ids = tiny("llama"), token_ids(1, 30)
    with build("tova", **SETTINGS)(model):
        with pytest.raises(ValueError, match=r"past_key_values: got .*, allowed: DynamicCache\(\) or Quant"):
            model.generate(ids, max_new_tokens=9, cache_implementation=kind)
        with pytest.raises(ValueError, match="past_key_values: got StaticCache"):
            model(ids, past_key_values=StaticCache(config=model.config, max_cache_len=64))
        model.generate(ids, max_new_tokens=9)


def test_without_a_cache_nothing_happens():
    model, ids = tiny("llama"), token_ids(1, 60)
    with build("tova", **SETTINGS)(model):
        assert torch.equal(model(ids, use_cache=False).logits, model(ids).logits)


class StopAt(StoppingCriteria):
    def __init__(self, length):
        self.length = length

    def __call__(self, ids, scores, **kwargs):
        return torch.full((ids.shape[0],), ids.shape[1] >= self.length)


def test_stopping_criteria_and_a_later_turn():
    model, ids, more = tiny("llama"), token_ids(1, 30), token_ids(1, 12, seed=1)
    press = build("ams_tova", **SETTINGS)
    with press(model):
        cache = DynamicCache(config=model.config)
        stop = StoppingCriteriaList([StopAt(62)])
        first = model.generate(ids, max_new_tokens=90, do_sample=False, stopping_criteria=stop, past_key_values=cache)
        assert first.shape[1] == 62
        assert press.next_position(cache) == 61
        whole = torch.cat([first, more], dim=1)
        second = model.generate(whole, max_new_tokens=20, do_sample=False, past_key_values=cache)
        # the same by hand: what the cache lacks in one forward, then token by token
        again = DynamicCache(config=model.config)
        model.generate(ids, max_new_tokens=32, do_sample=False, past_key_values=again)
        token, got = whole[:, 61:], []
        for _ in range(20):
            token = model(token, past_key_values=again).logits[:, -1:].argmax(dim=-1)
            got.append(token)
    assert torch.equal(second[:, 74:], torch.cat(got, dim=1))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(family, dtype):
    model, ids = tiny(family).to(dtype), token_ids(2, 30)
    for name in ("ams_expected", "snapkv"):
        cache = DynamicCache(config=model.config)
        with build(name, **SETTINGS)(model):
            out = model.generate(ids, max_new_tokens=40, do_sample=False, past_key_values=cache)
        assert out.shape == (2, 70)
        bounded = [layer for layer in cache.layers if hasattr(layer, "events")]
        assert all(layer.keys.dtype == dtype and layer.keys.shape[-2] < 32 for layer in bounded)
        wide = build(name, target_size=100, compression_interval=8)
        with wide(model):
            bounded_out = model.generate(ids, max_new_tokens=40, do_sample=False)
        assert torch.equal(bounded_out, model.generate(ids, max_new_tokens=40, do_sample=False))


@pytest.mark.parametrize(("head_dim", "heads", "kv_heads"), [(48, 4, 4), (80, 4, 2), (16, 7, 1), (16, 6, 2)])
@pytest.mark.parametrize("name", ["ams_expected", "snapkv", "keydiff"])
def test_head_sizes_and_groups(name, head_dim, heads, kv_heads):
    model = tiny("llama", head_dim=head_dim, num_attention_heads=heads, num_key_value_heads=kv_heads)
    ids = token_ids(1, 30)
    cache = DynamicCache(config=model.config)
    with build(name, **SETTINGS)(model):
        model.generate(ids, max_new_tokens=40, do_sample=False, past_key_values=cache)
    for layer in cache.layers:  # KV heads are stored, not query heads
        assert layer.keys.shape == (1, kv_heads, 24 + 7, head_dim)
        assert layer.keys.untyped_storage().nbytes() == kv_heads * (24 + 8) * head_dim * 4


def test_gradients_pass_through_a_compressed_cache():
    """The same loss and gradients as when what was evicted is masked out."""
    model, ids = tiny("llama").requires_grad_(True), token_ids(1, 60)
    cache = DynamicCache(config=model.config)
    with build("ams_tova", **SETTINGS)(model) as press, press.record() as trace:
        logits = [model(part, past_key_values=cache).logits for part in ids.split([20] + [1] * 40, dim=1)]
    torch.cat(logits, dim=1).square().mean().backward()
    got = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    masked_logits(model, ids, trace).square().mean().backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(got[name], p.grad, atol=1e-4, rtol=1e-3)


def test_a_cache_from_inference_mode_goes_on_outside():
    model, ids = tiny("llama"), token_ids(1, 60)
    runs = []
    for mode in (torch.inference_mode, torch.no_grad):
        cache = DynamicCache(config=model.config)
        with build("ams_expected", **SETTINGS)(model):
            with mode():
                for part in ids[:, :40].split([20] + [1] * 20, dim=1):
                    model(part, past_key_values=cache)
            runs.append(torch.cat([model(t, past_key_values=cache).logits for t in ids[:, 40:].split(1, dim=1)]))
    assert torch.equal(*runs)
