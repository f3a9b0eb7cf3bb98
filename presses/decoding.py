"""DecodingPress: when to compress, by which budget, and what the user is told about it."""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import kvpress
from kvpress import ScorerPress
from kvpress.presses.base_press import SUPPORTED_MODELS
from torch import Tensor
from transformers import Cache

from ..kernels import compact
from .attachment import Attachment
from .cache import PressLayer, QueryWindow
from .event import Event
from .scorers import HeadSelection, Scorer, adapt, require, require_int, select_top
from .trace import EventRecord, Trace

logger = logging.getLogger(__name__)


@dataclass
class SequenceAccount:
    """What happened to one sequence (or batch).

    Attributes
    ----------
    tokens, prompt : int
        Tokens fed in all, and of those the prompt.
    events : int
        Compactions per layer.
    entries, peak_entries : int
        Cached entries per layer and head now, and at most.
    """

    tokens: int = 0
    prompt: int = 0
    events: int = 0
    entries: int = 0
    peak_entries: int = 0


@dataclass
class Decision:
    """What to keep in one layer; no indices: everything."""

    indices: Tensor | None = None
    start: Tensor | None = None  # (B, H) on the CPU, for heads that keep different numbers
    capacity: int = 0
    evicted: Tensor | None = None  # (B,) rows that lose entries; None: all
    state: dict[str, Tensor] | None = None  # what scorers carry on; None: what they had
    record: EventRecord | None = None


