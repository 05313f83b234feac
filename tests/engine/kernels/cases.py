"""Inputs of the kernels and the reference's results, bit for bit: for the emulator and for a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from driftguard_engine.kernels import verify as verify_kernels
from driftguard_engine.kernels.cuda.launcher import Argument, Launcher, Size
from driftguard_engine.kernels.reference import tiles
from driftguard_engine.kernels.reference import verify as reference
from driftguard_engine.kernels.reference.distribution import TokenDistributions, token_distributions
from driftguard_engine.kernels.reference.exp2 import fused_exp2
from driftguard_engine.kernels.reference.sampling import Integers, SamplingBatch
from driftguard_engine.kernels.reference.verify import Chain, Rule
from driftguard_engine.kernels.verify import DistributionTable, SamplingTensors, Workspace
from torch import Tensor

# Cycled over the rows; greedy beside stochastic, filtered beside unfiltered.
TEMPERATURES = [1.0, 0.0, 0.7, 1.3, 1e-3]
TOP_KS = [0, 3, 0, 50, 0, 1, 0]
TOP_PS = [1.0, 1.0, 0.9, 1.0, 0.3, 1.0]

ROWS, DRAFTS, SIZE = 10, 3, 4097  # of the special cases: three tiles, the last one with a single token


@dataclass(frozen=True)
class Case:
    target: Tensor  # [B, K + 1, V]
    draft: Tensor  # [B, K, V]
    lengths: Tensor  # [B]
    sampling: SamplingBatch
    position: Integers  # [B]: of the first token drawn
    tokens: Tensor | None = None  # [B, K] offered instead of the drawn ones
    certain: bool = False  # these tokens were not drawn, as those of n-grams
    padding: int = 0  # elements between rows in memory
    rule: Rule = "token"

    def rows(self, index: Tensor) -> Case:
        return replace(
            self,
            target=self.target[index],
            draft=self.draft[index],
            lengths=self.lengths[index],
            sampling=self.sampling.rows(index.numpy()),
            position=self.position[index.numpy()],
            tokens=None if self.tokens is None else self.tokens[index],
        )


@dataclass(frozen=True)
class Outcome:
    """On the CPU, of the kernels or of the reference."""

    drawn: Tensor  # [B, K] int64
    tokens: Tensor  # [B, K + 1] int64
    accepted: Tensor  # [B] int64
    status: Tensor  # [B] int32


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
    sampling = SamplingBatch.of(
        cycle(TEMPERATURES, rows),
        cycle(TOP_KS, rows) if filtered else zero,
        cycle(TOP_PS, rows) if filtered else one,
        seeds(rows),
    )
    lengths, position = torch.arange(rows) % (drafts + 1), np.full(rows, 9)
    return Case(target.to(dtype), draft.to(dtype), lengths, sampling, position)


def seeds(rows: int) -> Tensor:
    return torch.arange(rows) * 7919 - 5


def shaped(top_k: list[int], top_p: list[float], temperature: list[float]) -> Case:
    given = case(ROWS, DRAFTS, SIZE)
    settings = (cycle(temperature, ROWS), cycle(top_k, ROWS), cycle(top_p, ROWS).double(), seeds(ROWS))
    return replace(given, sampling=SamplingBatch.of(*settings), lengths=torch.full((ROWS,), DRAFTS))


def with_tokens_ruled_out() -> Case:
    """Half of each row at -inf, and rows that leave a single token."""
    given = case(ROWS, DRAFTS, SIZE)
    random = torch.Generator().manual_seed(5)
    for logits in (given.target, given.draft):
        logits[torch.rand(logits.shape, generator=random) < 0.5] = -torch.inf
        logits[3] = -torch.inf
        logits[3, :, 4096] = 1.0
    return given


def all_equal() -> Case:
    given = case(ROWS, DRAFTS, SIZE)
    return replace(given, target=torch.full_like(given.target, 0.25), draft=torch.zeros_like(given.draft))


def unknown_ids() -> Case:
    tokens = case(ROWS, DRAFTS, SIZE).target[:, :DRAFTS].argmax(-1)
    tokens[0::3, 0], tokens[1::3, 1] = -1, SIZE
    tokens[2::3, 2], tokens[2::6, 0] = 2**40, -(2**33)
    return replace(case(ROWS, DRAFTS, SIZE), tokens=tokens, lengths=torch.full((ROWS,), DRAFTS))


def certain_drafts() -> Case:
    """Likely tokens, so that some are accepted, and an id that the vocabulary lacks."""
    given = case(ROWS, DRAFTS, SIZE)
    tokens = given.target[:, :DRAFTS].topk(2, -1).indices[..., 1]
    tokens[::2] = given.target[::2, :DRAFTS].argmax(-1)
    tokens[2, 1] = -1
    return replace(given, tokens=tokens, certain=True)


SPECIAL: dict[str, Callable[[], Case]] = {
    "tokens ruled out": with_tokens_ruled_out,
    "all logits equal": all_equal,
    "ids that the vocabulary lacks": unknown_ids,
    "certain drafts": certain_drafts,
    "top-k 1 and V": partial(shaped, [1, SIZE, SIZE - 1], [1.0], [1.0, 0.8]),
    "top-p tiny and 1": partial(shaped, [0], [1e-30, 0.0, 1.0, 1 - 1e-7], [1.0, 0.8, 0.0]),
    "top-k and top-p": partial(shaped, [40, 4000], [0.9, 0.99, 0.2], [1.0, 1.4]),
    "temperatures near 0": partial(shaped, [0], [1.0], [1e-2, 1e-30, 1e-38, 1e-45, 0.0]),
    "rows apart and unaligned": lambda: replace(case(ROWS, DRAFTS, SIZE), padding=3),
    "rows apart, in bfloat16": lambda: replace(case(ROWS, DRAFTS, SIZE, torch.bfloat16), padding=5),
    "no drafts": lambda: case(ROWS, 0, SIZE),
}


@dataclass(frozen=True)
class Shared:
    """A launcher with so many blocks to each row that is cut or drawn from, also where one would do."""

    launcher: Launcher
    blocks: int

    def launch(self, kernel: str, grid: Size, block: int, arguments: Sequence[Argument]) -> None:
        if kernel.startswith(("verify_chain", "draw_drafts", "row_cutoffs")):
            grid = (grid[0], self.blocks, 1)
        self.launcher.launch(kernel, grid, block, arguments)


def run(launcher: Launcher, given: Case, device: torch.device) -> Workspace:
    """Drafts drawn and verified by the kernels; `outcome_of` reads the workspace."""
    batch, drafts, size = given.draft.shape
    space = Workspace.empty(batch, drafts, size, device, rule=given.rule)
    spoil(space)
    target, draft = (apart(logits.to(device), given.padding) for logits in (given.target, given.draft))
    settings = SamplingTensors.of(given.sampling, given.position, size, device)
    if given.certain:
        assert given.tokens is not None
    else:
        for step in range(drafts):
            verify_kernels.draw_drafts(launcher, draft[:, step], settings, space, step)
    if given.tokens is not None:
        space.draft_tokens.copy_(given.tokens)
    offered = None if given.certain or not drafts else draft
    lengths = given.lengths.int().to(device)
    verify_kernels.verify(launcher, target, offered, lengths, settings, space)
    assert not any(bool(left.any()) for left in space.meetings.all())
    return space


def spoil(space: Workspace) -> None:
    """Fills the memory that no kernel may read before one has written it."""
    of_distributions = [
        getattr(table, name) for table in (space.target, space.draft) for name in DistributionTable.__slots__
    ]
    rest = (space.tile_masses, space.draft_tokens, space.tokens, space.accepted, space.status)
    for values in (*of_distributions, *rest):
        values.fill_(torch.nan if values.is_floating_point() else 7_777_777)


def apart(logits: Tensor, padding: int) -> Tensor:
    """The same [B, S, V], rows `padding` elements apart, with NaN between them, which must not be read."""
    if not padding:
        return logits.contiguous()
    batch, steps, size = logits.shape
    width = size + padding
    memory = torch.full((batch * steps * width,), torch.nan, dtype=logits.dtype, device=logits.device)
    spread = memory.as_strided((batch, steps, size), (steps * width, width, 1), 1)
    return spread.copy_(logits)


def outcome_of(space: Workspace) -> Outcome:
    found = (space.draft_tokens, space.tokens, space.accepted.long(), space.status)
    return Outcome(*(values.cpu().clone() for values in found))


def answer(given: Case) -> Outcome:
    """The reference's, with the powers of two that the kernels compute."""
    drawn = given.tokens
    if drawn is None:
        drawn = reference.draw_chain(given.draft, given.sampling, given.position, given.rule, fused_exp2)
    draft = given.draft
    if given.certain:
        draft = torch.full_like(draft, -torch.inf)
        known = (drawn >= 0) & (drawn < draft.shape[-1])
        draft.scatter_(2, drawn.where(known, 0).unsqueeze(2), 0.0)
    chain = Chain(given.target, draft, drawn, given.lengths, given.sampling, given.position)
    tokens, accepted = reference.verify_chain(chain, fused_exp2, given.rule)
    return Outcome(drawn, tokens, accepted, torch.zeros(len(tokens), dtype=torch.int32))


