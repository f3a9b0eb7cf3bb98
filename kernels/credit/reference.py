"""Mass and credit in plain torch. Rows (R, T), fp32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

EPSILON = 1e-12


def mass_of(usage: Tensor, start: Tensor | None) -> Tensor:
    usage = usage.float()
    mass = torch.where(usage > 0, usage, 0) + EPSILON  # NaN is not greater than 0
    if start is not None:
        mass = mass * (torch.arange(mass.shape[-1], device=mass.device) >= start)
    return mass / mass.sum(dim=-1, keepdim=True)


def mix_credit(
    usage: Tensor, credit: Tensor | None, decay: float, mix: float, init: str, start: Tensor | None
) -> tuple[Tensor, Tensor]:
    mass = mass_of(usage, start)
    new = mass if init == "mass" else torch.zeros_like(mass)
    if credit is None:
        past = new
    else:
        known = F.pad(credit.float(), (0, mass.shape[-1] - credit.shape[-1]), value=torch.nan)
        past = torch.where(known.isnan() | (mass == 0), new, known)  # padding alone has no mass at all
    credit = decay * past + (1 - decay) * mass
    total = credit.sum(dim=-1, keepdim=True)
    history = torch.where(total > 0, credit / total, mass)  # no credit at all says nothing: the present mass stands
    mixed = mix * mass + (1 - mix) * history
    return mixed / mixed.sum(dim=-1, keepdim=True), credit
