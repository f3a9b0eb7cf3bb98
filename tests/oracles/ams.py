"""Adaptive mass segmentation of one row, step by step, in plain Python: slow, literal, one function per step.

A row is one (batch, KV head) pair: T entries of which the first `pad` do not exist, and K to keep.
"""

from dataclasses import dataclass
from fractions import Fraction
from math import ceil, floor, isnan

import torch

# -- A1: usage ---------------------------------------------------------------------------------------------------------


def usage(queries, keys, *, kernel_size, scaling, suffix="max", n_sink=4, pad=0, available=None):
    """queries (G, W, D) of the group, keys (T, D), both at their positions; float64. T numbers."""
    group, window, _ = queries.shape
    entries = keys.shape[0]
    used = max(0, min(window, entries - pad - 1, window if available is None else available))
    if used == 0:
        return [0.0] * entries
    before = entries - used  # entries before the window
    pooled = [0.0] * entries
    observed = [0.0] * entries
    for head in range(group):
        mean = [0.0] * entries
        seen = [0] * entries
        for j in range(used):
            query = queries[head, window - used + j]
            sees = range(pad, entries - used + j + 1)
            logits = torch.stack([scaling * (query * keys[i]).sum() for i in sees]).double()
            for i, probability in zip(sees, logits.softmax(dim=0).tolist(), strict=True):
                mean[i] += probability / used
                observed[i] += probability / group
                seen[i] += 1
        for i in range(pad, before):
            near = [mean[n] for n in range(i - kernel_size // 2, i + kernel_size // 2 + 1) if 0 <= n < before]
            pooled[i] += sum(near) / kernel_size / group
    result = pooled[:]
    for i in range(before, entries):
        if suffix == "observed":
            result[i] = observed[i] / min(used, entries - i)
        else:
            first = pad if suffix == "max" or before <= pad + n_sink else pad + n_sink
            result[i] = max(pooled[first:before], default=0.0)
    return result


# -- A2, A3: mass and credit -------------------------------------------------------------------------------------------


def mass(u, pad=0):
    raised = [0.0 if i < pad else (0.0 if isnan(x) else max(x, 0.0)) + 1e-12 for i, x in enumerate(u)]
    total = sum(raised)
    return [x / total for x in raised]


def normed(values):
    total = sum(values)
    return [x / total for x in values]


def mix(m, credit, *, decay, beta, init="zero"):
    """Mixed mass and new credit. `credit` belongs to the first entries, those that were there before."""
    known = [] if credit is None else list(credit)
    new = m[len(known) :] if init == "mass" else [0.0] * (len(m) - len(known))
    past = [0.0 if isnan(c) else c for c in known] + new
    c = [decay * a + (1 - decay) * b for a, b in zip(past, m, strict=True)]
    history = normed(c) if sum(c) > 0 else m
    return normed([beta * a + (1 - beta) * b for a, b in zip(m, history, strict=True)]), c


# -- A4: segments ------------------------------------------------------------------------------------------------------


def fixed_point(m):
    return [0 if isnan(x) or x <= 0 else floor(min(float(x), 1.0) * 2.0**40) for x in m]


def segments(m, *, segment_mass, min_len, max_len, pad=0):
    """Ends of the segments."""
    weights = fixed_point(m)
    prefix, total = [], 0
    for w in weights:
        total += w
        prefix.append(total)
    cuts = []
    k = 1
    while k * segment_mass < 1:
        threshold = ceil(float(k) * segment_mass * float(total))
        cut = next(i for i in range(pad, len(m)) if prefix[i] >= threshold) + 1
        if not cuts or cuts[-1] != cut:
            cuts.append(cut)
        k += 1
    if not cuts or cuts[-1] != len(m):
        cuts.append(len(m))
    # merge
    merged, start, rest = [], pad, list(cuts)
    while rest:
        end = rest.pop(0)
        while end - start < min_len and rest:
            end = rest.pop(0)
        merged.append((start, end))
        start = end
    if len(merged) > 1 and merged[-1][1] - merged[-1][0] < min_len:
        last = merged.pop()
        merged[-1] = (merged[-1][0], last[1])
    # split
    ends = []
    for start, end in merged:
        length = end - start
        parts = ceil(Fraction(length, max_len))
        ends += [start + floor(Fraction(j * length, parts)) for j in range(1, parts)] + [end]
    return ends


def fixed(entries, length, pad=0):
    return [*range(pad + length, entries, length), entries]


def segment_weights(m, ends, pad=0):
    weights = fixed_point(m)
    return [sum(weights[a:b]) for a, b in zip([pad, *ends[:-1]], ends, strict=True)]


# -- A5: quotas --------------------------------------------------------------------------------------------------------


@dataclass
class Plan:
    quota: list
    sink: int
    recent: int
    dropped: int


def quotas(ends, weights, *, keep, n_sink, n_recent, min_keep, by_mass=True, pad=0):
    entries = ends[-1]
    begins = [pad, *ends[:-1]]
    lengths = [b - a for a, b in zip(begins, ends, strict=True)]
    keep = min(keep, entries - pad)
    sink = min(n_sink, keep)
    wanted_recent = recent = min(n_recent, keep - sink, entries - pad - sink)

    def must(recent):
        protected = set(range(pad, pad + sink)) | set(range(entries - recent, entries))
        return [sum(a <= i < b for i in protected) for a, b in zip(begins, ends, strict=True)]

    def low(floors, recent):
        return [max(m, f) for m, f in zip(must(recent), floors, strict=True)]

    def fits(floors, recent):
        return sum(low(floors, recent)) <= keep

    floors = [min(min_keep, length) for length in lengths]
    wanted = floors
    if not fits(floors, recent):
        floors = [min(1, f) for f in floors]
        if not fits(floors, recent):
            recent = max((r for r in range(recent) if fits(floors, r)), default=0)
        order = sorted(range(len(ends)), key=lambda i: (weights[i], i))
        for i in order:
            if fits(floors, recent):
                break
            floors = [0 if j == i else f for j, f in enumerate(floors)]
        recent = max(r for r in range(wanted_recent + 1) if r == recent or (r > recent and fits(floors, r)))
    dropped = sum(f == 0 and w > 0 for f, w in zip(floors, wanted, strict=True))

    lo, hi = low(floors, recent), lengths
    share = weights if by_mass else lengths
    q, free, budget = [0] * len(ends), list(range(len(ends))), keep
    while True:
        M = {i: share[i] for i in free}
        if free and sum(M.values()) == 0:
            M = {i: hi[i] - floors[i] for i in free}
            if sum(M.values()) == 0:
                M = dict.fromkeys(free, 1)
        tot = sum(M.values())
        R = budget - sum(floors[i] for i in free)
        exact = {i: floors[i] + Fraction(R * M[i], tot) for i in free}
        d = sum(min(max(exact[i], lo[i]), hi[i]) for i in free) - budget
        settled = {i: lo[i] for i in free if d >= 0 and exact[i] < lo[i]}
        settled |= {i: hi[i] for i in free if d <= 0 and exact[i] > hi[i]}
        if not settled:
            break
        for i, value in settled.items():
            q[i] = value
            budget -= value
        free = [i for i in free if i not in settled]
    for i in free:
        q[i] = floor(exact[i])
    left = budget - sum(q[i] for i in free)
    for i in sorted(free, key=lambda i: (-(exact[i] - floor(exact[i])), i))[:left]:
        q[i] += 1
    return Plan(q, sink, recent, dropped)


# -- A6: local choice --------------------------------------------------------------------------------------------------


def choose(scores, ends, plan, *, keep, pad=0):
    entries = ends[-1]
    if entries - pad <= keep:
        return list(range(entries - keep, entries))
    kept = []
    for begin, end, quota in zip([pad, *ends[:-1]], ends, plan.quota, strict=True):
        protected = [i for i in range(begin, end) if i < pad + plan.sink or i >= entries - plan.recent]
        others = [i for i in range(begin, end) if i not in protected]
        others.sort(key=lambda i: (1, 0, i) if isnan(scores[i]) else (0, -scores[i], i))
        kept += protected + others[: quota - len(protected)]
    return sorted(kept)
