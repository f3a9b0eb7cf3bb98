"""What compression costs, on tensors and traces: distance of two distributions, what is left of a sequence, repetition.

Neither the length of a region, nor the overlap of kept sets, nor repetition has a definition in the papers; the ones
here are ours and are said beside every number. A region is ``REGION`` consecutive tokens or entries.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ..presses import Trace

REGION = 64
ELEMENTS = 2**23  # logits turned to fp32 at a time: 32 MiB

# -- distributions -----------------------------------------------------------------------------------------------------


def kl_divergence(full_logits: Tensor, pressed_logits: Tensor) -> Tensor:
    """KL(full || pressed) per token in nats, in fp32.

    Rounding can leave values a little below zero, and they stay so: a clamp would bias the mean.

    Parameters
    ----------
    full_logits, pressed_logits : Tensor
        (..., V), any floating type. Tokens are taken in blocks, so that no fp32 copy of all of them exists.

    Returns
    -------
    Tensor
        (...), fp32. NaN where either has NaN, infinite where only ``pressed_logits`` excludes a token.
    """
    _check_logits(full_logits, pressed_logits)
    out = torch.empty(full_logits.shape[:-1].numel(), device=full_logits.device)
    for part, full, pressed in _blocks(full_logits, pressed_logits):
        log_p, log_q = full.float().log_softmax(-1), pressed.float().log_softmax(-1)
        terms = log_p.exp() * (log_p - log_q)
        out[part] = terms.masked_fill_(log_p == -torch.inf, 0).sum(-1)
    return out.view(full_logits.shape[:-1])


def top1_agreement(full_logits: Tensor, pressed_logits: Tensor) -> Tensor:
    """Whether both say the same most likely token, per token; ties go to the smaller id, NaN agrees with nothing.

    Parameters
    ----------
    full_logits, pressed_logits : Tensor
        (..., V).

    Returns
    -------
    Tensor
        (...), bool.
    """
    _check_logits(full_logits, pressed_logits)
    best = [logits.argmax(-1, keepdim=True) for logits in (full_logits, pressed_logits)]
    values = [logits.gather(-1, index) for logits, index in zip((full_logits, pressed_logits), best, strict=True)]
    return ((best[0] == best[1]) & ~values[0].isnan() & ~values[1].isnan()).squeeze(-1)


def nll(logits: Tensor, targets: Tensor) -> Tensor:
    """Negative log-likelihood of ``targets`` per token in nats, in fp32.

    Parameters
    ----------
    logits : Tensor
        (..., V).
    targets : Tensor
        (...), ids in [0, V).

    Returns
    -------
    Tensor
        (...), fp32.
    """
    _check_logits(logits)
    vocab = logits.shape[-1]
    if targets.shape != logits.shape[:-1]:
        raise ValueError(f"targets: got shape {tuple(targets.shape)}, allowed: {tuple(logits.shape[:-1])}")
    if targets.numel() and not 0 <= int(targets.min()) <= int(targets.max()) < vocab:
        raise ValueError(f"targets: got {int(targets.min())} to {int(targets.max())}, allowed: 0 to {vocab - 1}")
    out = torch.empty(targets.numel(), device=logits.device)
    flat = targets.reshape(-1, 1)
    for part, block in _blocks(logits):
        out[part] = -block.float().log_softmax(-1).gather(-1, flat[part])[:, 0]
    return out.view(targets.shape)


def _check_logits(first: Tensor, *others: Tensor) -> None:
    if first.ndim < 1 or first.shape[-1] == 0 or not first.is_floating_point():
        raise ValueError(f"logits: got {first.dtype} of shape {tuple(first.shape)}, allowed: floating point (..., V)")
    for other in others:
        if other.shape != first.shape:
            raise ValueError(f"pressed_logits: got shape {tuple(other.shape)}, allowed: {tuple(first.shape)}")


def _blocks(*logits: Tensor) -> Iterator[tuple]:
    flat = [x.reshape(-1, x.shape[-1]) for x in logits]
    rows = max(1, ELEMENTS // flat[0].shape[1])
    for begin in range(0, flat[0].shape[0], rows):
        part = slice(begin, begin + rows)
        yield part, *(x[part] for x in flat)


# -- kept sets ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WipeOut:
    """Shares of regions with nothing kept, means over rows, layers and events; NaN without an event.

    Attributes
    ----------
    per_event : float
        Regions are the segments of the cache order that the event saw; for methods without segments (or with a single
        one) runs of 64 entries. Only comparable between methods whose regions are made alike.
    cumulative : float
        Regions are 64 consecutive tokens of all those seen so far, prompt included.
    bound : float
        The least value of ``cumulative`` that the number of kept entries allows, were each in another region.
    """

    per_event: float
    cumulative: float
    bound: float


def wipe_out_rate(trace: Trace, *, region: int = REGION) -> WipeOut:
    """How much of the sequence has nothing left in the cache; see :class:`WipeOut`.

    Parameters
    ----------
    trace : Trace
        From ``press.record()``. Padding belongs to no region.
    region : int, default 64
        Length of a region, in entries for ``per_event`` and in tokens for ``cumulative``.

    Raises
    ------
    ValueError
        For a region of less than one token, or a trace whose positions are unknown because another press evicted
        before it.
    """
    if region < 1:
        raise ValueError(f"region: got {region}, allowed: an integer of at least 1")
    segmented = any(e.segment_count is not None and int(e.segment_count.max()) > 1 for e in trace.events)
    shares: list[tuple[Tensor, ...]] = []
    for event in trace.events:
        _check_known(event.present)
        entries = event.present.shape[-1]
        if segmented:
            assert event.segment_ends is not None
            assert event.segment_count is not None
            owner = torch.searchsorted(event.segment_ends.contiguous(), event.indices.contiguous(), right=True)
            per_event = _empty_share(owner.masked_fill(event.kept < 0, -1), event.segment_count)
        else:
            start = (event.present < 0).sum(-1, keepdim=True)  # pads lie in front
            per_event = _empty_share((event.indices - start) // region, -((start[..., 0] - entries) // region))
        regions = event.present.amax(-1) // region + 1  # the newest token is always present
        bound = (1 - (event.kept >= 0).sum(-1).double() / regions).clamp(min=0)
        shares.append((per_event, _empty_share(event.kept // region, regions), bound))
    return WipeOut(*(_mean(column) for column in zip(*shares, strict=True))) if shares else WipeOut(*[math.nan] * 3)


def retained_iou(trace: Trace) -> float:
    """Overlap of consecutive kept sets: |A and B| / |A or B| over positions that existed at the earlier event.

    Mean over rows, layers and pairs of events; 1 if nothing old is ever dropped, NaN with fewer than two events.

    Parameters
    ----------
    trace : Trace
        From ``press.record()``, of one sequence or batch at a time.

    Raises
    ------
    ValueError
        For unknown positions, as :func:`wipe_out_rate`.
    """
    values = []
    for layer in trace.layers:
        for earlier, later in pairwise(trace.layer(layer)):
            if later.index != earlier.index + 1:  # another sequence begins
                continue
            _check_known(later.present)
            newest = earlier.present.amax(-1, keepdim=True)
            size = int(newest.max()) + 1
            a = _as_mask(earlier.kept, size)
            b = _as_mask(later.kept.masked_fill(later.kept > newest, -1), size)
            values.append((a & b).sum(-1).double() / (a | b).sum(-1))
    return _mean(values) if values else math.nan


def repetition_rate(ids: Sequence[int] | Tensor, n: int = 4) -> float:
    """Fraction of n-grams that occurred before: ``1 - unique / total``; NaN for fewer than ``n`` tokens.

    Parameters
    ----------
    ids : sequence of int or Tensor
        (tokens,) generated ids of one sequence.
    n : int, default 4
    """
    if n < 1:
        raise ValueError(f"n: got {n}, allowed: an integer of at least 1")
    if isinstance(ids, Tensor):
        if ids.ndim != 1:
            raise ValueError(f"ids: got shape {tuple(ids.shape)}, allowed: one sequence (tokens,)")
        ids = ids.tolist()
    grams = list(zip(*(ids[i:] for i in range(n)), strict=False))
    return 1 - len(set(grams)) / len(grams) if grams else math.nan


def _as_mask(positions: Tensor, size: int) -> Tensor:
    """(B, H, K) positions, negative ones left out, to (B, H, size) bool."""
    mask = torch.zeros(*positions.shape[:-1], size + 1, dtype=torch.bool)
    return mask.scatter_(-1, positions.clamp(min=-1) + 1, True)[..., 1:]


def _empty_share(owner: Tensor, regions: Tensor) -> Tensor:
    """Share (B, H) of ``regions`` (B, H) that own no kept entry; owner (B, H, K), negative: none."""
    return 1 - _as_mask(owner, int(regions.max())).sum(-1).double() / regions


def _mean(values: Sequence[Tensor]) -> float:
    return float(torch.cat([x.flatten() for x in values]).mean())


def _check_known(present: Tensor) -> None:
    if int((present == -1).sum(-1).max()) > 1:  # padding counts down, its -1 is single
        raise ValueError("trace: got entries of unknown position, allowed: sequences no other press has evicted from")
