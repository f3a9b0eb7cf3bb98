import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import ams

from pressroom.kernels import fixed_segments, mass_of, mass_segments, single_segment


def rows_of(segments):
    """Per row, ends and weights without the padding."""
    ends, count, weight = (x.reshape(-1, *x.shape[segments.count.ndim :]) for x in segments)
    for e, c, w in zip(ends, count, weight, strict=True):
        assert (e[int(c) :] == e[-1]).all()
        assert (w[int(c) :] == 0).all()
        yield e[: int(c)].tolist(), w[: int(c)].tolist()


@st.composite
def masses(draw):
    entries = draw(st.sampled_from([1, 2, 3, 7, 16, 33, 63, 100]))
    kind = draw(st.sampled_from(["smooth", "spikes", "flat", "tail"]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    u = torch.rand(entries, generator=generator)
    if kind == "spikes":
        u = u**20
    elif kind == "flat":
        u = torch.ones(entries)
    elif kind == "tail":
        u[: entries // 2] = 0
    return mass_of(u[None])[0]


@given(masses(), st.sampled_from([0.02, 0.1, 1 / 3, 0.5, 0.7, 1.0]), st.integers(1, 9), st.integers(0, 20), st.data())
def test_against_the_oracle(mass, segment_mass, min_len, extra, data):
    entries = len(mass)
    pad = data.draw(st.integers(0, entries - 1))
    mass = mass_of(mass[None], start=torch.tensor([pad]))[0]
    limits = {"segment_mass": segment_mass, "min_len": min_len, "max_len": 2 * min_len + extra}
    got = mass_segments(mass[None], **limits, start=torch.tensor([pad]))
    ((ends, weight),) = rows_of(got)
    want = ams.segments(mass.tolist(), **limits, pad=pad)
    assert ends == want
    assert weight == ams.segment_weights(mass.tolist(), want, pad)
    lengths = [b - a for a, b in zip([pad, *ends[:-1]], ends, strict=True)]
    assert max(lengths) <= limits["max_len"]
    if entries - pad >= min_len:
        assert min(lengths) >= min_len
    if pad == 0:
        unpadded = mass_segments(mass[None], **limits)
        assert all(torch.equal(a, b) for a, b in zip(unpadded, got, strict=True))


@pytest.mark.parametrize("entries", [500, 1024, 4096])
def test_long_rows(entries):
    usage = torch.rand(2, 3, entries, generator=torch.Generator().manual_seed(1)) ** 8
    mass = mass_of(usage)
    got = mass_segments(mass, segment_mass=0.02, min_len=16, max_len=256)
    assert got.ends.shape[:2] == got.count.shape == (2, 3)
    for (ends, weight), row in zip(rows_of(got), mass.reshape(-1, entries), strict=True):
        assert ends == ams.segments(row.tolist(), segment_mass=0.02, min_len=16, max_len=256)
        assert sum(weight) == sum(ams.fixed_point(row.tolist())) <= 2**40 * 1.0001


def test_a_cut_comes_after_the_entry_that_reaches_the_threshold():
    mass = torch.tensor([0.25, 0.25, 0.25, 0.25])
    got = mass_segments(mass, segment_mass=0.5, min_len=1, max_len=4)
    assert got.ends[: int(got.count)].tolist() == [2, 4]
    mass = torch.tensor([0.2, 0.2, 0.2, 0.4])
    got = mass_segments(mass, segment_mass=0.5, min_len=1, max_len=4)
    assert got.ends[: int(got.count)].tolist() == [3, 4]


def test_short_neighbours_merge_and_long_segments_split_evenly():
    mass = torch.zeros(20)
    mass[0] = mass[1] = 0.25
    mass[19] = 0.5
    got = mass_segments(mass, segment_mass=0.25, min_len=2, max_len=6)
    assert got.ends[: int(got.count)].tolist() == [2, 8, 14, 20]


def test_no_mass_at_all():
    for mass in (torch.zeros(2, 50), torch.full((2, 50), torch.nan)):
        got = mass_segments(mass, segment_mass=0.1, min_len=4, max_len=16)
        for ends, weight in rows_of(got):
            assert ends == ams.segments([0.0] * 50, segment_mass=0.1, min_len=4, max_len=16)
            assert weight == [0] * len(ends)


@given(st.integers(1, 60), st.integers(1, 20), st.data())
def test_fixed_and_single(entries, length, data):
    pad = data.draw(st.integers(0, entries - 1))
    mass = mass_of(torch.rand(1, entries), start=torch.tensor([pad]))
    ((ends, weight),) = rows_of(fixed_segments(mass, length=length, start=torch.tensor([pad])))
    assert ends == ams.fixed(entries, length, pad)
    assert weight == ams.segment_weights(mass[0].tolist(), ends, pad)
    ((ends, weight),) = rows_of(single_segment(mass, start=torch.tensor([pad])))
    assert ends == [entries]


def test_rows_do_not_influence_each_other():
    mass = mass_of(torch.rand(3, 2, 200) ** 4)
    start = torch.tensor([0, 50, 120])
    limits = {"segment_mass": 0.05, "min_len": 4, "max_len": 32}
    together = list(rows_of(mass_segments(mass, **limits, start=start)))
    for b in range(3):
        for h in range(2):
            ((ends, weight),) = rows_of(mass_segments(mass[b, h], **limits, start=start[b].view(())))
            assert together[2 * b + h] == (ends, weight)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"segment_mass": 0.0}, "segment_mass: got 0.0, allowed: a number in (0, 1]"),
        ({"segment_mass": 1.5}, "segment_mass: got 1.5"),
        ({"min_len": 0}, "min_len: got 0"),
        ({"max_len": 7}, "max_len: got 7, allowed: at least 2 * min_len = 8"),
        ({"mass": torch.ones(0)}, "mass.shape: got (0,)"),
        ({"mass": torch.ones(5, dtype=torch.int64)}, "mass.dtype: got torch.int64"),
        ({"start": torch.ones(4)}, "start.shape: got (4,)"),
    ],
)
def test_bad_input(change, message):
    arguments = {"mass": torch.ones(2, 9), "segment_mass": 0.1, "min_len": 4, "max_len": 8, **change}
    with pytest.raises(ValueError) as error:
        mass_segments(arguments.pop("mass"), **arguments)
    assert str(error.value).startswith(message)
