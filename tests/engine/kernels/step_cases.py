"""Random states of slots and rows of a step, and what a launcher makes of them."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields

import torch
from driftguard_engine.kernels import steps
from driftguard_engine.kernels.cuda.launcher import Launcher
from driftguard_engine.kernels.steps import DraftContext, SlotState
from torch import Tensor

VOCABULARY = 12  # so small that end-of-sequence tokens occur
CPU = torch.device("cpu")


@dataclass(frozen=True)
class StepCase:
    """A step, begun and fed and appended."""

    state: SlotState
    queued: Tensor  # [2, B]
    context: DraftContext | None
    draft_tokens: Tensor  # [B, K]
    at_once: bool  # how drafts are fed: all, or one by one
    tokens: Tensor  # [B, K + 1]
    accepted: Tensor  # [B] int32
    status: Tensor  # [B] int32


def step_case(seed: int, slots: int, positions: int, drafts: int, with_model: bool) -> StepCase:
    """Of `slots` slots about two thirds are asked for, and the spare one twice.

    Rows that had ended, at and near their limits and the end of their slot, with one token, without room for
    drafts; drafts that are absent, ids that the draft does not have, targets without usable logits. Also what
    no step leaves behind: lengths of 0, lengths and limits beyond the slot, emitted tokens that are none.
    """
    chance = random.Random(seed)
    lengths, limits = [], []
    for _ in range(slots):
        most = chance.choice([positions, positions, chance.randint(2, positions), positions + 3])
        limits.append(most)
        usual = [1, 2, most, most - 1, max(1, most - 2), chance.randint(1, most)]
        lengths.append(chance.choice([*usual, *usual, 0, positions + 2]))
    ended = [int(chance.random() < 0.2) for _ in range(slots - 1)] + [1]
    state = SlotState(
        token_ids=torch.tensor(
            [[chance.randrange(VOCABULARY) for _ in range(positions)] for _ in range(slots)]
        ),
        lengths=torch.tensor(lengths),
        limits=torch.tensor(limits),
        ended=torch.tensor(ended),
        heeds_ends=torch.tensor([chance.randrange(2) for _ in range(slots)]),
        seeds=torch.tensor([chance.randrange(2**63) for _ in range(slots)]),
        temperatures=torch.rand(slots, generator=torch.Generator().manual_seed(seed)),
        scales=torch.rand(slots, generator=torch.Generator().manual_seed(seed + 1)),
        top_ps=torch.rand(slots, generator=torch.Generator().manual_seed(seed + 2)),
        top_ks=torch.tensor([chance.randrange(9) for _ in range(slots)], dtype=torch.int32),
        eos_token_ids=torch.tensor(chance.choice([[], [3], [0, 5, 7]]), dtype=torch.int64),
    )
    asked = [*chance.sample(range(slots - 1), 2 * slots // 3), slots - 1, slots - 1]
    chance.shuffle(asked)
    accepted = [chance.randint(-1, drafts) for _ in asked]
    status = [int(chance.random() < 0.2) for _ in asked]
    tokens = torch.full((len(asked), drafts + 1), -1)
    for row, kept in enumerate(accepted):
        tokens[row, : kept + 1] = torch.tensor([chance.randrange(-1, VOCABULARY) for _ in range(kept + 1)])
    drafted = [chance.randrange(-1, VOCABULARY) for _ in range(len(asked) * drafts)]
    context = DraftContext(
        length=chance.choice([2, positions // 2, 2 * positions]), vocabulary=chance.choice([4, 99])
    )
    return StepCase(
        state,
        torch.tensor([asked, [chance.randint(0, drafts) for _ in asked]]),
        context if with_model else None,
        torch.tensor(drafted, dtype=torch.int64).view(len(asked), drafts),
        chance.random() < 0.5,
        tokens,
        torch.tensor(accepted, dtype=torch.int32),
        torch.tensor(status, dtype=torch.int32),
    )


def ran(case: StepCase, launcher: Launcher | None, device: torch.device = CPU) -> dict[str, Tensor]:
    """Everything that a step leaves, by name, on the CPU."""
    slots = {each.name: getattr(case.state, each.name) for each in fields(case.state)}
    state = SlotState(**{name: tensor.to(device, copy=True) for name, tensor in slots.items()})
    queued, draft_tokens = case.queued.to(device), case.draft_tokens.to(device)
    drafts = draft_tokens.shape[1]
    rows = steps.begin(launcher, state, queued, drafts, case.context)
    left = {"fed at first": rows.fed.clone(), "drafted at first": rows.drafted.clone()}
    if rows.draft is not None:
        left |= {"first start of the draft": rows.draft.starts.clone()}
    for first in range(drafts):
        if first == 0 or not case.at_once:
            steps.feed(launcher, rows, draft_tokens, first, drafts if case.at_once else 1)
    given = [each.to(device) for each in (case.tokens, case.accepted, case.status)]
    left["outputs"] = steps.append(launcher, rows, *given)
    for of, names in (
        (rows, "slots lengths seeds scales top_ps top_ks starts drafted fed"),
        (rows.draft, "token_ids chosen starts next" if drafts else "token_ids chosen starts"),
        (state, "token_ids lengths ended"),
    ):
        if of is not None:
            left |= {f"{type(of).__name__}.{name}": getattr(of, name) for name in names.split()}
    return {name: tensor.cpu() for name, tensor in left.items()}


def assert_equal(found: dict[str, Tensor], known: dict[str, Tensor], which: str) -> None:
    assert found.keys() == known.keys()
    for name, tensor in known.items():
        assert found[name].dtype == tensor.dtype, f"{name}, {which}"
        assert torch.equal(found[name], tensor), f"{name}, {which}: {found[name]}, not {tensor}"
