"""Left-padded batches: every row gets exactly what it gets alone."""

import pytest
import torch
from helpers import FAMILIES, tiny, token_ids
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList

from pressroom.presses import build, names

SETTINGS = {"target_size": 24, "compression_interval": 8}
METHODS = [name for name in names()[1:] if not name.startswith("ablation_") or name.endswith("_tova")]
SMALL = {"window_size": 6, "min_seg_len": 3, "max_seg_len": 8, "n_sink": 2, "always_keep_last": 4, "segment_mass": 0.2}


def left_pad(rows):
    """Rows of ids to (ids, mask)."""
    width = max(len(row) for row in rows)
    ids = torch.stack([torch.cat([torch.zeros(width - len(row), dtype=torch.long), row]) for row in rows])
    mask = torch.stack([torch.arange(width) >= width - len(row) for row in rows]).long()
    return ids, mask


def generate(model, press, ids, mask=None, new=60, **more):
    with press(model), press.record() as trace:
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids) if mask is None else mask,
            max_new_tokens=new,
            do_sample=False,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
            **more,
        )
    return out, trace


def press_for(name):
    return build(name, **SETTINGS, **(SMALL if name.startswith(("ams_", "ablation_")) else {}))


def feed(model, press, ids, mask, prompt):
    """Teacher forcing, the prompt in one forward: logits of what follows, trace."""
    cache = DynamicCache(config=model.config)
    logits = []
    position = (mask.cumsum(dim=1) - 1).clamp(min=0)
    with press(model), press.record() as trace:
        done = 0
        for size in [prompt] + [1] * (ids.shape[1] - prompt):
            part = slice(done, done + size)
            done += size
            out = model(
                ids[:, part], attention_mask=mask[:, :done], position_ids=position[:, part], past_key_values=cache
            )
            logits.append(out.logits[:, -1])
    return torch.stack(logits, dim=1), trace


def check_rows(model, name, lengths, new=60):
    """Rows without a token twice: equal tokens tie, and rounding would choose among them."""
    tokens = [torch.randperm(512, generator=torch.Generator().manual_seed(i))[: n + new] for i, n in enumerate(lengths)]
    ids, mask = left_pad(tokens)
    logits, trace = feed(model, press_for(name), ids, mask, max(lengths))
    for i, row in enumerate(tokens):
        expected, own = feed(model, press_for(name), row[None], torch.ones_like(row[None]), lengths[i])
        torch.testing.assert_close(logits[i], expected[0], atol=5e-4, rtol=5e-4)
        pad = max(lengths) - lengths[i]
        kept = {(event.layer, event.seen - pad): event.kept[i] for event in trace.events}
        assert own.events
        for event in own.events:
            assert torch.equal(kept[event.layer, event.seen], event.kept[0])
        yield i


@pytest.mark.parametrize("name", METHODS)
def test_rows_are_as_alone(name):
    lengths = [3, 20, 14, 20] if name == "random_prompt" else [3, 31, 14, 31]
    assert list(check_rows(tiny("llama"), name, lengths)) == [0, 1, 2, 3]


@pytest.mark.parametrize("attn", ["eager", "sdpa"])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["snapkv", "ams_expected"])
def test_for_every_model(family, attn, name):
    assert list(check_rows(tiny(family, attn), name, [3, 31, 14], new=40))


@pytest.mark.parametrize("budget", [1, 7, 63, 64])
@pytest.mark.parametrize("name", ["tova", "ams_snapkv", "streaming_llm"])
def test_padding_longer_than_the_budget(budget, name):
    """A row of three tokens beside one of seventy: pads outlive the first events, in front of what is kept."""
    model = tiny("qwen2")
    rows = [token_ids(1, n, seed=n)[0] for n in (3, 70)]
    ids, mask = left_pad(rows)
    press = build(name, target_size=budget, compression_interval=16)
    together, trace = generate(model, press, ids, mask, new=64)
    for i, row in enumerate(rows):
        fresh = build(name, target_size=budget, compression_interval=16)
        alone, _ = generate(model, fresh, row[None], new=64)
        assert torch.equal(together.sequences[i, 70:], alone.sequences[0, len(row) :])
    for event in trace.events:
        assert (event.kept.diff(dim=-1) > 0).all()  # pads, which are negative, come first
        real = (event.present[0] >= 0).sum(dim=-1)
        assert torch.equal((event.kept[0] >= 0).sum(dim=-1), real.clamp(max=budget))


