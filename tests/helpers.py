"""Builders shared by the tests: `from helpers import tiny`."""

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCAB = 512

FAMILIES: dict[str, tuple[type, type]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "phi3": (Phi3Config, Phi3ForCausalLM),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM),
}


def tiny(family: str, attn: str = "sdpa", seed: int = 0, **overrides) -> PreTrainedModel:
    """A random model of `family` in eval mode: 64 wide, 3 layers, 4 query heads, 2 KV heads, head size 16, 512 tokens.

    Gemma3 has 6 layers, every third one full, the others sliding over 32 tokens. Weights are drawn wider than usual, or
    attention would be nearly uniform and no test would notice a wrong entry. There is no end-of-sequence token, so
    `generate` runs to its limit, and no pad token, or `generate` would guess a mask from the ids: pass
    `attention_mask` for padded batches. `overrides` go to the config; equal arguments give equal weights.
    """
    config_class, model_class = FAMILIES[family]
    settings: dict = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 8192,
        "initializer_range": 0.15,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": None,
        "tie_word_embeddings": False,
    }
    if family in ("mistral", "phi3"):
        settings["sliding_window"] = None
    if family == "gemma3":
        settings.update(num_hidden_layers=6, sliding_window=32, query_pre_attn_scalar=16)
    settings.update(overrides)
    if family == "gemma3":
        kinds = ["full_attention" if i % 3 == 2 else "sliding_attention" for i in range(settings["num_hidden_layers"])]
        settings.setdefault("layer_types", kinds)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class._from_config(config_class(**settings), attn_implementation=attn)
    return model.eval().requires_grad_(False)


def token_ids(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    """Random token ids `(batch, length)` for the tiny models."""
    return torch.randint(VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))
