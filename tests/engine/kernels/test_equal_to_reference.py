"""The kernels give the reference's tokens and laws, bit for bit, in whatever order threads and blocks run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from driftguard_engine.kernels import launches, reference
from driftguard_engine.kernels.distribution import Laws, Shaping, laws
from driftguard_engine.kernels.exp2 import fused_exp2
from driftguard_engine.kernels.launches import LawTable, Settings, Workspace
from driftguard_engine.kernels.reference import Chain, Noise
from torch import Tensor

from tests.engine.kernels.emulated import SOURCES, Emulated
from tests.engine.simt.emulator import Module

CPU = torch.device("cpu")
# Cycled over the rows; greedy beside stochastic, filtered beside unfiltered.
TEMPERATURES = [1.0, 0.0, 0.7, 1.3, 1e-3]
TOP_KS = [0, 3, 0, 50, 0, 1, 0]
TOP_PS = [1.0, 1.0, 0.9, 1.0, 0.3, 1.0]


@pytest.fixture(scope="module")
def module(compiled: Callable[..., Module]) -> Module:
    return compiled(*SOURCES)


@dataclass(frozen=True)
class Case:
    target: Tensor  # [B, K + 1, V]
    draft: Tensor  # [B, K, V]
    lengths: Tensor  # [B]
    shaping: Shaping
    noise: Noise

    @property
    def settings(self) -> Settings:
        return Settings.of(self.shaping, self.noise, self.target.shape[-1], CPU)


def cycle(values: list[float] | list[int], rows: int) -> Tensor:
    return torch.tensor([values[row % len(values)] for row in range(rows)])


def case(
    rows: int, drafts: int, size: int, dtype: torch.dtype = torch.float32, filtered: bool = True
) -> Case:
    random = torch.Generator().manual_seed(1000 * rows + size)
    target = 2 * torch.randn(rows, drafts + 1, size, generator=random)
    target[1::4] = target[1::4].round()  # many equal logits
    draft = target[:, :-1] + 0.5 * torch.randn(rows, drafts, size, generator=random)
    zero, one = torch.zeros(rows, dtype=torch.int64), torch.ones(rows)
    shaping = Shaping.of(
        cycle(TEMPERATURES, rows),
        cycle(TOP_KS, rows) if filtered else zero,
        cycle(TOP_PS, rows) if filtered else one,
    )
    noise = Noise.of(torch.arange(rows) * 7919 - 5, zero + 9)
    return Case(target.to(dtype), draft.to(dtype), torch.arange(rows) % (drafts + 1), shaping, noise)


def drawn_by_reference(given: Case) -> Tensor:
    words = reference.draft_words(given.noise, given.draft.shape[1])
    steps = [
        reference.sample_draft(given.draft[:, step], given.shaping, words[step], fused_exp2)
        for step in range(given.draft.shape[1])
    ]
    return torch.stack(steps, 1)


def run(module: Module, given: Case, seed: int, blocks_per_row: int = 4) -> Workspace:
    batch, drafts, size = given.draft.shape
    space, emulated = Workspace.empty(batch, drafts, size, CPU), Emulated(module, seed)
    for step in range(drafts):
        launches.draw_drafts(emulated, given.draft[:, step].contiguous(), given.settings, space, step)
    lengths = given.lengths.int()
    launches.verify(emulated, given.target, given.draft, lengths, given.settings, space, blocks_per_row)
    assert int(space.row_arrivals.abs().max()) == int(space.arrivals.abs().max()) == 0
    return space


def assert_same_laws(table: LawTable, expected: Laws, read: Tensor, context: str) -> None:
    """read: bool [B, S], which rows were."""
    chosen = read.flatten().nonzero().squeeze(1)
    for name in ("peak", "normaliser", "cut", "cut_token", "tile_mass"):
        found = getattr(table, "tile_masses" if name == "tile_mass" else name)[chosen]
        wanted = torch.from_numpy(getattr(expected, name)).flatten(0, 1)[chosen]
        assert torch.equal(found, wanted.to(found.dtype)), f"{name}: {context}"


def assert_equal_to_reference(given: Case, space: Workspace, context: str) -> None:
    tokens = drawn_by_reference(given)
    assert torch.equal(space.draft_tokens, tokens), f"drafts: {context}"
    chain = Chain(given.target, given.draft, tokens, given.lengths, given.shaping, given.noise)
    rows = torch.from_numpy(~given.shaping.greedy).nonzero().squeeze(1)
    for table, logits, read in (
        (space.target, given.target, chain.read),
        (space.draft, given.draft, torch.ones(given.draft.shape[:2], dtype=torch.bool)),
    ):
        one = laws(logits[rows].float().numpy(), given.shaping.rows(rows.numpy()), fused_exp2)
        steps = logits.shape[1]
        index = (rows.unsqueeze(1) * steps + torch.arange(steps)).flatten()
        picked = LawTable(*(getattr(table, name)[index] for name in LawTable.__slots__))
        assert_same_laws(picked, one, read[rows], context)
    emitted, accepted = reference.verify_chain(chain, fused_exp2)
    assert torch.equal(space.accepted, accepted.int()), f"accepted: {context}"
    assert torch.equal(space.tokens, emitted), f"tokens: {context}"
    assert not bool(space.status.any())


@pytest.mark.parametrize("size", [1, 2, 7, 255, 257, 2048, 4097, 9001])
@pytest.mark.parametrize("filtered", [False, True])
def test_tokens_and_laws(module: Module, size: int, filtered: bool) -> None:
    given = case(10, 3, size, filtered=filtered)
    for seed in (0, 1):
        space = run(module, given, seed)
        assert_equal_to_reference(given, space, f"V={size}, filtered={filtered}, order {seed}")