def assert_equal_to_reference(given: Case, space: Workspace, context: str) -> None:
    assert_same(outcome_of(space), answer(given), context)
    drafts = given.draft.shape[1]
    read = torch.arange(drafts + 1) <= given.lengths.unsqueeze(1)
    assert_same_distributions(space.target, given.target, given.sampling, read, f"target, {context}")
    if drafts and not given.certain:
        drawn = torch.ones(given.draft.shape[:2], dtype=torch.bool)
        assert_same_distributions(space.draft, given.draft, given.sampling, drawn, f"draft, {context}")


def assert_same(found: Outcome, expected: Outcome, context: str) -> None:
    for name in ("drawn", "accepted", "tokens", "status"):
        one, other = getattr(found, name), getattr(expected, name)
        assert torch.equal(one, other), f"{name}: {context}: {one.tolist()}, not {other.tolist()}"


def assert_same_distributions(
    table: DistributionTable, logits: Tensor, sampling: SamplingBatch, read: Tensor, context: str
) -> None:
    """Of the rows that are read (bool [B, S]) and not greedy."""
    rows = torch.from_numpy(~sampling.greedy).nonzero().squeeze(1)
    steps = logits.shape[1]
    singles, own = logits[rows].float().numpy(), sampling.rows(rows.numpy())
    expected: TokenDistributions = token_distributions(singles, own, fused_exp2)
    # The kernels add the tiles up whether or not top-k cuts them, the reference only where it does not.
    uncut = replace(own, top_k=np.zeros_like(own.top_k), top_p=np.ones_like(own.top_p))
    chosen = read[rows].flatten().nonzero().squeeze(1)
    index = (rows.unsqueeze(1) * steps + torch.arange(steps)).flatten()[chosen]
    scale = torch.from_numpy(own.scale).repeat_interleave(steps)[chosen]
    found = Laws.of(table, index, scale)
    wanted: dict[str, Any] = {
        "peak": expected.peak,
        "normaliser": expected.normaliser,
        "cut": expected.cut,
        "cut_token": expected.cut_token,
        "tile_masses": token_distributions(singles, uncut, fused_exp2).tile_mass,
    }
    for name, values in wanted.items():
        here = getattr(found, name)
        known = torch.from_numpy(values).flatten(0, 1)[chosen]
        assert torch.equal(here, known.to(here.dtype)), f"{name}: {context}"


@dataclass(frozen=True)
class Laws:
    """What the kernels' table says of N rows, on the CPU, added up as its readers do."""

    peak: Tensor  # [N]
    normaliser: Tensor  # [N]
    cut: Tensor  # [N]
    cut_token: Tensor  # [N]
    tile_masses: Tensor  # [N, T], as if nothing were cut

    @classmethod
    def of(cls, table: DistributionTable, rows: Tensor, scale: Tensor) -> Laws:
        """rows: int64 [N]. scale: float32 [N], in powers of two."""
        maxima, sums, cut, cut_token, kept = (
            values.cpu()[rows]
            for values in (table.tile_maxima, table.tile_sums, table.cut, table.cut_token, table.kept)
        )
        peak = maxima.max(-1).values
        weights = fused_exp2((maxima - peak.unsqueeze(1)).numpy(), scale.unsqueeze(1).numpy())
        masses = sums.double() * torch.from_numpy(weights)
        normaliser = torch.from_numpy(tiles.row_sum(masses.numpy()))
        return cls(peak, torch.where(cut > -torch.inf, kept, normaliser), cut, cut_token, masses)
