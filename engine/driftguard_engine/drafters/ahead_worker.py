"""The second process of `ahead`: drafts for likely outcomes of a verification while the target verifies.

It has the draft model, and memory that it shares with the engine's process: the draft's slot cache, in which
each row has further slots for its outcomes, and logits. What it drafts for an outcome is what the engine
would draft behind the same tokens: by the same passes over the same keys and values, and the same random
numbers.
"""

from __future__ import annotations

import mmap
import pickle
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from math import prod
from multiprocessing.connection import Connection
from types import ModuleType
from typing import IO, Any, NamedTuple, cast

import torch

from driftguard_engine.drafters.draft_model import DraftModelDrafter
from driftguard_engine.kernels.reference.sampling import SamplingBatch
from driftguard_engine.kernels.reference.verify import Rule
from driftguard_engine.kernels.steps import DraftContext, DraftInputs, RowState, SlotState
from driftguard_engine.kv_cache import SlotCache, Span
from driftguard_engine.models.llama import LlamaModel
from driftguard_engine.speculation import ReferenceVerification

READY = "ready"
# Power of the probabilities by which outcomes are chosen: the target's own tokens are nearer to the likeliest
# ones than the draft's law says, so that chances are better spread over how many drafts are accepted.
_SHARPNESS = 3.0


class AheadRow(NamedTuple):
    """A row of the step that is being verified. fresh: nothing was prepared for its request before."""

    slot: int
    fresh: bool
    length: int  # tokens of the sequence
    limit: int  # tokens that it may have
    newest: int  # its last token
    drafts: Sequence[int]  # what is being verified
    sampling: tuple[float, int, float, int]  # temperature, top-k, top-p, seed


class Outcome(NamedTuple):
    """Of row `row` the first `accepted` drafts are accepted; `own` is the target's token behind them."""

    row: int
    accepted: int
    own: int


@dataclass(frozen=True, slots=True)
class Job:
    """acceptance: the part of draft tokens that was accepted so far."""

    number: int
    rows: Sequence[AheadRow]
    acceptance: float


@dataclass(frozen=True, slots=True)
class Settings:
    """slots: of the cache that hold requests; behind them are `outcomes` further ones of each.

    drafts: most of a step. vocabulary: the target's. looks_beyond: the draft's own logits behind all drafts
    say what is likely there; else `Shared.inputs` does.
    """

    slots: int
    outcomes: int
    drafts: int
    vocabulary: int
    rule: Rule
    looks_beyond: bool
    threads: int

    def outcome_slots(self, rows: Sequence[AheadRow], outcomes: Sequence[Outcome]) -> list[int]:
        """The slot of each outcome."""
        taken: dict[int, int] = {}
        found = []
        for outcome in outcomes:
            place = taken[outcome.row] = taken.get(outcome.row, -1) + 1
            found.append(self.slots + rows[outcome.row].slot * self.outcomes + place)
        return found


