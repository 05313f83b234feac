"""The timings of verification: beside its floor, its kernels apart, top-k and top-p; and of its peers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from driftguard_engine.kernels.cuda import loader
from driftguard_engine.kernels.cuda.loader import Kernels

from tests.gpu.check.peers import PEERS, time_peer
from tests.gpu.check.rows import SamplingTime, VerifyTime
from tests.gpu.check.run import Run
from tests.gpu.check.timing import bandwidth_of, graph_microseconds
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

BATCHES, DRAFTS = (64, 1), (4, 8)  # the largest first: what bounds it is the memory
PARTS = ("row_statistics", "verify_chain")
PARTS_OF_CUTS = ("row_statistics", "row_cut", "verify_chain")


def verification(run: Run) -> None:
    kernels = loader.kernels(torch.device("cuda"))
    bandwidth = bandwidth_of(run, kernels.device)
    for batch in BATCHES:
        for drafts in DRAFTS:
            if not run.late(f"verify, B = {batch}, K = {drafts}"):
                _time_plain(run, kernels, batch, drafts, bandwidth)
    for batch in BATCHES:
        for sampling in SAMPLINGS:
            if not run.late(f"{sampling.name}, B = {batch}"):
                _time_sampling(run, kernels, batch, sampling, bandwidth)


def peers(run: Run) -> None:
    """One after the other: one that loses the device takes the times of no earlier one with it."""
    kernels = loader.kernels(torch.device("cuda"))
    for peer, batch, drafts in itertools.product(PEERS, BATCHES, DRAFTS):
        if run.late(f"{peer.name}, B = {batch}, K = {drafts}"):
            continue
        given = batches(kernels, kernels.device, batch, drafts, PLAIN)
        row = time_peer(peer, given, _microseconds(given, _verifies(kernels)))
        run.add(row)
        took = row.note if row.ratio is None else f"{row.microseconds:.1f} us, {row.ratio:.2f} x ours"
        run.say(f"{row.name}, B={batch} K={drafts}: {took}")
        torch.cuda.empty_cache()


def _time_plain(run: Run, kernels: Kernels, batch: int, drafts: int, bandwidth: float) -> None:
    given = batches(kernels, kernels.device, batch, drafts, PLAIN)
    size = floor_bytes(batch, drafts)
    row = VerifyTime(
        batch,
        drafts,
        cold=_microseconds(given, _verifies(kernels)),
        warm=_microseconds(given[:1], _verifies(kernels)),
        floor=size / bandwidth * 1e6,
        bytes=size,
        accepted=mean_accepted(given),
        parts=_parts(kernels, given, PARTS),
    )
    run.add(row)
    told = ", ".join(f"{name} {took:.1f}" for name, took in row.parts.items())
    run.say(f"verify B={batch} K={drafts}: {row.cold:.1f} us cold, {row.over_floor:.2f} x the floor; {told}")
    torch.cuda.empty_cache()


def _time_sampling(run: Run, kernels: Kernels, batch: int, sampling: Sampling, bandwidth: float) -> None:
    given = batches(kernels, kernels.device, batch, 4, sampling)
    row = SamplingTime(
        sampling.name,
        batch,
        4,
        verify=_microseconds(given, _verifies(kernels)),
        draw=_microseconds(given, lambda one: one.draw(kernels)),
        draw_floor=draw_floor_bytes(batch) / bandwidth * 1e6,
        parts=_parts(kernels, given, PARTS_OF_CUTS if sampling.narrows else PARTS),
    )
    run.add(row)
    told = ", ".join(f"{name} {took:.1f}" for name, took in row.parts.items())
    run.say(f"{row.name} B={batch} K=4: verify {row.verify:.1f} us ({told}), draw {row.draw:.1f} us")


def _parts(kernels: Kernels, given: Sequence[Batch], names: Sequence[str]) -> dict[str, float]:
    """Microseconds of the kernels whose names begin so, alone."""
    return {name: _microseconds(given, _verifies(Only(kernels, name))) for name in names}


def _verifies(launcher: Only | Kernels) -> Callable[[Batch], None]:
    return lambda given: given.verify(launcher)


def _microseconds(given: Sequence[Batch], call: Callable[[Batch], None]) -> float:
    return graph_microseconds([lambda one=one: call(one) for one in given])  # type: ignore[misc]
