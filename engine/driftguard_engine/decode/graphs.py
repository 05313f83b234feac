"""Runs steps: on CUDA captured in a graph once per shape and replayed, on the CPU called."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from driftguard_engine.decode.graph_capture import capturing, first_cause
from driftguard_engine.decode.step import Step
from driftguard_engine.upload import upload

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

logger = logging.getLogger(__name__)

_WARM_UP_STEPS = 2  # at first calls libraries choose kernels and take memory, which a graph must not do

RunStep = Callable[[Sequence[int]], Tensor]  # slots, then drafts: `queued` of `Step.run`, flat


class Runners:
    """capture_failure: why steps of some shape are launched one kernel at a time, which is slower; the first
    reason."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        # One for all graphs: matrix products keep memory for each stream that they have run on.
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.capture_failure: str | None = None

    def eager(self, step: Step) -> RunStep:
        """The step as a function that launches one kernel after another."""

        def eager(queued: Sequence[int]) -> Tensor:
            return step.run(upload(queued, self._device).view(2, step.shape.batch))

        return eager

    def runner(self, step: Step) -> RunStep:
        """The step as a function. On CUDA waits for the device, and runs the step on the spare slot.

        Raises torch.OutOfMemoryError. What else prevents a capture only costs speed: see capture_failure.
        """
        if self._pool is None or self._side is None:
            return self.eager(step)
        batch = step.shape.batch
        idle = [step.table.spare] * batch + [0] * batch
        try:
            return self._captured(step, batch, idle, self._pool, self._side)
        except RuntimeError as error:
            self._pool = torch.cuda.graph_pool_handle()  # the other may be that of a broken capture
            if isinstance(error, torch.OutOfMemoryError):
                raise
            # A kernel or library did what is not allowed in a capture.
            cause = first_cause(error)
            told = f"{type(cause).__name__}: {cause}"
            self.capture_failure = self.capture_failure or told
            logger.error(
                "a step of %d rows cannot be captured in a CUDA graph: %s", batch, told, exc_info=error
            )
            return self.eager(step)

    def _captured(
        self, step: Step, batch: int, idle: Sequence[int], pool: _POOL_HANDLE, side: torch.cuda.Stream
    ) -> RunStep:
        queued = upload(idle, self._device).view(2, batch)
        side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP_STEPS):
                step.run(queued)
        torch.cuda.current_stream(self._device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Steps run one after another, so that all graphs can use the same memory. Other threads go on: one
        # may be loading a draft.
        with capturing(graph, pool):
            outputs = step.run(queued)

        def replay(now: Sequence[int]) -> Tensor:
            queued.copy_(upload(now, self._device).view(2, batch), non_blocking=True)
            graph.replay()
            return outputs

        return replay


class Readback:
    """A tensor on its way to the host."""

    def __init__(self, values: Tensor) -> None:
        self._event = None
        if values.device.type == "cuda":
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record(torch.cuda.current_stream(values.device))
        else:
            self._values = values

    def wait(self) -> list[list[int]]:
        """Until the tensor has come; what was queued behind it goes on."""
        if self._event is not None:
            self._event.synchronize()
        rows: list[list[int]] = self._values.tolist()
        return rows
