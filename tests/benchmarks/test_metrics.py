import itertools
import math
import warnings

import pytest
import torch
from helpers import tiny, token_ids
from oracles.eviction import masked_logits
from transformers import DynamicCache

from pressroom.benchmarks import metrics
from pressroom.benchmarks.metrics import (
    kl_divergence,
    nll,
    repetition_rate,
    retained_iou,
    top1_agreement,
    wipe_out_rate,
)
from pressroom.benchmarks.teacher_forcing import clustered_stderr, fidelity, first_event, full_run
from pressroom.presses import FullKVPress, KnormPress, Trace, build
from pressroom.presses.trace import EventRecord

SETTINGS = {"target_size": 24, "compression_interval": 16}

# -- distributions -----------------------------------------------------------------------------------------------------


def logits(*shape, dtype=torch.float32, seed=0):
    return (4 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def exact_kl(full, pressed):
    """Token by token from probabilities, in fp64."""
    out = []
    for p, q in zip(full.double().flatten(0, -2), pressed.double().flatten(0, -2), strict=True):
        p, q = p.softmax(-1), q.softmax(-1)
        out.append((p * (p / q).log()).sum())
    return torch.stack(out).view(full.shape[:-1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows_at_a_time", [1, 4, 1000])
def test_kl_divergence(monkeypatch, dtype, rows_at_a_time):
    monkeypatch.setattr(metrics, "ELEMENTS", 501 * rows_at_a_time)
    full, pressed = logits(2, 7, 501, dtype=dtype), logits(2, 7, 501, dtype=dtype, seed=1)
    got, expected = kl_divergence(full, pressed), exact_kl(full, pressed)
    plain = torch.nn.functional.kl_div(
        pressed.float().log_softmax(-1), full.float().log_softmax(-1), log_target=True, reduction="none"
    ).sum(-1)
    assert got.dtype == torch.float32
    assert (got - expected).abs().max() <= 2 * (plain - expected).abs().max() + 1e-6


def test_kl_of_equals_is_zero_and_a_shift_changes_nothing():
    full = logits(5, 100)
    assert torch.equal(kl_divergence(full, full), torch.zeros(5))
    assert kl_divergence(full, full + 3).abs().max() < 1e-5


def test_kl_of_excluded_tokens():
    full, pressed = torch.zeros(3, 4), torch.zeros(3, 4)
    full[0, 0] = pressed[0, 0] = pressed[1, 0] = full[2, 0] = -torch.inf
    assert kl_divergence(full, pressed).tolist() == pytest.approx([0, math.inf, math.log(4 / 3)])


def test_nan_stays_at_its_token():
    full, pressed = logits(3, 10), logits(3, 10)
    full[0, 3] = pressed[1, 3] = torch.nan
    assert kl_divergence(full, pressed).isnan().tolist() == [True, True, False]
    assert top1_agreement(full, pressed).tolist() == [False, False, True]
    assert nll(full, torch.zeros(3, dtype=torch.long)).isnan().tolist() == [True, False, False]


def test_top1_agreement():
    full = torch.tensor([[0.0, 2.0, 1.0], [3.0, 3.0, 1.0], [0.0, 1.0, 2.0]])
    pressed = torch.tensor([[0.0, 9.0, 8.0], [3.0, 2.0, 1.0], [2.0, 1.0, 2.0]])
    assert top1_agreement(full, pressed).tolist() == [True, True, False]


@pytest.mark.parametrize("rows_at_a_time", [1, 3, 100])
def test_nll(monkeypatch, rows_at_a_time):
    monkeypatch.setattr(metrics, "ELEMENTS", 50 * rows_at_a_time)
    values, targets = logits(2, 5, 50), torch.randint(50, (2, 5))
    expected = torch.nn.functional.cross_entropy(values.flatten(0, 1).double(), targets.flatten(), reduction="none")
    torch.testing.assert_close(nll(values, targets), expected.view(2, 5).float())


def test_no_tokens_give_no_figures():
    assert kl_divergence(torch.empty(0, 9), torch.empty(0, 9)).shape == (0,)
    assert top1_agreement(torch.empty(2, 0, 9), torch.empty(2, 0, 9)).shape == (2, 0)
    assert nll(torch.empty(0, 9), torch.empty(0, dtype=torch.long)).shape == (0,)


def test_bad_logits_and_targets():
    with pytest.raises(ValueError, match=r"pressed_logits: got shape \(3, 4\), allowed: \(2, 4\)"):
        kl_divergence(torch.zeros(2, 4), torch.zeros(3, 4))
    for bad in (torch.zeros(2, 0), torch.zeros(2, 4, dtype=torch.long), torch.tensor(1.0)):
        with pytest.raises(ValueError, match="logits: got"):
            top1_agreement(bad, bad)
    with pytest.raises(ValueError, match=r"targets: got shape \(3,\)"):
        nll(torch.zeros(2, 4), torch.zeros(3, dtype=torch.long))
    for bad in (-1, 4):
        with pytest.raises(ValueError, match="allowed: 0 to 3"):
            nll(torch.zeros(2, 4), torch.tensor([0, bad]))


# -- kept sets ---------------------------------------------------------------------------------------------------------


def event(present, kept, *, layer=0, index=0, ends=None, count=None):
    """One event from nested lists (H rows): positions before, positions after."""
    present, kept = torch.tensor([present]), torch.tensor([kept])
    indices = torch.searchsorted(present, kept)
    assert torch.equal(present.gather(-1, indices), kept)
    record = EventRecord(layer, index, int(present.max()) + 1, 0, present, kept, indices)
    if ends is not None:
        record.segment_ends, record.segment_count = torch.tensor([ends]), torch.tensor([count])
    return record


def two_events(layer=0):
    """200 tokens, then 320 more; two rows, four entries kept."""
    everything, new = list(range(200)), list(range(200, 520))
    first = [[0, 1, 2, 3], [0, 64, 128, 192]]
    second = [[0, 200, 201, 202], [0, 64, 128, 519]]
    return [
        event([everything, everything], first, layer=layer),
        event([kept + new for kept in first], second, layer=layer, index=1),
    ]


def test_known_wipe_outs_and_overlap():
    trace = Trace(two_events())
    lost = wipe_out_rate(trace)
    # 200 tokens are 4 regions; 520 are 9, of which the second event's cache holds 324 entries, 6 runs
    assert lost.per_event == pytest.approx((3 / 4 + 0 + 5 / 6 + 4 / 6) / 4)
    assert lost.cumulative == pytest.approx((3 / 4 + 0 + 7 / 9 + 5 / 9) / 4)
    assert lost.bound == pytest.approx((0 + 0 + 5 / 9 + 5 / 9) / 4)
    assert retained_iou(trace) == pytest.approx((1 / 4 + 3 / 4) / 2)


def test_layers_count_alike_and_pair_with_themselves():
    one, both = Trace(two_events()), Trace([*two_events(), *two_events(layer=1)])
    both.events[1:3] = both.events[2], both.events[1]  # as recorded: layer by layer within each event
    assert wipe_out_rate(both) == wipe_out_rate(one)
    assert retained_iou(both) == retained_iou(one)


def test_sequences_do_not_pair_with_each_other():
    twice = Trace(two_events() + two_events())
    assert retained_iou(twice) == retained_iou(Trace(two_events()))


def test_segments_are_the_regions_where_there_are_several():
    row = list(range(100))
    segmented = event([row, row], [[5, 60], [10, 20]], ends=[[10, 50, 100, 100], [10, 50, 60, 100]], count=[3, 4])
    assert wipe_out_rate(Trace([segmented])).per_event == pytest.approx((1 / 3 + 3 / 4) / 2)
    single = event([row, row], [[5, 60], [10, 70]], ends=[[100], [100]], count=[1, 1])
    assert wipe_out_rate(Trace([single])).per_event == pytest.approx((1 / 2 + 0) / 2)


def test_padding_belongs_to_no_region():
    bare = event([list(range(65))], [[0, 64]])
    padded = event([[*range(-70, 65)]], [[-2, -1, 0, 64]])
    assert wipe_out_rate(Trace([padded])) == wipe_out_rate(Trace([bare]))
    lost = wipe_out_rate(Trace([event([[*range(-3, 200)]], [[-1, 0]])]))
    assert lost.per_event == lost.cumulative == lost.bound == 3 / 4


def test_no_event_has_no_rate():
    lost = wipe_out_rate(Trace())
    assert all(math.isnan(x) for x in (lost.per_event, lost.cumulative, lost.bound))
    assert math.isnan(retained_iou(Trace()))
    assert math.isnan(retained_iou(Trace(two_events()[:1])))


def test_unknown_positions_are_refused():
    known, later = two_events()
    later.present[..., :4] = -1
    for measure in (wipe_out_rate, retained_iou):
        with pytest.raises(ValueError, match="unknown position"):
            measure(Trace([known, later]))
    with pytest.raises(ValueError, match="region: got 0"):
        wipe_out_rate(Trace(), region=0)


def literal_rates(trace, region):
    """The three figures and the overlap by loops over sets."""
    a, b, bound, overlaps = [], [], [], []
    before = {}
    segmented = any(e.segment_count is not None and int(e.segment_count.max()) > 1 for e in trace.events)
    for e in trace.events:
        for row, head in itertools.product(*map(range, e.present.shape[:2])):
            present, kept = e.present[row, head].tolist(), e.kept[row, head].tolist()
            real = [i for i, position in enumerate(present) if position >= 0]
            if segmented:
                ends = e.segment_ends[row, head, : int(e.segment_count[row, head])].tolist()
                groups = [range(begin, end) for begin, end in zip([real[0], *ends[:-1]], ends, strict=True)]
            else:
                groups = [real[i : i + region] for i in range(0, len(real), region)]
            chosen = set(e.indices[row, head].tolist())
            a.append(sum(not chosen & set(group) for group in groups) / len(groups))
            tokens = range(max(present) + 1)
            groups = [tokens[i : i + region] for i in range(0, len(tokens), region)]
            b.append(sum(not set(kept) & set(group) for group in groups) / len(groups))
            bound.append(max(0, len(groups) - len([k for k in kept if k >= 0])) / len(groups))
            key = (e.layer, row, head)
            if key in before:
                newest, old = before[key]
                now = {k for k in kept if 0 <= k <= newest}
                overlaps.append(len(old & now) / len(old | now))
            before[key] = max(present), {k for k in kept if k >= 0}
    return [sum(values) / len(values) for values in (a, b, bound, overlaps)]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("name", "region"), [("snapkv", 3), ("ams_tova", 8), ("ablation_no_segments_tova", 8)])
def test_rates_of_real_traces(name, region, padded):
    model, ids = tiny("llama"), token_ids(2, 90)
    mask = torch.ones_like(ids)
    if padded:
        mask[1, :18] = 0
    press = build(name, **SETTINGS)
    with press(model), press.record() as trace:
        cache, begin = DynamicCache(config=model.config), 0
        for part in ids.split([20] + [16] * 4 + [6], dim=1):
            begin += part.shape[1]
            model(part, attention_mask=mask[:, :begin], past_key_values=cache, use_cache=True)
    assert len(trace.layer(0)) == 4
    lost = wipe_out_rate(trace, region=region)
    got = [lost.per_event, lost.cumulative, lost.bound, retained_iou(trace)]
    assert got == pytest.approx(literal_rates(trace, region))


def test_repetition_rate():
    assert repetition_rate([1, 2, 3, 4, 5]) == 0
    assert repetition_rate([7] * 10) == pytest.approx(6 / 7)
    assert repetition_rate(torch.tensor([1, 2, 3, 4, 1, 2, 3, 4])) == pytest.approx(1 / 5)
    assert repetition_rate([1, 2, 1, 2, 1], n=2) == pytest.approx(2 / 4)
    assert repetition_rate([1, 1, 2], n=1) == pytest.approx(1 / 3)
    assert math.isnan(repetition_rate([1, 2, 3]))
    assert math.isnan(repetition_rate([]))
    with pytest.raises(ValueError, match=r"ids: got shape \(1, 8\)"):
        repetition_rate(torch.zeros(1, 8))
    with pytest.raises(ValueError, match="n: got 0"):
        repetition_rate([1], n=0)


# -- teacher forcing ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model():
    return tiny("llama").double()  # rounding is no matter here


def recorded(model, ids, press, prompt, step):
    """Feed ids under a press, ``step`` tokens at a time after the prompt: the trace."""
    with press(model), press.record() as trace:
        cache = DynamicCache(config=model.config)
        for part in (ids[:, :prompt], *ids[:, prompt:].split(step, dim=1)):
            model(part, past_key_values=cache, use_cache=True)
    return trace


@pytest.mark.parametrize("name", ["streaming_llm", "tova", "expected", "snapkv", "ams_keydiff", "random_prompt"])
def test_one_forward_per_interval_is_step_by_step(model, name):
    """Against tokens fed one by one, and against one forward in which evicted entries are masked out."""
    ids, prompt, first = token_ids(1, 90), 20, 36
    press = build(name, **SETTINGS)
    chunked, single = (recorded(model, ids, press, prompt, step) for step in (16, 1))
    assert len(chunked.events) == len(single.events) == 4 * 3
    for a, b in zip(chunked.events, single.events, strict=True):
        assert torch.equal(a.kept, b.kept)

    torch.set_default_dtype(torch.float64)  # the type of the oracle's masks
    try:
        masked = masked_logits(model, ids, single)[0, first:]
    finally:
        torch.set_default_dtype(torch.float32)
    full = model(ids, use_cache=False).logits[0, first:]
    expected = exact_kl(full, masked)
    lost = wipe_out_rate(single)
    for step in (None, 1, 5):
        got = fidelity(model, ids, press, prompt_tokens=prompt, step=step)
        torch.testing.assert_close(got.token_kl.double(), expected, atol=2e-6, rtol=1e-5)
        assert got.kl == pytest.approx(float(expected.mean()), abs=1e-6)
        assert got.kl > 1e-3
        assert got.agreement == pytest.approx(float((full.argmax(-1) == masked.argmax(-1)).double().mean()))
        losses = [x[:-1].log_softmax(-1).gather(-1, ids[0, first + 1 :, None]).mean() for x in (full, masked)]
        assert [-got.nll_full, -got.nll_pressed] == pytest.approx([float(x) for x in losses], abs=1e-6)
        assert (got.tokens, got.scored, got.events, got.kept, got.peak) == (90, 54, 4, 24, 40)
        figures = [got.wipe_out_event, got.wipe_out_cumulative, got.wipe_out_bound, got.iou]
        assert figures == [lost.per_event, lost.cumulative, lost.bound, retained_iou(single)]


def test_a_full_cache_differs_by_nothing(model):
    got = fidelity(model, token_ids(1, 90), FullKVPress(), prompt_tokens=20)
    assert abs(got.kl) < 1e-7
    assert got.token_kl.abs().max() < 1e-6
    assert got.agreement == 1
    assert got.nll_full == pytest.approx(got.nll_pressed)
    assert (got.events, got.kept, got.peak, got.scored) == (0, 90, 90, 70)
    assert got.figures()["iou"] is got.figures()["wipe_out_event"] is None
    assert "token_kl" not in got.figures()


def test_one_full_run_serves_many_methods(model):
    ids = token_ids(1, 90)
    early, exact = full_run(model, ids, start=0), full_run(model, ids[0], start=36)
    assert early.logits.shape == (90, 512)
    assert early.logits.dtype == torch.float64
    assert (exact.logits.shape, exact.nll.shape) == ((54, 512), (53,))
    torch.testing.assert_close(early.logits, model(ids, use_cache=False).logits[0])
    for name in ("tova", "keydiff"):
        own = fidelity(model, ids, build(name, **SETTINGS), prompt_tokens=20)
        for full in (early, exact):
            shared = fidelity(model, ids[0], build(name, **SETTINGS), prompt_tokens=20, full=full)
            assert torch.equal(shared.token_kl, own.token_kl)
            names = set(own.figures()) - {"seconds"}
            assert {k: shared.figures()[k] for k in names} == {k: own.figures()[k] for k in names}
    late = full_run(model, ids, start=40)
    with pytest.raises(ValueError, match="full: got a run from token 40 on, allowed: at most 36"):
        fidelity(model, ids, build("tova", **SETTINGS), prompt_tokens=20, full=late)
    with pytest.raises(ValueError, match="full: got a run over other ids"):
        fidelity(model, token_ids(1, 90, seed=1), build("tova", **SETTINGS), prompt_tokens=20, full=early)


def test_a_compressed_prompt_is_the_first_event(model):
    press = build("snapkv", compress_prompt=True, **SETTINGS)
    got = fidelity(model, token_ids(1, 60), press, prompt_tokens=40)
    assert (got.events, got.scored, got.peak) == (2, 20, 40)
    alone = fidelity(model, token_ids(1, 60), build("snapkv", **SETTINGS), prompt_tokens=40)
    assert (alone.events, alone.scored) == (1, 4)


@pytest.mark.parametrize(
    ("prompt", "budget", "first"), [(20, 24, 36), (4, 24, 36), (8, 24, 40), (40, 24, 56), (1, 64, 65)]
)
def test_first_event(model, prompt, budget, first):
    press = build("keydiff", target_size=budget, compression_interval=16)
    assert first_event(press, prompt) == first
    got = fidelity(model, token_ids(1, 100), press, prompt_tokens=prompt)
    assert got.scored == 100 - first


def test_progress_counts_tokens(model):
    fed = []
    full_run(model, token_ids(1, 60), start=30, progress=fed.append)
    assert fed == [60]
    fed.clear()
    fidelity(model, token_ids(1, 60), build("tova", **SETTINGS), prompt_tokens=20, progress=fed.append)
    assert fed == [20, 16, 16, 8]


def test_a_text_without_an_event_is_refused(model):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match=r"ids: got 37 tokens, 20 of them prompt, .*=16 .*=24; .* at least 38"):
            fidelity(model, token_ids(1, 37), build("tova", **SETTINGS), prompt_tokens=20)
        with pytest.raises(ValueError, match="target_size=100"):
            fidelity(model, token_ids(1, 90), build("tova", target_size=100), prompt_tokens=20)
    fidelity(model, token_ids(1, 38), build("tova", **SETTINGS), prompt_tokens=20)


def test_bad_arguments(model):
    press, ids = build("tova", **SETTINGS), token_ids(1, 60)
    for bad in (token_ids(2, 60), ids[None], ids[:, :1]):
        with pytest.raises(ValueError, match="ids: got shape"):
            fidelity(model, bad, press, prompt_tokens=20)
    for bad in (0, 60):
        with pytest.raises(ValueError, match=f"prompt_tokens: got {bad}, allowed: 1 to 59"):
            fidelity(model, ids, press, prompt_tokens=bad)
    with pytest.raises(ValueError, match="step: got 0"):
        fidelity(model, ids, press, prompt_tokens=20, step=0)
    with pytest.raises(ValueError, match="press: got KnormPress"):
        fidelity(model, ids, KnormPress(0.5), prompt_tokens=20)
    for bad in (-1, 59):
        with pytest.raises(ValueError, match=f"start: got {bad}, allowed: 0 to 58"):
            full_run(model, ids, start=bad)


def test_logits_that_are_not_finite_are_no_result(model):
    ids = token_ids(1, 60)
    full = full_run(model, ids, start=36)

    def spoil(module, args, output):
        output[:, -1] = torch.nan

    handle = model.lm_head.register_forward_hook(spoil)
    try:
        with pytest.raises(FloatingPointError, match="not finite at 2 of 24 tokens"):
            fidelity(model, ids, build("tova", **SETTINGS), prompt_tokens=20, full=full)
    finally:
        handle.remove()


def test_standard_error_over_runs():
    values = torch.randn(50, dtype=torch.float64)
    naive = float(values.std() / 50**0.5)
    assert clustered_stderr(values, 1) == pytest.approx(naive)
    # what is said three times is no more evidence than what is said once
    assert clustered_stderr(values.repeat_interleave(3), 3) == pytest.approx(naive)
    assert clustered_stderr(torch.ones(7), 3) == 0
    assert math.isnan(clustered_stderr(values, 50))
