"""Mass from usage, and its average over events."""

from __future__ import annotations

from torch import Tensor

from ..dispatch import choose
from ..rows import per_row, require
from . import reference

INITS = ("zero", "mass")


def mass_of(usage: Tensor, *, start: Tensor | None = None, backend: str | None = None) -> Tensor:
    """Usage (..., T) as a distribution: ``(max(u, 0) + 1e-12) / sum`` over the real entries, fp32; NaN counts as 0."""
    choose("mass_of", backend)
    first = per_row("start", start, tuple(usage.shape[:-1]), usage.device)
    return reference.mass_of(usage.reshape(-1, usage.shape[-1]), first).view(usage.shape)


def mix_credit(
    usage: Tensor,
    credit: Tensor | None,
    *,
    decay: float,
    mix: float,
    init: str = "zero",
    start: Tensor | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Mass smoothed over events by a running credit per entry.

    Parameters
    ----------
    usage : Tensor
        (..., T).
    credit : Tensor or None
        (..., n) credit of the first ``n <= T`` entries, those that were there before; NaN where an entry has none
        yet. None at the first event.
    decay : float
        Weight of the old credit: ``c = decay * c + (1 - decay) * m``.
    mix : float
        Weight of the present mass: ``norm(mix * m + (1 - mix) * norm(c))``.
    init : {"zero", "mass"}
        Credit of new entries.

    Returns
    -------
    mass, credit : Tensor
        (..., T) each, fp32. Gather ``credit`` with the kept indices for the next event.

    Raises
    ------
    ValueError
        For a weight outside [0, 1], an unknown ``init`` or shapes that do not fit.
    """
    choose("mix_credit", backend)
    for name, value in (("decay", decay), ("mix", mix)):
        require(name, value, 0 <= value <= 1, "a number in [0, 1]")
    require("init", init, init in INITS, " | ".join(INITS))
    lead, entries = tuple(usage.shape[:-1]), usage.shape[-1]
    if credit is not None:
        fits = tuple(credit.shape[:-1]) == lead and credit.shape[-1] <= entries
        require("credit.shape", tuple(credit.shape), fits, f"{(*lead, f'at most {entries}')}")
        credit = credit.reshape(-1, credit.shape[-1])
    first = per_row("start", start, lead, usage.device)
    mass, credit = reference.mix_credit(usage.reshape(-1, entries), credit, decay, mix, init, first)
    return mass.view(usage.shape), credit.view(usage.shape)
