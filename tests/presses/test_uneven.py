"""Layers of different lengths, and heads that hold different numbers of entries: what the runtime allows presses."""

import pytest
import torch
from helpers import tiny, token_ids
from oracles.eviction import masked_logits
from transformers import DynamicCache

from pressroom.presses import DecodingPress, KeyDiffPress, UsagePress
from pressroom.presses.attachment import head_mask
from pressroom.presses.scorers import HeadSelection, base_scores


class Pyramid(KeyDiffPress):
    """Layers of 30, 20, 10 entries."""

    def layer_budgets(self, layers, keep):
        return [30, 20, 10][:layers]


class PerHead(UsagePress):
    """The first KV head keeps ``keep + 8`` entries, the second ``keep - 8``."""

    def select(self, event, keep, n_sink=0):
        scores = base_scores(self, event, keep)
        most = min(keep + 8, scores.shape[-1])
        wanted = torch.tensor([most, keep - 8])
        batch, heads, entries = scores.shape
        held = torch.full((batch, heads), entries)
        if event.start is not None:
            held = held - (event.start if event.start.ndim == 2 else event.start[:, None])
        counts = torch.where(held <= keep, held, held.minimum(wanted))  # a row within the budget loses nothing
        indices = torch.zeros(batch, heads, most, dtype=torch.int64)
        for b in range(batch):
            for h in range(heads):
                n = int(counts[b, h])
                indices[b, h, most - n :] = scores[b, h].argsort(descending=True, stable=True)[:n].sort().values
        return HeadSelection(indices, most - counts)


def feed(model, ids, press, chunks):
    cache = DynamicCache(config=model.config)
    with press(model), press.record() as trace:
        logits = [model(part, past_key_values=cache, use_cache=True).logits for part in ids.split(chunks, dim=1)]
    return torch.cat(logits, dim=1), cache, trace


CHUNKS = [[20] + [1] * 60, [20, 8, 8, 3, 5, 20, 1, 1, 14], [40, 40]]


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("scorer", [Pyramid, PerHead])
def test_evicting_equals_masking(scorer, attn, chunks):
    model, ids = tiny("llama", attn), token_ids(2, 80)
    press = DecodingPress(scorer(), target_size=20, compression_interval=8)
    logits, cache, trace = feed(model, ids, press, chunks)
    torch.testing.assert_close(logits, masked_logits(model, ids, trace), atol=2e-4, rtol=2e-4)
    since = cache.layers[0].since_event
    lengths = [layer.keys.shape[-2] - since for layer in cache.layers]
    assert lengths == ([30, 20, 10] if scorer is Pyramid else [28] * 3)
    if scorer is PerHead:
        last = trace.events[-1]
        assert ((last.kept >= 0).sum(dim=-1) == torch.tensor([28, 12])).all()
        assert (last.kept[:, 1, :16] == -1).all()


@pytest.mark.parametrize("scorer", [Pyramid, PerHead])
def test_a_batch_with_padding_is_its_rows(scorer):
    model = tiny("llama")
    lengths = [5, 30, 19]
    rows = [torch.randperm(512, generator=torch.Generator().manual_seed(i))[: n + 50] for i, n in enumerate(lengths)]
    ids = torch.stack([torch.cat([torch.zeros(80 - len(row), dtype=torch.long), row]) for row in rows])
    mask = (torch.arange(80) >= torch.tensor([[80 - len(row)] for row in rows])).long()
    press = DecodingPress(scorer(), target_size=20, compression_interval=8)
    cache = DynamicCache(config=model.config)
    got = []
    with press(model):
        for end in range(30, 81):
            begin = 0 if end == 30 else end - 1
            where = (mask[:, :end].cumsum(dim=1) - 1).clamp(min=0)[:, begin:]
            part = {"attention_mask": mask[:, :end], "position_ids": where}
            got.append(model(ids[:, begin:end], past_key_values=cache, **part).logits[:, -1])
    got = torch.stack(got, dim=1)
    for i, row in enumerate(rows):
        alone, _, _ = feed(model, row[None], press, [lengths[i]] + [1] * 50)
        torch.testing.assert_close(got[i], alone[0, lengths[i] - 1 :], atol=5e-4, rtol=5e-4)


def test_beams_and_copies_carry_uneven_heads():
    model, ids = tiny("llama"), token_ids(1, 30)
    press = DecodingPress(PerHead(), target_size=20, compression_interval=8)
    with press(model):
        greedy = model.generate(ids, max_new_tokens=40, do_sample=False)
        sampled = model.generate(ids, max_new_tokens=40, do_sample=True, num_return_sequences=3)
        beams = model.generate(ids, max_new_tokens=40, do_sample=False, num_beams=2)
    assert greedy.shape == beams.shape == (1, 70)
    assert sampled.shape == (3, 70)


def test_budgets_that_make_no_sense_are_refused():
    class Wrong(KeyDiffPress):
        def layer_budgets(self, layers, keep):
            return [keep] * (layers - 1)

    with pytest.raises(ValueError, match=r"Wrong.layer_budgets: got \[20, 20\], allowed: 3 integers of at least 1"):
        DecodingPress(Wrong(), target_size=20).post_init_from_model(tiny("llama"))


def test_head_wise_masks_need_an_attention_that_takes_them():
    model, ids = tiny("llama"), token_ids(1, 60)
    press = DecodingPress(PerHead(), target_size=20, compression_interval=8)
    with press(model):
        cache = DynamicCache(config=model.config)
        for part in ids[:, :28].split([20] + [1] * 8, dim=1):
            model(part, past_key_values=cache)
        layer = cache.layers[0]
        valid = torch.arange(29) >= layer.start[..., None]
        attention = model.model.layers[0].self_attn
        attention.config._attn_implementation = "flash_attention_2"
        with pytest.raises(ValueError, match="attn_implementation: got 'flash_attention_2', allowed: eager"):
            head_mask(valid, 1, attention, torch.float32)
