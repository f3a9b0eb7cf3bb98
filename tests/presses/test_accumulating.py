"""Scorers that read every query once, and what they carry along."""

import copy

import kvpress
import pytest
import torch
from helpers import tiny, token_ids
from transformers import DynamicCache

from pressroom.presses import AMSPress, DecodingPress, H2OPress, TOVAPress, build

SIZES = {"target_size": 24, "compression_interval": 8}


class Summed:
    """A run under a press, and the sums of what eager attention gave to each position, written out."""

    def __init__(self, family, press, parts, batch=2):
        self.model = tiny(family, "eager")
        self.cache = DynamicCache(config=self.model.config)
        full = [i for i, layer in enumerate(self.model.model.layers) if self._is_full(layer)]
        total = sum(parts)
        heads = self.model.config.num_key_value_heads
        self.sums = {layer: torch.zeros(batch, heads, total) for layer in full}
        done = 0
        with press(self.model), press.record() as self.trace:
            for part in token_ids(batch, total, seed=4).split(parts, dim=1):
                before = {layer: self._positions(layer, batch, heads) for layer in full}
                new = torch.arange(done, done + part.shape[1]).expand(batch, heads, -1)
                out = self.model(part, past_key_values=self.cache, output_attentions=True)
                done += part.shape[1]
                for layer in full:
                    given = out.attentions[layer].sum(dim=2).unflatten(1, (heads, -1)).sum(dim=2)
                    self.sums[layer].scatter_add_(-1, torch.cat([before[layer], new], dim=-1), given)
        self.full = full

    @staticmethod
    def _is_full(layer):
        return getattr(layer, "attention_type", "full_attention") == "full_attention"

    def _positions(self, layer, batch, heads):
        if not self.cache.layers[layer].is_initialized:
            return torch.zeros(batch, heads, 0, dtype=torch.long)
        return self.cache.layers[layer].positions()

    def check(self):
        for index in self.full:
            layer = self.cache.layers[index]
            state = layer.state["attention_sum"]
            positions = layer.positions()[..., : state.shape[-1]]
            torch.testing.assert_close(state, self.sums[index].gather(-1, positions), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("wrap", [lambda scorer: scorer, AMSPress], ids=["plain", "ams"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "gemma3"])
def test_h2o_sums_every_query(family, wrap):
    """Across a prompt above the budget, three evictions, and a chunk in between."""
    run = Summed(family, DecodingPress(wrap(H2OPress()), **SIZES), [40] + [1] * 11 + [9] + [1] * 8)
    assert len(run.trace.layer(run.full[0])) == 3
    run.check()


def test_h2o_sums_a_prompt_of_one_token():
    Summed("llama", DecodingPress(H2OPress(), **SIZES), [1] * 41).check()


def test_h2o_keeps_the_recent_half_and_the_heaviest():
    run = Summed("llama", DecodingPress(H2OPress(), **SIZES), [40] + [1] * 8)
    for record in run.trace.events:
        sums = run.sums[record.layer]
        recent = torch.arange(36, 48).expand(2, 2, -1)
        heavy = sums[..., :36].topk(12, dim=-1).indices.sort(dim=-1).values
        assert torch.equal(record.kept, torch.cat([heavy, recent], dim=-1))


def test_recent_share():
    run = Summed("llama", DecodingPress(H2OPress(recent_ratio=0), **SIZES), [40] + [1] * 8)
    for record in run.trace.events:
        assert torch.equal(record.kept, run.sums[record.layer].topk(24, dim=-1).indices.sort(dim=-1).values)
    with pytest.raises(ValueError, match=r"recent_ratio: got 1\.5"):
        H2OPress(recent_ratio=1.5)


def test_nothing_is_absorbed_twice_when_a_forward_fails():
    model, press = tiny("llama"), DecodingPress(H2OPress(), **SIZES)
    cache, good = DynamicCache(config=model.config), DynamicCache(config=model.config)
    ids = token_ids(1, 30)

    def fail(*_):
        raise RuntimeError("stop")

    with press(model):
        for target in (cache, good):
            model(ids[:, :20], past_key_values=target)
        handle = model.model.layers[2].mlp.register_forward_hook(fail)
        for part in (ids[:, 20:25], ids[:, 20:21]):
            with pytest.raises(RuntimeError):
                model(part, past_key_values=cache)
        handle.remove()
        for target in (cache, good):
            model(ids[:, 20:25], past_key_values=target)
            model(ids[:, 25:26], past_key_values=target)
    for ours, theirs in zip(cache.layers, good.layers, strict=True):
        assert ours.unread == theirs.unread == 1
        assert torch.equal(ours.state["attention_sum"], theirs.state["attention_sum"])


def test_state_is_cut_with_the_tokens_it_belongs_to():
    model, press = tiny("llama"), DecodingPress(H2OPress(), **SIZES)
    cache = DynamicCache(config=model.config)
    with press(model):
        model(token_ids(1, 20), past_key_values=cache)
        model(token_ids(1, 5), past_key_values=cache)
        cache.crop(22)
        model(token_ids(1, 1), past_key_values=cache)
    for layer in cache.layers:
        assert (layer.length, layer.state["attention_sum"].shape[-1], layer.unread) == (23, 22, 1)


def test_state_goes_along_with_other_presses_and_copies():
    """Another press on the same cache moves the sums with the entries, and a copy has its own."""
    model = tiny("llama")
    cache = DynamicCache(config=model.config)
    ids = token_ids(1, 60)
    with DecodingPress(H2OPress(), **SIZES)(model):
        for part in ids[:, :36].split([20] + [1] * 16, dim=1):
            model(part, past_key_values=cache)
    before = {i: (layer.positions(), layer.state["attention_sum"]) for i, layer in enumerate(cache.layers)}
    twin = copy.deepcopy(cache)
    with DecodingPress(TOVAPress(), **SIZES)(model):
        for part in ids[:, 36:44].split(1, dim=1):
            model(part, past_key_values=cache)
    for i, layer in enumerate(cache.layers):
        places, sums = before[i]
        after = layer.state["attention_sum"]
        assert after.shape[-1] == layer.length == 24
        for head in range(2):
            known = dict(zip(places[0, head].tolist(), sums[0, head].tolist(), strict=False))
            expected = [known.get(position, 0.0) for position in layer.positions()[0, head].tolist()]
            assert after[0, head].tolist() == expected
        assert torch.equal(twin.layers[i].state["attention_sum"], sums)


@pytest.mark.parametrize("scorer", [H2OPress(), AMSPress(H2OPress())], ids=["plain", "ams"])
def test_kvpress_hands_over_some_queries_only(scorer):
    model = tiny("llama")
    with (
        kvpress.DecodingPress(scorer, compression_interval=4, target_size=8)(model),
        pytest.raises(ValueError, match=r"hidden_states: got those of .* tokens, allowed: those of all"),
    ):
        model.generate(token_ids(1, 12), max_new_tokens=12, do_sample=False)


@pytest.mark.parametrize("name", ["h2o", "ams_h2o"])
def test_two_sequences_in_a_row_are_fresh_ones(name):
    model, press = tiny("llama"), build(name, **SIZES)
    with press(model):
        first = [model.generate(token_ids(1, 30), max_new_tokens=30, do_sample=False) for _ in range(2)]
    assert torch.equal(*first)
