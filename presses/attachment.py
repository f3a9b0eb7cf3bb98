"""The hooks that put a press on a model, and take it off again."""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import Cache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer, QuantizedLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function

from .cache import PressLayer, QueryWindow
from .quantized import QuantizedPressLayer

if TYPE_CHECKING:
    from .decoding import DecodingPress

SPECULATIVE = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit")
_occupied: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def decoder_of(model: Any) -> Any:
    """The module that holds the decoder layers; PEFT wrappers and vision towers are looked through.

    Raises
    ------
    ValueError
        If there is none.
    """
    if hasattr(model, "get_base_model"):
        model = model.get_base_model()
    inner = getattr(model, "model", model)
    decoder = getattr(inner, "language_model", inner)
    if not hasattr(decoder, "layers") or not hasattr(decoder, "rotary_emb"):
        raise ValueError(
            f"model: got {type(model).__name__}, allowed: a causal language model with `layers` and `rotary_emb` "
            "(Llama, Mistral, Phi3, Qwen2, Qwen3, Gemma3)"
        )
    return decoder


def slides(module: Any) -> bool:
    """Whether an attention layer has a sliding window by its configuration (the rule of ``DynamicCache``)."""
    config = module.config
    types = getattr(config, "layer_types", None)
    if types is not None:
        return types[module.layer_idx] != "full_attention"
    return getattr(config, "sliding_window", None) is not None


def full_attention_layers(decoder: Any) -> dict[int, Any]:
    """Attention modules with a full cache, by layer index.

    Raises
    ------
    ValueError
        If there is none, or queries cannot be read from one.
    """
    modules = [layer.self_attn for layer in decoder.layers if hasattr(layer, "self_attn")]
    full = {module.layer_idx: module for module in modules if not slides(module)}
    name = type(decoder).__name__
    if not full:
        raise ValueError(
            f"model: got {name} without a full attention layer (every layer has a sliding window), allowed: a model "
            "with at least one; set sliding_window=None in its config if it should attend to everything"
        )
    for index, module in full.items():
        if not hasattr(module, "q_proj") and not hasattr(module, "qkv_proj"):
            raise ValueError(f"model: layer {index} of {name} has neither q_proj nor qkv_proj to read queries from")
    return full


def check_cache(cache: Cache) -> None:
    """Raise ``ValueError`` for a cache whose layers cannot be bounded."""
    layers = getattr(cache, "layers", None)
    if layers is None or getattr(cache, "offloading", False):
        kind = type(cache).__name__ + (" that offloads" if layers is not None else "")
        raise ValueError(f"past_key_values: got {kind}, allowed: DynamicCache() or QuantizedCache(...)")
    replicated = getattr(cache, "layer_class_to_replicate", None)
    kinds: set[Any] = {type(layer) for layer in layers} | ({replicated} - {None})
    for cls in kinds:
        if not issubclass(cls, PressLayer | DynamicSlidingWindowLayer | QuantizedLayer) and cls is not DynamicLayer:
            raise ValueError(
                f"past_key_values: got {type(cache).__name__} with {cls.__name__}, allowed: DynamicCache() or "
                "QuantizedCache(...)"
            )


def read_padding(mask: Tensor) -> Tensor | None:
    """Left padding per row (B,) on the CPU from a 2-D mask; None if there is none. One transfer.

    Raises
    ------
    ValueError
        For right padding, holes, or a row of padding only.
    """
    real = mask.bool()
    width = mask.shape[1]
    left = (~real).long().cumprod(dim=1).sum(dim=1)
    found = torch.stack([left, real.sum(dim=1)]).cpu()
    left, count = found[0], found[1]
    bad = ((left + count != width) | (count == 0)).nonzero()[:, 0]
    if bad.numel():
        row = int(bad[0])
        raise ValueError(
            f"attention_mask: row {row} has {int(count[row])} real tokens and {int(left[row])} pads in front of them "
            f"in a width of {width}; allowed: left padding only, without holes or right padding"
        )
    return left if bool(left.any()) else None


