import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import ams

from pressroom.kernels import mass_of, mix_credit

VALUES = st.one_of(st.floats(0, 1, width=32), st.sampled_from([0.0, -1.0, float("nan"), 1e-30]))


@given(st.lists(VALUES, min_size=1, max_size=40), st.data())
def test_mass_against_the_oracle(values, data):
    pad = data.draw(st.integers(0, len(values) - 1))
    got = mass_of(torch.tensor([values]), start=torch.tensor([pad]))
    want = torch.tensor([ams.mass(values, pad)], dtype=torch.float64)
    torch.testing.assert_close(got.double(), want, atol=1e-7, rtol=1e-5)
    assert (got[0, :pad] == 0).all()


@given(
    st.lists(st.floats(0, 1, width=32), min_size=1, max_size=30),
    st.lists(st.one_of(st.floats(0, 1, width=32), st.just(0.0)), max_size=30),
    st.sampled_from([0.0, 0.5, 0.9, 1.0]),
    st.sampled_from([0.0, 0.3, 0.9, 1.0]),
    st.sampled_from(["zero", "mass"]),
)
def test_mix_against_the_oracle(usage, credit, decay, beta, init):
    credit = credit[: len(usage)]
    mass, new = mix_credit(
        torch.tensor([usage]),
        torch.tensor([credit]) if credit else None,
        decay=decay,
        mix=beta,
        init=init,
    )
    want_mass, want_new = ams.mix(ams.mass(usage), credit or None, decay=decay, beta=beta, init=init)
    torch.testing.assert_close(mass.double(), torch.tensor([want_mass], dtype=torch.float64), atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(new.double(), torch.tensor([want_new], dtype=torch.float64), atol=1e-6, rtol=1e-4)


def test_the_first_event_is_the_mass_itself():
    usage = torch.rand(2, 3, 17)
    mass, credit = mix_credit(usage, None, decay=0.9, mix=0.7)
    torch.testing.assert_close(mass, mass_of(usage))
    torch.testing.assert_close(credit, 0.1 * mass_of(usage))


def test_an_entry_without_credit_is_new():
    """NaN marks entries of a row that had no event yet: the row is as at its first event, beside rows that are not."""
    usage = torch.rand(2, 12)
    known = torch.stack([torch.rand(8), torch.full((8,), torch.nan)])
    for init in ("zero", "mass"):
        mass, credit = mix_credit(usage, known, decay=0.8, mix=0.5, init=init)
        for row, past in ((0, known[:1]), (1, None)):
            alone = mix_credit(usage[row : row + 1], past, decay=0.8, mix=0.5, init=init)
            assert torch.equal(mass[row], alone[0][0])
            assert torch.equal(credit[row], alone[1][0])


def test_rows_of_any_shape_and_padding():
    usage, credit = torch.rand(2, 3, 15), torch.rand(2, 3, 9)
    start = torch.tensor([0, 4])
    mass, _ = mix_credit(usage, credit, decay=0.9, mix=0.9, start=start)
    assert (mass[1, :, :4] == 0).all()
    torch.testing.assert_close(mass.sum(dim=-1), torch.ones(2, 3))
    for h in range(3):
        alone, _ = mix_credit(usage[1:, h], credit[1:, h], decay=0.9, mix=0.9, start=start[1:])
        torch.testing.assert_close(mass[1, h], alone[0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"decay": 1.1}, "decay: got 1.1, allowed: a number in [0, 1]"),
        ({"mix": -0.1}, "mix: got -0.1"),
        ({"init": "one"}, "init: got 'one', allowed: zero | mass"),
        ({"credit": torch.ones(2, 6)}, "credit.shape: got (2, 6)"),
        ({"credit": torch.ones(3, 2)}, "credit.shape: got (3, 2)"),
        ({"start": torch.ones(3)}, "start.shape: got (3,)"),
    ],
)
def test_bad_input(change, message):
    arguments = {"credit": None, "decay": 0.9, "mix": 0.9, **change}
    with pytest.raises(ValueError) as error:
        mix_credit(torch.ones(2, 5), arguments.pop("credit"), **arguments)
    assert str(error.value).startswith(message)
