"""Drafting beside the target's pass: a second process prepares drafts for likely outcomes of verification.

Speculative speculative decoding (Kumar, Dao, May 2026, arXiv:2603.03251) with a draft model, whose own
logits say which outcomes are likely. Or an early layer of the target says so while its later layers run, as
in Mirror speculative decoding (Bhendawade et al. 2025, arXiv:2510.13161), here without its streams.

What is prepared is what `DraftModelDrafter` would draft behind the same tokens, by the same passes and random
numbers. So the output of a request is the same with it and without it, bit for bit, and which outcomes are
prepared matters for speed alone. The draft's law is not bent towards them, as in the first paper.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from driftguard_engine.core import InvalidModel
from driftguard_engine.drafters.ahead_process import AheadProcess, Worker, WorkerLost
from driftguard_engine.drafters.ahead_worker import (
    AheadRow,
    Job,
    Outcome,
    Settings,
    Shared,
    drafts_behind,
    store,
)
from driftguard_engine.drafters.draft_model import DraftModelDrafter
from driftguard_engine.kernels.cuda.launcher import Launcher
from driftguard_engine.kernels.steps import RowState
from driftguard_engine.kv_cache import Span
from driftguard_engine.models.llama import LlamaModel
from driftguard_engine.speculation import Verification

START_SECONDS = 120.0
RESTART_SECONDS = 10.0  # at the earliest after the last start
_SUREST = 0.99  # part of drafts accepted, so that no outcome counts as impossible

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class AheadCounts:
    """lookups: rows that a step drafted for, where the step before had been given to the process; hits: those
    whose outcome was prepared. used_seconds: of the process, for steps with hits; waited_seconds: that those
    steps waited for it."""

    lookups: int = 0
    hits: int = 0
    used_seconds: float = 0.0
    waited_seconds: float = 0.0
    lost_workers: int = 0

    @property
    def hit_rate(self) -> float | None:
        return self.hits / self.lookups if self.lookups else None

    @property
    def overlap(self) -> float | None:
        """The part of the process's drafting that the target's pass hid, of what was used."""
        return max(1 - self.waited_seconds / self.used_seconds, 0.0) if self.used_seconds else None

    def told(self) -> dict[str, float | None]:
        return asdict(self) | {"hit_rate": self.hit_rate, "overlap": self.overlap}


@dataclass(frozen=True, slots=True)
class _Pending:
    """What the process works on. rows: by slot, where in the job; without requests that have left."""

    job: Job
    rows: dict[int, int]


class AheadDrafter(DraftModelDrafter):
    """See `Drafter`. Where the outcome of a row is prepared, its draft logits are taken over, with what the
    model's cache would hold, and its tokens are drawn from these logits as ever. Other rows are drafted here,
    and all of them while there is no process.
    """

    def __init__(
        self,
        model: LlamaModel,
        settings: Settings,
        exit_layer: int | None = None,
        read_out: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """model: with `outcomes` further slots for each of its first `slots`. read_out: logits of the target
        from what `exit_layer` reads. Raises InvalidModel where the process does not start."""
        super().__init__(model)
        self.exit_layer, self._read_out = exit_layer, read_out
        self.captured, self.obstacle = False, "it drafts in a second process on the CPU"
        self.counts = AheadCounts()
        self._settings = settings
        self._files = [os.fdopen(os.memfd_create(name), "r+b") for name in ("draft", "shared")]
        store(model, self._files[0])
        self._files[0].flush()
        self._shared = Shared(self._files[1].fileno(), settings, model.cache)
        self._accepted, self._offered = 1, 2  # draft tokens; at first as if half of them were accepted
        self._number = 0
        self._pending: _Pending | None = None
        self._seen: set[int] = set()  # slots with requests that the process knows
        self._worker: Worker | None = None
        self._start_first()

    def _start_first(self) -> None:
        """Waits until the process is ready. Raises InvalidModel."""
        why: object = f"it is not ready after {START_SECONDS:g} seconds"
        try:
            self._worker = self._start()
            if self._worker.ready(START_SECONDS):
                return
        except (WorkerLost, OSError) as error:
            why = error
        self._end_worker()
        raise InvalidModel(
            f"draft: the second process, which drafts ahead, does not start ({why})", field="draft"
        )

    def _start(self) -> Worker:
        self._started = time.monotonic()
        self._seen.clear()
        model, memory = (file.fileno() for file in self._files)
        return AheadProcess(model, memory, self._settings)

    def _end_worker(self) -> None:
        if self._worker is not None:
            self._worker.end()
        self._worker = self._pending = None

    def _lost(self, error: WorkerLost | OSError) -> None:
        """The requests go on: the engine drafts for them."""
        self.counts.lost_workers += 1
        logger.error("the second process, which drafts ahead, is lost (%s); drafting without it", error)
        self._end_worker()

    def draft(self, rows: RowState, verification: Verification, launcher: Launcher | None) -> None:
        ready: Collection[int] = ()
        pending, self._pending = self._pending, None
        if pending is not None and self._worker is not None:
            try:
                ready = self._take(self._worker, pending, rows, verification.draft_logits)
            except WorkerLost as error:
                self._lost(error)
        self.draft_rows(rows, verification, launcher, ready)

    def _take(self, worker: Worker, pending: _Pending, rows: RowState, logits: Tensor) -> Collection[int]:
        """The rows whose outcome is prepared, their logits [B, K, V] written. Raises WorkerLost."""
        outcomes, job = worker.chosen(pending.job.number), pending.job
        numbers = {outcome: number for number, outcome in enumerate(outcomes)}
        found: dict[int, tuple[int, int, Span]] = {}  # by row: its outcome's number, drafts, what they fill
        told = zip(rows.slots.tolist(), rows.lengths.tolist(), rows.drafted.tolist(), strict=True)
        for row, (slot, length, count) in enumerate(told):
            if not count or slot not in pending.rows:
                continue
            before = job.rows[pending.rows[slot]]
            *accepted, own = rows.state.token_ids[slot, before.length : length].tolist()
            if accepted != [*before.drafts[: len(accepted)]]:
                continue  # steps without drafts came between
            self.counts.lookups += 1
            self._accepted, self._offered = self._accepted + len(accepted), self._offered + len(before.drafts)
            number = numbers.get(Outcome(pending.rows[slot], len(accepted), own))
            if number is not None and count <= drafts_behind(before, length, self.model.max_length):
                found[row] = number, count, Span(slot, length - 2, count + 1)
        if not found:
            return ()
        began = time.perf_counter()
        self.counts.used_seconds += worker.prepared(job.number)
        self.counts.waited_seconds += time.perf_counter() - began
        self.counts.hits += len(found)
        slots = self._settings.outcome_slots(job.rows, outcomes)
        for row, (number, count, span) in found.items():
            logits[row, :count] = self._shared.prepared[number, :count]
            self.model.copy(slots[number], span)
        return found

    def ahead(self, rows: RowState, verification: Verification, exit_states: Tensor | None) -> None:
        try:
            if self._worker is None:
                if time.monotonic() - self._started > RESTART_SECONDS:
                    self._worker = self._start()
            elif self._worker.ready(0) and (asked := self._asked(rows)):
                self._write_inputs(asked, rows, verification, exit_states)
                self._number += 1
                job = Job(self._number, [*asked.values()], min(self._accepted / self._offered, _SUREST))
                self._worker.ask(job)
                self._seen.update(row.slot for row in job.rows)
                self._pending = _Pending(job, {row.slot: index for index, row in enumerate(job.rows)})
        except (WorkerLost, OSError) as error:
            self._lost(error)

    def _asked(self, rows: RowState) -> dict[int, AheadRow]:
        """The rows that have drafts, by their place."""
        state, slots = rows.state, rows.slots
        sampling = (state.temperatures, state.top_ks, state.top_ps, state.seeds)
        told = zip(
            slots.tolist(),
            rows.lengths.tolist(),
            state.limits[slots].tolist(),
            rows.drafted.tolist(),
            rows.fed.tolist(),
            zip(*(each[slots].tolist() for each in sampling), strict=True),
            strict=True,
        )
        return {
            place: AheadRow(slot, slot not in self._seen, length, limit, fed[0], fed[1 : count + 1], how)
            for place, (slot, length, limit, count, fed, how) in enumerate(told)
            if count
        }

    def _write_inputs(
        self,
        asked: Mapping[int, AheadRow],
        rows: RowState,
        verification: Verification,
        exit_states: Tensor | None,
    ) -> None:
        """What the process chooses outcomes by."""
        counts = rows.drafted.tolist()
        said: Sequence[Tensor]
        if exit_states is None or self._read_out is None:
            said = [verification.draft_logits[place, :count] for place, count in enumerate(counts)]
        else:
            said = torch.split_with_sizes(self._read_out(exit_states), [1 + count for count in counts])
        for place, row in asked.items():
            self._shared.inputs[row.slot, : len(said[place])] = said[place]

    def forget(self, slot: int) -> None:
        self._seen.discard(slot)
        if self._pending is not None:
            self._pending.rows.pop(slot, None)