def head_mask(valid: Tensor, queries: int, module: Any, dtype: torch.dtype) -> Tensor:
    """Mask (B, Hq, q, T) for the last ``queries`` of T entries of which each KV head may see ``valid`` (B, H, T) only.

    Raises
    ------
    ValueError
        For an attention implementation that takes no such mask.
    """
    implementation = module.config._attn_implementation
    if implementation not in ("eager", "sdpa"):
        raise ValueError(
            f"attn_implementation: got {implementation!r}, allowed: eager | sdpa for a press whose heads keep "
            "different numbers of entries"
        )
    entries = valid.shape[-1]
    causal = torch.ones(queries, entries, dtype=torch.bool, device=valid.device).tril(entries - queries)
    seen = (valid[:, :, None] & causal).repeat_interleave(module.num_key_value_groups, dim=1)
    if implementation == "sdpa":
        return seen
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, torch.finfo(dtype).min)


def last_rows(states: Tensor, count: int) -> Tensor:
    """The last ``count`` tokens of (B, q, ...), without a hold on the others."""
    states = states.detach()
    return states if states.shape[1] <= count else states[:, -count:].clone()


@dataclass
class Forward:
    """What one forward pass leaves behind until it is over."""

    cache: Cache | None
    before: int  # tokens the cache had seen
    tokens: int  # of this forward
    prompt: bool
    left_pad: Tensor | None
    keep: int = 0  # last tokens whose queries are kept
    absorbs: bool = False  # whether the scorer reads all queries at once, when this forward has many
    keep_hidden: bool = False
    others: list[tuple] = field(default_factory=list)  # layers left alone, and what they held
    raw: dict[int, Tensor] = field(default_factory=dict)
    absorbed: dict[int, dict] = field(default_factory=dict)  # layer -> the state its scorer made of them
    states: dict[int, tuple] = field(default_factory=dict)  # layer -> what its scorer had before
    seen: dict[int, tuple] = field(default_factory=dict)  # layer -> hidden, (cos, sin), position_ids, cache_position
    masks: dict[tuple, Tensor | None] = field(default_factory=dict)


