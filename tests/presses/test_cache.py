import copy
import gc
import weakref

import pytest
import torch
from helpers import tiny, token_ids
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache

from pressroom.kernels.compaction.reference import BLOCK, BLOCK_BYTES
from pressroom.presses import PressLayer, build

CLOSE = {"atol": 1e-4, "rtol": 1e-4}
SETTINGS = {"target_size": 24, "compression_interval": 8}


def fed(model, ids, chunks):
    cache = DynamicCache(config=model.config)
    for part in ids.split(chunks, dim=1):
        model(part, past_key_values=cache, use_cache=True)
    return cache


def rest(model, ids, cache):
    return torch.cat([model(part, past_key_values=cache, use_cache=True).logits for part in ids.split(1, dim=1)], dim=1)


@pytest.mark.parametrize("name", ["ams_expected", "snapkv"])
@pytest.mark.parametrize("fed_tokens", [33, 41])  # before an event is due, and inside an interval after one
def test_reorder_repeat_and_select_carry_all_state(name, fed_tokens):
    model, ids, more = tiny("llama"), token_ids(3, fed_tokens), token_ids(3, 30, seed=1)
    with build(name, **SETTINGS)(model):
        chunks = [20] + [1] * (fed_tokens - 20)
        expected = rest(model, more, fed(model, ids, chunks))
        order = torch.tensor([2, 0, 1])

        cache = fed(model, ids, chunks)
        cache.reorder_cache(order)
        torch.testing.assert_close(rest(model, more[order], cache), expected[order], **CLOSE)

        cache = fed(model, ids, chunks)
        cache.batch_repeat_interleave(2)
        twice = rest(model, more.repeat_interleave(2, dim=0), cache)
        torch.testing.assert_close(twice, expected.repeat_interleave(2, dim=0), **CLOSE)

        cache = fed(model, ids, chunks)
        cache.batch_select_indices(torch.tensor([1]))
        torch.testing.assert_close(rest(model, more[1:2], cache), expected[1:2], **CLOSE)


def test_beams():
    """Every beam is what greedy decoding of its tokens would have been: scores of the best one, recomputed."""
    model, ids = tiny("llama"), token_ids(1, 30)
    with build("ams_tova", **SETTINGS)(model):
        out = model.generate(
            ids, max_new_tokens=30, num_beams=3, do_sample=False, return_dict_in_generate=True, output_scores=True
        )
        tokens = out.sequences[:, 30:]
        cache = DynamicCache(config=model.config)
        logits = [model(ids, past_key_values=cache, use_cache=True).logits[:, -1]]
        for token in tokens[0, :-1]:
            logits.append(model(token.view(1, 1), past_key_values=cache, use_cache=True).logits[:, -1])
    chosen = torch.stack(logits, dim=1).log_softmax(dim=-1).gather(-1, tokens[..., None]).sum()
    torch.testing.assert_close(chosen / tokens.shape[1], out.sequences_scores[0], atol=1e-4, rtol=1e-4)


def test_storage_is_allocated_once_and_written_in_place():
    model, ids = tiny("llama"), token_ids(2, 100)
    with build("ams_tova", **SETTINGS)(model):
        cache = fed(model, ids[:, :28], [20] + [1] * 8)
        where = [(layer.keys.data_ptr(), layer.values.data_ptr()) for layer in cache.layers]
        sizes = [layer.keys.untyped_storage().nbytes() for layer in cache.layers]
        for part in ids[:, 28:].split(1, dim=1):
            model(part, past_key_values=cache, use_cache=True)
            assert [(layer.keys.data_ptr(), layer.values.data_ptr()) for layer in cache.layers] == where
    assert sizes == [2 * 2 * (24 + 8) * 16 * 4] * 3


def test_a_long_chunk_grows_the_storage_until_its_event():
    model, ids = tiny("llama"), token_ids(1, 100)
    with build("tova", **SETTINGS)(model):
        cache = fed(model, ids[:, :75], [20, 8, 3, 44])
        assert cache.layers[0].keys.shape[-2] == 24
        assert cache.layers[0].keys.untyped_storage().nbytes() == 2 * 32 * 16 * 4


def test_crop_takes_back_what_no_event_has_consumed():
    model, ids = tiny("llama"), token_ids(1, 60)
    with build("ams_tova", **SETTINGS)(model):
        expected = rest(model, ids[:, 30:], fed(model, ids[:, :30], [20] + [1] * 10))
        cache = fed(model, torch.cat([ids[:, :30], token_ids(1, 5, seed=2)], dim=1), [20] + [1] * 15)
        cache.crop(30)
        assert cache.get_seq_length() == 30
        torch.testing.assert_close(rest(model, ids[:, 30:], cache), expected, **CLOSE)
        with pytest.raises(ValueError, match=r"crop: max_length=40 .* allowed: 60 to 60"):
            cache.crop(40)
        cache.crop(0)
        assert cache.get_seq_length() == 0


def test_reset_starts_a_new_sequence():
    model, ids, other = tiny("llama"), token_ids(1, 50), token_ids(1, 50, seed=1)
    with build("ams_tova", **SETTINGS)(model):
        expected = rest(model, other[:, 20:], fed(model, other[:, :20], [20]))
        cache = fed(model, ids, [20] + [1] * 30)
        cache.reset()
        model(other[:, :20], past_key_values=cache, use_cache=True)
        torch.testing.assert_close(rest(model, other[:, 20:], cache), expected, **CLOSE)


