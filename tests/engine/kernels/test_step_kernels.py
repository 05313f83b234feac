"""What a step does around the models' passes: by hand, and the kernels as the reference."""

from __future__ import annotations

import pytest
import torch
from driftguard_engine.kernels import steps
from driftguard_engine.kernels.steps import DraftContext, SlotState

from tests.engine.kernels.emulated import Emulated
from tests.engine.kernels.step_cases import assert_equal, ran, step_case
from tests.engine.simt.emulator import Module


@pytest.mark.parametrize("drafts", [0, 1, 4, 31])
@pytest.mark.parametrize("with_model", [True, False])
def test_kernels_leave_what_the_reference_leaves(module: Module, drafts: int, with_model: bool) -> None:
    for seed in range(12):
        slots, positions = [(3, 32), (40, 33), (7, 64)][seed % 3]
        case = step_case(seed, slots, positions, drafts, with_model)
        assert_equal(ran(case, Emulated(module, seed)), ran(case, None), f"seed {seed}")


@pytest.mark.parametrize("by_kernels", [False, True])
def test_by_hand(module: Module, by_kernels: bool) -> None:
    launcher = Emulated(module) if by_kernels else None
    sequences = [[5, 6, 7], [5, 6, 7], [1] * 8, [2], [4, 4]]
    token_ids = torch.tensor([row + [0] * (12 - len(row)) for row in sequences])
    numbers = torch.zeros(5)
    state = SlotState(
        token_ids,
        lengths=torch.tensor([3, 3, 8, 1, 2]),
        limits=torch.tensor([10, 10, 10, 9, 12]),
        ended=torch.tensor([0, 0, 0, 0, 1]),
        heeds_ends=torch.tensor([1, 0, 1, 1, 1]),
        seeds=torch.arange(5),
        temperatures=numbers,
        scales=numbers,
        top_ps=numbers,
        top_ks=numbers.int(),
        eos_token_ids=torch.tensor([9]),
    )
    slots = [3, 4, 2, 1, 0, 4]
    queued = torch.tensor([slots, [3, 3, 3, 2, 3, 3]])
    rows = steps.begin(launcher, state, queued, 3, DraftContext(length=8, vocabulary=7))
    assert rows.starts.tolist() == [0, 1, 7, 2, 2, 1]
    assert rows.fed[:, 0].tolist() == [2, 4, 1, 7, 7, 4]
    # Slot 2 has room for one token besides the target's own, and so has the draft's context.
    assert rows.drafted.tolist() == [3, 0, 1, 2, 3, 0]
    assert rows.draft is not None
    assert rows.draft.starts.tolist() == [0, 0, 6, 1, 1, 0]
    assert rows.draft.chosen.tolist() == [0, 3, 5, 7, 9, 11]  # of one token, the first is the newest
    # The draft does not have the id 7.
    assert rows.draft.token_ids[:, 0].tolist() == [2, 4, 1, 6, 6, 4]
    assert rows.draft.token_ids[1:, 1].tolist() == [4, 1, 0, 0, 4]

    drafts = torch.tensor([[8, -1, 3], [1, 1, 1], [1, 1, 1], [8, 9, 4], [8, 9, 4], [1, 1, 1]])
    for step, (following, starts) in enumerate(
        [([0, 1, 1, 0, 0, 1], [1, 2, 7, 3, 3, 2]), ([0, 1, 1, 0, 0, 1], [2, 3, 7, 4, 4, 3])]
    ):
        steps.feed(launcher, rows, drafts, step, 1)
        assert (rows.draft.next[:, 0].tolist(), rows.draft.starts.tolist()) == (following, starts)
    steps.feed(launcher, rows, drafts, 2, 1)
    assert rows.fed[0].tolist() == [2, 8, 0, 3]
    assert rows.drafted.tolist() == [1, 0, 1, 2, 3, 0]

    tokens = torch.tensor(
        [[-1] * 4, [1, -1, -1, -1], [1, 6, -1, -1], [8, 9, 1, -1], [8, 9, 4, 4], [1, -1, -1, -1]]
    )
    accepted = torch.tensor([-1, 0, 1, 2, 3, 0], dtype=torch.int32)
    status = torch.tensor([1, 1, 0, 0, 0, 0], dtype=torch.int32)
    outputs = steps.append(launcher, rows, tokens, accepted, status)
    assert outputs.tolist() == [
        [1, 1, -1, 0, -1, -1, -1, -1],  # no usable logits
        [0, 0, 0, 0, 1, -1, -1, -1],  # had ended
        [0, 1, 1, 2, 1, 6, -1, -1],
        [0, 2, 2, 3, 8, 9, 1, -1],  # heeds no end-of-sequence token
        [0, 3, 3, 2, 8, 9, 4, 4],  # ends with an accepted draft
        [0, 0, 0, 0, 1, -1, -1, -1],
    ]
    assert state.lengths.tolist() == [5, 6, 10, 1, 2]
    assert state.ended.tolist() == [1, 0, 1, 1, 1]
    assert [row[:length].tolist() for row, length in zip(token_ids, state.lengths, strict=True)] == [
        [5, 6, 7, 8, 9],
        [5, 6, 7, 8, 9, 1],
        [1] * 9 + [6],
        [2],
        [4, 4],
    ]
    assert not token_ids[0, 5:].any(), "nothing is written behind what was emitted"
