"""The cache layer that owns everything a press knows about one sequence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from ..kernels import compact


class QueryWindow:
    """What the last decode tokens looked like: projected queries, their rotation, the layer's input.

    Chunks are appended as they come and joined only when an event reads them, so a step costs no copy.
    """

    def __init__(self) -> None:
        self.queries: list[Tensor] = []  # (B, q, Hq * D) as projected, before norm and rotation
        self.cos: list[Tensor] = []  # (B, q, D)
        self.sin: list[Tensor] = []  # (B, q, D)
        self.hidden: list[Tensor] = []  # (B, q, hidden), only for scorers that project by themselves
        self.available: Tensor | None = None  # (B,) on the CPU: how many count, where rows differ

    def __len__(self) -> int:
        return sum(chunk.shape[1] for chunk in self.queries)

    def _streams(self) -> list[list[Tensor]]:
        return [self.queries, self.cos, self.sin, self.hidden]

    def append(self, limit: int, queries: Tensor, cos: Tensor, sin: Tensor, hidden: Tensor | None) -> None:
        """Add the states of up to ``limit`` tokens and forget all but the last ``limit``."""
        batch = queries.shape[0]
        new = [queries, cos.expand(batch, -1, -1), sin.expand(batch, -1, -1), hidden]
        for stream, chunk in zip(self._streams(), new, strict=True):
            if chunk is None:
                continue
            stream.append(chunk)
        for stream in self._streams():
            while stream and sum(c.shape[1] for c in stream) - stream[0].shape[1] >= limit:
                del stream[0]
        if self.available is not None:
            self.available = self.available + queries.shape[1]

    def followed_by(self, other: QueryWindow) -> QueryWindow:
        """This window and then ``other``; neither is changed."""
        new = QueryWindow()
        for stream, first, second in zip(new._streams(), self._streams(), other._streams(), strict=True):
            stream.extend(first + second)
        if self.available is not None:
            new.available = self.available + len(other)
        return new

    def drop_last(self, count: int) -> None:
        """Forget the ``count`` newest tokens."""
        for stream in self._streams():
            left = count
            while stream and left > 0:
                size = stream[-1].shape[1]
                if size > left:
                    stream[-1] = stream[-1][:, : size - left]
                else:
                    del stream[-1]
                left -= size
        if self.available is not None:
            self.available = (self.available - count).clamp(min=0)

    def clear(self, evicted: Tensor | None = None) -> None:
        """Forget everything, or what the rows ``evicted`` (B,) had: for them new queries count only."""
        if evicted is None or bool(evicted.all()):
            self.available = None
            for stream in self._streams():
                stream.clear()
            return
        counts = torch.full(evicted.shape, len(self)) if self.available is None else self.available
        self.available = counts.masked_fill(evicted, 0)

    @staticmethod
    def joined(stream: list[Tensor]) -> Tensor | None:
        """A stream as one tensor; None if nothing was kept."""
        return torch.cat(stream, dim=1) if stream else None

    def map(self, change: Callable[[Tensor], Tensor]) -> None:
        """Apply a change of the batch dimension, joining the chunks on the way."""
        for stream in self._streams():
            if stream:
                stream[:] = [change(torch.cat(stream, dim=1))]
        if self.available is not None:
            self.available = change(self.available)


class PressLayer(DynamicLayer):
    """A cache layer whose logical length goes on when entries are evicted.

    ``get_seq_length()`` is the number of tokens seen, ``keys.shape[-2]`` the number of entries held. Before the first
    event it grows like ``DynamicLayer``; from then on it lives in storage allocated once, written in place and
    compacted in place. All state is batch first, so it follows copies, beams and saving.

    Attributes
    ----------
    seen : int
        Tokens fed, the batch's padding included.
    prompt_length : int
        Tokens of the prompt (what was cached when a press first saw the layer, and the forward after that); 0 before.
    since_event : int
        Tokens after the prompt or the last event.
    events : int
        Compactions so far.
    unread : int
        Last queries that no scorer has absorbed yet.
    left_pad, start : Tensor or None
        (B,) on the CPU: padding of each row in the input; padding entries still in front of each row, or (B, H) of
        each KV head. None: none.
    kept_positions : Tensor or None
        (B, H, n) original positions of the entries that survived the last event, -1 where another press evicted.
        Entries after them are consecutive.
    state : dict of Tensor
        What scorers carry along, batch first.
    entry_state : tuple of str
        Which of it has one number per entry.
    """

    keys: Any  # Tensor (B, H, entries, D); None before the first token
    values: Any

    def __init__(self) -> None:
        super().__init__()
        self._forget()

    def _forget(self) -> None:
        self.keys = self.values = None
        self.is_initialized = False
        self.seen = 0
        self.since_event = 0
        self.events = 0
        self.unread = 0
        self.prompt_length = 0
        self.left_pad: Tensor | None = None
        self.start: Tensor | None = None
        self.kept_positions: Tensor | None = None
        self.next_position: Any = None
        self.window = QueryWindow()
        self.state: dict[str, Tensor] = {}
        self.entry_state: tuple[str, ...] = ()
        self._storage: tuple[Tensor, Tensor] | None = None
        self._length = 0
        self._pointer = 0  # where our own keys lie, to tell a cut tail from an evicted copy

    @classmethod
    def adopt(cls, layer: DynamicLayer, left_pad: Tensor | None) -> PressLayer:
        """Take over what a plain layer holds."""
        new = cls()
        if layer.is_initialized and layer.keys is not None and layer.keys.numel():
            new.lazy_initialization(layer.keys, layer.values)
            new.keys, new.values = layer.keys, layer.values
            new.seen = new._length = layer.keys.shape[-2]
        new.left_pad = left_pad
        new.start = left_pad
        return new

    # -- transformers' layer interface ------------------------------------------------------------------------------

    def update(self, key_states: Tensor, value_states: Tensor, cache_kwargs: dict | None = None):
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.sync()
        added = key_states.shape[-2]
        held = self._length
        if self._storage is not None and not self._writable(key_states):
            self._storage = None
        if self._storage is not None and held + added > self._storage[0].shape[-2]:
            self._grow(held + added)
        if self._storage is None:
            self.keys = torch.cat([self.keys, key_states], dim=-2)
            self.values = torch.cat([self.values, value_states], dim=-2)
        else:
            for store, new in zip(self._storage, (key_states, value_states), strict=True):
                store[:, :, held : held + added] = new
            self._cut(held + added)
        self._pointer = self.keys.data_ptr()
        self._count(added)
        return self.keys, self.values

    def _count(self, added: int) -> None:
        self._length += added
        self.seen += added
        if not self.prompt_length:
            self.prompt_length = self.seen
        else:
            self.since_event += added

    def get_seq_length(self) -> int:
        self.sync()
        return self.seen

    def get_mask_sizes(self, cache_position: Tensor) -> tuple[int, int]:
        self.sync()
        return self._length + cache_position.shape[0], self.seen - self._length

    def crop(self, max_length: int) -> None:
        """Forget the tokens from logical length ``max_length`` on, but not what scorers have made of their queries.

        Raises
        ------
        ValueError
            If an event has already decided over some of those tokens.
        """
        target = max_length if max_length >= 0 else self.get_seq_length() + max_length
        drop = self.get_seq_length() - max(target, 0)
        if drop <= 0:
            return
        if target <= 0:
            self._forget()
            return
        if drop > self.since_event and self.events:
            raise ValueError(
                f"crop: max_length={max_length} would take back {drop} tokens, but an event has already compressed "
                f"all but the last {self.since_event}; allowed: {self.seen - self.since_event} to {self.seen}"
            )
        self._cut(self._length - drop)
        self._length -= drop
        self.state = self.state | {name: self.state[name][..., : self._length] for name in self.entry_state}
        self.seen -= drop
        self.since_event = max(0, self.since_event - drop)
        self.unread = max(0, self.unread - drop)
        self.prompt_length = min(self.prompt_length, self.seen)
        if self.next_position is not None:
            self.next_position = self.next_position - drop
        self.window.drop_last(drop)

    def reset(self) -> None:
        """Start a new sequence."""
        self._forget()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._map_batch(lambda x: x.index_select(0, beam_idx.to(x.device)))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._map_batch(lambda x: x.repeat_interleave(repeats, dim=0))

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map_batch(lambda x: x[indices.to(x.device), ...])

    # -- what the press does with it ---------------------------------------------------------------------------------

    @property
    def length(self) -> int:
        """Entries held now."""
        self.sync()
        return self._length

    def contents(self) -> tuple[Tensor, Tensor]:
        """Keys and values (B, H, T, D) of all entries."""
        return self.keys, self.values

    def carry(self, state: dict[str, Tensor], entry_state: tuple[str, ...]) -> None:
        """Keep what a scorer has made of all queries so far; the names ``entry_state`` have one number per entry."""
        self.state, self.unread = state, 0
        self.entry_state = tuple(name for name in dict.fromkeys(self.entry_state + entry_state) if name in state)

    def settle(self) -> None:
        """Called after each forward, when nothing can be rolled back any more."""

    def positions(self) -> Tensor:
        """Original positions (B, H, T) of the entries, counted from each row's first real token; pads are negative."""
        batch, heads = self.keys.shape[:2]
        held = self.length
        device = self.keys.device
        kept = self.kept_positions
        n_kept = 0 if kept is None else kept.shape[-1]
        new = torch.arange(self.seen - (held - n_kept), self.seen, device=device)
        new = new.expand(batch, heads, -1)
        if self.left_pad is not None:
            new = new - self.left_pad.to(device)[:, None, None]
        return new if kept is None else torch.cat([kept, new], dim=-1)

    def evicting(self, keep: int) -> Tensor | None:
        """Rows (B,) that lose real entries when ``keep`` are kept; None for all of them. A CPU tensor."""
        if self.start is None:
            return None
        loses = self.length - self.start > keep
        return loses if loses.ndim == 1 else loses.any(dim=-1)

    def evict(
        self, indices: Tensor, capacity: int, *, start: Tensor | None = None, evicted: Tensor | None = None
    ) -> None:
        """Keep the entries at ``indices`` (B, H, K), ascending, in storage of ``capacity`` entries; what lies before
        ``start`` (B, H), if given, is no entry. ``evicted`` (B,): rows that lose entries, default all."""
        keep = indices.shape[-1]
        self.kept_positions = self.positions().gather(-1, indices)
        if start is not None:
            void = torch.arange(keep, device=indices.device) < start.to(indices.device)[..., None]
            self.kept_positions = self.kept_positions.masked_fill(void, -1)
        if start is None and self.start is not None:
            start = (keep - (self.length - self.start)).clamp(min=0)
        self._compact(indices, capacity)
        self.start = start if start is not None and bool(start.any()) else None  # on the CPU: nothing is waited for
        self._length = keep
        self._pointer = self.keys.data_ptr()
        self.window.clear(evicted)
        self.events += 1

    def _compact(self, indices: Tensor, capacity: int) -> None:
        storage = self._storage
        if not self._writable(self.keys):
            self.keys, self.values = compact(self.keys, self.values, indices)
            self._storage = None
            return
        if storage is None or storage[0].shape[-2] != capacity:
            storage = self._allocate(capacity)
        compact(self.keys, self.values, indices, out=storage)
        self._storage = storage
        self._cut(indices.shape[-1])

    def sync(self) -> None:
        """Notice what others did to ``keys`` and ``values``: cut the tail, or put an evicted copy in their place."""
        if not self.is_initialized or self.keys is None:
            return
        held = self.keys.shape[-2] if self.keys.numel() else 0
        if self._storage is not None and self.keys.data_ptr() != self._storage[0].data_ptr():
            self._storage = None
        if held == self._length:
            return
        if held < self._length and self.keys.data_ptr() == self._pointer:  # the tail was cut off
            self.seen -= self._length - held
        elif self.keys.numel():
            batch, heads = self.keys.shape[:2]
            self.kept_positions = torch.full((batch, heads, held), -1, device=self.keys.device)
        self._length = held

    def _writable(self, new: Tensor) -> bool:
        """Whether storage may be written in place: neither for gradients, nor after ``torch.inference_mode()``."""
        stale = self.keys.is_inference() and not torch.is_inference_mode_enabled()
        return not (new.requires_grad or self.keys.requires_grad or stale)

    def _cut(self, length: int) -> None:
        source = self._storage or (self.keys, self.values)
        self.keys, self.values = source[0][:, :, :length], source[1][:, :, :length]

    def _allocate(self, capacity: int) -> tuple[Tensor, Tensor]:
        keys, values = (x.new_empty((*x.shape[:2], capacity, x.shape[-1])) for x in (self.keys, self.values))
        return keys, values

    def _grow(self, capacity: int) -> None:
        """Room for a chunk longer than the interval; the next event goes back to the usual size."""
        grown = self._allocate(capacity)
        for new, old in zip(grown, (self.keys, self.values), strict=True):
            new[:, :, : self._length] = old
        self._storage = grown

    def _map_batch(self, change: Callable[[Tensor], Tensor]) -> None:
        if not self.is_initialized:
            return
        self.sync()
        if self._storage is None:
            self.keys, self.values = change(self.keys), change(self.values)
        else:
            self._storage = (change(self._storage[0]), change(self._storage[1]))
            self._cut(self._length)
        for name in ("left_pad", "start", "kept_positions", "next_position"):
            value = getattr(self, name)
            if value is not None:
                setattr(self, name, change(value))
        self.state = {name: change(value) for name, value in self.state.items()}
        self.window.map(change)


# the default torch.load refuses classes it was not told about
torch.serialization.add_safe_globals([PressLayer, QueryWindow, DynamicCache, DynamicLayer])
