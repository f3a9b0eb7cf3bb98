"""Which implementation of an op runs. The only place that decides."""

from __future__ import annotations

import os

ENVIRONMENT = "PRESSROOM_KERNELS"
BACKENDS = ("reference", "triton")


def choose(op: str, backend: str | None) -> str:
    """The backend of an op: the argument, else the environment, else the reference.

    Raises
    ------
    ValueError
        For an unknown backend.
    RuntimeError
        For one that is asked for and cannot run.
    """
    source = "backend" if backend is not None else ENVIRONMENT
    wanted = backend or os.environ.get(ENVIRONMENT) or "reference"
    if wanted not in BACKENDS:
        raise ValueError(f"{source}: got {wanted!r}, allowed: {' | '.join(BACKENDS)}")
    if wanted == "triton":
        raise RuntimeError(f"{source}: got 'triton', but {op} has no Triton kernel in this version")
    return wanted
