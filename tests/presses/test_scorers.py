import sys

import pytest
import torch
import torch.nn.functional as F
from helpers import tiny, token_ids
from transformers import DynamicCache

from pressroom.presses import (
    DecodingPress,
    ExpectedAttentionPress,
    KeyDiffPress,
    RandomPress,
    SnapKVPress,
    StreamingLLMPress,
    TOVAPress,
    UsagePress,
    build,
    names,
)

PROMPT, BUDGET, INTERVAL = 20, 24, 8
SCORERS = [
    name for name in names() if not name.startswith(("ams_", "ablation_", "full", "random_prompt", "knorm", "lagkv"))
]


class Observed:
    """Runs a model under a press one token at a time, and keeps what eager attention saw and what the scorer said."""

    def __init__(self, family, scorer, events=3, shift=0):
        self.model = tiny(family, "eager")
        self.full = [i for i, layer in enumerate(self.model.model.layers) if self._is_full(layer)]
        self.scores = {layer: [] for layer in self.full}  # per event (B, H, T)
        self.keys = {layer: [] for layer in self.full}  # per event, keys, values
        self.attention = {layer: [] for layer in self.full}  # per step (B, Hq, entries)
        self.raw = {layer: [] for layer in self.full}  # per step, queries before rotation (B, Hq, 1, D)
        ids = token_ids(1, PROMPT + events * INTERVAL)
        original = scorer.scores

        def spy(event):
            scores = original(event)
            self.scores[event.layer_idx].append(scores.clone())
            self.keys[event.layer_idx].append((event.keys.clone(), event.values.clone()))
            return scores

        scorer.scores = spy
        press = DecodingPress(scorer, target_size=BUDGET, compression_interval=INTERVAL)
        for layer in self.full:
            self._watch(layer)
        cache = DynamicCache(config=self.model.config)
        with press(self.model), press.record() as self.trace:
            position = shift
            for part in ids.split([PROMPT] + [1] * (events * INTERVAL), dim=1):
                where = torch.arange(position, position + part.shape[1])[None]
                position += part.shape[1]
                out = self.model(
                    part, past_key_values=cache, use_cache=True, position_ids=where, output_attentions=True
                )
                for layer in self.full:
                    self.attention[layer].append(out.attentions[layer][:, :, -1])
        self.next_position = [shift + PROMPT + (n + 1) * INTERVAL for n in range(events)]

    @staticmethod
    def _is_full(layer):
        return getattr(layer, "attention_type", "full_attention") == "full_attention"

    def _watch(self, index):
        attention = self.model.model.layers[index].self_attn
        last = getattr(attention, "q_norm", None) or getattr(attention, "q_proj", None) or attention.qkv_proj
        heads, dim = self.model.config.num_attention_heads, self.model.config.head_dim

        def hook(module, args, output):
            states = output if output.ndim == 4 else output[..., : heads * dim].unflatten(-1, (heads, dim))
            if states.shape[1] != heads:
                states = states.transpose(1, 2)
            latest.append(states[:, :, -1:].clone())

        def done(*_):  # an event norms queries again: only what attention itself used counts
            self.raw[index].append(latest[-1])

        latest: list = []
        last.register_forward_hook(hook)
        attention.register_forward_hook(done)

    def window(self, layer, event, size):
        """(B, Hq, size, T): probabilities of the last steps before an event."""
        end = 1 + (event + 1) * INTERVAL
        steps = self.attention[layer][end - size : end]
        entries = steps[-1].shape[-1]
        return torch.stack([F.pad(step, (0, entries - step.shape[-1])) for step in steps], dim=2)

    def events(self):
        for layer in self.full:
            assert len(self.scores[layer]) == 3
            for event, scores in enumerate(self.scores[layer]):
                yield layer, event, scores


FAMILIES = ["llama", "qwen3", "phi3", "gemma3"]


@pytest.mark.parametrize("family", FAMILIES)
def test_tova(family):
    seen = Observed(family, TOVAPress())
    for layer, event, scores in seen.events():
        expected = seen.window(layer, event, 1)[:, :, 0].mean(dim=1, keepdim=True).expand_as(scores)
        torch.testing.assert_close(scores, expected, atol=1e-6, rtol=1e-4)
    for record in seen.trace.events:
        assert (record.kept[..., -1] == record.seen - 1).all()  # the newest entry


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("window", [1, 4, 8])
def test_snapkv(family, window):
    seen = Observed(family, SnapKVPress(window_size=window, kernel_size=3))
    for layer, event, scores in seen.events():
        mean = seen.window(layer, event, window).mean(dim=2)  # (B, Hq, T)
        entries = mean.shape[-1]
        before = F.avg_pool1d(mean[..., : entries - window], 3, stride=1, padding=1)
        groups = before.unflatten(1, (scores.shape[1], -1)).mean(dim=2)
        torch.testing.assert_close(scores[..., : entries - window], groups, atol=1e-6, rtol=1e-4)
    for record in seen.trace.events:
        assert torch.equal(record.kept[0, 0, -window:], torch.arange(record.seen - window, record.seen))


