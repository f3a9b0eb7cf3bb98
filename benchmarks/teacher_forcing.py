"""Fidelity of a press: a text is fed under it, and every next-token distribution compared with the full cache's."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from ..presses import DecodingPress, FullKVPress
from .metrics import kl_divergence, nll, retained_iou, top1_agreement, wipe_out_rate

CHUNK = 512  # tokens of one forward where nothing else decides


@dataclass(frozen=True)
class FullRun:
    """What the full cache says about one text, shared by the methods compared with it.

    Only tokens from ``start`` on are kept, in the model's own type, which loses nothing: for 4.6k tokens and a
    vocabulary of 49k in fp32 that is 0.75 GB. Pressed logits exist for one forward at a time.

    Attributes
    ----------
    ids : Tensor
        (1, N).
    start : int
        First token whose logits are kept.
    logits : Tensor
        (N - start, V).
    nll : Tensor
        (N - start - 1,), fp32: the last token has no next one.
    """

    ids: Tensor
    start: int
    logits: Tensor
    nll: Tensor


@dataclass(frozen=True)
class Fidelity:
    """Distance of one pressed run from the full one, over the tokens after the first event.

    Attributes
    ----------
    kl, kl_stderr : float
        Mean KL(full || pressed) per token in nats, and its standard error with the stretches between events taken as
        independent (tokens are not: taken so, the error comes out about three times too small). NaN for one stretch.
    agreement : float
        Share of tokens with the same most likely next token.
    nll_full, nll_pressed : float
        Mean negative log-likelihood of the text per token, in nats.
    wipe_out_event, wipe_out_cumulative, wipe_out_bound, iou : float
        See :class:`WipeOut` and :func:`retained_iou`; NaN where there were too few events.
    events : int
        Compactions per layer.
    kept, peak : int
        Entries per layer and head after an event, and at most.
    tokens, scored : int
        Tokens of the text, and of those after the first event.
    seconds : float
        Wall time of the pressed pass, metrics included.
    token_kl : Tensor
        (scored,), for paired comparisons.
    """

    kl: float
    kl_stderr: float
    agreement: float
    nll_full: float
    nll_pressed: float
    wipe_out_event: float
    wipe_out_cumulative: float
    wipe_out_bound: float
    iou: float
    events: int
    kept: int
    peak: int
    tokens: int
    scored: int
    seconds: float
    token_kl: Tensor = field(repr=False, compare=False)

    def figures(self) -> dict[str, Any]:
        """Everything but the tensor, for JSON; what is undefined is None."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "token_kl"}
        return {name: None if isinstance(x, float) and math.isnan(x) else x for name, x in values.items()}


def first_event(press: DecodingPress | FullKVPress, prompt_tokens: int) -> int:
    """Tokens fed when ``press`` evicts for the first time; for a full cache, which never does, the prompt."""
    if isinstance(press, FullKVPress):
        return prompt_tokens
    if not isinstance(press, DecodingPress):
        raise ValueError(f"press: got {type(press).__name__}, allowed: a DecodingPress, or FullKVPress")
    if press.compress_prompt and prompt_tokens > press.target_size:
        return prompt_tokens
    missing = max(press.target_size + 1 - prompt_tokens, 1)
    return prompt_tokens + press.compression_interval * math.ceil(missing / press.compression_interval)


@torch.no_grad()
def full_run(model: Any, ids: Tensor, *, start: int, progress: Callable[[int], None] | None = None) -> FullRun:
    """Logits of the full cache from token ``start`` on.

    Parameters
    ----------
    ids : Tensor
        (N,) or (1, N).
    start : int
        At most N - 2, so that a next token can be scored.
    progress : callable, optional
        Told the tokens of each forward.
    """
    ids = _one_sequence(model, ids)
    total = ids.shape[1]
    if not 0 <= start <= total - 2:
        raise ValueError(f"start: got {start}, allowed: 0 to {total - 2} for {total} tokens")
    cache = DynamicCache(config=model.config)
    logits: Any = None
    for begin, end in _chunks(total, 0, CHUNK, CHUNK):
        scored = max(begin, start)
        part = _forward(model, ids[:, begin:end], cache, end - scored)
        if end > start:
            if logits is None:
                logits = part.new_empty(total - start, part.shape[-1])
            logits[scored - start : end - start] = part
        if progress is not None:
            progress(end - begin)
    return FullRun(ids, start, logits, nll(logits[:-1], ids[0, start + 1 :]))


