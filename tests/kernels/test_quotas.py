import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from oracles import ams

from pressroom.kernels import Segments, segment_quotas


def as_segments(ends, weights, entries):
    ends = torch.tensor(ends + [entries] * 2)  # two unused slots
    return Segments(ends, torch.tensor(len(ends) - 2), torch.tensor([*weights, 0, 0]))


@st.composite
def plans(draw):
    count = draw(st.integers(1, 12))
    pad = draw(st.integers(0, 5))
    lengths = draw(st.lists(st.integers(1, 12), min_size=count, max_size=count))
    big = st.one_of(st.integers(0, 2**40 // 12), st.integers(0, 3), st.just(0))
    weights = draw(st.lists(big, min_size=count, max_size=count))
    entries = pad + sum(lengths)
    ends = [pad + sum(lengths[: i + 1]) for i in range(count)]
    settings = {
        "keep": draw(st.integers(1, entries + 2)),
        "n_sink": draw(st.integers(0, 8)),
        "n_recent": draw(st.integers(0, 20)),
        "min_keep": draw(st.integers(0, 5)),
        "by_mass": draw(st.booleans()),
    }
    return ends, weights, pad, settings


@given(plans())
@example(([4, 8, 12, 16], [1, 1, 1, 1], 0, {"keep": 8, "n_sink": 2, "n_recent": 2, "min_keep": 1, "by_mass": True}))
def test_against_the_oracle(plan):
    ends, weights, pad, settings = plan
    got = segment_quotas(as_segments(ends, weights, ends[-1]), **settings, start=torch.tensor(pad))
    want = ams.quotas(ends, weights, **settings, pad=pad)
    quota = got.quota.tolist()
    assert quota[len(ends) :] == [0, 0]
    assert quota[: len(ends)] == want.quota
    assert (int(got.n_sink), int(got.n_recent), int(got.floors_dropped)) == (want.sink, want.recent, want.dropped)
    # what it promises
    keep = min(settings["keep"], ends[-1] - pad)
    begins = [pad, *ends[:-1]]
    assert sum(quota) == keep
    assert int(got.n_sink) == min(settings["n_sink"], keep)
    for a, b, q in zip(begins, ends, quota, strict=False):
        protected = sum(i < pad + want.sink or i >= ends[-1] - want.recent for i in range(a, b))
        assert protected <= q <= b - a
    floors = [min(settings["min_keep"], b - a) for a, b in zip(begins, ends, strict=True)]
    if int(got.floors_dropped) == 0 and settings["min_keep"]:
        assert min(quota[: len(ends)]) >= 1
    sinks = [max(0, min(b, pad + want.sink) - a) for a, b in zip(begins, ends, strict=True)]
    if sum(max(f, s) for f, s in zip(floors, sinks, strict=True)) <= keep and int(got.n_recent) == settings["n_recent"]:
        assert int(got.floors_dropped) == 0


@pytest.mark.parametrize("mandatory", [(2, 0), (0, 2), (1, 1), (2, 2), (0, 4), (4, 0)])
def test_the_worked_example(mandatory):
    """16 entries, four equal segments, eight to keep: two each, mandatory entries inside; four sinks fill a segment."""
    segments = as_segments([4, 8, 12, 16], [2**38] * 4, 16)
    got = segment_quotas(segments, keep=8, n_sink=mandatory[0], n_recent=mandatory[1], min_keep=1)
    if 4 in mandatory:
        assert sorted(got.quota.tolist()[:4]) == [1, 1, 2, 4]
    else:
        assert got.quota.tolist()[:4] == [2, 2, 2, 2]


def test_what_a_small_budget_gives_up():
    """Floors above one, then the suffix from its far end, then floors from the lightest segment on; sinks last."""
    ends, weights = [4, 8, 12, 16], [5, 1, 9, 2]
    settings = {"n_sink": 2, "n_recent": 6, "min_keep": 3}

    def plan(keep):
        got = segment_quotas(as_segments(ends, weights, 16), keep=keep, **settings)
        return got.quota.tolist()[:4], int(got.n_sink), int(got.n_recent), int(got.floors_dropped)

    assert plan(13) == ([3, 3, 3, 4], 2, 6, 0)
    assert plan(12) == ([3, 1, 4, 4], 2, 6, 0)  # floors fall to one
    assert plan(9) == ([2, 1, 2, 4], 2, 6, 0)
    assert plan(8) == ([2, 1, 1, 4], 2, 5, 0)  # the suffix gets shorter
    assert plan(5) == ([2, 1, 1, 1], 2, 1, 0)
    assert plan(4) == ([2, 0, 1, 1], 2, 1, 1)  # the lightest segment loses its floor
    assert plan(3) == ([2, 0, 1, 0], 2, 0, 2)
    assert plan(2) == ([2, 0, 0, 0], 2, 0, 4)
    assert plan(1) == ([1, 0, 0, 0], 1, 0, 4)


def test_protection_per_row_and_rows_alone():
    ends = torch.tensor([[[4, 8, 12, 16]] * 2] * 3)
    weight = torch.randint(0, 2**38, (3, 2, 4), generator=torch.Generator().manual_seed(0))
    sink = torch.tensor([0, 3, 7])
    segments = Segments(ends, torch.full((3, 2), 4), weight)
    got = segment_quotas(segments, keep=9, n_sink=sink[:, None], n_recent=2, min_keep=1)
    assert got.n_sink.tolist() == [[0, 0], [3, 3], [7, 7]]
    for b in range(3):
        for h in range(2):
            alone = Segments(ends[b, h], torch.tensor(4), weight[b, h])
            want = segment_quotas(alone, keep=9, n_sink=int(sink[b]), n_recent=2, min_keep=1)
            assert torch.equal(got.quota[b, h], want.quota)


def test_large_numbers_stay_exact():
    """T 2**17 and all the mass there can be: 64 bits hold the shares."""
    entries = 2**17
    ends = [256 * (i + 1) for i in range(entries // 256)]
    weights = [2**40 // len(ends)] * len(ends)
    weights[7] += 2**20
    got = segment_quotas(as_segments(ends, weights, entries), keep=entries // 2, n_sink=4, n_recent=32, min_keep=8)
    want = ams.quotas(ends, weights, keep=entries // 2, n_sink=4, n_recent=32, min_keep=8)
    assert got.quota.tolist()[: len(ends)] == want.quota


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keep": 0}, "keep: got 0, allowed: an integer of at least 1"),
        ({"keep": 2.5}, "keep: got 2.5"),
        ({"n_sink": -1}, "n_sink: got -1"),
        ({"n_recent": True}, "n_recent: got True"),
        ({"min_keep": -1}, "min_keep: got -1"),
        ({"n_sink": torch.ones(3)}, "n_sink.shape: got (3,)"),
    ],
)
def test_bad_input(change, message):
    segments = Segments(torch.tensor([[4, 8]] * 2), torch.tensor([2, 2]), torch.ones(2, 2, dtype=torch.int64))
    with pytest.raises(ValueError) as error:
        segment_quotas(segments, **{"keep": 4, "n_sink": 1, "n_recent": 1, "min_keep": 1, **change})
    assert str(error.value).startswith(message)
