"""Four events of a real forward, entry by entry what the literal algorithm keeps from queries and keys caught on their
way into attention."""

import pytest
import torch
import torch.nn.functional as F
from helpers import tiny, token_ids
from oracles import ams
from transformers import DynamicCache
from transformers.models.llama import modeling_llama

from pressroom.presses import AMSPress, DecodingPress, KeyDiffPress

PROMPT, BUDGET, INTERVAL = 30, 32, 10


class Literal:
    """One layer and KV head with its own cache, credit and query window."""

    def __init__(self, settings):
        self.settings = settings
        self.keys, self.positions, self.queries, self.credit = [], [], [], None

    def feed(self, queries, keys, prompt):
        """queries (G, q, D), keys (q, D), rotated."""
        for i in range(keys.shape[0]):
            self.keys.append(keys[i].double())
            self.positions.append(len(self.positions) if prompt else self.positions[-1] + 1)
            if not prompt:
                self.queries.append(queries[:, i].double())

    def event(self):
        s = self.settings
        keys = torch.stack(self.keys)
        queries = torch.stack(self.queries, dim=1)[:, -s["window_size"] :]
        u = ams.usage(
            queries, keys, kernel_size=s["window_kernel_size"], scaling=keys.shape[1] ** -0.5, suffix=s["suffix_usage"]
        )
        m = ams.mass(u)
        if s["use_credit"]:
            m, self.credit = ams.mix(m, self.credit, decay=s["credit_decay"], beta=s["mix_beta"], init=s["credit_init"])
        limits = {"segment_mass": s["segment_mass"], "min_len": s["min_seg_len"], "max_len": s["max_seg_len"]}
        ends = ams.segments(m, **limits)
        plan = ams.quotas(
            ends,
            ams.segment_weights(m, ends),
            keep=BUDGET,
            n_sink=s["n_sink"],
            n_recent=s["always_keep_last"],
            min_keep=s["min_keep_per_segment"],
            by_mass=s["use_mass_quotas"],
        )
        anchor = F.normalize(F.normalize(keys, dim=1).mean(dim=0), dim=0)
        scores = (-(F.normalize(keys, dim=1) @ anchor)).tolist()
        kept = ams.choose(scores, ends, plan, keep=BUDGET)
        self.keys = [self.keys[i] for i in kept]
        self.positions = [self.positions[i] for i in kept]
        if self.credit is not None:
            self.credit = [self.credit[i] for i in kept]
        self.queries = []
        return self.positions[:], ends, plan


VARIANTS = [
    {},
    {"use_credit": False},
    {"credit_init": "mass", "credit_decay": 0.5, "mix_beta": 0.3},
    {"use_mass_quotas": False, "suffix_usage": "observed"},
    {"min_keep_per_segment": 9, "always_keep_last": 20, "n_sink": 6},
]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: ",".join(v) or "defaults")
def test_four_events(variant):
    settings = {
        "window_size": 7,
        "window_kernel_size": 3,
        "segment_mass": 0.15,
        "min_seg_len": 3,
        "max_seg_len": 9,
        "min_keep_per_segment": 1,
        "n_sink": 2,
        "always_keep_last": 5,
        "use_credit": True,
        "credit_decay": 0.9,
        "mix_beta": 0.9,
        "credit_init": "zero",
        "use_mass_quotas": True,
        "suffix_usage": "max",
        **variant,
    }
    model, ids = tiny("llama", "eager"), token_ids(1, PROMPT + 4 * INTERVAL)
    literal = {(layer, head): Literal(settings) for layer in range(3) for head in range(2)}
    fed = 0

    def catch(module, args, kwargs):
        hidden, (cos, sin) = kwargs["hidden_states"], kwargs["position_embeddings"]
        q, k = (p(hidden).unflatten(-1, (-1, 16)).transpose(1, 2) for p in (module.q_proj, module.k_proj))
        q, k = modeling_llama.apply_rotary_pos_emb(q, k, cos, sin)
        for head in range(2):
            group = q[0, 2 * head : 2 * head + 2]
            literal[module.layer_idx, head].feed(group, k[0, head], prompt=fed == 0)

    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(catch, with_kwargs=True)
    press = DecodingPress(AMSPress(KeyDiffPress(), **settings), target_size=BUDGET, compression_interval=INTERVAL)
    cache = DynamicCache(config=model.config)
    with press(model), press.record() as trace:
        for part in ids.split([PROMPT] + [1] * (4 * INTERVAL), dim=1):
            model(part, past_key_values=cache, use_cache=True)
            fed += part.shape[1]
            if fed > PROMPT and (fed - PROMPT) % INTERVAL == 0:
                for (layer, head), row in literal.items():
                    event = trace.layer(layer)[-1]
                    kept, ends, plan = row.event()
                    count = int(event.segment_count[0, head])
                    assert event.seen == fed
                    assert event.segment_ends[0, head, :count].tolist() == ends
                    assert event.quota[0, head, :count].tolist() == plan.quota
                    assert event.kept[0, head].tolist() == kept
                    if row.credit is not None:
                        got = cache.layers[layer].state["credit"][0, head].double()
                        torch.testing.assert_close(got, torch.tensor(row.credit).double(), atol=1e-6, rtol=1e-3)
    assert len(trace.layer(0)) == 4