class Attachment:
    """A press on a model. Holds hooks and the running forward, nothing about sequences."""

    def __init__(self, press: DecodingPress, model: nn.Module) -> None:
        self.press = press
        self.decoder = decoder_of(model)
        self.modules = full_attention_layers(self.decoder)
        self.budgets = dict(zip(self.modules, press.budgets(len(self.modules)), strict=True))
        if self.decoder in _occupied:
            raise ValueError("model: already has a press on it, allowed: one at a time")
        self.forward: Forward | None = None
        self.mask: Tensor | None = None
        self._had_rotary = {module for module in self.modules.values() if hasattr(module, "rotary_emb")}
        self._handles: list = []
        self._guarded: list = []  # models whose generate is wrapped
        _occupied.add(self.decoder)
        try:
            self._install(model)
        except BaseException:
            self.remove()
            raise

    def _install(self, model: nn.Module) -> None:
        def pre(module, hook):
            self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

        self._guard_generate(model)
        if model is not self.decoder:
            pre(model, self._note_mask)
        pre(self.decoder, self._before)
        self._handles.append(self.decoder.register_forward_hook(self._after, with_kwargs=True, always_call=True))
        for index, module in self.modules.items():
            pre(module, self._before_attention)
            projection = getattr(module, "q_proj", None) or module.qkv_proj
            self._handles.append(projection.register_forward_hook(self._capture(index, module)))
            if self.press.accumulates:
                self._handles.append(module.register_forward_hook(self._after_attention))

    def remove(self) -> None:
        """Take everything off the model."""
        self._roll_back()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for guarded in self._guarded:
            guarded.__dict__.pop("generate", None)
        self._guarded.clear()
        _occupied.discard(self.decoder)
        for module in self.modules.values():  # kvpress leaves this behind
            if module not in self._had_rotary and "rotary_emb" in module._modules:
                del module._modules["rotary_emb"]
        self.mask = None

    def _guard_generate(self, model: Any) -> None:
        """Refuse before the first token what hooks would notice too late: drafts that are taken back."""
        if not hasattr(model, "generate") or "generate" in model.__dict__:
            return
        generate = model.generate

        @functools.wraps(generate)
        def guarded(*args, **kwargs):
            config = kwargs.get("generation_config") or getattr(model, "generation_config", None)
            for name in SPECULATIVE:
                value = kwargs.get(name) or getattr(config, name, None)
                if value is not None:
                    got = value if isinstance(value, int | str) else type(value).__name__
                    raise ValueError(
                        f"{name}: got {got!r}, allowed: None; assisted generation takes tokens back that an event may "
                        "have consumed"
                    )
            return generate(*args, **kwargs)

        model.generate = guarded
        self._guarded.append(model)

    # -- hooks -------------------------------------------------------------------------------------------------------

    def _note_mask(self, module, args, kwargs) -> None:
        mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
        self.mask = mask if isinstance(mask, Tensor) and mask.ndim == 2 else None

    def _before(self, decoder, args, kwargs) -> None:
        self._roll_back()  # an interrupt leaves no other chance
        cache = kwargs.get("past_key_values")
        if cache is not None:
            check_cache(cache)
        mask = kwargs.get("attention_mask", args[1] if len(args) > 1 else None)
        if isinstance(mask, Tensor) and mask.ndim == 4:
            raise ValueError("attention_mask: got a 4-D mask, allowed: a 2-D mask (B, tokens) or none")
        if not isinstance(mask, Tensor):
            mask, self.mask = self.mask, None
        ids = kwargs.get("input_ids", args[0] if args else None)
        tokens = (ids if ids is not None else kwargs["inputs_embeds"]).shape[1]
        layers = [] if cache is None else self._press_layers(cache)
        fresh = not layers or not all(layer.prompt_length for layer in layers)
        left_pad = None
        if mask is not None:
            if fresh:
                left_pad = read_padding(mask)
            elif tokens > 1 and not bool(mask[:, -tokens:].all()):
                raise ValueError(
                    f"attention_mask: padding among the last {tokens} tokens of a sequence that has begun, allowed: "
                    "padding in front of the first tokens only"
                )
        before = 0 if cache is None else cache.get_seq_length(min(self.modules))
        if fresh:
            self.press.check_prompt(before + tokens - (0 if left_pad is None else int(left_pad.min())))
        others = [] if cache is None else [x for i, x in enumerate(cache.layers) if i not in self.modules]
        wanted, with_hidden = self.press.wanted()
        if fresh and not self.press.compress_prompt:
            wanted = 0
        snapshot = [(layer, dict(layer.__dict__)) for layer in others]
        self.forward = Forward(
            cache,
            before,
            tokens,
            fresh,
            left_pad,
            keep=wanted,
            absorbs=self.press.accumulates and (tokens > 1 or fresh),
            keep_hidden=with_hidden,
            others=snapshot,
        )

    def _before_attention(self, module, args, kwargs):
        forward, cache = self.forward, kwargs.get("past_key_values")
        if cache is None or forward is None:
            return None
        index = module.layer_idx
        layer = self._swap(cache, index, forward)
        if layer is None:
            return None
        hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        forward.cache = cache
        forward.states[index] = (layer.state, layer.unread)
        forward.seen[index] = (
            last_rows(hidden, forward.keep) if forward.keep and forward.keep_hidden else None,
            kwargs["position_embeddings"],
            kwargs.get("position_ids"),
            kwargs.get("cache_position"),
        )
        if layer.prompt_length:
            kwargs["attention_mask"] = self._attention_mask(layer, module, hidden, forward.masks)
        return args, kwargs

    def _capture(self, index: int, module: Any):
        def hook(projection, args, output):
            forward = self.forward
            if forward is not None and (forward.keep or forward.absorbs) and index in forward.seen:
                width = module.config.num_attention_heads * module.head_dim
                kept = output.detach() if forward.absorbs else last_rows(output, forward.keep)
                # a part of a fused projection is copied, so that keys and values are not kept alive
                forward.raw[index] = kept if kept.shape[-1] == width else kept[..., :width].clone()

        return hook

    def _after_attention(self, module, args, output) -> None:
        forward = self.forward
        if forward is None or not forward.absorbs or module.layer_idx not in forward.seen or forward.cache is None:
            return
        index = module.layer_idx
        layer, raw, (cos, sin) = forward.cache.layers[index], forward.raw[index], forward.seen[index][1]
        chunk = QueryWindow()
        chunk.append(raw.shape[1], raw, cos, sin, None)
        with torch.no_grad():
            forward.absorbed[index] = self.press.absorb(layer, module, self.decoder.rotary_emb, chunk)
        if forward.keep:
            forward.raw[index] = last_rows(raw, forward.keep)
        else:
            del forward.raw[index]

    def _after(self, decoder, args, kwargs, output) -> None:
        forward = self.forward
        if output is None:  # it failed
            self._roll_back()
        if forward is None or self.forward is None or forward.cache is None or not forward.seen:
            self.forward = None
            return
        cache = forward.cache
        due = []
        try:
            for index in forward.seen:
                layer = cache.layers[index]
                self._absorb(layer, forward, index)
                if self.press.is_due(layer, forward.prompt):
                    due.append((layer, self.modules[index], self.budgets[index]))
            rotary = self.decoder.rotary_emb
            with torch.no_grad():
                decisions = [self.press.decide(layer, module, rotary, keep) for layer, module, keep in due]
        except BaseException:
            self._roll_back()
            raise
        self.forward = None
        peak = max(cache.layers[index].length for index in forward.seen)
        for (layer, _, _), decision in zip(due, decisions, strict=True):
            self.press.commit(layer, decision)
        for index in forward.seen:
            cache.layers[index].settle()
        self.press.count(cache, [cache.layers[index] for index in forward.seen], forward.prompt, peak)

    # -- parts of them -----------------------------------------------------------------------------------------------

    def _press_layers(self, cache: Cache) -> list[PressLayer]:
        layers = [cache.layers[i] for i in self.modules if i < len(cache.layers)]
        return [layer for layer in layers if isinstance(layer, PressLayer)]

    def _swap(self, cache: Cache, index: int, forward: Forward) -> PressLayer | None:
        """Our layer in the place of a plain one; None for layers left alone."""
        if getattr(cache, "layer_class_to_replicate", None) is not None:
            while len(cache.layers) <= index:
                cache.layers.append(cache.layer_class_to_replicate())
        layer = cache.layers[index]
        if isinstance(layer, PressLayer):
            if forward.prompt and not layer.prompt_length and forward.left_pad is not None:
                layer.left_pad = layer.start = forward.left_pad
            return layer
        if isinstance(layer, DynamicSlidingWindowLayer):
            return None
        kind = QuantizedPressLayer if isinstance(layer, QuantizedLayer) else PressLayer
        cache.layers[index] = adopted = kind.adopt(layer, forward.left_pad)
        return adopted

    def _attention_mask(self, layer: PressLayer, module: Any, hidden: Tensor, masks: dict) -> Tensor | None:
        """Mask over the entries that are there, in cache order; none when every query may see all of them."""
        batch, queries = hidden.shape[:2]
        if queries == 1 and layer.start is None:
            return None
        held = layer.length
        key = (held, None if layer.start is None else str(layer.start.tolist()), hidden.device)
        if key not in masks:
            end = held + queries
            valid = None
            if layer.start is not None:
                valid = torch.arange(end, device=hidden.device) >= layer.start.to(hidden.device)[..., None]
            if valid is not None and valid.ndim == 3:
                masks[key] = head_mask(valid, queries, module, hidden.dtype)
                return masks[key]
            masks[key] = ALL_MASK_ATTENTION_FUNCTIONS[module.config._attn_implementation](
                batch_size=batch,
                cache_position=torch.arange(held, end, device=hidden.device),
                kv_length=end,
                kv_offset=0,
                mask_function=causal_mask_function,
                attention_mask=valid,
                dtype=hidden.dtype,
                config=module.config,
            )
        return masks[key]

    def _absorb(self, layer: PressLayer, forward: Forward, index: int) -> None:
        hidden, (cos, sin), position_ids, cache_position = forward.seen[index]
        last = cache_position[-1:] if position_ids is None else position_ids[:, -1]
        layer.next_position = (last + 1).expand(layer.keys.shape[0])
        if forward.keep:
            cos, sin = (last_rows(x, forward.keep) for x in (cos, sin))
            layer.window.append(forward.keep, forward.raw[index], cos, sin, hidden)
        if index in forward.absorbed:
            layer.carry(forward.absorbed[index], self.press.entry_state)
        else:
            layer.unread = min(layer.unread + forward.tokens, len(layer.window))

    def _roll_back(self) -> None:
        """The cache as it was before the running forward, which failed."""
        forward, self.forward = self.forward, None
        if forward is None or forward.cache is None:
            return
        for layer, fields in forward.others:
            layer.__dict__.update(fields)
        for layer in self._press_layers(forward.cache):
            layer.crop(forward.before)
        for index, state in forward.states.items():
            layer = forward.cache.layers[index]
            layer.state, layer.unread = state
        for layer in self._press_layers(forward.cache):
            if forward.prompt:
                layer.prompt_length = 0
