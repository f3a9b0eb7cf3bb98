"""The cache layer over a quantised one: events choose among the dequantised entries, the kept ones are packed again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import QuantizedLayer

from ..kernels import compact
from .cache import PressLayer


class QuantizedPressLayer(PressLayer):
    """What :class:`PressLayer` does, for a layer of ``QuantizedCache`` (quanto or HQQ).

    The newest entries, up to ``residual_length``, stay in full precision in ``keys`` and ``values``; when there are
    more they are packed as a chunk of their own, and never again until an event. Every step dequantises what it
    attends to, as transformers does. Differs from transformers: a new chunk does not quantise the older ones again
    (beams do: what they reorder is packed anew).
    """

    backend: QuantizedLayer

    def _forget(self) -> None:
        super()._forget()
        self._packed: list[tuple[Any, Any]] = []
        self._packed_length = 0

    @classmethod
    def adopt(cls, layer: QuantizedLayer, left_pad: Tensor | None) -> QuantizedPressLayer:
        """Take over what a quantised layer holds."""
        new = cls()
        new.backend = layer
        if layer.is_initialized:
            new._packed = [(layer._quantized_keys, layer._quantized_values)]
            recent = layer.keys.shape[-2] if layer.keys.ndim == 4 else 0
            new.seen = new._length = layer.cumulative_length
            new._packed_length = new.seen - recent
            keys, values = (layer._dequantize(part) for part in new._packed[0])
            new.lazy_initialization(keys, values)
            new.keys, new.values = (layer.keys, layer.values) if recent else (keys[:, :, :0], values[:, :, :0])
        new.left_pad = new.start = left_pad
        return new

    def contents(self) -> tuple[Tensor, Tensor]:
        if not self._packed:
            return self.keys, self.values
        parts = [[self.backend._dequantize(part).to(self.keys.dtype) for part in pair] for pair in self._packed]
        keys = torch.cat([*(pair[0] for pair in parts), self.keys], dim=-2)
        return keys, torch.cat([*(pair[1] for pair in parts), self.values], dim=-2)

    def update(self, key_states: Tensor, value_states: Tensor, cache_kwargs: dict | None = None):
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.keys, self.values = key_states[:, :, :0], value_states[:, :, :0]
        self.keys = torch.cat([self.keys, key_states], dim=-2)
        self.values = torch.cat([self.values, value_states], dim=-2)
        self._count(key_states.shape[-2])
        return self.contents()

    def settle(self) -> None:
        recent = self.keys.shape[-2]
        if recent < max(self.backend.residual_length, 1):
            return
        backend = self.backend
        backend.keys, backend.values = self.keys, self.values  # HQQ reads device and dtype there
        axes = backend.axis_key, backend.axis_value
        pair = [backend._quantize(x.contiguous(), axis=a) for x, a in zip((self.keys, self.values), axes, strict=True)]
        backend.keys = backend.values = None
        self._packed.append((pair[0], pair[1]))
        self._packed_length += recent
        # an empty view would hold the storage of the packed entries
        self.keys, self.values = (x.new_empty((*x.shape[:2], 0, x.shape[-1])) for x in (self.keys, self.values))

    def sync(self) -> None:
        """Nothing: nobody else can reach the packed entries."""

    def _compact(self, indices: Tensor, capacity: int) -> None:
        self._replace(*compact(*self.contents(), indices))

    def _cut(self, length: int) -> None:
        if length < self._packed_length:
            self._replace(*self.contents())
        recent = length - self._packed_length
        self.keys, self.values = self.keys[:, :, :recent], self.values[:, :, :recent]

    def _map_batch(self, change) -> None:
        if self.is_initialized:
            self._replace(*self.contents())
        super()._map_batch(change)

    def _replace(self, keys: Tensor, values: Tensor) -> None:
        """Hold these in full precision, until they settle."""
        self._packed, self._packed_length = [], 0
        self.keys, self.values = keys, values

    def __getstate__(self) -> dict[str, Any]:
        """Copies and files hold dequantised entries: packed tensors of quanto cannot be copied."""
        state = dict(self.__dict__)
        if self.is_initialized:
            state["keys"], state["values"] = self.contents()
        return state | {"_packed": [], "_packed_length": 0}
