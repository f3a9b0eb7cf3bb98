"""Window attention and usage in plain torch: one matrix product, one softmax in place, one matrix-vector product."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 1 << 22  # logits held at once by a sum over many queries


def window_attention(
    queries: Tensor, keys: Tensor, scaling: float | None, start: Tensor | None, available: Tensor | None
) -> Tensor:
    probs, used = _probabilities(queries, keys, scaling, start, available)  # (B, Hq, W, T), (B, 1)
    if probs.shape[2] == 0:
        return probs.new_zeros(probs.shape[0], probs.shape[1], probs.shape[3])
    return _mean(probs, used)


def window_usage(
    queries: Tensor,
    keys: Tensor,
    scaling: float | None,
    start: Tensor | None,
    available: Tensor | None,
    kernel_size: int,
    suffix: str,
    n_sink: int,
) -> Tensor:
    batch, heads, entries, _ = keys.shape
    probs, used = _probabilities(queries, keys, scaling, start, available)
    window = probs.shape[2]
    if window == 0:
        return probs.new_zeros(batch, heads, entries)
    # group and window are averaged at once; pooling is linear, so it may come last
    grouped = probs.view(batch, heads, -1, entries)  # (B, H, G*W, T)
    mean = _mean(grouped, used * (queries.shape[1] // heads))  # (B, H, T)

    position = torch.arange(entries, device=keys.device)
    before = position < entries - used  # (B, T), inclusive of padding, which is zero
    pooled = mean * before[:, None]
    if kernel_size > 1:
        pooled = F.avg_pool1d(pooled, kernel_size, stride=1, padding=kernel_size // 2)
    first = torch.zeros_like(used) if start is None else start
    pooled = pooled * (before & (position >= first))[:, None]

    if suffix == "observed":
        seen_by = (entries - position).clamp(min=1)  # an entry of the window is seen by the queries after it
        tail = mean * (used / seen_by)[:, None]
    else:
        rated = pooled
        if suffix == "max_no_sink":
            no_sink = (position >= first + n_sink) & before
            no_sink = no_sink | ~no_sink.any(dim=-1, keepdim=True)
            rated = pooled * no_sink[:, None]
        tail = rated.amax(dim=-1, keepdim=True)
    return torch.where(before[:, None], pooled, tail)


def attention_sums(queries: Tensor, keys: Tensor, scaling: float | None, start: Tensor | None) -> Tensor:
    batch, heads, entries, dim = keys.shape
    count = queries.shape[2]
    keys = keys.float().transpose(2, 3)
    sums = keys.new_zeros(batch, heads, queries.shape[1] // heads, entries)
    rows = max(1, BLOCK // (batch * queries.shape[1] * entries))
    first = None if start is None else start.view(batch, heads, 1, 1, 1)
    for begin in range(0, count, rows):
        end = min(begin + rows, count)
        seen = entries - count + end
        block = queries[:, :, begin:end].float() * (dim**-0.5 if scaling is None else scaling)
        logits = torch.matmul(block.reshape(batch, heads, -1, dim), keys[..., :seen])
        logits = logits.view(batch, heads, -1, end - begin, seen)
        future = torch.ones(end - begin, end - begin, dtype=torch.bool, device=keys.device).triu(1)
        logits[..., seen - (end - begin) :].masked_fill_(future, -torch.inf)
        if first is None:
            probs = _softmax_(logits)
        else:
            position = torch.arange(seen, device=keys.device)
            probs = _softmax_(logits.masked_fill_(position < first, -torch.inf))
            own = position[seen - (end - begin) :, None]
            probs = probs.masked_fill(own < first, 0)
        ones = probs.new_ones(*probs.shape[:3], 1, end - begin)
        sums[..., :seen] += torch.matmul(ones, probs).squeeze(3)
    return sums.flatten(1, 2)


def _probabilities(
    queries: Tensor, keys: Tensor, scaling: float | None, start: Tensor | None, available: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Softmax of the window (B, Hq, W, T) in fp32, and how many queries each row uses (B, 1); unused ones are 0."""
    batch, heads, entries, dim = keys.shape
    window = min(queries.shape[2], entries - 1)
    queries = queries[:, :, queries.shape[2] - window :].float() * (dim**-0.5 if scaling is None else scaling)
    logits = torch.matmul(queries.reshape(batch, heads, -1, dim), keys.float().transpose(2, 3))
    logits = logits.view(batch, queries.shape[1], window, entries)
    future = torch.ones(window, window, dtype=torch.bool, device=keys.device).triu(1)
    logits[..., entries - window :].masked_fill_(future, -torch.inf)
    used = torch.full((batch, 1), window, device=keys.device)
    if start is None and available is None:
        return _softmax_(logits), used
    if start is not None:
        logits.masked_fill_((torch.arange(entries, device=keys.device) < start)[:, None, None], -torch.inf)
        used = used.minimum((entries - 1 - start).clamp(min=0))
    if available is not None:
        used = used.minimum(available.clamp(min=0))
    probs = _softmax_(logits)
    unused = torch.arange(window, device=keys.device) < window - used  # (B, W)
    return probs.masked_fill_(unused[:, None, :, None], 0), used


def _softmax_(logits: Tensor) -> Tensor:
    """Softmax over the last dimension, in the same memory where the kernel works row by row."""
    return torch.softmax(logits, dim=-1, out=logits) if logits.device.type == "cpu" else logits.softmax(dim=-1)


def _mean(probs: Tensor, count: Tensor) -> Tensor:
    """Sum (B, h, n, T) over n as a matrix-vector product, divided by count (B, 1): (B, h, T)."""
    ones = probs.new_ones(probs.shape[0], probs.shape[1], 1, probs.shape[2])
    return torch.matmul(ones, probs).squeeze(2) / count.clamp(min=1)[:, None]
