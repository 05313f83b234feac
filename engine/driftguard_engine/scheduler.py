"""Which requests run: free slots in order of arrival, prompts in chunks. Plain Python, no tensors."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from driftguard_engine.prefix_cache import PrefixCache


@dataclass(frozen=True, slots=True)
class Admission:
    """A waiting request gets a slot."""

    request_id: str
    slot: int


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Prompt tokens start .. start + count - 1 of a request are read in this step. is_block: others may go on
    behind them."""

    request_id: str
    start: int
    count: int
    is_block: bool = False


@dataclass(frozen=True, slots=True)
class ReusedPrefix:
    """Prompt tokens start .. start + count - 1 of a request are in slot `source`, perhaps its own."""

    request_id: str
    source: int
    start: int
    count: int


@dataclass(frozen=True, slots=True)
class Schedule:
    """One step: copies the prefixes in order, prefills the chunks, verifies once per request in `decode`."""

    reused: tuple[ReusedPrefix, ...]
    prefill: tuple[PrefillChunk, ...]
    decode: tuple[str, ...]


@dataclass(slots=True)
class _Running:
    slot: int
    prefill_tokens: int
    blocks: Sequence[bytes]
    caches: Sequence[PrefixCache] = ()
    prefilled: int = 0


class Scheduler:
    """Slots, the queue, and how far each prompt has been read.

    A prompt is read in chunks of `chunk_tokens`, so its shapes depend on its own length alone. One step reads
    at most `chunk_tokens` prompt tokens, of one or several requests: long prompts do not stall decoding.

    Chunks that a slot already holds, from a running request or an earlier one, are not read again.
    """

    def __init__(self, slots: int, chunk_tokens: int) -> None:
        self.kept = PrefixCache()  # of the target's cache
        self._free = list(range(slots))  # the least recently used first
        self._chunk_tokens = chunk_tokens
        self._waiting: deque[tuple[str, int, Sequence[bytes]]] = deque()
        self._running: dict[str, _Running] = {}  # in order of admission
        self._alone: str | None = None  # waits for a step without others, or has it

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._running)

    def enqueue(self, request_id: str, prefill_tokens: int, blocks: Sequence[bytes] = ()) -> None:
        """prefill_tokens: how much of the prompt is read before decoding starts. blocks: of `chunk_tokens`
        each, as `blocks_of` names them; none: nothing is reused for it, nor of it."""
        self._waiting.append((request_id, prefill_tokens, blocks))

    def enqueue_alone(self, request_id: str, prefill_tokens: int) -> None:
        """Before all others and beside none: nothing else is admitted until it is removed."""
        self._waiting.appendleft((request_id, prefill_tokens, ()))
        self._alone = request_id

    def admit(self) -> list[Admission]:
        """Moves waiting requests into free slots; `begin` must follow for each."""
        admitted: list[Admission] = []
        most = len(self._free) if self._alone is None else 0 if self._running else 1
        while self._waiting and len(admitted) < most:
            request_id, prefill_tokens, blocks = self._waiting.popleft()
            slot = self._choose(blocks)
            self._free.remove(slot)
            self._running[request_id] = _Running(slot, prefill_tokens, blocks)
            admitted.append(Admission(request_id, slot))
        return admitted

    def _choose(self, blocks: Sequence[bytes]) -> int:
        """The slot whose content this prompt continues; else an empty one, else the least recently used.

        A slot that shares only a part keeps its content: copying the shared part is cheap, computing the rest
        again is not.
        """

        def worth(slot: int) -> tuple[int, int]:
            held = self.kept.held(slot)
            if not held:
                return 0, -slot
            goes_on = len(held) <= len(blocks) and held[-1] == blocks[len(held) - 1]
            return (len(held) if goes_on else -1), 0

        return max(self._free, key=worth)

    def begin(self, request_id: str, draft: PrefixCache | None) -> None:
        """draft: what is held in the cache of the request's drafter; None: it has no drafter."""
        running = self._running[request_id]
        running.caches = [self.kept] if draft is None else [self.kept, draft]
        for cache in running.caches:
            cache.begin(running.slot, running.blocks)

    def plan(self) -> Schedule:
        """The next step. Its chunks count as read: a request whose last chunk is in it decodes in it too."""
        chunks: list[PrefillChunk] = []
        reused: list[ReusedPrefix] = []
        budget = self._chunk_tokens
        for request_id, running in self._running.items():
            reused.extend(self._reuse(request_id, running))
            count = min(self._chunk_tokens, running.prefill_tokens - running.prefilled)
            if count == 0:
                continue
            if count > budget:
                break  # a later, shorter prompt must not overtake
            is_block = running.prefilled // self._chunk_tokens < len(running.blocks)
            chunks.append(PrefillChunk(request_id, running.prefilled, count, is_block))
            running.prefilled += count
            budget -= count
        for chunk in chunks:  # last: chunks of this step cannot be copied in it
            self._hold(self._running[chunk.request_id], chunk.start // self._chunk_tokens)
        decode = tuple(name for name, each in self._running.items() if each.prefilled == each.prefill_tokens)
        return Schedule(tuple(reused), tuple(chunks), decode)

    def _reuse(self, request_id: str, running: _Running) -> Iterator[ReusedPrefix]:
        """The next blocks of its prompt, as far as some slot holds them in all its caches."""
        sources: list[int] = []
        for block in running.blocks[running.prefilled // self._chunk_tokens :]:
            slots = frozenset.intersection(*(cache.slots(block) for cache in running.caches))
            if not slots:
                break
            sources.append(running.slot if running.slot in slots else min(slots))
        while sources:
            last = running.blocks[running.prefilled // self._chunk_tokens + len(sources) - 1]
            if ends := frozenset.intersection(*(cache.ends(last) for cache in running.caches)):
                sources[-1] = running.slot if running.slot in ends else min(ends)
                break
            sources.pop()
        for source, together in groupby(sources):
            start = running.prefilled
            for _ in together:
                self._hold(running, running.prefilled // self._chunk_tokens)
                running.prefilled += self._chunk_tokens
            yield ReusedPrefix(request_id, source, start, running.prefilled - start)

    @staticmethod
    def _hold(running: _Running, index: int) -> None:
        if index < len(running.blocks):
            for cache in running.caches:
                cache.hold(running.slot, index, running.blocks[index])

    def remove(self, request_id: str) -> None:
        """The request has ended or was aborted, running or waiting; its slot is free again."""
        if request_id == self._alone:
            self._alone = None
        running = self._running.pop(request_id, None)
        if running is not None:
            self._free.append(running.slot)
            return
        self._waiting = deque(entry for entry in self._waiting if entry[0] != request_id)