class Shared:
    """Memory of both processes, which also holds the slot cache.

    inputs [slots, K + 1, V]: logits behind each of a row's drafts, by which outcomes are chosen.
    prepared [slots * outcomes, K, V]: the draft's logits for each outcome.
    """

    def __init__(self, handle: int, settings: Settings, cache: SlotCache) -> None:
        """handle: of a file in memory, which is made large enough. Moves the cache there, empty."""
        slots, drafts, vocabulary = settings.slots, settings.drafts, settings.vocabulary
        parts = [
            ((slots, drafts + 1, vocabulary), torch.float32),
            ((slots * settings.outcomes, drafts, vocabulary), torch.float32),
            *((tuple(each.shape), each.dtype) for each in (*cache.keys, *cache.values)),
        ]
        sizes = [prod(shape) * dtype.itemsize for shape, dtype in parts]
        firsts = [0]
        for size in sizes:
            firsts.append(firsts[-1] + -(-size // mmap.PAGESIZE) * mmap.PAGESIZE)
        with open(handle, "r+b", closefd=False) as file:
            file.truncate(firsts[-1])
        memory = mmap.mmap(handle, firsts[-1])
        tensors = [
            torch.frombuffer(memory, dtype=dtype, count=prod(shape), offset=first).view(shape)
            for (shape, dtype), first in zip(parts, firsts, strict=False)
        ]
        self.inputs, self.prepared, *kept = tensors
        layers = len(cache.keys)
        cache.keys[:], cache.values[:] = kept[:layers], kept[layers:]


def store(model: LlamaModel, file: IO[bytes]) -> None:
    """Writes the model without the memory of its slot cache."""
    _Pickler(file).dump(model)


class _Pickler(pickle.Pickler):
    def reducer_override(self, given: object) -> Any:
        if isinstance(given, ModuleType):
            return import_module, (given.__name__,)
        if isinstance(given, SlotCache):
            layers = zip(given.keys, given.values, strict=True)
            sizes = [(*keys.shape[1:], values.shape[2]) for keys, values in layers]
            return _cache_without_memory, (given.slots, given.length, given.keys[0].dtype, sizes)
        return NotImplemented


def _cache_without_memory(
    slots: int, length: int, dtype: torch.dtype, sizes: Sequence[tuple[int, int, int]]
) -> SlotCache:
    cache = SlotCache(slots, length, torch.device("meta"), dtype)
    for size in sizes:
        cache.add_layer(*size)
    return cache


def main() -> None:
    """The process. Its arguments are file descriptors: of the connection, which gives `Settings` and then one
    `Job` after another; of what `store` wrote; of the memory that is shared."""
    # Ctrl+C, and what systemd sends to all processes, is for the engine, which may finish its requests.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    handle, model_file, memory = (int(each) for each in sys.argv[1:])
    connection = Connection(handle)
    settings = connection.recv()
    torch.set_num_threads(settings.threads)  # as in the engine: bits may depend on it
    with mmap.mmap(model_file, 0, access=mmap.ACCESS_READ) as stored:
        model = pickle.loads(stored)  # noqa: S301 (written by the engine)
    serve(connection, Preparer(model, Shared(memory, settings, model.cache), settings))


def serve(connection: Connection, preparer: Preparer) -> None:
    """Answers each job twice: by the outcomes that it chose, and by its seconds when they are prepared. Until
    the connection ends, as it does with the engine's process, however that ends."""
    try:
        connection.send(READY)
        while True:
            job: Job = connection.recv()
            began = time.perf_counter()
            outcomes = preparer.choose(job)
            connection.send((job.number, outcomes))
            if preparer.prepare(job.rows, outcomes, connection.poll):
                connection.send((job.number, time.perf_counter() - began))
    except (EOFError, OSError):
        return


class _Abandoned(Exception):
    """The next job is there: none of these outcomes came true."""


class _Abandonable(ReferenceVerification):
    abandoned: Callable[[], bool]

    def draw(self, step: int) -> None:
        super().draw(step)
        if self.abandoned():
            raise _Abandoned


class Preparer:
    """Chooses outcomes, and drafts for them."""

    def __init__(self, model: LlamaModel, shared: Shared, settings: Settings) -> None:
        self._model, self._shared, self._settings = model, shared, settings
        self._drafter = DraftModelDrafter(model)
        self._held: dict[
            int, int
        ] = {}  # by slot of an outcome: its first positions that are its row's for good

    @torch.inference_mode()
    def choose(self, job: Job) -> list[Outcome]:
        """The likeliest outcomes of each row behind which it may have drafts."""
        for row in job.rows:
            if row.fresh:
                first = self._first_slot(row)
                for slot in range(first, first + self._settings.outcomes):
                    self._held.pop(slot, None)
        if self._settings.looks_beyond:
            self._look_beyond([row for row in job.rows if self._most(row) > len(row.drafts)])
        return [
            each for index, row in enumerate(job.rows) for each in self._likeliest(index, row, job.acceptance)
        ]

    def _first_slot(self, row: AheadRow) -> int:
        return self._settings.slots + row.slot * self._settings.outcomes

    def _look_beyond(self, rows: Sequence[AheadRow]) -> None:
        spans, last = [], []
        for row in rows:
            slot, end = (
                self._settings.slots + row.slot * self._settings.outcomes,
                row.length + len(row.drafts) - 1,
            )
            self._copy(row, slot, end)
            spans.append(Span(slot, end, 1))
            last.append(self._known(row.drafts[-1]))
        if spans:
            size = min(self._model.vocabulary, self._settings.vocabulary)
            for row, logits in zip(rows, self._model.forward(last, spans), strict=True):
                self._shared.inputs[row.slot, len(row.drafts)].fill_(-torch.inf)[:size] = logits[:size]

    def _most(self, row: AheadRow) -> int:
        """So many numbers of accepted drafts, from 0 on, leave room for a draft behind the target's token."""
        room = min(row.limit - 2, self._model.max_length) - row.length
        return min(len(row.drafts) + 1, room)

    def _likeliest(self, index: int, row: AheadRow, acceptance: float) -> list[Outcome]:
        """An outcome is taken for as likely as `acceptance` makes its number of accepted drafts, times the
        sharpened probability of its token, which is not the draft that was rejected."""
        most, outcomes = self._most(row), self._settings.outcomes
        if most <= 0:
            return []
        p = (self._shared.inputs[row.slot, :most] * _SHARPNESS).softmax(-1)  # [A, V]
        stopped = torch.arange(min(most, len(row.drafts)))
        p[stopped, torch.tensor(row.drafts[:most])] = 0
        chance = acceptance ** torch.arange(most)
        chance[stopped] *= 1 - acceptance
        p *= (chance / p.sum(-1).clamp(min=torch.finfo(p.dtype).tiny))[:, None]
        places = p.flatten().topk(min(outcomes, p.numel())).indices.tolist()
        return [Outcome(index, *divmod(place, p.shape[1])) for place in places]

    @torch.inference_mode()
    def prepare(
        self, rows: Sequence[AheadRow], outcomes: Sequence[Outcome], abandoned: Callable[[], bool]
    ) -> bool:
        """Drafts for outcome i: logits in `prepared`[i], keys and values in its slot. False: abandoned."""
        slots = self._settings.outcome_slots(rows, outcomes)
        if not outcomes:
            return True
        own = [rows[each.row] for each in outcomes]
        lengths, read, counts = [], [], []
        for row, slot, (_, accepted, token) in zip(own, slots, outcomes, strict=True):
            self._copy(row, slot, row.length + accepted - 1)
            lengths.append(row.length + accepted + 1)
            read.append([self._known((row.newest, *row.drafts)[accepted]), self._known(token)])
            counts.append(drafts_behind(row, lengths[-1], self._model.max_length))
        batch, drafts, at = len(outcomes), max(counts), torch.tensor(lengths)
        drafted = torch.tensor(counts, dtype=torch.int32)
        sampling = SamplingBatch.of(*map(torch.tensor, zip(*(row.sampling for row in own), strict=True)))
        verification = _Abandonable(
            sampling, at.numpy(), drafted, drafts, self._settings.vocabulary, self._settings.rule
        )
        verification.abandoned = abandoned
        verification.draft_logits = self._shared.prepared[:batch, :drafts]
        context = DraftContext(self._model.max_length, self._model.vocabulary)
        following = torch.zeros(batch, 1, dtype=torch.int64)
        inputs = DraftInputs(context, torch.tensor(read), 2 * torch.arange(batch) + 1, at - 2, following)
        unread = torch.empty(0)  # by drafting
        state = RowState(
            state=cast("SlotState", None),
            slots=torch.tensor(slots),
            lengths=at,
            seeds=unread,
            scales=unread,
            top_ps=unread,
            top_ks=unread,
            starts=unread,
            drafted=drafted,
            fed=torch.zeros(batch, drafts + 1, dtype=torch.int64),
            draft=inputs,
        )
        try:
            self._drafter.draft(state, verification, None)
        except _Abandoned:
            return False
        return True

    def _copy(self, row: AheadRow, slot: int, end: int) -> None:
        """Keys and values of the row before position `end`. Those from length - 2 on are computed again."""
        first = self._held.get(slot, 0)
        self._model.copy(row.slot, Span(slot, first, end - first))
        self._held[slot] = max(row.length - 2, 0)

    def _known(self, token: int) -> int:
        return token if token < self._model.vocabulary else 0


def drafts_behind(row: AheadRow, length: int, context: int) -> int:
    """How many drafts the row may have when its sequence has `length` tokens, if it is asked for as many."""
    return min(len(row.drafts), row.limit - length - 1, context - length + 1)
