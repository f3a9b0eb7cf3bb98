import copy
import warnings
from dataclasses import fields

import kvpress
import pytest
import torch
from helpers import tiny, token_ids
from kvpress import KnormPress
from transformers import DynamicCache

from pressroom.presses import AMSPress, DecodingPress, KeyDiffPress, StreamingLLMPress, TOVAPress, UsagePress, build

SMALL = {"window_size": 6, "window_kernel_size": 3, "min_seg_len": 3, "max_seg_len": 8, "n_sink": 2}
SMALL |= {"always_keep_last": 4, "segment_mass": 0.2}


def feed(model, ids, press, chunks):
    cache = DynamicCache(config=model.config)
    with press(model), press.record() as trace:
        for part in ids.split(chunks, dim=1):
            model(part, past_key_values=cache, use_cache=True)
    return cache, trace


def decoding(press, **settings):
    return DecodingPress(press, **{"target_size": 24, "compression_interval": 8, **settings})


# -- around a scorer ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scorer", [KnormPress, KeyDiffPress, UsagePress])
@pytest.mark.parametrize("use_credit", [True, False])
def test_a_neutral_ams_is_its_scorer(scorer, use_credit):
    """One region, nothing protected: what the scorer alone would keep."""
    model, ids = tiny("llama"), token_ids(2, 70)
    neutral = AMSPress(scorer(), segmentation="none", n_sink=0, always_keep_last=0, use_credit=use_credit)
    _, plain = feed(model, ids, decoding(scorer()), [20] + [1] * 50)
    _, wrapped = feed(model, ids, decoding(neutral), [20] + [1] * 50)
    assert len(plain.events) == len(wrapped.events) > 10
    for a, b in zip(plain.events, wrapped.events, strict=True):
        assert torch.equal(a.kept, b.kept)


@pytest.mark.parametrize("kind", ["mass", "fixed", "none"])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_quotas_are_kept_to(family, kind):
    model, ids = tiny(family), token_ids(2, 110)
    press = AMSPress(KeyDiffPress(), **SMALL, segmentation=kind, fixed_seg_len=5)
    _, trace = feed(model, ids, decoding(press), [30] + [8] * 10)
    assert trace.events
    for event in trace.events:
        entries = event.present.shape[-1]
        begins = torch.cat([torch.zeros_like(event.segment_ends[..., :1]), event.segment_ends[..., :-1]], dim=-1)
        inside = (event.indices[..., None] >= begins[..., None, :]) & (
            event.indices[..., None] < event.segment_ends[..., None, :]
        )
        assert torch.equal(inside.sum(dim=-2), event.quota)
        assert (event.quota.sum(dim=-1) == 24).all()
        assert (event.floors_dropped == 0).all()
        used = torch.arange(event.quota.shape[-1]) < event.segment_count[..., None]
        assert (event.quota[used] >= 1).all()
        assert (event.indices[..., :2] == torch.arange(2)).all()
        assert (event.indices[..., -4:] == torch.arange(entries - 4, entries)).all()


def test_a_budget_too_small_gives_up_in_order():
    model, ids = tiny("llama"), token_ids(1, 60)
    press = AMSPress(KeyDiffPress(), **{**SMALL, "always_keep_last": 8, "n_sink": 4}, min_keep_per_segment=3)
    _, trace = feed(model, ids, decoding(press, target_size=6), [40] + [4] * 5)
    first = trace.events[0]
    assert first.kept.shape[-1] == 6
    assert (first.n_sink == 4).all()  # sinks first,
    assert (first.n_recent < 8).all()  # the suffix shrinks,
    assert (first.floors_dropped > 0).all()  # and then floors fall
    assert (first.floors_dropped < first.segment_count).all()
    assert torch.equal(first.indices[0, :, :4], torch.arange(4).expand(2, -1))


def test_the_scorer_is_not_changed():
    base = StreamingLLMPress(n_sink=7)
    before = copy.deepcopy(vars(base))
    press = AMSPress(base)
    model, ids = tiny("llama"), token_ids(1, 60)
    feed(model, ids, decoding(press), [20] + [1] * 40)
    assert vars(base) == before
    assert press.base_press is base


def test_credit_follows_the_kept_entries():
    model, ids = tiny("llama"), token_ids(1, 60)
    cache, trace = feed(model, ids, decoding(AMSPress(TOVAPress(), **SMALL)), [20] + [1] * 40)
    assert len(trace.layer(0)) == 5
    for layer in cache.layers:
        assert layer.state["credit"].shape == (1, 2, 24)
        assert (layer.state["credit"] > 0).all()
    without, _ = feed(model, ids, decoding(AMSPress(TOVAPress(), **SMALL, use_credit=False)), [20] + [1] * 40)
    assert all("credit" not in layer.state for layer in without.layers)


# -- hand-made layers --------------------------------------------------------------------------------------------------


