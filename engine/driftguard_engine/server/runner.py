"""Runs the engine in one thread and hands what it emits to the event loop.

One queue per HTTP request: its sequences (several prompts, n > 1) share it. Everything but `_step_forever`
runs in the event loop, so no lock is needed here.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from types import TracebackType

import structlog

from driftguard_engine.core import (
    EngineUnavailable,
    FinishedRequest,
    Request,
    RequestOutput,
    SamplingParams,
)
from driftguard_engine.engine import Engine

log = structlog.get_logger("driftguard_engine.runner")

IDLE_WAIT_SECONDS = 0.2  # how long it may take to notice a stop while idle
STOP_LIMIT_SECONDS = 10.0
# Steps that end requests with an error, and none in between that gave such a request a token.
MOST_FAILED_IN_A_ROW = 20
# The engine hangs where so many looks in a row see the same step: five minutes. A step reads at most a chunk
# of each prompt and gives each request a few tokens, so it takes seconds.
LOOK_EVERY_SECONDS = 5.0
STUCK_LOOKS = 60
TRIAL = "trial"  # id of the request that then tells whether the engine fails, or those requests

_FIRST_TRIAL = Request(TRIAL, (0,), SamplingParams(max_tokens=1), datetime.fromtimestamp(0, UTC))


class EngineBroken(Exception):
    """The device is lost or hangs, or the engine's own trial fails too: the process has to be restarted."""


class Submission:
    """The sequences of one HTTP request in the engine; leaving the `with` block aborts what still runs."""

    def __init__(self, runner: EngineRunner, requests: Sequence[Request]) -> None:
        self._runner = runner
        self._pending = {request.request_id for request in requests}
        self._queue: asyncio.Queue[RequestOutput | EngineUnavailable] = asyncio.Queue()

    def __enter__(self) -> Submission:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._runner.release(self._pending)

    def put(self, item: RequestOutput | EngineUnavailable) -> None:
        self._queue.put_nowait(item)

    async def outputs(self) -> AsyncIterator[RequestOutput]:
        """Each step's output until every sequence has finished. Raises EngineUnavailable."""
        while self._pending:
            item = await self._queue.get()
            if isinstance(item, EngineUnavailable):
                raise item
            if item.finished is not None:
                self._pending.discard(item.request_id)
            yield item


