"""What a model says when evicted entries are masked out instead: no cache, no positions to get wrong."""

import torch
from torch import Tensor


def masked_logits(model, ids: Tensor, trace) -> Tensor:
    """Logits (B, T, V) of one cacheless forward in which a query sees, per layer and head, what the trace kept.

    After an event that saw ``seen`` tokens, later queries see the kept positions and everything from ``seen`` on. Every
    layer gets its own mask (B, Hq, T, T). For unpadded input and full-attention layers.
    """
    batch, length = ids.shape
    handles = []
    for layer in model.model.layers:
        attention = layer.self_attn
        events = trace.layer(attention.layer_idx)
        if not events:
            continue
        groups = model.config.num_attention_heads // events[0].kept.shape[1]
        visible = torch.ones(length, length, dtype=torch.bool).tril()
        visible = visible.expand(batch, events[0].kept.shape[1], -1, -1).clone()
        for event in events:
            gone = torch.ones(*event.kept.shape[:2], event.seen + 1, dtype=torch.bool)  # the last: kept by no head
            gone = gone.scatter(-1, event.kept.where(event.kept >= 0, event.seen), False)[..., :-1]
            visible[:, :, event.seen :, : event.seen] &= ~gone[:, :, None]
        mask = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
        mask = mask.repeat_interleave(groups, dim=1)

        def hook(module, args, kwargs, mask=mask):
            return args, {**kwargs, "attention_mask": mask}

        handles.append(attention.register_forward_pre_hook(hook, with_kwargs=True))
    try:
        return model(ids, use_cache=False).logits
    finally:
        for handle in handles:
            handle.remove()
