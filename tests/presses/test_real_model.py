"""SmolLM2-135M with its own words: what tiny random models cannot show."""

import warnings

import pytest
import torch
from oracles.eviction import masked_logits
from transformers import DynamicCache

from pressroom.presses import build

pytestmark = pytest.mark.real_model
QUESTION = [{"role": "user", "content": "Explain step by step why the sum of two odd numbers is even, with examples."}]


@pytest.fixture(scope="module")
def prompt(smollm2):
    _, tokenizer = smollm2
    return tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=True, return_tensors="pt")


@pytest.fixture(scope="module")
def answer(smollm2, prompt):
    """Prompt and 96 greedy tokens of the full cache."""
    model, _ = smollm2
    return model.generate(**prompt, min_new_tokens=96, max_new_tokens=96, do_sample=False)


@pytest.mark.parametrize("name", ["streaming_llm", "expected", "ams_tova"])
def test_a_bounded_cache_generates(smollm2, prompt, name):
    model, _ = smollm2
    length = prompt["input_ids"].shape[1]
    press = build(name, target_size=48, compression_interval=24)
    cache = DynamicCache(config=model.config)
    with press(model), press.record() as trace:
        out = model.generate(**prompt, min_new_tokens=96, max_new_tokens=96, do_sample=False, past_key_values=cache)
    assert out.shape[1] == length + 96
    assert len(trace.layer(0)) == press.account[0].events == 3
    assert press.account[0].peak_entries == max(length + 24, 48 + 24)
    assert {layer.keys.shape[-2] for layer in cache.layers} == {48 + 23}
    assert cache.get_seq_length() == length + 95


@pytest.mark.parametrize("name", ["snapkv", "ams_tova"])
def test_evicting_equals_masking(smollm2, answer, name):
    model, _ = smollm2
    ids = answer[:, :130]
    press = build(name, target_size=48, compression_interval=24)
    cache = DynamicCache(config=model.config)
    with press(model), press.record() as trace:
        logits = [model(part, past_key_values=cache).logits for part in ids.split([50] + [1] * 80, dim=1)]
    assert len(trace.layer(0)) == 3
    logits = torch.cat(logits, dim=1)
    expected = masked_logits(model, ids, trace)
    assert (logits - expected).abs().max() < 1e-3 * expected.std()
    assert torch.equal(logits.argmax(dim=-1), expected.argmax(dim=-1))


def test_a_budget_of_the_length_is_full_kv(smollm2, prompt, answer):
    model, _ = smollm2
    press = build("ams_tova", target_size=1000, compression_interval=24)
    with press(model), warnings.catch_warnings():
        warnings.simplefilter("error")
        out = model.generate(**prompt, min_new_tokens=96, max_new_tokens=96, do_sample=False)
    assert torch.equal(out, answer)


def test_a_padded_batch_is_its_rows(smollm2):
    """Prompts of very different length, greedy, 200 tokens: token for token what each row gives alone."""
    model, tokenizer = smollm2
    questions = ["Why is the sky blue?", "List ten facts about whales. " * 8, "Add 17 and 25, then double it. Explain."]
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": q}], add_generation_prompt=True, tokenize=False)
        for q in questions
    ]
    greedy = {"min_new_tokens": 200, "max_new_tokens": 200, "do_sample": False}
    batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    assert (batch["attention_mask"] == 0).any(dim=1).sum() == 2
    press = build("ams_snapkv", target_size=64, compression_interval=32)
    with press(model):
        together = model.generate(**batch, **greedy)[:, batch["input_ids"].shape[1] :]
        for text, row in zip(texts, together, strict=True):
            alone = tokenizer(text, return_tensors="pt", add_special_tokens=False)
            assert torch.equal(model.generate(**alone, **greedy)[0, alone["input_ids"].shape[1] :], row)
    assert [account.events for account in press.account] == [6] * 4
