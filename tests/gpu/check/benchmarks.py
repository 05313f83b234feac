"""The timings: verification beside its floor and its peers, its parts, drawing drafts, top-k and top-p."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from driftguard_engine.kernels.cuda.loader import Kernels

from tests.gpu.check import linear_times
from tests.gpu.check.linear_times import LinearTime
from tests.gpu.check.loop.results import LoopMeasured
from tests.gpu.check.peers import PEERS, PeerTime, measure
from tests.gpu.check.timing import copy_bytes_per_second, graph_microseconds
from tests.gpu.check.workload import (
    PLAIN,
    SAMPLINGS,
    Batch,
    Only,
    Sampling,
    batches,
    draw_floor_bytes,
    floor_bytes,
    mean_accepted,
)

BATCHES, DRAFTS = (1, 8, 64, 128), (4, 8)
QUICK_BATCHES, QUICK_DRAFTS = (1, 64), (4,)
PARTS = ("row_statistics", "verify_chain")  # without top-k and top-p

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class VerifyTime:
    batch: int
    drafts: int
    cold: float  # microseconds
    warm: float
    floor: float  # microseconds: the bytes that must move, at the bandwidth of a copy
    bytes: int
    accepted: float  # drafts per request, on these data
    parts: dict[str, float]  # microseconds, cold, each kernel on its own
    peers: list[PeerTime]

    @property
    def over_floor(self) -> float:
        return self.cold / self.floor


@dataclass(frozen=True, slots=True)
class SamplingTime:
    name: str
    batch: int
    drafts: int
    verify: float  # microseconds, cold
    draw: float
    draw_floor: float


@dataclass(slots=True)
class Measured:
    copy_bytes_per_second: float | None = None
    verify: list[VerifyTime] = field(default_factory=list)
    linear: list[LinearTime] = field(default_factory=list)
    sampling: list[SamplingTime] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    loop: LoopMeasured = field(default_factory=LoopMeasured)


@dataclass(frozen=True, slots=True)
class Plan:
    kernels: Kernels
    l2_bytes: int
    quick: bool
    out_of_time: Callable[[], bool]
    say: Say


def run(plan: Plan, found: Measured) -> None:
    """Measures into `found` as long as there is time; names the rest in its `left_out`."""
    found.copy_bytes_per_second = copy_bytes_per_second(plan.kernels.device)
    plan.say(f"copy: {found.copy_bytes_per_second / 1e12:.2f} TB/s, read and written")
    for batch in QUICK_BATCHES if plan.quick else BATCHES:
        for drafts in QUICK_DRAFTS if plan.quick else DRAFTS:
            if plan.out_of_time():
                found.left_out.append(f"verify, B = {batch}, K = {drafts}")
                continue
            row = _verify(plan.kernels, batch, drafts, plan.l2_bytes, found.copy_bytes_per_second)
            found.verify.append(row)
            plan.say(f"verify B={batch} K={drafts}: {row.cold:.1f} us cold, {row.over_floor:.2f} x the floor")
            torch.cuda.empty_cache()
    for batch in (8, 64):
        for sampling in SAMPLINGS:
            if plan.out_of_time():
                found.left_out.append(f"{sampling.name}, B = {batch}")
                continue
            time = _sampling(plan, batch, sampling, found.copy_bytes_per_second)
            found.sampling.append(time)
            plan.say(f"{time.name} B={batch} K=4: verify {time.verify:.1f} us, draw {time.draw:.1f} us")
    _linear(plan, found, found.copy_bytes_per_second)


def _linear(plan: Plan, found: Measured, bandwidth: float) -> None:
    kernels = plan.kernels
    for row in linear_times.measured(kernels, kernels.device, plan.l2_bytes, bandwidth, plan.quick):
        found.linear.append(row)
        plan.say(
            f"linear {row.layer.name} M={row.tokens}: {row.kernel:.1f} us, {row.floor / row.kernel:.0%} of"
            f" the bandwidth of a copy; torch {row.library:.1f} us, {row.floor / row.library:.0%}"
        )
        if plan.out_of_time():
            found.left_out.append(f"linear layers after {row.layer.name}, M = {row.tokens}")
            return


def _sampling(plan: Plan, batch: int, sampling: Sampling, bandwidth: float) -> SamplingTime:
    given = batches(plan.kernels, plan.kernels.device, batch, 4, sampling, plan.l2_bytes)
    verify, draw = (_microseconds(given, call) for call in (_verifies(plan.kernels), _draws(plan.kernels)))
    return SamplingTime(
        sampling.name, batch, 4, verify, draw, draw_floor=draw_floor_bytes(batch) / bandwidth * 1e6
    )


def _verify(kernels: Kernels, batch: int, drafts: int, l2_bytes: int, bandwidth: float) -> VerifyTime:
    given = batches(kernels, kernels.device, batch, drafts, PLAIN, l2_bytes)
    size = floor_bytes(batch, drafts)
    parts = {part: _microseconds(given, _verifies(Only(kernels, part))) for part in PARTS}
    return VerifyTime(
        batch,
        drafts,
        cold=_microseconds(given, _verifies(kernels)),
        warm=_microseconds(given[:1], _verifies(kernels)),
        floor=size / bandwidth * 1e6,
        bytes=size,
        accepted=mean_accepted(given),
        parts=parts,
        peers=[measure(peer, given) for peer in PEERS],
    )


def _verifies(launcher: Only | Kernels) -> Callable[[Batch], None]:
    return lambda given: given.verify(launcher)


def _draws(launcher: Kernels) -> Callable[[Batch], None]:
    return lambda given: given.draw(launcher)


def _microseconds(given: Sequence[Batch], call: Callable[[Batch], None]) -> float:
    return graph_microseconds([lambda one=one: call(one) for one in given])  # type: ignore[misc]
