"""The keys and values of all tokens on the host, what attention reads of them on the device."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from .scorers import require, require_int

Pair = tuple[Tensor, Tensor]


class HostMemoryError(MemoryError):
    """The host has no room for what was asked; the store is as it was before the call."""


@dataclass
class Traffic:
    """What moved between the tiers: bytes up to the device, bytes down to the host, and how often a fetch found a copy
    it needs still under way (the write of its layer's last tokens, or its own prefetch)."""

    bytes_up: int = 0
    bytes_down: int = 0
    waits: int = 0


class HostLayer:
    """One layer's tokens: keys and values in chunks (chunk_size, B, H, D). Position first, so that a run of tokens is
    one block of memory: no other could be copied beside the computation."""

    def __init__(self) -> None:
        self.length = 0
        self.chunks: tuple[list[Tensor], list[Tensor]] = ([], [])


class TieredStore:
    """The full KV of a batch on the host, in chunks that growth never moves; entries are fetched to the device.

    On CUDA host memory is pinned, and ``append`` and ``prefetch`` copy on streams of their own; elsewhere copies are
    plain. ``copy``, ``deepcopy`` and ``torch.save`` take tokens and counters along and share nothing.

    Parameters
    ----------
    layers : int
        Layers to hold.
    device : torch.device or str
        Where keys and values come from and go to.
    chunk_size : int, default 1024
        Tokens by which a layer's host memory grows.
    max_host_bytes : int, optional
        Most bytes of chunks to hold; the staging buffers, four of about the largest fetch, come on top. Default: no
        limit.

    Attributes
    ----------
    traffic : Traffic
        Counters since the start.

    Raises
    ------
    ValueError
        If a number is out of range.
    """

    def __init__(
        self, layers: int, *, device: torch.device | str, chunk_size: int = 1024, max_host_bytes: int | None = None
    ) -> None:
        require_int("layers", layers, 1)
        require_int("chunk_size", chunk_size, 1)
        if max_host_bytes is not None:
            require_int("max_host_bytes", max_host_bytes, 0)
        self.device = torch.empty(0, device=device).device  # with its index
        self.chunk_size = chunk_size
        self.max_host_bytes = max_host_bytes
        self.traffic = Traffic()
        self._layers = [HostLayer() for _ in range(layers)]
        self._reset_copies()

    def _reset_copies(self) -> None:
        self._cuda = self.device.type == "cuda" and torch.cuda.is_available()  # a saved store may be loaded elsewhere
        self._streams = [torch.cuda.Stream(self.device) for _ in range(2)] if self._cuda else []  # down, up
        self._written: dict[int, Any] = {}  # per layer, the event of its last write
        self._prefetched: dict[int, tuple[Tensor, Pair, Any]] = {}  # per layer: indices, result, event
        # Buffers and the events of their last copies: keys and values of two layers, one gathers while one is copied.
        self._staging: list[tuple[Tensor | None, Any]] = [(None, None)] * 4

    def length(self, layer: int) -> int:
        """Tokens that ``layer`` holds."""
        return self._layer(layer).length

    def host_bytes(self) -> int:
        """Bytes of all chunks, room for tokens to come included."""
        return sum(chunk.nbytes for chunks in self._lists() for chunk in chunks)

    def used_host_bytes(self) -> int:
        """Bytes of the tokens held."""
        return sum(host.length * chunks[0][0].nbytes for host in self._layers for chunks in host.chunks if chunks)

    @torch.no_grad()
    def append(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write new tokens behind: the copy may still run on return, and the sources may be overwritten at once.

        Parameters
        ----------
        layer : int
            The layer they belong to.
        keys, values : Tensor
            (B, H, q, D) on the device, q at least 1; the head sizes of keys and values may differ.

        Raises
        ------
        ValueError
            If shape, type or device is not that of the tokens before.
        HostMemoryError
            If the host has no room for another chunk.
        """
        host = self._layer(layer)
        for name, new, chunks in zip(("keys", "values"), (keys, values), host.chunks, strict=True):
            got = tuple(new.shape), new.dtype, new.device
            ok, allowed = new.ndim == 4 and 0 not in new.shape and new.device == self.device, "(B, H, q, D), q > 0,"
            if chunks:
                batch, heads, size = chunks[0].shape[1:]
                ok = ok and (new.shape[0], *new.shape[1::2], new.dtype) == (batch, heads, size, chunks[0].dtype)
                allowed = f"({batch}, {heads}, q, {size}), q > 0, {chunks[0].dtype}"
            require(name, got, ok, f"{allowed} on {self.device}")
        require("values", tuple(values.shape), values.shape[:3] == keys.shape[:3], f"B, H, q of {tuple(keys.shape)}")
        require("keys", len(keys), self._batch() in (0, len(keys)), f"B of the other layers, {self._batch()}")

        # (q, B, H, D); on CUDA a copy that is ours, since the stream that reads it runs behind the caller
        sources = [x.detach().permute(2, 0, 1, 3) for x in (keys, values)]
        if self._cuda:
            sources = [x.clone(memory_format=torch.contiguous_format) for x in sources]
        first, stop, size = host.length, host.length + keys.shape[2], self.chunk_size
        missing = -(-stop // size) - len(host.chunks[0])
        fresh = self._reserve([((size, *x.shape[1:]), x.dtype) for x in sources for _ in range(missing)])
        grown = host.chunks[0] + fresh[:missing], host.chunks[1] + fresh[missing:]
        pieces = []
        for chunks, source in zip(grown, sources, strict=True):
            for number in range(first // size, -(-stop // size)):
                start = number * size
                low, high = max(first, start), min(stop, start + size)
                pieces.append((chunks[number][low - start : high - start], source[low - first : high - first]))
        self._copy_down(layer, pieces)
        host.chunks, host.length = grown, stop
        self.traffic.bytes_down += keys.nbytes + values.nbytes

    @torch.no_grad()
    def fetch(self, layer: int, indices: Tensor, out: Pair | None = None) -> Pair:
        """Entries of ``layer`` on the device, bit for bit what was appended.

        Parameters
        ----------
        layer : int
            The layer to read.
        indices : Tensor
            int64 (B, n), or (n,) for all rows, on the CPU: positions of the batch's common axis, each row ascending.
            Repeats are fine: pad shorter rows in front with 0 or with their first position, and mask that.
        out : pair of Tensor, optional
            Keys and values (B, H, n, D) to fill, of any strides.

        Returns
        -------
        pair of Tensor
            Keys and values (B, H, n, D): ``out``, or new ones.

        Raises
        ------
        ValueError
            If indices are out of range or not ascending, or ``out`` does not fit.
        HostMemoryError
            If the host has no room for a staging buffer.
        """
        indices = self._checked(layer, indices, out)
        pending = self._prefetched.pop(layer, None)
        if pending is None or not torch.equal(pending[0], indices):
            return self._gather(layer, indices, out)
        _, result, ready = pending
        self.traffic.waits += not ready.query()
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(ready)
        for x in result:
            x.record_stream(stream)
        if out is None:
            return result
        for target, x in zip(out, result, strict=True):
            target.copy_(x)
        return out

    @torch.no_grad()
    def prefetch(self, layer: int, indices: Tensor) -> None:
        """Start now what the next ``fetch`` of this layer and these indices returns; without CUDA only check them."""
        indices = self._checked(layer, indices)
        if self._cuda:
            with torch.cuda.stream(self._streams[1]):
                result = self._gather(layer, indices, None)
            self._prefetched[layer] = indices.clone(), result, self._streams[1].record_event()

    def truncate(self, length: int) -> None:
        """Forget in every layer the tokens from ``length`` on, and release the chunks that only they used."""
        require_int("length", length, 0)
        self._settle()
        for host in self._layers:
            host.length = min(host.length, length)
            for chunks in host.chunks:
                del chunks[-(-host.length // self.chunk_size) :]

    @torch.no_grad()
    def reorder(self, index: Tensor) -> None:
        """Make row i what row ``index[i]`` was, as beams do. For another number of rows both copies need room.

        Parameters
        ----------
        index : Tensor
            Integers (new B,), on any device.

        Raises
        ------
        ValueError
            If an index is no row.
        HostMemoryError
            If the host has no room for the new rows.
        """
        index = index.to("cpu", torch.int64)  # the rows lie on the host, and so must the numbers that choose them
        batch = self._batch()
        if not batch or torch.equal(index, torch.arange(batch)):
            return
        ok = index.ndim == 1 and len(index) > 0 and bool(((index >= 0) & (index < batch)).all())
        require("index", index, ok, f"(rows,), each 0 to {batch - 1}")
        self._settle()
        old = [chunk for chunks in self._lists() for chunk in chunks]
        if len(index) == batch:
            scratch = self._stage(max(chunk.nbytes for chunk in old))
            for chunk in old:
                part = scratch[: chunk.nbytes].view(chunk.dtype).view(chunk.shape)
                chunk.copy_(torch.index_select(chunk, 1, index, out=part))
            return
        new = iter(self._reserve([((x.shape[0], len(index), *x.shape[2:]), x.dtype) for x in old]))
        for chunks in self._lists():
            chunks[:] = [torch.index_select(chunk, 1, index, out=next(new)) for chunk in chunks]

    def free(self) -> None:
        """Forget all tokens and release all memory; the counters stay."""
        self.truncate(0)
        self._reset_copies()

    # -- host ----------------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        self._settle()
        kept = ("device", "chunk_size", "max_host_bytes", "traffic", "_layers")
        return {name: self.__dict__[name] for name in kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reset_copies()
        for chunks in self._lists():  # pinned again, and to be written in any mode whichever they were made in
            new = self._reserve([(tuple(chunk.shape), chunk.dtype) for chunk in chunks], limited=False)
            chunks[:] = [target.copy_(chunk) for target, chunk in zip(new, chunks, strict=True)]

    def __copy__(self) -> TieredStore:
        return deepcopy(self)

    def _layer(self, layer: int) -> HostLayer:
        require("layer", layer, isinstance(layer, int) and 0 <= layer < len(self._layers), f"below {len(self._layers)}")
        return self._layers[layer]

    def _lists(self) -> list[list[Tensor]]:
        return [chunks for host in self._layers for chunks in host.chunks]

    def _batch(self) -> int:
        return next((chunks[0].shape[1] for chunks in self._lists() if chunks), 0)

    def _reserve(self, wanted: list[tuple[tuple[int, ...], torch.dtype]], limited: bool = True) -> list[Tensor]:
        """Host memory for all shapes, or ``HostMemoryError`` and none."""
        asked = sum(prod(shape) * dtype.itemsize for shape, dtype in wanted)
        held, limit = self.host_bytes(), self.max_host_bytes
        message = f"host memory: asked for {asked} bytes, held {held} bytes, limit {limit} bytes"
        if limited and asked and limit is not None and held + asked > limit:
            raise HostMemoryError(message)
        try:
            with torch.inference_mode(False):  # memory that may be written in any mode
                return [torch.empty(s, dtype=d, device="cpu", pin_memory=self._cuda) for s, d in wanted]
        except (RuntimeError, MemoryError) as error:
            raise HostMemoryError(message) from error

    def _checked(self, layer: int, indices: Tensor, out: Pair | None = None) -> Tensor:
        """Indices as (B, n). They lie on the CPU: looking at them waits for nothing."""
        length, batch = self.length(layer), self._batch()
        require("layer", layer, length > 0, "layers that hold tokens")
        got = tuple(indices.shape), indices.dtype, indices.device.type
        ok = got[1:] == (torch.int64, "cpu") and (indices.ndim == 1 or (indices.ndim == 2 and len(indices) == batch))
        require("indices", got, ok, f"int64 (n,) or ({batch}, n) on the CPU")
        indices = indices.expand(batch, -1).contiguous()
        if indices.numel():
            require("indices", "falling ones", bool((indices.diff(dim=-1) >= 0).all()), "ascending rows")
            low, high = int(indices[:, 0].min()), int(indices[:, -1].max())
            require("indices", (low, high), low >= 0 and high < length, f"0 to {length - 1}")
        for x, chunks in zip(out, self._layer(layer).chunks, strict=True) if out is not None else ():
            kind, allowed = (tuple(x.shape), x.dtype, x.device), (_shape(chunks, indices), chunks[0].dtype, self.device)
            require("out", kind, kind == allowed, f"{allowed}")
        return indices

    # -- between the tiers ---------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Before host memory changes: wait for every write, and forget what was fetched ahead."""
        for event in self._written.values():
            event.synchronize()
        self._written.clear()
        self._prefetched.clear()

    def _stage(self, size: int) -> Tensor:
        """The buffer whose last copy is the oldest, of at least ``size`` bytes, moved to the end of the line."""
        buffer, copied = self._staging[0]
        if copied is not None:
            copied.synchronize()
        if buffer is None or len(buffer) < size:  # to a power of two, as active sets grow token by token
            buffer = self._reserve([((1 << (size - 1).bit_length(),), torch.uint8)], limited=False)[0]
        self._staging = [*self._staging[1:], (buffer, None)]
        return buffer

    def _copy_down(self, layer: int, pieces: list[Pair]) -> None:
        if not self._cuda:
            for target, source in pieces:
                target.copy_(source)
            return
        stream = self._streams[0]
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            for target, source in pieces:
                target.copy_(source, non_blocking=True)
                source.record_stream(stream)
        self._written[layer] = stream.record_event()

    def _gather(self, layer: int, indices: Tensor, out: Pair | None) -> Pair:
        """Entries of one layer, copied up on the current stream."""
        written = self._written.pop(layer, None)
        if written is not None:
            self.traffic.waits += not written.query()
            written.synchronize()
        keys, values = self._layers[layer].chunks
        if out is None:
            new = [x[0].new_empty(_shape(x, indices), device=self.device) for x in (keys, values)]
            out = new[0], new[1]
        bounds = torch.arange(len(keys) + 1).mul(self.chunk_size).repeat(len(indices), 1)
        cuts = torch.searchsorted(indices, bounds).tolist()  # (B, chunks + 1), on the CPU already
        for chunks, target in zip((keys, values), out, strict=True):
            if target.numel():
                self._copy_up(chunks, indices, cuts, target)
                self.traffic.bytes_up += target.nbytes
        return out

    def _copy_up(self, chunks: list[Tensor], indices: Tensor, cuts: list[list[int]], target: Tensor) -> None:
        batch, heads, n, size = target.shape
        gathered = self._stage(target.nbytes)[: target.nbytes].view(target.dtype).view(batch, n, heads * size)
        for row in range(batch):
            for number, chunk in enumerate(chunks):
                low, high = cuts[row][number : number + 2]
                if low < high:  # a chunk as (chunk_size * B, H * D): a row's positions are B entries apart
                    entries = (indices[row, low:high] - number * self.chunk_size) * batch + row
                    torch.index_select(chunk.view(-1, heads * size), 0, entries, out=gathered[row, low:high])
        lifted = gathered.to(self.device, non_blocking=self._cuda)
        target.copy_(lifted.view(batch, n, heads, size).transpose(1, 2))
        if self._cuda:
            self._staging[-1] = self._staging[-1][0], torch.cuda.current_stream(self.device).record_event()


def _shape(chunks: list[Tensor], indices: Tensor) -> tuple[int, ...]:
    """(B, H, n, D) of what ``indices`` (B, n) fetch."""
    return len(indices), chunks[0].shape[2], indices.shape[1], chunks[0].shape[3]


def analytic_saving(
    prompt: int, generated: int, consensus: int, detail_length: float, voted: int, summary_length: float, window: int
) -> float:
    """Full cache over ZoomR's active set, ``(Np + Ng) / (Np + c LR + (|I_all| - c) LS + Nw)``; c is at most |I_all|.

    Parameters
    ----------
    prompt, generated, window : int
        Tokens of the prompt, generated since, and always kept at the end: Np, Ng, Nw.
    consensus, voted : int
        Summaries whose details are read, and summaries voted for in all: c, |I_all|.
    detail_length, summary_length : float
        Mean tokens of a summary's details and of a summary: LR, LS.

    Raises
    ------
    ValueError
        If a number is negative, or no token would be active.
    """
    for name, value in list(locals().items()):
        require(name, value, value >= 0, "at least 0")
    zoomed = min(consensus, voted)
    active = prompt + zoomed * detail_length + (voted - zoomed) * summary_length + window
    require("active tokens", active, active > 0, "more than 0")
    return (prompt + generated) / active


# the default torch.load refuses classes it was not told about
torch.serialization.add_safe_globals([TieredStore, HostLayer, Traffic])
