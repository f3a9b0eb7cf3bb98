import pytest
import torch
from helpers import tiny, token_ids
from oracles import rpc
from transformers import DynamicCache

from pressroom.presses import DecodingPress, RPCPress

INTERVAL = 8


def run(model, press, parts, batch=1, mask=None, seed=0):
    cache = DynamicCache(config=model.config)
    ids = token_ids(batch, sum(parts), seed=seed)
    with press(model), press.record() as trace:
        done = 0
        for part in ids.split(parts, dim=1):
            done += part.shape[1]
            model(part, past_key_values=cache, attention_mask=None if mask is None else mask[:, :done])
    return trace


def spied(scorer):
    """Events and scores as they are asked for."""
    seen, original = [], scorer.scores

    def spy(event):
        scores = original(event)
        seen.append((event, event.queries(scorer.window_size), event.keys.clone(), scores))
        return scores

    scorer.scores = spy
    return seen


@pytest.mark.parametrize("prompt", [10, 40])
@pytest.mark.parametrize("preset", ["paper", "ams"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "gemma3"])
def test_against_the_oracle(family, preset, prompt):
    model = tiny(family)
    scorer = RPCPress.preset(preset, window_size=6, kernel_size=3)
    seen = spied(scorer)
    run(model, DecodingPress(scorer, target_size=24, compression_interval=INTERVAL), [prompt] + [1] * 24)
    assert len(seen) >= 3
    for event, queries, keys, scores in seen:
        assert queries.shape[2] == 6
        assert all(not torch.equal(queries[:, :, i], queries[:, :, i + 1]) for i in range(5))  # R distinct queries
        front = prompt if preset == "paper" and prompt == 10 else 4
        expected = rpc.scores(
            queries[0].double(),
            keys[0].double(),
            front=front,
            kernel_size=3,
            scaling=event.scaling,
            heads=scorer.heads,
            softmax=scorer.softmax,
        )
        torch.testing.assert_close(scores[0].double(), torch.tensor(expected).double(), atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize(("prompt", "front"), [(17, 17), (18, 4), (40, 4)])
def test_the_prompt_stays_if_it_fits_beside_the_window(prompt, front):
    press = DecodingPress(RPCPress(window_size=6), target_size=24, compression_interval=INTERVAL)
    trace = run(tiny("llama"), press, [prompt] + [1] * 24)
    assert trace.events
    for event in trace.events:
        recent = torch.arange(event.seen - 6, event.seen)
        assert torch.equal(event.kept[0, 0, :front], torch.arange(front))
        assert torch.equal(event.kept[0, 0, -6:], recent)


def test_each_row_keeps_its_own_prompt():
    """Prompts of 5 and 14 tokens: both stay whole, also once the padding is gone."""
    mask = torch.ones(2, 14 + 40, dtype=torch.long)
    mask[0, :9] = 0
    press = DecodingPress(RPCPress(window_size=6), target_size=24, compression_interval=INTERVAL)
    trace = run(tiny("llama"), press, [14] + [1] * 40, batch=2, mask=mask)
    last = trace.layer(0)[-1]
    for row, prompt in ((0, 5), (1, 14)):
        assert torch.equal(last.kept[row, 0, :prompt], torch.arange(prompt))


def test_nothing_of_a_prompt_survives_into_the_next():
    model = tiny("llama")
    press = DecodingPress(RPCPress(window_size=6), target_size=24, compression_interval=INTERVAL)
    cache = [DynamicCache(config=model.config) for _ in range(2)]
    kept = []
    with press(model), press.record() as trace:
        for target in cache:
            for part in token_ids(1, 46, seed=3).split([14] + [1] * 32, dim=1):
                model(part, past_key_values=target)
            kept.append([event.kept for event in trace.events])
            trace.events.clear()
    assert len(kept[0]) == len(kept[1]) > 0
    assert all(torch.equal(a, b) for a, b in zip(*kept, strict=True))


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("window_size", 0, "an integer of at least 1"),
        ("kernel_size", 2, "an odd integer"),
        ("heads", "some", "all | group"),
        ("softmax", "none", "candidates | all"),
        ("keeps_prompt", 1, "True or False"),
        ("n_sink", -1, "an integer of at least 0"),
    ],
)
def test_fields_are_checked(field, value, allowed):
    with pytest.raises(ValueError) as error:
        RPCPress(**{field: value})
    assert str(error.value) == f"{field}: got {value!r}, allowed: {allowed}"
    with pytest.raises(ValueError, match=r"^preset: got 'x', allowed: paper \| ams"):
        RPCPress.preset("x")