@pytest.mark.filterwarnings("error")
def test_two_sequences_in_turns():
    model, first, second = tiny("llama"), token_ids(1, 60), token_ids(1, 60, seed=1)
    with build("ams_expected", **SETTINGS)(model) as press:
        apart = [rest(model, ids[:, 20:], fed(model, ids[:, :20], [20])) for ids in (first, second)]
        caches = [fed(model, ids[:, :20], [20]) for ids in (first, second)]
        together: list[list] = [[], []]
        for position in range(20, 60):
            for got, ids, cache in zip(together, (first, second), caches, strict=True):
                got.append(model(ids[:, position : position + 1], past_key_values=cache, use_cache=True).logits)
    assert [account.events for account in press.account] == [5] * 4
    for got, expected in zip(together, apart, strict=True):
        torch.testing.assert_close(torch.cat(got, dim=1), expected, **CLOSE)


def test_a_copy_goes_its_own_way():
    model, ids = tiny("llama"), token_ids(1, 60)
    with build("ams_expected", **SETTINGS)(model):
        cache = fed(model, ids[:, :33], [20] + [1] * 13)
        expected = rest(model, ids[:, 33:], copy.deepcopy(cache))
        rest(model, token_ids(1, 20, seed=5), copy.deepcopy(cache))
        torch.testing.assert_close(rest(model, ids[:, 33:], cache), expected, **CLOSE)


def test_entries_that_another_press_took_away_are_unknown():
    layer = PressLayer()
    layer.update(torch.randn(1, 2, 10, 4), torch.randn(1, 2, 10, 4))
    layer.keys, layer.values = layer.keys[:, :, ::2].contiguous(), layer.values[:, :, ::2].contiguous()
    assert layer.get_seq_length() == 10
    assert layer.length == 5
    layer.update(torch.randn(1, 2, 1, 4), torch.randn(1, 2, 1, 4))
    assert layer.positions()[0, 0].tolist() == [-1] * 5 + [10]


def test_a_cut_tail_is_taken_back():
    layer = PressLayer()
    layer.update(torch.randn(1, 2, 10, 4), torch.randn(1, 2, 10, 4))
    layer.keys, layer.values = layer.keys[:, :, :6], layer.values[:, :, :6]
    assert layer.get_seq_length() == 6
    assert layer.positions()[0, 0].tolist() == list(range(6))


def test_the_memory_of_a_long_prompt_is_released():
    model, ids = tiny("llama"), token_ids(1, 400)
    with build("ams_tova", **SETTINGS)(model):
        cache = fed(model, ids[:, :390], [390])
        before = [weakref.ref(x) for layer in cache.layers for x in (layer.keys, layer.values)]
        assert cache.layers[0].keys.untyped_storage().nbytes() == 2 * 390 * 16 * 4
        for part in ids[:, 390:398].split(1, dim=1):
            model(part, past_key_values=cache, use_cache=True)
        gc.collect()
        assert not any(ref() is not None for ref in before)
        assert sum(layer.keys.untyped_storage().nbytes() for layer in cache.layers) == 3 * 2 * (24 + 8) * 16 * 4


class Allocations(TorchDispatchMode):
    """Bytes of every floating point tensor an operation makes."""

    def __init__(self):
        super().__init__()
        self.sizes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor) and x.is_floating_point() and x.untyped_storage().data_ptr() not in given:
                self.sizes.append(x.untyped_storage().nbytes())
        return out


def test_compaction_needs_one_block_beside_the_storage():
    """B H (budget + interval) D for keys and for values, and one block of rows, whatever the number of rows."""
    layer, capacity = PressLayer(), 1024 + 512
    batch, heads, dim = 8, 4, 64
    generator = torch.Generator().manual_seed(0)

    def choice():
        entries = layer.keys.shape[-2]
        scores = torch.rand(batch, heads, entries, generator=generator)
        return scores.topk(1024, dim=-1).indices.sort(dim=-1).values

    for tokens in (2000, 512, 512):
        layer.update(*torch.randn(2, batch, heads, tokens, dim, generator=generator))
        with Allocations() as made:
            layer.evict(choice(), capacity)
    storage = batch * heads * capacity * dim * 4
    assert layer.keys.untyped_storage().nbytes() == layer.values.untyped_storage().nbytes() == storage
    block = batch * heads * BLOCK * dim * 4
    assert max(made.sizes) <= max(block, BLOCK_BYTES) < storage / 5


@pytest.mark.parametrize("name", ["tova", "ams_expected"])
def test_a_prompt_leaves_no_states_behind(name):
    """While a prompt is computed nothing but the cache and the forward's own tensors is alive."""
    model, ids = tiny("llama"), token_ids(1, 300)
    alive = []

    def watch(module, args, kwargs):
        alive.append(weakref.ref(kwargs["hidden_states"]))

    with build(name, **SETTINGS)(model):
        for layer in model.model.layers:
            layer.self_attn.register_forward_pre_hook(watch, with_kwargs=True)
        last = model.model.layers[-1].self_attn
        left = []
        last.register_forward_pre_hook(lambda *_: left.append([ref() is not None for ref in alive[:-1]]))
        model(ids, past_key_values=DynamicCache(config=model.config))
    assert left == [[False, False]]
