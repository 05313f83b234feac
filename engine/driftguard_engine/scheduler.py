"""Who runs next: first come, first served into free slots, prompts in chunks. Plain Python, no tensors."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Admission:
    """A waiting request gets a slot."""

    request_id: str
    slot: int


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Prompt tokens start .. start + count - 1 of a request are read in this step."""

    request_id: str
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: prefill these chunks, then one verification for each request in `decode`."""

    prefill: tuple[PrefillChunk, ...]
    decode: tuple[str, ...]


@dataclass(slots=True)
class _Running:
    slot: int
    prefill_tokens: int
    prefilled: int = 0


class Scheduler:
    """Slots, the queue, and how far each prompt has been read.

    A prompt is read in chunks of `chunk_tokens`, so its shapes depend on its own length alone. One step reads
    at most `chunk_tokens` prompt tokens, of one or several requests: long prompts do not stall decoding.
    """

    def __init__(self, slots: int, chunk_tokens: int) -> None:
        self._free = list(range(slots))
        self._chunk_tokens = chunk_tokens
        self._waiting: deque[tuple[str, int]] = deque()
        self._running: dict[str, _Running] = {}  # in order of admission

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    def enqueue(self, request_id: str, prefill_tokens: int) -> None:
        """prefill_tokens: how much of the prompt is read before decoding starts."""
        self._waiting.append((request_id, prefill_tokens))

    def admit(self) -> list[Admission]:
        """Moves waiting requests into free slots, the lowest slot first."""
        admitted = []
        while self._waiting and self._free:
            request_id, prefill_tokens = self._waiting.popleft()
            slot = heapq.heappop(self._free)
            self._running[request_id] = _Running(slot, prefill_tokens)
            admitted.append(Admission(request_id, slot))
        return admitted

    def plan(self) -> StepPlan:
        """What this step does. Its chunks count as read: a request whose last chunk is here decodes too."""
        chunks: list[PrefillChunk] = []
        budget = self._chunk_tokens
        for request_id, running in self._running.items():
            count = min(self._chunk_tokens, running.prefill_tokens - running.prefilled)
            if count == 0:
                continue
            if count > budget:
                break  # a later, shorter prompt must not overtake
            chunks.append(PrefillChunk(request_id, running.prefilled, count))
            running.prefilled += count
            budget -= count
        decode = tuple(name for name, each in self._running.items() if each.prefilled == each.prefill_tokens)
        return StepPlan(tuple(chunks), decode)

    def remove(self, request_id: str) -> None:
        """The request has ended or was aborted, running or waiting; its slot is free again."""
        running = self._running.pop(request_id, None)
        if running is not None:
            heapq.heappush(self._free, running.slot)
            return
        self._waiting = deque(entry for entry in self._waiting if entry[0] != request_id)