class EngineRunner:
    """on_finished: called in the engine thread for each request that leaves; must not block or raise.
    on_step: called in the event loop with the requests that a step finished. on_failure: called when the
    engine thread has failed.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        on_finished: Callable[[FinishedRequest], None],
        on_finished_in_loop: Callable[[FinishedRequest], None],
        on_failure: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._on_finished = on_finished
        self._on_finished_in_loop = on_finished_in_loop
        self._on_failure = on_failure
        self._submissions: dict[str, Submission] = {}
        self._idle = asyncio.Event()  # set while _submissions is empty
        self._idle.set()
        self._draining = False
        self._steps = 0  # begun and ended: odd within a step
        self._failed_in_a_row = 0
        self._with_drafts = False  # whether one of these ended a request that had a draft
        self._succeeded = _FIRST_TRIAL
        self._trial_waits = False
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._step_forever, name="engine", daemon=True)
        self.failure: BaseException | None = None

    def start(self) -> None:
        """Starts the engine thread; call it in the event loop that will await the outputs."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        self._look(self._steps, 0)

    def submit(self, requests: Sequence[Request]) -> Submission:
        """Queues all of them or none. Raises InvalidRequest, EngineBusy, EngineUnavailable."""
        self._check_available()
        submission = Submission(self, requests)
        self._engine.submit_all(requests)
        self._submissions |= {request.request_id: submission for request in requests}
        self._idle.clear()
        return submission

    def release(self, request_ids: set[str]) -> None:
        """Aborts these requests; what they still emit is discarded, but their records are kept."""
        for request_id in request_ids:
            self._forget(request_id)
            self._engine.abort(request_id)

    async def drain(self, limit_seconds: float) -> None:
        """Takes no new request or draft; lets the running ones finish, and aborts them after the limit."""
        self._draining = True
        self._engine.stop_loading()
        try:
            async with asyncio.timeout(limit_seconds):
                await self._idle.wait()
        except TimeoutError:
            log.warning("aborting requests: the shutdown limit is over", requests=len(self._submissions))
        for request_id in list(self._submissions):
            self._engine.abort(request_id)

    async def stop(self) -> None:
        """Ends the engine thread once it has no work left, so that every request is recorded."""
        self._stopping.set()
        await asyncio.to_thread(self._thread.join, STOP_LIMIT_SECONDS)
        if self._thread.is_alive():
            log.error("the engine thread does not stop; its last records may be missing")

    @property
    def hangs(self) -> bool:
        """The engine was given up in a step that has not ended."""
        return self.failure is not None and self._thread.is_alive()

    def _look(self, seen: int, looks: int) -> None:
        """Gives the engine up where a step does not end. Counts looks, not time: a process that was halted
        for long has not looked meanwhile."""
        looks = looks + 1 if self._steps == seen and seen % 2 else 0
        if looks < STUCK_LOOKS:
            self._loop.call_later(LOOK_EVERY_SECONDS, self._look, self._steps, looks)
        elif self.failure is None:
            error = EngineBroken(f"a step has not ended in {looks * LOOK_EVERY_SECONDS:.0f} s")
            log.error("the engine hangs", error=str(error))
            self._fail(error)

    def _forget(self, request_id: str) -> None:
        self._submissions.pop(request_id, None)
        if not self._submissions:
            self._idle.set()

    def _check_available(self) -> None:
        if self.failure is not None:
            raise EngineUnavailable(f"the engine has failed ({self.failure}); the server is shutting down")
        if self._draining:
            raise EngineUnavailable("the server is shutting down")

    def _step_forever(self) -> None:
        try:
            while True:
                if self._engine.has_work():
                    self._steps += 1
                    self._step()
                    self._steps += 1
                elif self._stopping.is_set():
                    return
                else:
                    self._engine.wait_for_work(IDLE_WAIT_SECONDS)
        except BaseException as error:
            log.exception("the engine thread has failed")
            self._loop.call_soon_threadsafe(self._fail, error)

    def _step(self) -> None:
        of_trial: list[RequestOutput] = []
        outputs: list[RequestOutput] = []
        for output in self._engine.step():
            (of_trial if output.request_id == TRIAL else outputs).append(output)
            if output.finished is not None and output.request_id != TRIAL:
                self._on_finished(output.finished)
        if outputs:
            self._loop.call_soon_threadsafe(self._deliver, outputs)
        if self._engine.lost is not None:
            raise EngineBroken(f"the device is lost: {self._engine.lost}")
        for output in of_trial:
            if output.finished is not None:
                self._end_trial(output.finished)
        self._count_failure(outputs)

    def _count_failure(self, outputs: list[RequestOutput]) -> None:
        failed = [each for each in outputs if each.finished and each.finished.finish_reason == "error"]
        # A request without drafts succeeds also where the draft is what fails.
        if any(each.token_ids and (each.has_draft or not self._with_drafts) for each in outputs):
            self._failed_in_a_row, self._with_drafts = 0, False
            if self._trial_waits:  # for these, and new ones for it
                self._engine.abort(TRIAL)
        elif failed:
            self._failed_in_a_row += 1
            self._with_drafts |= any(each.has_draft for each in failed)
        for output in outputs:
            if output.finished is not None and output.finished.finish_reason in ("stop", "length"):
                self._succeeded = output.finished.request
        if self._failed_in_a_row >= MOST_FAILED_IN_A_ROW and not self._trial_waits:
            self._trial_waits = True
            self._engine.try_alone(self._trial())

    def _trial(self) -> Request:
        """The last request that succeeded, again, as far as one step with drafts."""
        params = replace(
            self._succeeded.params,
            max_tokens=self._engine.config.num_speculative_tokens + 2,
            num_speculative_tokens=None,
            stop=(),
            ignore_eos=True,
        )
        return replace(self._succeeded, request_id=TRIAL, params=params)

    def _end_trial(self, finished: FinishedRequest) -> None:
        """Raises EngineBroken where it failed."""
        failed, self._failed_in_a_row, self._trial_waits = self._failed_in_a_row, 0, False
        self._with_drafts = False
        if finished.finish_reason == "error":
            raise EngineBroken(
                f"the last {failed} steps all ended their requests with an error, and so does a trial of the "
                f"engine's own: {finished.error}"
            )
        if finished.finish_reason != "abort":
            log.warning("requests fail, and the engine's own trial does not: it goes on", failed_steps=failed)

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            submission = self._submissions.get(output.request_id)
            if output.finished is not None:
                self._forget(output.request_id)
                self._on_finished_in_loop(output.finished)
            if submission is not None:
                submission.put(output)

    def _fail(self, error: BaseException) -> None:
        self.failure = error
        self._engine.stop_loading(failed=True)
        unavailable = EngineUnavailable(f"the engine has failed ({error}); the request is lost")
        for submission in set(self._submissions.values()):
            submission.put(unavailable)
        self._submissions.clear()
        self._idle.set()
        self._on_failure()
