import copy
import gc
import warnings
import weakref

import pytest
import torch
from helpers import FAMILIES, tiny, token_ids
from kvpress import CriticalKVPress, KnormPress, LagKVPress
from oracles.eviction import masked_logits
from transformers import DynamicCache, TextStreamer

from pressroom.presses import DecodingPress, KeyDiffPress, PressLayer, SnapKVPress, StreamingLLMPress, build, names

SETTINGS = {"target_size": 24, "compression_interval": 8}
FULL = [family for family in FAMILIES if family != "gemma3"]


def feed(model, ids, press, chunks, cache=None, warn=False):
    """Feed ids in chunks under a press: logits, cache, trace."""
    cache = DynamicCache(config=model.config) if cache is None else cache
    logits = []
    with press(model), press.record() as trace, warnings.catch_warnings():
        warnings.simplefilter("default" if warn else "ignore")
        for part in ids.split(chunks, dim=1):
            logits.append(model(part, past_key_values=cache, use_cache=True).logits)
    return torch.cat(logits, dim=1), cache, trace


def steps(prompt: int, total: int, size: int = 1) -> list[int]:
    rest = total - prompt
    return [prompt] + [size] * (rest // size) + ([rest % size] if rest % size else [])


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("family", FULL)
@pytest.mark.parametrize("name", ["streaming_llm", "keydiff", "ams_tova"])
def test_evicting_equals_masking(family, attn, name):
    model, ids = tiny(family, attn), token_ids(2, 80)
    logits, cache, trace = feed(model, ids, build(name, **SETTINGS), steps(20, 80))
    assert len(trace.events) == 7 * model.config.num_hidden_layers
    torch.testing.assert_close(logits, masked_logits(model, ids, trace), atol=2e-4, rtol=2e-4)
    assert all(layer.keys.shape[-2] == 24 + 4 for layer in cache.layers)


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("sizes", [[20, 8, 8, 3, 5, 20, 1, 1, 14], [33, 30, 17], [1] * 80])
def test_chunks_are_causal(attn, sizes):
    """Chunks of many tokens after evictions: each query sees what came before it, and no more."""
    model, ids = tiny("llama", attn), token_ids(1, 80)
    logits, _, trace = feed(model, ids, build("ams_keydiff", **SETTINGS), sizes)
    assert trace.events
    torch.testing.assert_close(logits, masked_logits(model, ids, trace), atol=2e-4, rtol=2e-4)


def test_tokens_are_counted_not_forwards():
    model, ids = tiny("llama"), token_ids(1, 84)
    single, _, trace = feed(model, ids, build("snapkv", **SETTINGS), steps(20, 84))
    chunked, _, chunked_trace = feed(model, ids, build("snapkv", **SETTINGS), steps(20, 84, 8))
    torch.testing.assert_close(single, chunked, atol=2e-4, rtol=2e-4)
    assert len(trace.events) == len(chunked_trace.events)
    for a, b in zip(trace.events, chunked_trace.events, strict=True):
        assert torch.equal(a.kept, b.kept)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", [name for name in names() if "ablation" not in name or name.endswith("_tova")])
def test_budget_of_the_length_is_full_kv(family, name):
    model, ids = tiny(family), token_ids(2, 12)
    full = model.generate(ids, max_new_tokens=30, do_sample=False)
    press = build(name, target_size=64, compression_interval=8)
    with press(model):
        assert torch.equal(model.generate(ids, max_new_tokens=30, do_sample=False), full)


@pytest.mark.parametrize("name", ["tova", "snapkv", "expected", "ams_tova", "ams_expected", "random"])
def test_two_generations_in_one_context_are_two_fresh_ones(name):
    model, first, second = tiny("qwen3"), token_ids(1, 30), token_ids(1, 17, seed=1)
    fresh = []
    for ids in (first, second):
        with (press := build(name, **SETTINGS))(model):
            fresh.append(model.generate(ids, max_new_tokens=60, do_sample=False))
    with (press := build(name, **SETTINGS))(model):
        for ids, expected in zip((first, second), fresh, strict=True):
            assert torch.equal(model.generate(ids, max_new_tokens=60, do_sample=False), expected)
    assert [account.events for account in press.account] == [7, 7]
    assert [account.prompt for account in press.account] == [30, 17]


@pytest.mark.parametrize("budget", [1, 2, 5, 33])
@pytest.mark.parametrize(
    "name", ["tova", "knorm", "streaming_llm", "snapkv", "ams_usage", "ablation_fixed_segment_tova"]
)
def test_exactly_the_budget_is_kept(name, budget):
    model, ids = tiny("mistral"), token_ids(2, 60)
    press = build(name, target_size=budget, compression_interval=10)
    _, cache, trace = feed(model, ids, press, steps(40, 60, 10))
    assert {layer.keys.shape[-2] for layer in cache.layers} == {budget}
    for event in trace.events:
        assert event.kept.shape[-1] == budget
        assert (event.kept.diff(dim=-1) > 0).all()
        assert (event.indices >= 0).all()


def test_fewer_entries_than_the_budget_are_left_alone():
    model, ids = tiny("llama"), token_ids(1, 24)
    _, cache, trace = feed(model, ids, build("tova", target_size=100, compression_interval=4), steps(8, 24))
    assert not trace.events
    assert cache.layers[0].events == 0
    assert cache.layers[0].since_event == 0  # the count starts anew all the same


def test_sampling_streaming_and_several_sequences():
    model, ids = tiny("llama"), token_ids(1, 30)
    press = build("ams_tova", **SETTINGS)

    class Sink(TextStreamer):
        def __init__(self):
            self.got = []

        def put(self, value):
            self.got.append(value)

        def end(self):
            pass

    sink = Sink()
    with press(model):
        torch.manual_seed(3)
        a = model.generate(ids, max_new_tokens=40, do_sample=True, streamer=sink)
        torch.manual_seed(3)
        b = model.generate(ids, max_new_tokens=40, do_sample=True)
        c = model.generate(ids, max_new_tokens=40, do_sample=True, num_return_sequences=3)
    assert torch.equal(a, b)
    assert len(sink.got) == 41
    assert c.shape == (3, 70)


def test_compress_prompt():
    model, ids = tiny("llama"), token_ids(1, 100)
    press = build("snapkv", target_size=24, compression_interval=64, compress_prompt=True)
    _, cache, trace = feed(model, ids, press, steps(90, 100))
    assert [event.seen for event in trace.layer(0)] == [90]
    assert cache.layers[0].keys.shape[-2] == 34
    assert cache.get_seq_length() == 100


def test_protect_prompt_keeps_the_prompt():
    model, ids = tiny("llama"), token_ids(1, 60)
    press = build("random_prompt", target_size=24, compression_interval=8)
    _, _, trace = feed(model, ids, press, steps(15, 60))
    assert len(trace.layer(0)) == 4
    for event in trace.events:
        assert torch.equal(event.kept[..., :15], torch.arange(15).expand(1, 2, 15))


def test_a_protected_prompt_without_room_is_refused_before_it_is_computed():
    model = tiny("llama")
    press = build("tova", target_size=24, compression_interval=8, protect_prompt=True)
    with press(model), pytest.raises(ValueError, match="target_size: got 24, allowed: more than the 24 tokens"):
        model.generate(token_ids(1, 24), max_new_tokens=4)


def test_random_is_reproducible_by_seed():
    model, ids = tiny("llama"), token_ids(1, 60)
    runs = [feed(model, ids, build("random", seed=seed, **SETTINGS), steps(20, 60))[2] for seed in (0, 0, 1)]
    same = [torch.equal(a.kept, b.kept) for a, b in zip(runs[0].events, runs[1].events, strict=True)]
    other = [torch.equal(a.kept, b.kept) for a, b in zip(runs[0].events, runs[2].events, strict=True)]
    assert all(same)
    assert not any(other)


# -- kvpress's scorers -------------------------------------------------------------------------------------------------


class Needy(KnormPress):
    """A foreign scorer that looks at everything it is given."""

    def score(self, module, hidden_states, keys, values, attentions, kwargs):
        assert attentions is None
        cos, _ = kwargs["position_embeddings"]
        self.seen.append((hidden_states.shape[1], cos.shape[1], keys.shape[2], self.compression_ratio))
        return super().score(module, hidden_states, keys, values, attentions, kwargs)


def test_foreign_scorers_get_their_states_and_a_ratio():
    model, ids = tiny("llama", "eager"), token_ids(1, 60)
    base = Needy()
    base.seen = []
    press = DecodingPress(base, hidden_states_buffer_size=6, **SETTINGS)
    feed(model, ids, press, steps(20, 60))
    assert len(base.seen) == 5 * 3
    assert base.seen[0] == (6, 6, 28, 1 - 24 / 28)
    assert base.seen[-1] == (6, 6, 32, 1 - 24 / 32)
    assert base.compression_ratio == 0


@pytest.mark.parametrize("base", [LagKVPress(n_sink=2, lag_size=4), CriticalKVPress(KnormPress())])
def test_other_kvpress_scorers_run(base):
    model, ids = tiny("llama"), token_ids(1, 60)
    _, cache, _ = feed(model, ids, DecodingPress(base, **SETTINGS), steps(20, 60))
    assert cache.layers[0].keys.shape[-2] == 24


def test_what_a_scorer_returns_is_checked():
    model, ids = tiny("llama"), token_ids(1, 60)

    class Odd(KnormPress):
        def score(self, module, hidden_states, keys, values, attentions, kwargs):
            return self.change(super().score(module, hidden_states, keys, values, attentions, kwargs))

    def kept(change):
        base = Odd()
        base.change = change
        return feed(model, ids, DecodingPress(base, **SETTINGS), steps(20, 60), warn=True)[2].events

    for change, message in [
        (lambda scores: scores[:, :1], r"Odd\.score: got \(1, 1, 28\), allowed: a tensor of shape \(1, 2, 28\)"),
        (lambda scores: scores[..., :-1], r"Odd\.score: got \(1, 2, 27\)"),
        (lambda scores: scores.long(), r"Odd\.score: got torch\.int64 on cpu, allowed: floating point on cpu"),
        (lambda scores: scores.to("meta"), r"Odd\.score: got torch\.float32 on meta"),
        (lambda scores: None, r"Odd\.score: got NoneType"),
    ]:
        with pytest.raises(ValueError, match=message):
            kept(change)

    def no_number(scores):
        scores = scores.clone()
        scores[..., 3:20] = torch.nan
        return scores

    with pytest.warns(UserWarning, match=r"Odd\.score: got NaN, which counts as lower"):
        events = kept(no_number)
    assert set(range(3)) | set(range(20, 28)) <= set(events[0].kept[0, 0].tolist())


# -- nothing is left behind --------------------------------------------------------------------------------------------


def fingerprint(model):
    return {
        name: (
            len(module._forward_hooks),
            len(module._forward_pre_hooks),
            sorted(module.__dict__),
            sorted(module._modules),
        )
        for name, module in model.named_modules()
    }


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
def test_the_model_is_as_it_was(error):
    model, ids = tiny("llama"), token_ids(1, 30)
    expected = model.generate(ids, max_new_tokens=20, do_sample=False)
    before = fingerprint(model)
    for base in (KnormPress(), SnapKVPress()):
        press = DecodingPress(base, **SETTINGS)
        try:
            with press(model):
                model.generate(ids, max_new_tokens=20)
                if error is not None:
                    raise error
        except (ValueError, KeyboardInterrupt):
            pass
        assert fingerprint(model) == before
    assert torch.equal(model.generate(ids, max_new_tokens=20, do_sample=False), expected)


class Failing(KnormPress):
    def score(self, *args):
        if self.fail:
            raise RuntimeError("scorer failed")
        return super().score(*args)


def test_a_failing_scorer_leaves_cache_and_model_usable():
    model, ids = tiny("llama"), token_ids(1, 40)
    expected, _, _ = feed(model, ids, DecodingPress(KnormPress(), **SETTINGS), steps(20, 40))
    base = Failing()
    base.fail = False
    cache = DynamicCache(config=model.config)
    press = DecodingPress(base, **SETTINGS)
    got = []
    with press(model):
        for position, part in enumerate(ids.split(steps(20, 40), dim=1)):
            if position == 8:  # the eighth token after the prompt brings an event
                base.fail = True
                with pytest.raises(RuntimeError, match="scorer failed"):
                    model(part, past_key_values=cache, use_cache=True)
                base.fail = False
            got.append(model(part, past_key_values=cache, use_cache=True).logits)
    torch.testing.assert_close(torch.cat(got, dim=1), expected)


@pytest.mark.parametrize("where", ["first layer", "last layer"])
@pytest.mark.parametrize("at", [0, 5])
def test_a_failing_forward_leaves_cache_and_model_usable(where, at):
    model, ids = tiny("llama"), token_ids(1, 40)
    expected, _, _ = feed(model, ids, build("tova", **SETTINGS), steps(20, 40))
    layer = model.model.layers[0 if where == "first layer" else -1]

    def boom(*_):
        raise KeyboardInterrupt

    cache = DynamicCache(config=model.config)
    got = []
    with build("tova", **SETTINGS)(model):
        for position, part in enumerate(ids.split(steps(20, 40), dim=1)):
            if position == at:
                handle = layer.mlp.register_forward_pre_hook(boom)
                with pytest.raises(KeyboardInterrupt):
                    model(part, past_key_values=cache, use_cache=True)
                handle.remove()
            got.append(model(part, past_key_values=cache, use_cache=True).logits)
    torch.testing.assert_close(torch.cat(got, dim=1), expected)


def test_the_press_holds_no_sequence():
    model, ids = tiny("llama"), token_ids(1, 40)
    press = build("ams_tova", **SETTINGS)
    with press(model):
        cache = DynamicCache(config=model.config)
        for part in ids.split(steps(20, 40), dim=1):
            model(part, past_key_values=cache, use_cache=True)
        gone = weakref.ref(cache)
        del cache
        gc.collect()
        assert gone() is None
    copy.deepcopy(press)


def test_one_press_at_a_time():
    model = tiny("llama")
    press = build("tova", **SETTINGS)
    with press(model):
        with pytest.raises(ValueError, match="on a model already"), press(model):
            pass
        with pytest.raises(ValueError, match="already has a press"), build("tova", **SETTINGS)(model):
            pass
    with press(model):
        pass


# -- later turns -------------------------------------------------------------------------------------------------------


def test_a_second_turn_goes_on_where_the_first_ended():
    model, ids = tiny("llama"), token_ids(1, 80)
    whole, _, _ = feed(model, ids, build("ams_snapkv", **SETTINGS), steps(20, 80))
    first, cache, _ = feed(model, ids[:, :50], build("ams_snapkv", **SETTINGS), steps(20, 50))
    rest, cache, _ = feed(model, ids[:, 50:], build("ams_snapkv", **SETTINGS), [1] * 30, cache)
    torch.testing.assert_close(torch.cat([first, rest], dim=1), whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("way", ["deepcopy", "save"])
def test_a_compressed_cache_can_be_kept_for_later(way, tmp_path):
    model, ids = tiny("llama"), token_ids(1, 80)
    whole, _, _ = feed(model, ids, build("ams_snapkv", **SETTINGS), steps(20, 80))
    first, cache, _ = feed(model, ids[:, :50], build("ams_snapkv", **SETTINGS), steps(20, 50))
    if way == "save":
        torch.save(cache, tmp_path / "cache.pt")
        later = torch.load(tmp_path / "cache.pt")
    else:
        later = copy.deepcopy(cache)
    feed(model, token_ids(1, 30, seed=5), build("ams_snapkv", **SETTINGS), [1] * 30, cache)  # the original goes its way
    rest, _, _ = feed(model, ids[:, 50:], build("ams_snapkv", **SETTINGS), [1] * 30, later)
    torch.testing.assert_close(torch.cat([first, rest], dim=1), whole, atol=1e-5, rtol=1e-5)


def test_without_a_press_the_cache_goes_on_at_true_positions():
    model, ids = tiny("llama"), token_ids(1, 60)
    _, cache, trace = feed(model, ids[:, :50], build("keydiff", **SETTINGS), steps(20, 50))
    assert isinstance(cache.layers[0], PressLayer)
    got = [model(ids[:, i : i + 1], past_key_values=cache, use_cache=True).logits for i in range(50, 60)]
    expected = masked_logits(model, ids, trace)[:, 50:]
    torch.testing.assert_close(torch.cat(got, dim=1), expected, atol=2e-4, rtol=2e-4)


# -- what the user is told ---------------------------------------------------------------------------------------------


def test_a_sequence_without_an_event_warns():
    model = tiny("llama")
    press = build("tova", target_size=24, compression_interval=64)
    with pytest.warns(UserWarning, match="40 tokens.*compression_interval=64"), press(model):
        model.generate(token_ids(1, 30), max_new_tokens=11, do_sample=False)
    assert (press.account[0].events, press.account[0].tokens, press.account[0].entries) == (0, 40, 40)


def test_a_sequence_with_events_does_not_warn():
    model = tiny("llama")
    press = build("tova", **SETTINGS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with press(model):
            model.generate(token_ids(1, 30), max_new_tokens=20, do_sample=False)
            model.generate(token_ids(1, 3), max_new_tokens=4, do_sample=False)
    first = press.account[0]
    assert (first.events, first.entries, first.peak_entries) == (2, 27, 38)


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("target_size", 0),
        ("target_size", -3),
        ("target_size", 2.0),
        ("target_size", True),
        ("compression_interval", 0),
        ("hidden_states_buffer_size", -1),
        ("protect_prompt", 1),
        ("compress_prompt", "yes"),
    ],
)
def test_fields_are_checked(field, value):
    with pytest.raises(ValueError, match=f"{field}: got {value!r}, allowed"):
        DecodingPress(KeyDiffPress(), **{field: value})


@pytest.mark.parametrize("base", [None, "tova", KnormPress, DecodingPress(KeyDiffPress())])
def test_base_press_must_be_a_scorer(base):
    with pytest.raises(ValueError, match="base_press: got"):
        DecodingPress(base)


def test_a_ratio_has_no_meaning_here():
    with pytest.raises(ValueError, match=r"compression_ratio: got 0\.5"):
        DecodingPress(KnormPress(compression_ratio=0.5))


def test_models_that_cannot_be_pressed_are_refused():
    press = DecodingPress(StreamingLLMPress(), **SETTINGS)
    with pytest.raises(ValueError, match="sliding"), press(tiny("mistral", sliding_window=16)):
        pass
    with pytest.raises(ValueError, match="model: got Linear"), press(torch.nn.Linear(2, 2)):
        pass
    with press(tiny("llama")):  # still free for another
        pass


def test_four_dimensional_masks_are_refused():
    model = tiny("llama")
    with build("tova", **SETTINGS)(model), pytest.raises(ValueError, match="4-D mask"):
        model(token_ids(1, 4), attention_mask=torch.zeros(1, 1, 4, 4), use_cache=True)


@pytest.mark.parametrize("mask", [[[1, 1, 1, 0]], [[1, 0, 1, 1]], [[0, 0, 0, 0]]])
def test_right_padding_and_holes_are_refused(mask):
    model = tiny("llama")
    with build("tova", **SETTINGS)(model), pytest.raises(ValueError, match="attention_mask: row 0"):
        model(token_ids(1, 4), attention_mask=torch.tensor(mask), use_cache=True)
