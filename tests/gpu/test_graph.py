"""Drafting and verifying in a CUDA graph, and without a host that waits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from driftguard_engine.kernels import verify as verify_kernels
from driftguard_engine.kernels.cuda.loader import Kernels
from driftguard_engine.kernels.verify import SamplingTensors, Workspace
from torch import Tensor

from tests.engine.kernels.cases import Outcome, assert_same, case, outcome_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

BATCH, DRAFTS, SIZE = 16, 4, 32_000


@dataclass
class Step:
    """What a graph of the loop would hold of this: all memory fixed."""

    kernels: Kernels
    target: Tensor
    draft: Tensor  # [K, B, V], as K forward passes leave it
    lengths: Tensor
    settings: SamplingTensors
    space: Workspace

    @classmethod
    def make(cls, kernels: Kernels) -> Step:
        given, device = case(BATCH, DRAFTS, SIZE, torch.bfloat16), kernels.device
        return cls(
            kernels,
            given.target.to(device),
            given.draft.transpose(0, 1).contiguous().to(device),
            given.lengths.int().to(device),
            SamplingTensors.of(given.sampling, given.position, SIZE, device),
            Workspace.empty(BATCH, DRAFTS, SIZE, device),
        )

    def queue(self) -> None:
        for step, logits in enumerate(self.draft):
            verify_kernels.draw_drafts(self.kernels, logits, self.settings, self.space, step)
        offered = self.draft.transpose(0, 1).contiguous()
        verify_kernels.verify(self.kernels, self.target, offered, self.lengths, self.settings, self.space)

    def next_inputs(self, seed: int) -> None:
        random = torch.Generator(self.target.device).manual_seed(seed)
        self.target.normal_(0, 2, generator=random)
        self.draft.normal_(0, 0.5, generator=random).add_(self.target[:, :-1].transpose(0, 1))
        self.settings.position.add_(DRAFTS + 1)
        self.lengths.random_(0, DRAFTS + 1, generator=random)

    def eager(self) -> Outcome:
        self.queue()
        return outcome_of(self.space)


@pytest.fixture
def step(engine_kernels: Kernels) -> Step:
    made = Step.make(engine_kernels)
    made.eager()  # every kernel is found and loaded
    return made


@pytest.fixture
def no_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_replayed_graph_gives_the_same_tokens(step: Step) -> None:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.queue()
    for seed in range(20):
        step.next_inputs(seed)
        expected = step.eager()
        step.space.tokens.fill_(-9)
        step.space.draft_tokens.fill_(-9)
        graph.replay()
        assert_same(outcome_of(step.space), expected, f"replay {seed}")


def test_torch_sees_no_synchronisation(step: Step, no_waiting: None) -> None:
    step.queue()


def test_launching_does_not_wait_for_the_device(step: Step) -> None:
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)  # type: ignore[no-untyped-call]
    before = torch.cuda.Event()  # type: ignore[no-untyped-call]
    before.record()
    step.queue()
    device_is_free = before.query()  # type: ignore[no-untyped-call]
    assert not device_is_free, "the launches came back after the device had caught up"
    torch.cuda.synchronize()