@torch.no_grad()
def fidelity(
    model: Any,
    ids: Tensor,
    press: DecodingPress | FullKVPress,
    *,
    prompt_tokens: int,
    full: FullRun | None = None,
    step: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Fidelity:
    """Feed a text under a press and compare every next-token distribution with the full cache's.

    The prompt is one forward, then the tokens between two events are one forward each: nothing is evicted among them,
    so this equals feeding them one by one. Tokens before the first event are equal by construction and do not count.

    Parameters
    ----------
    model : PreTrainedModel
    ids : Tensor
        (N,) or (1, N), one text.
    press : DecodingPress or FullKVPress
    prompt_tokens : int
        Length of the prompt, in [1, N).
    full : FullRun, optional
        From :func:`full_run` on the same ids, starting no later than the first event; made here if not given.
    step : int, optional
        Largest number of tokens per forward after the prompt. Default: the press's interval.
    progress : callable, optional
        Told the tokens of each pressed forward.

    Raises
    ------
    ValueError
        For a text too short for one event, arguments outside their range, or a ``full`` of another text.
    FloatingPointError
        If a logit is not finite.
    """
    ids = _one_sequence(model, ids)
    total = ids.shape[1]
    if not 1 <= prompt_tokens < total:
        raise ValueError(f"prompt_tokens: got {prompt_tokens}, allowed: 1 to {total - 1} for {total} tokens")
    expected = first_event(press, prompt_tokens)
    if expected > total - 2:
        raise ValueError(_too_short(total, prompt_tokens, press, f"at least {expected + 2} tokens"))
    interval = getattr(press, "compression_interval", CHUNK)
    step = interval if step is None else step
    if step < 1:
        raise ValueError(f"step: got {step}, allowed: an integer of at least 1")
    full = full_run(model, ids, start=expected) if full is None else full
    if not torch.equal(full.ids, ids):
        raise ValueError(f"full: got a run over other ids (shape {tuple(full.ids.shape)}), allowed: one over `ids`")

    began = time.perf_counter()
    cache = DynamicCache(config=model.config)
    kl, agree, losses = [], [], []
    with press(model), press.record() as trace:
        for begin, end in [(0, prompt_tokens), *_chunks(total, prompt_tokens, interval, step)]:
            scored = max(begin, full.start)
            logits = _forward(model, ids[:, begin:end], cache, end - scored)
            if end > full.start:
                reference = full.logits[scored - full.start : end - full.start]
                targets = ids[0, scored + 1 : end + 1]
                kl.append(kl_divergence(reference, logits))
                agree.append(top1_agreement(reference, logits))
                losses.append(nll(logits[: len(targets)], targets))
            if progress is not None:
                progress(end - begin)
    token_kl, agreed, loss = (torch.cat(x).cpu() for x in (kl, agree, losses))
    seconds = time.perf_counter() - began

    first = min((event.seen for event in trace.events), default=total)
    if isinstance(press, FullKVPress):
        first = full.start
    if first > total - 2:
        raise ValueError(_too_short(total, prompt_tokens, press, "a text with an event and two tokens after it"))
    if first < full.start:
        raise ValueError(f"full: got a run from token {full.start} on, allowed: at most {first}, the first event")
    skip = first - full.start
    token_kl, agreed, loss = token_kl[skip:], agreed[skip:], loss[skip:]
    if not bool(token_kl.isfinite().all()):
        bad = int((~token_kl.isfinite()).sum())
        raise FloatingPointError(f"logits are not finite at {bad} of {len(token_kl)} tokens after the first event")

    lost = wipe_out_rate(trace)
    last = trace.events[-1].kept.shape[-1] if trace.events else total
    return Fidelity(
        kl=float(token_kl.double().mean()),
        kl_stderr=clustered_stderr(token_kl, interval),
        agreement=float(agreed.double().mean()),
        nll_full=float(full.nll[skip:].double().mean()),
        nll_pressed=float(loss.double().mean()),
        wipe_out_event=lost.per_event,
        wipe_out_cumulative=lost.cumulative,
        wipe_out_bound=lost.bound,
        iou=retained_iou(trace),
        events=max((event.index + 1 for event in trace.events), default=0),
        kept=last,
        peak=press.account[-1].peak_entries if press.account else total,
        tokens=total,
        scored=len(token_kl),
        seconds=seconds,
        token_kl=token_kl,
    )


def clustered_stderr(values: Tensor, length: int) -> float:
    """Standard error of the mean of ``values`` (n,) whose runs of ``length`` are independent, but not what is inside.

    The last run may be shorter. NaN for a single run.
    """
    centred = values.double() - values.double().mean()
    sums = torch.stack([run.sum() for run in centred.split(length)])
    runs = len(sums)
    return float((sums.square().sum() * runs / (runs - 1)).sqrt() / len(values)) if runs > 1 else math.nan


def _one_sequence(model: Any, ids: Tensor) -> Tensor:
    if ids.ndim not in (1, 2) or (ids.ndim == 2 and ids.shape[0] != 1) or ids.numel() < 2:
        raise ValueError(f"ids: got shape {tuple(ids.shape)}, allowed: one text of two tokens or more, (N,) or (1, N)")
    return ids.reshape(1, -1).to(model.device)


def _chunks(total: int, begin: int, interval: int, step: int) -> Iterator[tuple[int, int]]:
    """Forwards of at most ``step`` tokens from ``begin`` on, none of which crosses an event."""
    origin = begin
    while begin < total:
        to_event = interval - (begin - origin) % interval
        end = min(begin + min(step, to_event), total)
        yield begin, end
        begin = end


def _forward(model: Any, ids: Tensor, cache: DynamicCache, wanted: int) -> Tensor:
    """Logits (n, V) of the last ``wanted`` tokens, of one if none is."""
    wanted = max(wanted, 1)
    return model(ids, past_key_values=cache, use_cache=True, logits_to_keep=wanted).logits[0]


def _too_short(total: int, prompt_tokens: int, press: Any, allowed: str) -> str:
    return (
        f"ids: got {total} tokens, {prompt_tokens} of them prompt, and no event to measure with compression_interval="
        f"{press.compression_interval} and target_size={press.target_size}; allowed: {allowed}"
    )