def handmade(query, key, hot_key=None):
    """A one-layer Llama in which every token has the same query and key before rotation, apart from token 7, whose key
    may be another one. Both are given as (pair, angle, length): a vector in one rotary plane."""
    model = tiny("llama", num_hidden_layers=1, tie_word_embeddings=False)
    attention = model.model.layers[0].self_attn
    width, dim = model.config.hidden_size, model.config.head_dim
    embedding = torch.zeros(model.config.vocab_size, width)
    embedding[:, 0] = embedding[:, 1] = 1
    embedding[7] = 0
    embedding[7, 0] = embedding[7, 2] = 1
    model.model.embed_tokens.weight.copy_(embedding)
    model.model.layers[0].input_layernorm.weight.fill_(1)
    unit = (width / 2) ** 0.5  # what the norm makes of each of the two ones

    def vector(pair, angle, length):
        out = torch.zeros(dim)
        out[pair] = length * torch.cos(torch.tensor(angle))
        out[pair + dim // 2] = length * torch.sin(torch.tensor(angle))
        return out

    attention.q_proj.weight.zero_()
    attention.q_proj.weight[:, 0] = vector(*query).repeat(4) / unit
    attention.k_proj.weight.zero_()
    attention.k_proj.weight[:, 1] = vector(*key).repeat(2) / unit
    if hot_key is not None:
        attention.k_proj.weight[:, 2] = vector(*hot_key).repeat(2) / unit
    return model


def test_queries_are_rotated_at_their_own_positions():
    """Attention peaks ten tokens back, so eight queries mark eight entries. Queries that were all rotated at the newest
    position would mark one place only."""
    model = handmade((2, 0.0, 20.0), (2, 1.0, 40.0))  # rotary plane 2 turns by 0.1 per position: peak at distance 10
    press = UsagePress(window_size=8, kernel_size=1)
    ids = torch.full((1, 48), 3)
    recording = decoding(press, target_size=16, compression_interval=8)
    _, trace = feed(model, ids, recording, [40] + [1] * 8)
    (event,) = trace.events
    # the window (40..47) gets the row's maximum; before it come the marked entries: query p marks p - 10
    expected = torch.arange(30, 38).tolist() + torch.arange(40, 48).tolist()
    assert event.kept[0, 0].tolist() == expected
    later = torch.cat([ids, torch.full((1, 8), 3)], dim=1)
    _, trace = feed(model, later, recording, [40] + [1] * 16)
    second = trace.events[1].kept[0, 0].tolist()
    assert set(range(40, 46)) <= set(second)  # marked by 50..55, at true positions after an eviction
    assert set(range(48, 56)) <= set(second)


def test_every_region_keeps_its_floor_where_tova_wipes_regions_out():
    model = handmade((7, 0.0, 10.0), (7, 3.14159, 1.0), hot_key=(7, 0.0, 10.0))  # plane 7 hardly turns at all
    ids = torch.full((1, 96), 3)
    ids[:, 40:56] = 7  # all attention goes there
    settings = {"target_size": 32, "compression_interval": 16}
    _, tova = feed(model, ids, decoding(TOVAPress(), **settings), [80, 16])
    ams = AMSPress(TOVAPress(), **{**SMALL, "max_seg_len": 6, "segment_mass": 0.1})
    _, ams = feed(model, ids, decoding(ams, **settings), [80, 16])

    def empty(event, ends):
        begins = [0, *ends[:-1]]
        kept = event.indices[0, 0].tolist()
        return [(a, b) for a, b in zip(begins, ends, strict=True) if not any(a <= i < b for i in kept)]

    ends = ams.events[0].segment_ends[0, 0].unique().tolist()
    assert len(ends) > 10
    assert set(range(40, 56)) <= set(tova.events[0].indices[0, 0].tolist())  # TOVA does see what is hot
    assert len(empty(tova.events[0], ends)) > 5
    assert empty(ams.events[0], ends) == []


# -- at prefill and in kvpress's own presses ---------------------------------------------------------------------------


@pytest.mark.parametrize("base", [KeyDiffPress(), KnormPress(), TOVAPress()])
def test_at_prefill_the_ratio_decides(base):
    model, ids = tiny("llama"), token_ids(2, 80)
    press = AMSPress(base, **SMALL, compression_ratio=0.5)
    cache = DynamicCache(config=model.config)
    with press(model):
        out = model(ids, past_key_values=cache, use_cache=True)
        following = model(ids[:, :1], past_key_values=cache, use_cache=True, position_ids=torch.tensor([[80], [80]]))
    assert {layer.keys.shape[-2] for layer in cache.layers} == {41}
    torch.testing.assert_close(out.logits, model(ids).logits)
    assert following.logits.isfinite().all()
    assert press.base_press is base


def test_scores_order_the_selection_first():
    """Whoever takes the top of score() gets what compress() keeps."""
    model, ids = tiny("llama"), token_ids(2, 80)
    for ratio in (0.25, 0.5, 0.9):
        scores, kept = {}, {}

        class Both(AMSPress):
            def compress(self, module, hidden_states, keys, values, attentions, kwargs, scores=scores, kept=kept):
                arguments = (module, hidden_states, keys, values, attentions, kwargs)
                scores[module.layer_idx] = self.score(*arguments), keys
                compressed = super().compress(*arguments)
                kept[module.layer_idx] = compressed[0]
                return compressed

        with Both(KeyDiffPress(), **SMALL, compression_ratio=ratio)(model):
            model(ids, past_key_values=DynamicCache(config=model.config), use_cache=True)
        for layer, (score, keys) in scores.items():
            keep = kept[layer].shape[2]
            top = score.topk(keep, dim=-1).indices.sort(dim=-1).values
            assert torch.equal(keys.gather(2, top[..., None].expand(-1, -1, -1, keys.shape[-1])), kept[layer])


def test_in_kvpress_decoding_press():
    model, ids = tiny("llama"), token_ids(1, 30)
    press = kvpress.DecodingPress(
        AMSPress(KeyDiffPress(), **SMALL), compression_interval=8, target_size=24, hidden_states_buffer_size=16
    )
    cache = DynamicCache(config=model.config)
    with press(model):
        out = model.generate(ids, max_new_tokens=40, do_sample=False, past_key_values=cache)
    assert out.shape == (1, 70)
    assert all(layer.keys.shape[-2] < 24 + 8 for layer in cache.layers)
    assert all(layer.ams_credit.shape == (1, 2, 24) for layer in cache.layers)


@pytest.mark.parametrize("outer", ["ours", "kvpress"])
def test_in_prefill_decoding_press(outer):
    model, ids = tiny("llama"), token_ids(1, 60)
    inner = {"ours": DecodingPress, "kvpress": kvpress.DecodingPress}[outer](
        AMSPress(KeyDiffPress(), **SMALL), compression_interval=8, target_size=24
    )
    press = kvpress.PrefillDecodingPress(
        prefilling_press=AMSPress(TOVAPress(), **SMALL, compression_ratio=0.5), decoding_press=inner
    )
    for _ in range(2):
        cache = DynamicCache(config=model.config)
        with press(model), warnings.catch_warnings():
            warnings.simplefilter("error")
            out = model.generate(ids, max_new_tokens=40, do_sample=False, past_key_values=cache)
        assert out.shape == (1, 100)
        assert all(layer.keys.shape[-2] < 24 + 8 for layer in cache.layers)
    if outer == "ours":
        assert cache.get_seq_length() == 99  # logical: the last token is not fed
        assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


# -- fields ------------------------------------------------------------------------------------------------------------


def test_presets():
    assert AMSPress.preset("paper", TOVAPress()) == AMSPress(TOVAPress())
    released = AMSPress.preset("released", TOVAPress(), n_sink=2)
    got = {f.name: getattr(released, f.name) for f in fields(released)}
    expected = {
        "window_size": 32,
        "window_kernel_size": 5,
        "segment_mass": 0.02,
        "min_seg_len": 32,
        "max_seg_len": 1024,
        "min_keep_per_segment": 8,
        "n_sink": 2,
        "always_keep_last": 32,
        "use_credit": True,
        "credit_decay": 0.8,
        "mix_beta": 0.7,
    }
    assert expected.items() <= got.items()
    with pytest.raises(ValueError, match=r"preset: got 'papr', allowed: paper \| released"):
        AMSPress.preset("papr", TOVAPress())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("window_size", 0),
        ("window_size", 2.0),
        ("window_kernel_size", 4),
        ("segment_mass", 0),
        ("segment_mass", 1.01),
        ("segment_mass", float("nan")),
        ("min_seg_len", 0),
        ("max_seg_len", 31),
        ("min_keep_per_segment", -1),
        ("n_sink", -1),
        ("always_keep_last", True),
        ("credit_decay", 1.5),
        ("mix_beta", -0.1),
        ("credit_init", "one"),
        ("segmentation", "some"),
        ("fixed_seg_len", 0),
        ("suffix_usage", "min"),
        ("compression_ratio", 1.0),
    ],
)
def test_fields_are_checked(field, value):
    with pytest.raises(ValueError, match=rf"^{field}: got .*, allowed: "):
        AMSPress(TOVAPress(), **{field: value})


@pytest.mark.parametrize("base", [None, "tova", TOVAPress, AMSPress(TOVAPress()), kvpress.PyramidKVPress()])
def test_base_press_must_be_a_scorer(base):
    with pytest.raises(ValueError, match=r"^base_press: got .*"):
        AMSPress(base)


@pytest.mark.parametrize("name", ["ams_tova", "ablation_no_credit_tova", "ablation_no_mass_tova"])
def test_a_batch_is_its_rows(name):
    model, ids = tiny("qwen2"), token_ids(3, 70)
    settings = {"target_size": 24, "compression_interval": 8, **SMALL}
    _, together = feed(model, ids, build(name, **settings), [20] + [1] * 50)
    for row in range(3):
        _, alone = feed(model, ids[row : row + 1], build(name, **settings), [20] + [1] * 50)
        for a, b in zip(together.events, alone.events, strict=True):
            assert torch.equal(a.kept[row : row + 1], b.kept)
