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
    """`count` consecutive tokens of the sequence in `slot`, the first at position `start`.

    parents: where they are a tree behind the first: of each its parent's place among them, before its own; -1
    of the first. A token then has the position start + its depth, and sees what is before the span and the
    tokens on its way from the first; their keys and values are one after another all the same.
    """

    slot: int
    start: int
    count: int
    parents: tuple[int, ...] | None = None

    @property
    def end(self) -> int:
        return self.start + self.count

    @property
    def positions(self) -> Sequence[int]:
        if self.parents is None:
            return range(self.start, self.end)
        found: list[int] = []
        for parent in self.parents:
            found.append(self.start if parent < 0 else found[parent] + 1)
        return found

    def seen(self) -> Tensor:
        """Which tokens of a tree see which of them: bool [count, count]."""
        among = torch.eye(self.count, dtype=torch.bool)
        for place, parent in enumerate(self.parents or ()):
            if parent >= 0:
                among[place] |= among[parent]
        return among


def slots_and_positions(spans: Sequence[Span]) -> tuple[Tensor, Tensor]:
    """Of every token of spans that are no trees, in order: [N] and [N]."""
    slots = [span.slot for span in spans for _ in range(span.count)]
    positions = [place for span in spans for place in range(span.start, span.end)]
    return torch.tensor(slots, dtype=torch.int64), torch.tensor(positions, dtype=torch.int64)


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

    def rows(self, slots: Tensor, positions: Tensor) -> Tensor:
        """As `places`, of these positions of these slots, broadcast together."""
        return slots * self.length + positions

    @torch.inference_mode()
    def copy(self, source: int, span: Span) -> None:
        """Copies what slot `source` holds at the span's positions into the span's slot. Positions beyond the
        slot's length are left out."""
        count = min(span.end, self.length) - span.start
        if count > 0:
            read, written = (slot * self.length + span.start for slot in (source, span.slot))
            for kept in (*self.keys, *self.values):
                kept[written : written + count].copy_(kept[read : read + count])

    @torch.inference_mode()
    def keep(self, slots: Sequence[int], starts: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Of what was written from starts[i] on in each slot, the entries at these places come first, in
        their order: ascending ones, from 0 on. What was behind them has no meaning."""
        read: list[int] = []
        written: list[int] = []
        for slot, start, path in zip(slots, starts, paths, strict=True):
            first = slot * self.length + start
            moved = [(first + place, first + to) for to, place in enumerate(path) if place != to]
            read += [place for place, _ in moved]
            written += [place for _, place in moved]
        if read:
            from_rows, to_rows = (torch.tensor(rows, device=self._device) for rows in (read, written))
            for kept in (*self.keys, *self.values):
                kept[to_rows] = kept[from_rows]

    def read(self, layer: int, span: Span) -> tuple[Tensor, Tensor]:
        """Keys and values of the sequence up to the span's end, as views [end, heads, dim]."""
        first = span.slot * self.length
        return self.keys[layer][first : first + span.end], self.values[layer][first : first + span.end]
