import pytest
import torch

from pressroom.kernels import mass_of


def test_the_argument_goes_before_the_environment(monkeypatch):
    usage = torch.rand(2, 5)
    want = mass_of(usage)
    monkeypatch.setenv("PRESSROOM_KERNELS", "nonsense")
    assert torch.equal(mass_of(usage, backend="reference"), want)
    with pytest.raises(ValueError, match=r"PRESSROOM_KERNELS: got 'nonsense', allowed: reference \| triton"):
        mass_of(usage)
    monkeypatch.setenv("PRESSROOM_KERNELS", "reference")
    assert torch.equal(mass_of(usage), want)


def test_a_backend_that_cannot_run_is_no_silent_fallback(monkeypatch):
    with pytest.raises(RuntimeError, match="backend: got 'triton', but mass_of has no Triton kernel"):
        mass_of(torch.rand(2, 5), backend="triton")
    monkeypatch.setenv("PRESSROOM_KERNELS", "triton")
    with pytest.raises(RuntimeError, match="PRESSROOM_KERNELS: got 'triton'"):
        mass_of(torch.rand(2, 5))


def test_an_unknown_backend():
    with pytest.raises(ValueError, match="backend: got 'cuda', allowed"):
        mass_of(torch.rand(2, 5), backend="cuda")
