"""RPC for one row, step by step in plain Python, as its paper describes it at a fixed budget."""

import torch


def scores(queries, keys, *, front, kernel_size, scaling, heads, softmax):
    """queries (Hq, R, D), keys (H, T, D), both at their positions. H lists of T numbers."""
    query_heads, window, _ = queries.shape
    kv_heads, entries, _ = keys.shape
    group = query_heads // kv_heads
    candidates = range(front, entries - window)
    pooled = []
    for head in range(query_heads):
        total = [0.0] * entries
        for j in range(window):
            sees = list(candidates) if softmax == "candidates" else list(range(entries - window + j + 1))
            if not sees:
                continue
            logits = torch.stack([scaling * (queries[head, j] * keys[head // group, i]).sum() for i in sees])
            for i, probability in zip(sees, logits.double().softmax(dim=0).tolist(), strict=True):
                if i in candidates:
                    total[i] += probability
        half = kernel_size // 2
        pooled.append(
            [
                sum(total[n] for n in range(i - half, i + half + 1) if 0 <= n < entries) / kernel_size
                for i in range(entries)
            ]
        )
    out = []
    for kv_head in range(kv_heads):
        members = range(query_heads) if heads == "all" else range(kv_head * group, (kv_head + 1) * group)
        out.append([sum(pooled[m][i] for m in members) / len(members) for i in range(entries)])
    return out
