"""Slots of keys and values: one per running sequence, as long as the context.

Rejected tokens leave stale entries beyond the sequence's length. Nothing is rolled back: attention never
reads beyond the sequence, and the next tokens overwrite these entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Span:
    """`count` consecutive tokens of the sequence in `slot`, the first at position `start`."""

    slot: int
    start: int
    count: int

    @property
    def end(self) -> int:
        return self.start + self.count


class SlotCache:
    """Keys and values of every layer, each [slots * length, heads, dim], zero at first."""

    def __init__(self, slots: int, length: int, device: torch.device, dtype: torch.dtype) -> None:
        self.slots = slots
        self.length = length
        self._device = device
        self._dtype = dtype
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []

    def add_layer(self, heads: int, key_dim: int, value_dim: int) -> None:
        for kept, dim in ((self.keys, key_dim), (self.values, value_dim)):
            kept.append(
                torch.zeros(self.slots * self.length, heads, dim, device=self._device, dtype=self._dtype)
            )

    def places(self, spans: Sequence[Span]) -> list[int]:
        """Row in `keys[layer]` of every token of the spans, in order."""
        return [
            row
            for span in spans
            for row in range(span.slot * self.length + span.start, span.slot * self.length + span.end)
        ]

    @torch.inference_mode()
    def copy(self, source: int, span: Span) -> None:
        """Copies what slot `source` holds at the span's positions into the span's slot. Positions beyond the
        slot's length are left out."""
        count = min(span.end, self.length) - span.start
        if count > 0:
            read, written = (slot * self.length + span.start for slot in (source, span.slot))
            for kept in (*self.keys, *self.values):
                kept[written : written + count].copy_(kept[read : read + count])

    def read(self, layer: int, span: Span) -> tuple[Tensor, Tensor]:
        """Keys and values of the sequence up to the span's end, as views [end, heads, dim]."""
        first = span.slot * self.length
        return self.keys[layer][first : first + span.end], self.values[layer][first : first + span.end]
