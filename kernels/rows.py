"""What the ops share: checks, and rows of any leading shape as one dimension."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def require(name: str, value: object, condition: bool, allowed: str) -> None:
    """Raise ``ValueError`` naming argument, value and what is allowed."""
    if not condition:
        raise ValueError(f"{name}: got {value!r}, allowed: {allowed}")


def require_size(name: str, value: Any, minimum: int, maximum: int | None = None) -> None:
    ok = isinstance(value, int) and not isinstance(value, bool) and value >= minimum
    upper = "" if maximum is None else f" and at most {maximum}"
    require(name, value, ok and (maximum is None or value <= maximum), f"an integer of at least {minimum}{upper}")


def require_shape(name: str, tensor: Tensor, shape: tuple[int, ...], meaning: str) -> None:
    require(f"{name}.shape", tuple(tensor.shape), tuple(tensor.shape) == shape, f"{shape} ({meaning})")


def column(name: str, value: Tensor | int, lead: tuple[int, ...], rows: int, device: torch.device) -> Tensor:
    """An int64 column (R, 1) of one number for all rows, or one per row.

    Raises
    ------
    ValueError
        For a negative number, or a shape that does not fit the rows.
    """
    if isinstance(value, Tensor):
        return _column(name, value, lead, device)
    require_size(name, value, 0)
    return torch.full((rows, 1), value, dtype=torch.int64, device=device)


def per_row(name: str, value: Tensor | None, lead: tuple[int, ...], device: torch.device) -> Tensor | None:
    """An int64 column (R, 1) from a tensor whose dimensions are the first ones of ``lead``; None stays None.

    Raises
    ------
    ValueError
        If the shape does not fit the rows.
    """
    return None if value is None else _column(name, value, lead, device)


def _column(name: str, value: Tensor, lead: tuple[int, ...], device: torch.device) -> Tensor:
    shape = tuple(value.shape)
    fits = len(shape) <= len(lead) and all(n in (1, m) for n, m in zip(shape, lead, strict=False))
    require(f"{name}.shape", shape, fits, f"a shape that broadcasts from the left to the rows {lead}")
    value = value.to(device=device, dtype=torch.int64)
    return value.reshape(shape + (1,) * (len(lead) - len(shape))).expand(lead).reshape(-1, 1)


def worth(mask: Tensor) -> bool:
    """Whether a branch for the rows of ``mask`` must run. Exact on the CPU, where nothing is waited for; elsewhere
    always true, since asking would stall the device."""
    return mask.device.type != "cpu" or bool(mask.any())