@pytest.mark.parametrize("family", FAMILIES)
def test_usage(family):
    seen = Observed(family, UsagePress(window_size=6, kernel_size=3))
    for layer, event, scores in seen.events():
        mean = seen.window(layer, event, 6).mean(dim=2)
        entries = mean.shape[-1]
        before = F.avg_pool1d(mean[..., : entries - 6], 3, stride=1, padding=1)
        before = before.unflatten(1, (scores.shape[1], -1)).mean(dim=2)
        expected = torch.cat([before, before.amax(dim=-1, keepdim=True).expand(-1, -1, 6)], dim=-1)
        torch.testing.assert_close(scores, expected, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("covariance", [True, False])
def test_expected_attention(family, covariance):
    """mu and Sigma through the mean of the rotation matrices over the next positions, written out."""
    scorer = ExpectedAttentionPress(n_future_positions=16, n_queries=INTERVAL, use_covariance=covariance)
    seen = Observed(family, scorer)
    rotary = seen.model.model.rotary_emb
    own = sys.modules[type(seen.model).__module__].apply_rotary_pos_emb
    for layer, event, scores in seen.events():
        keys, values = (x.double() for x in seen.keys[layer][event])
        dim = keys.shape[-1]
        where = seen.next_position[event] + torch.arange(16)[None]
        kind = {"layer_type": "full_attention"} if "Gemma3" in type(seen.model).__name__ else {}
        cos, sin = rotary(keys.float()[:, 0], where, **kind)
        basis = torch.eye(dim).view(1, dim, 1, dim).expand(-1, -1, 16, -1)  # as many heads as dimensions
        rotation = own(basis, basis, cos, sin)[0].mean(dim=2)[0].T.double()  # columns: rotated basis vectors
        end = 1 + (event + 1) * INTERVAL
        queries = torch.cat(seen.raw[layer][end - INTERVAL : end], dim=2).double()[0]  # (Hq, n, D)
        groups = queries.shape[0] // keys.shape[1]
        for head in range(keys.shape[1]):
            total = 0
            for query_head in range(head * groups, (head + 1) * groups):
                q = queries[query_head]
                mu = rotation @ q.mean(dim=0)
                sigma = rotation @ torch.cov(q.T, correction=0) @ rotation.T
                k = keys[0, head]
                z = k @ mu / dim**0.5
                if covariance:
                    z = z + torch.einsum("ti,ij,tj->t", k, sigma, k) / (2 * dim)
                total = total + z.softmax(dim=0)
            expected = (total / groups + 1e-2) * values[0, head].norm(dim=-1)
            torch.testing.assert_close(scores[0, head].double(), expected, atol=1e-5, rtol=1e-3)


def test_keydiff():
    seen = Observed("llama", KeyDiffPress())
    for layer, event, scores in seen.events():
        keys = seen.keys[layer][event][0]
        anchor = F.normalize(keys, dim=-1).mean(dim=2, keepdim=True)
        torch.testing.assert_close(scores, -F.cosine_similarity(keys, anchor, dim=-1), atol=1e-6, rtol=1e-4)


def test_streaming_keeps_sinks_and_the_newest():
    seen = Observed("llama", StreamingLLMPress())
    for record in seen.trace.events:
        expected = torch.cat([torch.arange(4), torch.arange(record.seen - BUDGET + 4, record.seen)])
        assert torch.equal(record.kept, expected.expand_as(record.kept))


def test_random_draws_anew_at_each_event_and_layer():
    seen = Observed("llama", RandomPress())
    drawn = [scores for _, _, scores in seen.events()]
    assert all(0 <= scores.min() <= scores.max() < 1 for scores in drawn)
    same_length = [scores for scores in drawn if scores.shape == drawn[-1].shape]
    assert len(same_length) > 3
    for i, a in enumerate(same_length):
        assert not any(torch.equal(a, b) for b in same_length[:i])


@pytest.mark.parametrize("name", SCORERS)
def test_a_shift_of_all_positions_changes_nothing(name):
    press = build(name, target_size=BUDGET).base_press
    here = Observed("qwen2", press)
    there = Observed("qwen2", build(name, target_size=BUDGET).base_press, shift=1000)
    for layer, event, scores in here.events():
        other = there.scores[layer][event]
        assert (scores - other).abs().max() <= 2e-3 * scores.std()  # fp32 rotations at 1000 are off by about 1e-4


@pytest.mark.parametrize(
    ("cls", "field", "value"),
    [
        (SnapKVPress, "window_size", 0),
        (SnapKVPress, "kernel_size", 4),
        (UsagePress, "kernel_size", 2),
        (UsagePress, "window_size", -1),
        (StreamingLLMPress, "n_sink", -1),
        (KeyDiffPress, "n_recent", 1.5),
        (ExpectedAttentionPress, "n_future_positions", 0),
        (ExpectedAttentionPress, "epsilon", -0.1),
        (RandomPress, "seed", -1),
        (TOVAPress, "compression_ratio", 1.0),
    ],
)
def test_fields_are_checked(cls, field, value):
    with pytest.raises((ValueError, AssertionError), match=rf"{field}.*{value}|Compression ratio"):
        cls(**{field: value})


@pytest.mark.parametrize("name", SCORERS)
@pytest.mark.parametrize("family", ["llama", "phi3"])
def test_at_prefill_the_ratio_decides(name, family):
    model, ids = tiny(family), token_ids(2, 60)
    press = build(name, target_size=BUDGET).base_press
    press.compression_ratio = 0.5
    cache = DynamicCache(config=model.config)
    with press(model):
        out = model(ids, past_key_values=cache, use_cache=True)
    assert {layer.keys.shape[-2] for layer in cache.layers} == {30}
    torch.testing.assert_close(out.logits, model(ids).logits)
