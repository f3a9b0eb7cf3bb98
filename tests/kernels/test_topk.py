import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import ams

from pressroom.kernels import fixed_segments, mass_of, mass_segments, segment_quotas, segmented_topk, top_indices

SPECIAL = [0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -1.0, 1e-45, 3.4e38]


@st.composite
def scored(draw):
    entries = draw(st.integers(1, 50))
    number = st.one_of(st.sampled_from(SPECIAL), st.floats(-2, 2, width=32), st.integers(0, 3).map(float))
    return draw(st.lists(number, min_size=entries, max_size=entries)), draw(st.integers(0, entries - 1))


@given(scored(), st.integers(1, 60), st.integers(0, 6), st.integers(0, 9), st.integers(0, 3), st.integers(1, 12))
def test_against_the_oracle(rows, keep, n_sink, n_recent, min_keep, length):
    scores, pad = rows
    entries = len(scores)
    keep = min(keep, entries)
    start = torch.tensor([pad])
    mass = mass_of(torch.rand(1, entries), start=start)
    segments = fixed_segments(mass, length=length, start=start)
    settings = {"keep": keep, "n_sink": n_sink, "n_recent": n_recent, "min_keep": min_keep}
    quotas = segment_quotas(segments, **settings, start=start)
    got = segmented_topk(torch.tensor([scores]), segments, quotas, start)
    ends = ams.fixed(entries, length, pad)
    plan = ams.quotas(ends, ams.segment_weights(mass[0].tolist(), ends, pad), **settings, pad=pad)
    # the oracle sees what fp32 holds
    want = ams.choose(torch.tensor(scores).tolist(), ends, plan, keep=keep, pad=pad)
    assert got.dtype == torch.int64
    assert got[0].tolist() == want


@given(scored(), st.integers(1, 60), st.integers(0, 6), st.integers(0, 9))
def test_top_indices_is_the_choice_from_one_segment(rows, keep, n_sink, n_recent):
    scores, pad = rows
    entries = len(scores)
    keep = min(keep, entries)
    got = top_indices(torch.tensor([scores]), keep=keep, n_sink=n_sink, n_recent=n_recent, start=torch.tensor([pad]))
    sink = min(n_sink, keep, entries - pad)
    recent = min(n_recent, keep - sink, entries - pad - sink)
    plan = ams.Plan([min(keep, entries - pad)], sink, recent, 0)
    assert got[0].tolist() == ams.choose(torch.tensor(scores).tolist(), [entries], plan, keep=keep, pad=pad)


@pytest.mark.parametrize("entries", [63, 500, 1024])
def test_long_rows_of_any_shape(entries):
    generator = torch.Generator().manual_seed(entries)
    scores = torch.randint(0, 20, (2, 3, entries), generator=generator).float()  # ties everywhere
    mass = mass_of(torch.rand(2, 3, entries, generator=generator) ** 6)
    start = torch.tensor([0, entries // 3])
    segments = mass_segments(mass, segment_mass=0.05, min_len=4, max_len=64, start=start)
    keep = entries // 3
    quotas = segment_quotas(segments, keep=keep, n_sink=4, n_recent=8, min_keep=2, start=start)
    got = segmented_topk(scores.transpose(0, 1).contiguous().transpose(0, 1), segments, quotas, start)
    assert got.shape == (2, 3, keep)
    for b in range(2):
        for h in range(3):
            ends = segments.ends[b, h, : int(segments.count[b, h])].tolist()
            plan = ams.Plan(
                quotas.quota[b, h].tolist()[: len(ends)], int(quotas.n_sink[b, h]), int(quotas.n_recent[b, h]), 0
            )
            want = ams.choose(scores[b, h].tolist(), ends, plan, keep=keep, pad=int(start[b]))
            assert got[b, h].tolist() == want


def test_everything_and_nothing_to_choose():
    scores = torch.rand(2, 9)
    mass = mass_of(torch.rand(2, 9))
    segments = fixed_segments(mass, length=3)
    quotas = segment_quotas(segments, keep=9, n_sink=0, n_recent=0, min_keep=0)
    assert torch.equal(segmented_topk(scores, segments, quotas), torch.arange(9).expand(2, -1))
    more = segment_quotas(segments, keep=20, n_sink=0, n_recent=0, min_keep=0)
    assert torch.equal(segmented_topk(scores, segments, more), torch.arange(9).expand(2, -1))
    assert torch.equal(top_indices(scores, keep=9), torch.arange(9).expand(2, -1))


def test_padding_stays_in_front():
    got = top_indices(torch.rand(1, 10), keep=6, start=torch.tensor([7]))
    assert got[0].tolist() == [4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scores": torch.ones(2, 9, dtype=torch.int32)}, "scores.dtype: got torch.int32, allowed: floating point"),
        ({"scores": torch.ones(0)}, "scores.shape: got (0,)"),
        ({"keep": 0}, "keep: got 0, allowed: an integer of at least 1 and at most 9"),
        ({"keep": 10}, "keep: got 10"),
        ({"n_sink": -1}, "n_sink: got -1"),
        ({"start": torch.ones(3)}, "start.shape: got (3,)"),
    ],
)
def test_bad_input(change, message):
    arguments = {"scores": torch.ones(2, 9), "keep": 4, **change}
    with pytest.raises(ValueError) as error:
        top_indices(arguments.pop("scores"), **arguments)
    assert str(error.value).startswith(message)


def test_segments_of_other_rows_are_refused():
    segments = fixed_segments(torch.rand(2, 9), length=3)
    quotas = segment_quotas(segments, keep=4, n_sink=0, n_recent=0, min_keep=0)
    with pytest.raises(ValueError, match=r"segments\.ends\.shape: got \(2, 3\), allowed: \(3, 3\)"):
        segmented_topk(torch.rand(3, 9), segments, quotas)