@dataclass
class DecodingPress(kvpress.DecodingPress):
    """Compress the cache while the model decodes: every ``compression_interval`` tokens, to ``target_size`` entries.

    Wrap generation in ``with press(model):``. A new cache is a new sequence; all state lies on the cache, so copies,
    beams and later turns carry it along. Positions stay the true ones. The prompt is not counted; a forward of many
    tokens counts as many. Differs from kvpress: see the README.

    Parameters
    ----------
    base_press : ScorerPress
        Scores entries: ours, kvpress's, or your own. kvpress's SnapKV, TOVA, StreamingLLM, KeyDiff and Expected
        Attention are replaced by ours, which are right while decoding.
    compression_interval : int, default 512
        Tokens between two events.
    target_size : int, default 2048
        Entries kept by an event, per layer and head.
    hidden_states_buffer_size : int, default 256
        Last hidden states handed to scorers that are not ours; ours declare their need.
    protect_prompt : bool, default False
        Always keep the prompt's entries; they count towards the budget.
    compress_prompt : bool, default False
        Also compress once after the prompt, to the same budget, if it is longer.

    Raises
    ------
    ValueError
        For a field outside its range, or a base press that cannot score while decoding.
    """

    base_press: ScorerPress
    compression_interval: int = 512
    target_size: int = 2048
    hidden_states_buffer_size: int = 256
    protect_prompt: bool = False
    compress_prompt: bool = False
    account: list[SequenceAccount] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self):
        self.base_press = adapt(self.base_press)
        require_int("compression_interval", self.compression_interval, 1)
        require_int("target_size", self.target_size, 1)
        require_int("hidden_states_buffer_size", self.hidden_states_buffer_size, 0)
        for name in ("protect_prompt", "compress_prompt"):
            require(name, getattr(self, name), isinstance(getattr(self, name), bool), "True or False")
        if self.base_press.compression_ratio:
            raise ValueError(
                f"base_press.compression_ratio: got {self.base_press.compression_ratio}, allowed: 0; while decoding "
                "target_size is the budget"
            )
        self._attachment: Attachment | None = None
        self._trace: Trace | None = None
        self._open: list[tuple[weakref.ref, SequenceAccount]] = []  # sequences that may go on

    # -- on and off ---------------------------------------------------------------------------------------------------

    def post_init_from_model(self, model: Any) -> None:
        """Put the press on a model. Called by ``press(model)``, and by kvpress when it wraps this press."""
        if self._attachment is not None:
            raise ValueError("model: this press is on a model already, allowed: one at a time")
        self.base_press.post_init_from_model(model)
        self.account = []
        self._attachment = Attachment(self, model)

    def reset(self) -> None:
        """Take the press off the model; caches keep their state."""
        attachment, self._attachment = self._attachment, None
        if attachment is not None:
            attachment.remove()
            self._end([account for _, account in self._open])
            self._open = []

    @contextmanager
    def __call__(self, model: Any) -> Iterator[DecodingPress]:
        known = model.get_base_model() if hasattr(model, "get_base_model") else model
        if not isinstance(known, SUPPORTED_MODELS) and type(known).__name__ != "Gemma3ForCausalLM":
            logger.warning("Model %s is not tested; tested: Llama, Mistral, Phi3, Qwen2, Qwen3, Gemma3", type(known))
        self.post_init_from_model(model)
        try:
            yield self
        finally:
            self.reset()

    @contextmanager
    def record(self) -> Iterator[Trace]:
        """Record what events decide: ``with press(model), press.record() as trace``."""
        self._trace, before = Trace(), self._trace
        try:
            yield self._trace
        finally:
            self._trace = before

    def forward_hook(self, module, input, kwargs, output):
        """Nothing: events happen after the whole forward. kvpress's wrappers call this."""
        return output

    def compress(self, module, hidden_states, keys, values, attentions, kwargs) -> tuple[Tensor, Tensor]:
        """Compress given tensors (B, H, T, D) to the budget, once, outside any sequence."""
        if keys.shape[2] <= self.target_size:
            return keys, values
        event = Event.from_kvpress(module, hidden_states, keys, values, kwargs)
        event.budget = self.target_size
        if self.accumulates:
            event.state = self.base_press.absorb(event)
        indices = self._select(event, self.target_size, 0)
        if isinstance(indices, HeadSelection):
            name = type(self.base_press).__name__
            raise ValueError(f"base_press: got {name}, whose heads keep different numbers; allowed: generation only")
        return compact(keys, values, indices)

    def next_position(self, cache: Cache) -> int:
        """Logical position of the next token of a cache this press has worked on, padding included."""
        return max((layer.get_seq_length() for layer in cache.layers), default=0)

    # -- called by the attachment -------------------------------------------------------------------------------------

    def wanted(self) -> tuple[int, bool]:
        """How many last queries to keep, and whether with hidden states."""
        foreign = not isinstance(self.base_press, Scorer)
        if foreign:
            return max(self.hidden_states_buffer_size, 1), True
        window = self.base_press.query_window()
        if self.base_press.accumulates:
            window = max(window, self.compression_interval)
        if self.base_press.reads_hidden_states:
            return max(window, self.hidden_states_buffer_size), True
        return window, False

    @property
    def accumulates(self) -> bool:
        """Whether every query must be handed to :meth:`absorb`."""
        return isinstance(self.base_press, Scorer) and self.base_press.accumulates

    @property
    def entry_state(self) -> tuple[str, ...]:
        """Names of the scorer's states with one number per entry."""
        return self.base_press.entry_state if isinstance(self.base_press, Scorer) else ()

    def absorb(self, layer: PressLayer, module: Any, rotary: Any, chunk: QueryWindow) -> dict[str, Tensor]:
        """What the scorer makes of an input of many tokens, whose queries are ``chunk``."""
        window = layer.window.followed_by(chunk)
        event = self._event(layer, module, rotary, window)
        event.unread = min(layer.unread + len(chunk), len(window))
        return self.base_press.absorb(event)

    def budgets(self, layers: int) -> list[int]:
        """Entries to keep in each full-attention layer."""
        if not isinstance(self.base_press, Scorer):
            return [self.target_size] * layers
        shares = self.base_press.layer_budgets(layers, self.target_size)
        if len(shares) != layers or not all(isinstance(share, int) and share >= 1 for share in shares):
            name = type(self.base_press).__name__
            raise ValueError(f"{name}.layer_budgets: got {shares}, allowed: {layers} integers of at least 1")
        return shares

    def check_prompt(self, tokens: int) -> None:
        """Refuse a protected prompt that leaves no room, before it is computed."""
        if self.protect_prompt and tokens >= self.target_size:
            raise ValueError(
                f"target_size: got {self.target_size}, allowed: more than the {tokens} tokens of the prompt, which "
                "protect_prompt=True keeps"
            )

    def is_due(self, layer: PressLayer, prompt: bool) -> bool:
        """Whether an event is due after this forward."""
        if prompt:
            return self.compress_prompt
        return layer.since_event >= self.compression_interval

    def decide(self, layer: PressLayer, module: Any, rotary: Any, keep: int) -> Decision:
        """Choose what to keep; changes nothing."""
        if layer.length <= keep and not self.accumulates:
            return Decision()
        event = self._event(layer, module, rotary, layer.window)
        if self.accumulates:
            event.state = self.base_press.absorb(event)
        if layer.length <= keep:
            return Decision(state=event.state)
        event.evicted = layer.evicting(keep)
        indices = self._select(event, keep, layer.prompt_length if self.protect_prompt else 0, layer)
        start = None
        if isinstance(indices, HeadSelection):
            indices, start = indices
            start = start.to("cpu")  # the one transfer of a head-wise event: storage and masks are sized on the host
        record = None
        if self._trace is not None:
            window = getattr(self.base_press, "window_size", 0)
            record = EventRecord.of(module.layer_idx, layer, event, indices, start, window)
        state = self.base_press.after_select(event, indices) if isinstance(self.base_press, Scorer) else {}
        capacity = indices.shape[-1] + self.compression_interval
        return Decision(indices, start, capacity, event.evicted, state, record)

    def commit(self, layer: PressLayer, decision: Decision) -> None:
        """Carry a decision out."""
        layer.since_event = 0
        if decision.state is not None:
            layer.carry(decision.state, self.entry_state)
        if decision.indices is not None:
            if self._trace is not None and decision.record is not None:
                self._trace.events.append(decision.record)
            layer.evict(decision.indices, decision.capacity, start=decision.start, evicted=decision.evicted)

    def count(self, cache: Cache, layers: list[PressLayer], prompt: bool, peak: int) -> None:
        """Keep the account, once per forward."""
        account = next((account for ref, account in self._open if ref() is cache), None)
        if prompt or account is None:
            ended = [pair for pair in self._open if pair[0]() in (None, cache)]
            self._open = [pair for pair in self._open if pair not in ended]
            self._end([account for _, account in ended])
            account = SequenceAccount()
            self._open.append((weakref.ref(cache), account))
            self.account.append(account)
        account.tokens, account.prompt = layers[0].seen, layers[0].prompt_length
        account.events = layers[0].events
        account.entries = max(layer.length for layer in layers)
        account.peak_entries = max(account.peak_entries, peak)

    # -- parts ---------------------------------------------------------------------------------------------------------

    def _event(self, layer: PressLayer, module: Any, rotary: Any, window: QueryWindow) -> Event:
        batch = layer.keys.shape[0]
        pads = [0] * batch if layer.left_pad is None else layer.left_pad.tolist()
        keys, values = layer.contents()
        return Event(
            module,
            keys,
            values,
            layer.next_position,
            tuple(layer.seen - pad for pad in pads),
            raw=window.joined(window.queries),
            cos=window.joined(window.cos),
            sin=window.joined(window.sin),
            hidden=window.joined(window.hidden),
            start=layer.start,
            counts=window.available,
            prompts=tuple(layer.prompt_length - pad for pad in pads),
            unread=layer.unread,
            state=layer.state,
            entry_state=tuple({*layer.entry_state, *self.entry_state}),
            budget=self.target_size,
            rotary=rotary,
        )

    def _select(self, event: Event, keep: int, prompt: int, layer: PressLayer | None = None) -> Any:
        n_sink: int | Tensor = prompt
        if prompt and layer is not None and layer.left_pad is not None:
            n_sink = (prompt - layer.left_pad).to(event.keys.device)[:, None]  # (B, 1)
        press = self.base_press
        if isinstance(press, Scorer):
            return press.select(event, keep, n_sink)
        return select_top(press, event, keep, n_sink)

    def _end(self, accounts: list[SequenceAccount]) -> None:
        for account in accounts:
            generated = account.tokens - account.prompt
            if account.events == 0 and account.tokens > self.target_size and generated > 0:
                warnings.warn(
                    f"a sequence of {account.tokens} tokens ({account.prompt} of them prompt) outgrew target_size="
                    f"{self.target_size} without one event: they come every compression_interval="
                    f"{self.compression_interval} tokens after the prompt; lower it, or set compress_prompt=True",
                    stacklevel=3,
                )

    def with_budget(self, target_size: int) -> DecodingPress:
        """The same press with another budget."""
        return replace(self, target_size=target_size)
