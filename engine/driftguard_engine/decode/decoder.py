"""Runs decoding steps: on a GPU one step ahead of the host, else with the outcome at once."""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import product
from typing import cast
from weakref import WeakKeyDictionary, proxy

import torch

from driftguard_engine.decode.graphs import Readback, Runners, RunStep
from driftguard_engine.decode.slots import SlotTable
from driftguard_engine.decode.step import Shape, Step
from driftguard_engine.drafters.base import Drafter
from driftguard_engine.kernels.cuda.launcher import Launcher
from driftguard_engine.kernels.reference.verify import Rule
from driftguard_engine.kernels.verify import MOST_DRAFTS
from driftguard_engine.kv_cache import Span
from driftguard_engine.models.base import TokenModel
from driftguard_engine.sequence import RunningSequence

logger = logging.getLogger(__name__)

DRAFTS = (0, 1, 2, 3, 4, 5, 6, 8, 12, 16, 24, MOST_DRAFTS)  # K of a step; a request may be given fewer
_COUNTS = 4  # columns of a step's outputs before the tokens: status, drafted, accepted, emitted


@dataclass(frozen=True, slots=True)
class RowOutcome:
    """The outcome of one verification for one sequence: accepted + 1 tokens, or why there are none."""

    emitted: list[int]
    drafted: int
    accepted: int
    error: str | None = None


@dataclass(frozen=True, slots=True)
class _Launched:
    rows: list[RunningSequence | None]  # None: it has left
    counts: Sequence[int]  # most draft tokens of each row
    outputs: Readback