def test_no_mask_is_built_once_the_padding_is_gone():
    model = tiny("llama")
    ids, mask = left_pad([token_ids(1, n)[0] for n in (20, 36)])
    seen = []

    def watch(module, args, kwargs):
        seen.append(kwargs["attention_mask"] is None)

    with build("tova", **SETTINGS)(model):
        handle = model.model.layers[0].self_attn.register_forward_pre_hook(watch, with_kwargs=True)
        model.generate(ids, attention_mask=mask, max_new_tokens=30, do_sample=False, pad_token_id=0)
        handle.remove()
    assert not any(seen[:9])
    assert all(seen[9:])


class EndRow(LogitsProcessor):
    """Makes row 0 end at its fourth token."""

    def __init__(self, eos):
        self.eos, self.step = eos, 0

    def __call__(self, ids, scores):
        self.step += 1
        scores = scores.clone()
        scores[:, self.eos] = -torch.inf
        if self.step == 4:
            scores[0] = -torch.inf
            scores[0, self.eos] = 0
        return scores


@pytest.mark.parametrize("name", ["tova", "ams_snapkv", "ams_expected"])
def test_rows_that_finish_early_disturb_nobody(name):
    model = tiny("llama")
    rows = [token_ids(1, n, seed=n)[0] for n in (9, 30, 17)]
    more = {"eos_token_id": 5, "logits_processor": LogitsProcessorList([EndRow(5)])}
    together, _ = generate(model, press_for(name), *left_pad(rows), **more)
    for i, row in enumerate(rows[1:], start=1):
        no_end = EndRow(5)
        no_end.step = 10
        alone, _ = generate(
            model, press_for(name), row[None], eos_token_id=5, logits_processor=LogitsProcessorList([no_end])
        )
        assert torch.equal(together.sequences[i, 30:], alone.sequences[0, len(row) :])


def test_padding_inside_a_later_chunk_is_refused():
    model = tiny("llama")
    cache = DynamicCache(config=model.config)
    ids, mask = left_pad([token_ids(1, n)[0] for n in (5, 9)])
    with build("tova", **SETTINGS)(model):
        model(ids, attention_mask=mask, past_key_values=cache)
        longer = torch.cat([mask, torch.tensor([[1, 1, 1], [0, 1, 1]])], dim=1)
        with pytest.raises(ValueError, match="attention_mask: padding among the last 3 tokens"):
            model(token_ids(2, 3), attention_mask=longer, past_key_values=cache)


@pytest.mark.parametrize("name", ["tova", "ams_tova"])
def test_a_second_turn_of_a_padded_batch(name):
    model = tiny("llama")
    rows = [token_ids(1, n, seed=n)[0] for n in (6, 30)]
    ids, mask = left_pad(rows)
    chunk = token_ids(2, 20, seed=9)

    def talk(ids, mask, chunk):
        cache = DynamicCache(config=model.config)
        with press_for(name)(model):
            first = model.generate(
                ids, attention_mask=mask, max_new_tokens=20, do_sample=False, pad_token_id=0, past_key_values=cache
            )
            whole = torch.cat([first, chunk], dim=1)
            mask = torch.cat([mask, torch.ones(len(ids), whole.shape[1] - mask.shape[1], dtype=torch.long)], dim=1)
            return model.generate(
                whole, attention_mask=mask, max_new_tokens=20, do_sample=False, pad_token_id=0, past_key_values=cache
            )[:, -20:]

    together = talk(ids, mask, chunk)
    for i, row in enumerate(rows):
        alone = talk(row[None], torch.ones(1, len(row), dtype=torch.long), chunk[i : i + 1])
        assert torch.equal(together[i], alone[0])


@pytest.mark.parametrize("option", ["compress_prompt", "protect_prompt"])
@pytest.mark.parametrize("name", ["ams_snapkv", "expected", "tova", "ams_expected"])
def test_what_happens_to_prompts_happens_to_each_row(name, option):
    model = tiny("llama")
    lengths = (70, 12, 40) if option == "compress_prompt" else (15, 7, 20)
    rows = [token_ids(1, n, seed=n)[0] for n in lengths]
    press = build(name, **SETTINGS, **{option: True})
    together, _ = generate(model, press, *left_pad(rows), new=40)
    for i, row in enumerate(rows):
        alone, _ = generate(model, press, row[None], new=40)
        assert torch.equal(together.sequences[i, max(lengths) :], alone.sequences[0, len(row) :])
