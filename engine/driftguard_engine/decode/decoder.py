"""Decoding on the device, one step ahead of the host."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import product
from weakref import WeakKeyDictionary

import torch

from driftguard_engine.core import InvalidModel
from driftguard_engine.decode.base import RowOutcome
from driftguard_engine.decode.drafting import Drafting, LookupDrafting, ModelDrafting
from driftguard_engine.decode.graphs import Readback, Runners, RunStep
from driftguard_engine.decode.slots import SlotTable
from driftguard_engine.decode.step import Step
from driftguard_engine.decode.verification import (
    KernelVerification,
    ReferenceVerification,
    Shape,
    Verification,
)
from driftguard_engine.drafters.base import Drafter
from driftguard_engine.drafters.draft_model import DraftModelDrafter
from driftguard_engine.drafters.ngram import NgramDrafter
from driftguard_engine.drafters.suffix import SuffixDrafter
from driftguard_engine.kernels.cuda.launcher import Launcher
from driftguard_engine.kernels.verify import MOST_DRAFTS
from driftguard_engine.kv_cache import Span
from driftguard_engine.models.llama import LlamaModel
from driftguard_engine.sequence import RunningSequence

logger = logging.getLogger(__name__)

DRAFTS = (0, 1, 2, 3, 4, 5, 6, 8, 12, 16, 24, MOST_DRAFTS)  # K of a step; a request may be given fewer
_COUNTS = 4  # columns of a step's outputs before the tokens: status, drafted, accepted, emitted


@dataclass(frozen=True, slots=True)
class _Launched:
    rows: list[RunningSequence | None]  # None: it has left
    counts: Sequence[int]  # most draft tokens of each row
    outputs: Readback


class DeviceDecoder:
    """Runs steps of the rows that it is given, and returns the outcome of each when the next one is launched.

    A request that has ended in the meantime runs one step more, which changes nothing.
    """

    def __init__(
        self,
        target: LlamaModel,
        eos_token_ids: Collection[int],
        slots: int,
        most_drafts: int,
        device: torch.device,
        launcher: Launcher | None,
    ) -> None:
        """most_drafts: the largest K that a request may have, <= MOST_DRAFTS.

        launcher: of the CUDA kernels; None: the reference computes, on the CPU only.
        """
        self._target, self._device, self._launcher = target, device, launcher
        self._table = SlotTable(slots, max(target.max_length, MOST_DRAFTS + 1), eos_token_ids, device)
        self._batches = [*(1 << power for power in range((slots - 1).bit_length())), slots]
        self._drafts = DRAFTS[: bisect_left(DRAFTS, most_drafts) + 1]
        self._runners = Runners(device)
        self._plain: dict[Shape, RunStep] = {}
        self._drafted: WeakKeyDictionary[Drafter, dict[Shape, RunStep]] = WeakKeyDictionary()
        self._launched: deque[_Launched] = deque()
        self._unread: dict[str, int] = {}  # by request: tokens read by a draft model that lags behind

    @property
    def capture_failure(self) -> str | None:
        """Why steps of some shape are launched one kernel at a time; None: all are captured."""
        return self._runners.capture_failure

    @property
    def in_flight(self) -> bool:
        """Whether a step has been launched whose outcome was not read yet."""
        return bool(self._launched)

    def shapes(self, drafter: Drafter | None) -> list[Shape]:
        """Of every step that may run with this drafter; each must be prepared before a request gets it."""
        drafts = self._drafts[:1] if drafter is None else self._drafts[1:]
        return [Shape(*each) for each in product(self._batches, drafts, (False, True))]

    def prepare(self, drafter: Drafter | None, shape: Shape) -> None:
        """Makes the step of this shape; on CUDA it is captured, which takes as long as several steps.

        Must not run beside `step`. Raises torch.OutOfMemoryError.
        """
        drafting = self._drafting(drafter)
        step = Step(self._target, self._table, drafting, lambda: self._verification(shape), self._launcher)
        self._steps(drafter)[shape] = self._runners.runner(step, shape.batch)

    def admit(self, row: RunningSequence) -> None:
        """The row will be decoded. Overwrites what its slot held before."""
        params = row.request.params
        limit = min(len(row.token_ids) + params.max_tokens, row.max_length)
        self._table.admit(row.slot, row.token_ids, limit, params)

    def forget(self, row: RunningSequence) -> None:
        """The row has left: drops every reference to it, so that the memory of its draft can be freed."""
        for launched in self._launched:
            launched.rows[:] = [None if each is row else each for each in launched.rows]
        self._unread.pop(row.request.request_id, None)

    def reset(self) -> None:
        """After a failure: waits for no step that was launched."""
        self._launched.clear()

    def step(
        self, rows: Sequence[RunningSequence], draft_counts: Sequence[int]
    ) -> list[tuple[RunningSequence, RowOutcome]]:
        """Launches a step of these rows. Returns the outcomes of the step before."""
        earlier = len(self._launched)
        by_drafter: dict[Drafter | None, tuple[list[RunningSequence], list[int]]] = {}
        for row, count in zip(rows, draft_counts, strict=True):
            together, counts = by_drafter.setdefault(row.draft.drafter, ([], []))
            together.append(row)
            counts.append(count)
        for drafter, (together, counts) in by_drafter.items():
            self._launch(drafter, together, counts)
        return [outcome for _ in range(earlier) for outcome in _outcomes(self._launched.popleft())]

    def _launch(
        self, drafter: Drafter | None, rows: Sequence[RunningSequence], counts: Sequence[int]
    ) -> None:
        drafts = _at_least(self._drafts, max(counts))
        narrows = any(row.request.params.top_k > 0 or row.request.params.top_p < 1 for row in rows)
        shape = Shape(_at_least(self._batches, len(rows)), drafts, narrows)
        if isinstance(drafter, DraftModelDrafter):
            self._catch_up(drafter, rows, drafts > 0)
        filling = shape.batch - len(rows)
        slots = [*(row.slot for row in rows), *[self._table.spare] * filling]
        run = self._steps(drafter if drafts else None)[shape]
        outputs = run([*slots, *counts, *[0] * filling])
        self._launched.append(_Launched([*rows], counts, Readback(outputs)))

    def _catch_up(self, drafter: DraftModelDrafter, rows: Sequence[RunningSequence], drafts: bool) -> None:
        """Lets the draft model read what it has missed in steps without drafts, before it drafts again."""
        for row in rows:
            name, known = row.request.request_id, len(row.token_ids)
            if not drafts:
                self._unread.setdefault(name, max(0, known - 2))
            elif (first := self._unread.pop(name, None)) is not None and first < known:
                drafter.prefill(row.token_ids[first:], [Span(row.slot, first, known - first)])

    def _steps(self, drafter: Drafter | None) -> dict[Shape, RunStep]:
        return self._plain if drafter is None else self._drafted.setdefault(drafter, {})

    def _drafting(self, drafter: Drafter | None) -> Drafting | None:
        if isinstance(drafter, NgramDrafter):
            return LookupDrafting(drafter.min_tokens, drafter.max_tokens, self._launcher)
        if isinstance(drafter, DraftModelDrafter):
            return ModelDrafting(llama_of(drafter), self._launcher)
        return None

    def _verification(self, shape: Shape) -> Verification:
        if self._launcher is None:
            return ReferenceVerification(shape, self._target.vocabulary)
        return KernelVerification(
            self._launcher, shape, self._target.vocabulary, self._target.dtype, self._device
        )


def _at_least(sizes: Sequence[int], least: int) -> int:
    """The smallest of the ascending sizes that is not below `least`."""
    return sizes[bisect_left(sizes, least)]


def _outcomes(launched: _Launched) -> list[tuple[RunningSequence, RowOutcome]]:
    outputs = launched.outputs.wait()
    given = zip(launched.rows, launched.counts, outputs, strict=False)  # further outputs are of filling rows
    return [(row, _outcome(row, count, each)) for row, count, each in given if row is not None]


def _outcome(row: RunningSequence, count: int, outputs: Sequence[int]) -> RowOutcome:
    status, drafted, accepted, emitted = outputs[:_COUNTS]
    if status:
        return RowOutcome([], 0, 0, "the model gave no usable logits: NaN, +inf, or nothing above -inf")
    drafter = row.draft.drafter
    if emitted and isinstance(drafter, DraftModelDrafter):
        expected = min(count, row.draft_count, drafter.most_drafts(len(row.token_ids)))
        if drafted < expected:
            # The target needs no draft: the request goes on with what is usable.
            logger.error("the draft gives no usable logits: %d of %d drafts", drafted, expected)
    return RowOutcome(list(outputs[_COUNTS : _COUNTS + emitted]), drafted, accepted)


def check_drafter(drafter: Drafter | None) -> None:
    """Raises InvalidModel where it cannot draft inside a step on the device."""
    if isinstance(drafter, DraftModelDrafter):
        llama_of(drafter)
    if isinstance(drafter, SuffixDrafter):
        raise InvalidModel(
            "draft: suffix lookup reads the outcome of each step on the host, which the device loop does not "
            "wait for; start the engine with loop = 'host' to serve it",
            field="draft",
        )


def llama_of(drafter: DraftModelDrafter) -> LlamaModel:
    """The drafter's model. Raises InvalidModel where it does not run on the lean path."""
    if not isinstance(drafter.model, LlamaModel):
        raise InvalidModel(
            f"draft: a model of its shape runs on the {drafter.model.path} path only, which the device loop "
            "cannot use; start the engine with loop = 'host' to serve it",
            field="draft",
        )
    return drafter.model