class Decoder:
    """Runs one verification per step for each row that it is given.

    Ahead of the host, it returns the outcomes of each step when the next one is launched: a request that has
    ended in the meantime runs one step more, which changes nothing. Steps then have prepared shapes, padded
    with rows of the spare slot; else their rows and drafts are those that are asked for.
    """

    def __init__(
        self,
        target: TokenModel,
        eos_token_ids: Collection[int],
        slots: int,
        most_drafts: int,
        device: torch.device,
        launcher: Launcher | None,
        *,
        ahead: bool,
        rule: Rule = "token",
    ) -> None:
        """most_drafts: the largest K that a request may have; by kernels or ahead <= MOST_DRAFTS.

        launcher: of the CUDA kernels; None: the reference verifies, and the state is on the CPU.
        """
        self._target, self._launcher, self._ahead = target, launcher, ahead
        self._rule: Rule = rule
        state = torch.device("cpu") if launcher is None else device
        self._table = SlotTable(slots, max(target.max_length, MOST_DRAFTS + 1), eos_token_ids, state)
        self._batches = [*(1 << power for power in range((slots - 1).bit_length())), slots]
        self._drafts = DRAFTS[: bisect_left(DRAFTS, most_drafts) + 1]
        self._runners = Runners(state)
        self._plain: dict[Shape, RunStep] = {}
        self._drafted: WeakKeyDictionary[Drafter, dict[Shape, RunStep]] = WeakKeyDictionary()
        self._launched: deque[_Launched] = deque()
        self._unread: dict[str, int] = {}  # by request: tokens read by a drafter that lags behind

    @property
    def capture_failure(self) -> str | None:
        """Why steps of some shape are launched one kernel at a time; None: all are captured."""
        return self._runners.capture_failure

    @property
    def in_flight(self) -> bool:
        """Whether a step has been launched whose outcome was not read yet."""
        return bool(self._launched)

    def shapes(self, drafter: Drafter | None) -> list[Shape]:
        """Of the steps with this drafter that must be prepared before a request gets it."""
        if not self._is_prepared(drafter):
            return []
        drafts = self._drafts[:1]
        if drafter is not None:  # one that reads features is told of steps without drafts too
            drafts = self._drafts[0 if drafter.features else 1 :]
        return [Shape(*each) for each in product(self._batches, drafts, (False, True))]

    def prepare(self, drafter: Drafter | None, shape: Shape) -> None:
        """Makes the step of this shape; on CUDA it is captured, which takes as long as several steps.

        Must not run beside `step`. Raises torch.OutOfMemoryError.
        """
        # Its steps go with it, and do not hold it.
        own = None if drafter is None else cast("Drafter", proxy(drafter))
        step = Step(self._target, self._table, own, shape, self._launcher, self._rule)
        self._steps(drafter)[shape] = self._runners.runner(step)

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
        if row.draft.drafter is not None:
            row.draft.drafter.forget(row.slot)

    def reset(self) -> None:
        """After a failure: waits for no step that was launched."""
        self._launched.clear()

    def step(
        self, rows: Sequence[RunningSequence], draft_counts: Sequence[int]
    ) -> list[tuple[RunningSequence, RowOutcome]]:
        """Decodes these rows with the given numbers of draft tokens, each at most the row's `draft_count`.

        Returns the outcomes of this step, or of the one before, for rows that have not left.
        """
        due = len(self._launched)
        by_drafter: dict[Drafter | None, tuple[list[RunningSequence], list[int]]] = {}
        for row, count in zip(rows, draft_counts, strict=True):
            together, counts = by_drafter.setdefault(row.draft.drafter, ([], []))
            together.append(row)
            counts.append(count)
        for drafter, (together, counts) in by_drafter.items():
            self._launch(drafter, together, counts)
        if not self._ahead:
            due = len(self._launched)
        return [outcome for _ in range(due) for outcome in _outcomes(self._launched.popleft())]

    def _launch(
        self, drafter: Drafter | None, rows: Sequence[RunningSequence], counts: Sequence[int]
    ) -> None:
        if drafter is not None and not drafter.features:  # one that reads features is told of every step
            self._catch_up(drafter, rows, counts)
            if not any(counts):
                drafter = None
        narrows = self._launcher is not None and any(map(_narrows, rows))
        if self._is_prepared(drafter):
            shape = Shape(_at_least(self._batches, len(rows)), _at_least(self._drafts, max(counts)), narrows)
            run = self._steps(drafter)[shape]
        else:
            shape = Shape(len(rows), max(counts), narrows)
            step = Step(self._target, self._table, drafter, shape, self._launcher, self._rule)
            run = self._runners.eager(step)
        filling = shape.batch - len(rows)
        slots = [*(row.slot for row in rows), *[self._table.spare] * filling]
        outputs = run([*slots, *counts, *[0] * filling])
        self._launched.append(_Launched([*rows], counts, Readback(outputs)))

    def _is_prepared(self, drafter: Drafter | None) -> bool:
        return self._ahead and (drafter is None or drafter.captured)

    def _catch_up(self, drafter: Drafter, rows: Sequence[RunningSequence], counts: Sequence[int]) -> None:
        """Lets the drafter read what it has missed in steps without drafts, before it drafts again."""
        for row, count in zip(rows, counts, strict=True):
            name, known = row.request.request_id, len(row.token_ids)
            if not count:
                self._unread.setdefault(name, max(0, known - 2))
            elif (first := self._unread.pop(name, None)) is not None and first < known:
                drafter.prefill(row.token_ids[first:], [Span(row.slot, first, known - first)], None)

    def _steps(self, drafter: Drafter | None) -> dict[Shape, RunStep]:
        return self._plain if drafter is None else self._drafted.setdefault(drafter, {})


def _narrows(row: RunningSequence) -> bool:
    return row.request.params.top_k > 0 or row.request.params.top_p < 1


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
    if emitted and drafted < (expected := min(count, row.draft_count, _room(row))):
        # The target needs no draft: the request goes on with what is usable.
        logger.error("the draft gives no usable logits: %d of %d drafts", drafted, expected)
    return RowOutcome(list(outputs[_COUNTS : _COUNTS + emitted]), drafted, accepted)


def _room(row: RunningSequence) -> int:
    """How many drafts it has at least where nothing failed and the drafter is not told to make fewer."""
    drafter, length = row.draft.drafter, len(row.token_ids)
    if drafter is None or drafter.drafts_fewer:
        return 0
    if drafter.context is not None:
        return drafter.context.length - length + 1
    return row.draft_count if drafter.captured and drafter.features and length > 1 else 0
