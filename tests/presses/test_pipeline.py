"""kvpress's own pipeline with our presses, on the real model."""

import warnings

import kvpress
import pytest
import torch
from transformers import DynamicCache, pipeline

from pressroom.presses import AMSPress, DecodingPress, SnapKVPress, TOVAPress, build

pytestmark = pytest.mark.real_model
CONTEXT = (
    "A farmer has 17 sheep. Nine of them run away, and he buys 12 more. Then a third of all his sheep are sold. " * 3
)
QUESTION = "How many sheep does he have now? Explain each step."


@pytest.fixture(scope="module")
def pipe(smollm2):
    model, tokenizer = smollm2
    return pipeline("kv-press-text-generation", model=model, tokenizer=tokenizer)


def ask(pipe, press, **more):
    return pipe(CONTEXT, question=QUESTION, press=press, max_new_tokens=40, **more)["answer"]


def test_a_budget_of_everything_is_the_plain_pipeline(pipe):
    plain = ask(pipe, None)
    for name in ("full_kv", "ams_snapkv"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert ask(pipe, build(name, target_size=2000, compression_interval=8)) == plain


def test_answers_are_those_of_generate(pipe, smollm2):
    """Two ways to the same tokens: the pipeline prefills before it enters the press, generate inside."""
    model, tokenizer = smollm2
    inputs = pipe.preprocess(CONTEXT, [QUESTION], "", 10_000)
    ids, question = inputs["context_ids"], inputs["questions_ids"][0]
    press = build("ams_tova", target_size=48, compression_interval=16)
    answer = ask(pipe, press)
    (account,) = press.account
    assert account.prompt == ids.shape[1] + question.shape[1]
    assert account.events == (account.tokens - account.prompt) // 16 >= 2
    cache = DynamicCache()
    model(ids, past_key_values=cache)
    with press(model):
        whole = model.generate(
            torch.cat([ids, question], dim=1), past_key_values=cache, max_new_tokens=40, do_sample=False
        )
    text = tokenizer.decode(whole[0, ids.shape[1] + question.shape[1] :], skip_special_tokens=True)
    assert text == answer
    assert press.account[0].events == account.events


def test_two_questions_in_a_row_are_two_fresh_ones(pipe):
    press = build("ams_snapkv", target_size=48, compression_interval=16)
    assert (
        ask(pipe, press) == ask(pipe, press) == ask(pipe, build("ams_snapkv", target_size=48, compression_interval=16))
    )


def test_prefill_and_decoding(pipe):
    decoding = DecodingPress(AMSPress(TOVAPress()), target_size=48, compression_interval=16)
    press = kvpress.PrefillDecodingPress(prefilling_press=SnapKVPress(compression_ratio=0.5), decoding_press=decoding)
    cache = DynamicCache()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        answer = ask(pipe, press, cache=cache)
    assert len(answer) > 20
    (account,) = decoding.account
    assert account.events >= 2
    assert account.entries < 48 + 16
