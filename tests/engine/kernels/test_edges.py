"""The kernels equal the reference where settings, ids, logits and shapes are at their limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from driftguard_engine.kernels import launches, reference
from driftguard_engine.kernels.distribution import Shaping
from driftguard_engine.kernels.exp2 import fused_exp2
from driftguard_engine.kernels.launches import Launcher, Workspace
from driftguard_engine.kernels.launching import Argument, Size
from torch import Tensor

from tests.engine.kernels.cases import (
    CPU,
    Case,
    assert_equal_to_reference,
    noise_of,
    padded,
    related_logits,
    run,
    shaping_of,
)
from tests.engine.kernels.emulated import Emulated
from tests.engine.simt.emulator import Module

INF = torch.inf
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
HUGE = 2**40


def case(rows: int, drafts: int, size: int, shaping: Shaping | None = None) -> Case:
    target, draft = related_logits(rows, drafts, size)
    shaping = shaping or shaping_of(rows, [1.0], [0], [1.0])
    return Case(target, draft, torch.full((rows,), drafts), shaping, noise_of(rows))


def in_type(given: Case, dtype: torch.dtype) -> Case:
    return replace(
        given, target=given.target.to(dtype), draft=None if given.draft is None else given.draft.to(dtype)
    )


def check(module: Module, given: Case, context: str = "", seed: int = 0) -> Workspace:
    space = run(Emulated(module, seed), given)
    assert_equal_to_reference(given, space, context)
    return space


@DTYPES
def test_settings_at_their_limits(module: Module, dtype: torch.dtype) -> None:
    size, rows = 300, 25
    shaping = shaping_of(
        rows,
        [1.0, 1e30, 0.0, 1e-30, 1.0, 1e-45],
        [0, 1, size - 1, size, HUGE],
        [1.0, 0.0, 1e-12, 1 - 1e-7],
    )
    check(module, in_type(case(rows, 1, size, shaping), dtype))


def test_a_top_p_that_float32_cannot_tell_from_1_is_off() -> None:
    asked = torch.tensor([1 - 1e-9, 0.9], dtype=torch.float64)
    shaping = Shaping.of(torch.ones(2), torch.zeros(2, dtype=torch.int64), asked)
    assert shaping.narrows(10).tolist() == [False, True]
    assert shaping.top_p.tolist() == asked.float().tolist()


def test_no_drafts_and_rows_apart(module: Module) -> None:
    shaping = shaping_of(5, [1.0, 0.0, 0.6], [0, 0, 0, 4], [1.0, 1.0, 1.0, 1.0, 0.5])
    given = case(5, 0, 501, shaping)
    for target in (given.target, padded(given.target, 3), padded(given.target[:, 0], 7).unsqueeze(1)):
        check(module, replace(given, target=target, draft=None), f"strides {target.stride()}")


def test_as_many_drafts_as_there_may_be(module: Module) -> None:
    given = case(4, launches.MOST_DRAFTS, 40, shaping_of(4, [0.7, 0.0], [0], [1.0]))
    assert given.draft is not None
    given.target[:2, :-1] = given.draft[:2] = 60 * given.target[:2, :-1]  # nothing is rejected
    space = check(module, replace(given, lengths=torch.tensor([31, 31, 30, 1])))
    assert space.accepted[:2].tolist() == [31, 31]
    with pytest.raises(ValueError, match="0 to 31 drafts at a time, not 32"):
        Workspace.empty(1, 32, 40, CPU)


def test_ids_that_the_vocabulary_lacks(module: Module) -> None:
    size = 77
    given = case(12, 2, size, shaping_of(12, [1.0, 0.0], [0, 0, 5], [1.0])).drafted()
    assert given.tokens is not None
    bad = [-1, size, HUGE, -(2**40), 2**32, 2**31]
    given.tokens[torch.arange(12), torch.arange(12) % 2] = torch.tensor(bad * 2)
    space = check(module, given)
    assert bool((space.accepted <= torch.arange(12) % 2).all())
    # What is beyond a row's length is not even looked at.
    check(module, replace(given, lengths=torch.arange(12) % 2))


@DTYPES
def test_certain_drafts(module: Module, dtype: torch.dtype) -> None:
    size, rows = 4100, 8
    shaping = shaping_of(rows, [1.0, 0.0, 0.7, 1.0], [0, 0, 0, 3, 0], [1.0, 1.0, 0.8])
    given = in_type(case(rows, 2, size, shaping), dtype)
    tokens = given.target[:, :-1].argmax(-1)
    tokens[0] = torch.tensor([5, 4099])
    tokens[1, 1], tokens[2, 0], tokens[3, 1] = -1, 4098, size
    given.target[4, 0, tokens[4, 0]] = 60  # what it is certain of has nearly all mass
    given.target[5, 0] = -INF
    given.target[5, 0, tokens[5, 0]] = 0  # or all of it
    check(module, replace(given, draft=None, tokens=tokens))


@pytest.mark.parametrize("size", [1, 64, 4500])
def test_equal_logits_and_a_single_one(module: Module, size: int) -> None:
    """Ties across every cut; beyond 4,096 of them the row is searched whole."""
    rows = 6
    shaping = shaping_of(rows, [1.0], [0, 1, size // 2, size - 1, 0, 0], [1.0, 1.0, 1.0, 0.3, 0.5, 1e-12])
    given = case(rows, 1, size, shaping)
    given.target[:, 0] = 3.5
    given.target[:, 1] = -INF
    given.target[:, 1, -1] = -2.0
    assert given.draft is not None
    given.draft[:] = given.target[:, :1]
    check(module, given)


def test_both_zeros_are_one_logit(module: Module) -> None:
    given = case(4, 1, 40, shaping_of(4, [1.0, 0.0], [3, 0], [1.0, 0.5]))
    given.target[:] = -1.0
    given.target[..., 5:15:2], given.target[..., 4:15:2] = 0.0, -0.0
    assert given.draft is not None
    given.draft[:] = given.target[:, :1]
    check(module, given)


def test_an_empty_residual_leaves_the_target_s_law(module: Module) -> None:
    size = 9001
    target, _ = related_logits(4, 1, size)
    target[:, 0, 17] = -INF
    shaping = shaping_of(4, [1.0, 0.7], [0, 0, 20, 0], [1.0, 1.0, 1.0, 0.9])
    one, tokens = torch.ones(4, dtype=torch.int64), torch.full((4, 1), 17)
    given = Case(target, target[:, :1].clone(), one, shaping, noise_of(4), tokens)
    for seed in (0, 1):
        space = run(Shared(Emulated(module, seed), 4), given)
        assert_equal_to_reference(given, space, f"order {seed}")
        assert not bool(space.accepted.any())
        assert 17 not in space.tokens[:, 0]


@dataclass(frozen=True)
class Shared:
    """A launcher with so many blocks to each row of a verification, also where there is little to share."""

    launcher: Launcher
    blocks: int

    def launch(self, kernel: str, grid: Size, block: int, arguments: Sequence[Argument]) -> None:
        if kernel.startswith("verify_chain"):
            grid = (grid[0], self.blocks, 1)
        self.launcher.launch(kernel, grid, block, arguments)


@pytest.mark.parametrize("blocks", [1, 2, 4, 16])
def test_blocks_that_share_a_row_change_nothing(module: Module, blocks: int) -> None:
    given = case(5, 1, 4500, shaping_of(5, [1.0, 1.0, 0.0, 1.0], [0, 10, 0, 0], [1.0]))
    given.target[1:4, 0].neg_()  # the draft is wrong
    space = run(Shared(Emulated(module, blocks), blocks), given)
    assert_equal_to_reference(given, space, f"{blocks} blocks")
    assert space.accepted[1:4].tolist() == [0, 0, 0]


def test_a_row_of_many_tiles(module: Module) -> None:
    """18 tiles, of which blocks take 8 at a time: three share the row; a block's warps take more than one."""
    given = case(2, 1, 18 * 4096 - 5)
    given.target[:, 0].neg_()
    for blocks in (1, 16):
        space = run(Emulated(module, blocks), given, blocks_per_row=blocks)
        assert_equal_to_reference(given, space, f"{blocks} blocks")
    assert space.accepted.tolist() == [0, 0]


def test_the_largest_vocabulary(module: Module) -> None:
    """More tiles than a warp has lanes; the greedy choice in the last one, the nucleus among 2,048 shares."""
    given = case(2, 0, 262_144, shaping_of(2, [0.0, 0.5], [0], [1.0, 0.7]))
    given.target[0, 0, -3:] = 50.0
    space = check(module, replace(given, draft=None))
    assert int(space.tokens[0, 0]) == 262_141


def test_a_row_alone_is_a_row_in_a_batch(module: Module) -> None:
    rows = 7
    shaping = shaping_of(rows, [1.0, 0.0, 0.7], [0, 0, 0, 0, 9], [1.0, 1.0, 1.0, 0.6])
    given = replace(case(rows, 3, 4200, shaping), lengths=torch.arange(rows) % 4)
    together = run(Emulated(module), given)
    for row in (0, 3, 4, 6):
        alone = run(Emulated(module, row), given.rows(slice(row, row + 1)))
        for name in ("draft_tokens", "tokens", "accepted"):
            assert torch.equal(getattr(alone, name)[0], getattr(together, name)[row]), f"{name} of row {row}"


def with_laws_missing(given: Case) -> tuple[Case, list[int]]:
    """The same with logits that have no law, and the status that each row must get."""
    target, draft = given.target.clone(), given.draft
    assert draft is not None
    assert given.tokens is not None
    draft, tokens = draft.clone(), given.tokens.clone()
    target[0, 0, -1] = torch.nan
    target[1, 2, 3] = INF  # after the last draft
    target[2, 1] = -INF
    draft[3, 1, -2] = torch.nan
    draft[4, 0, 0], target[4, 1, 0] = INF, torch.nan
    target[5, 2], draft[5, 1] = torch.nan, -INF  # beyond its length
    draft[6, 0], tokens[6, 0] = torch.nan, -1  # no proposal: there is no draft law to read
    draft[7] = torch.nan  # greedy: nobody reads it
    target[8, 0, 5] = torch.nan  # greedy too
    return replace(given, target=target, draft=draft, tokens=tokens), [1, 1, 1, 2, 1, 0, 0, 0, 1, 0]


@pytest.mark.parametrize(
    ("size", "dtype"),
    [(70, torch.float32), (70, torch.bfloat16), (70, torch.float16), (4099, torch.bfloat16)],
)
def test_rows_without_a_law_harm_no_other_row(module: Module, size: int, dtype: torch.dtype) -> None:
    rows = 10
    shaping = shaping_of(rows, [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 1.0], [0, 5, 3], [1.0, 0.9])
    healthy = replace(case(rows, 2, size, shaping), lengths=torch.tensor([2, 2, 2, 2, 2, 1, 2, 2, 2, 2]))
    given, status = with_laws_missing(in_type(healthy, dtype).drafted())
    space = run(Emulated(module, 1), given)
    assert space.status.tolist() == status
    lawless = space.status > 0
    assert bool((space.tokens[lawless] == -1).all())
    assert bool((space.accepted[lawless] == -1).all())
    tokens, accepted = reference.verify_chain(given.chain(), fused_exp2)
    assert torch.equal(space.tokens[~lawless], tokens[~lawless])
    assert torch.equal(space.accepted[~lawless], accepted[~lawless].int())


def test_a_draft_without_a_law_draws_nothing(module: Module) -> None:
    given = case(4, 1, 50, shaping_of(4, [1.0, 0.0], [0, 0, 3], [1.0]))
    space, logits = Workspace.empty(4, 1, 50, CPU), given.draft
    assert logits is not None
    logits[0, 0, 7], logits[1, 0, 8], logits[2, 0] = torch.nan, torch.nan, -INF
    launches.draw_drafts(Emulated(module), logits[:, 0], given.settings, space, 0)
    assert space.draft_tokens[:3, 0].tolist() == [-1, -1, -1]
    assert int(space.draft_tokens[3, 0]) == int(logits[3, 0].argmax())


# --- where top-k and top-p end: three ways to find it ------------------------------------------------------


def logits_at_hand(row: Tensor, rank: int) -> int:
    """How many reach the `rank`-th largest of the maxima of the lanes' shares of tiles."""
    size = -(-len(row) // 4096) * 4096
    whole = torch.full((size,), -INF)
    whole[: len(row)] = row
    shares = whole.view(-1, 16, 32, 8).amax((1, 3)).flatten()
    return int((row >= shares.topk(rank).values[-1]).sum()) if rank <= len(shares) else len(row)


FITS = 4096
FLAT, STEEP = 0.01, 3.0


@pytest.mark.parametrize(
    ("size", "spread", "top_k", "top_p", "way"),
    [
        (4096, FLAT, 0, 0.95, "all of it"),
        (4096, STEEP, 4095, 0.5, "all of it"),
        (9000, STEEP, 40, 1.0, "by shares"),
        (9000, STEEP, 40, 0.8, "by shares"),
        (9000, STEEP, 0, 0.5, "by shares"),
        (9000, FLAT, 0, 0.95, "whole, the nucleus being too large"),
        (5000, STEEP, 4500, 0.9, "whole, the k being too many"),
        (5000, 0.0, 7, 1.0, "whole, for ties"),
        (5000, 0.0, 7, 0.5, "whole, for ties"),
        (5000, 0.0, 7, 0.9, "whole, for ties"),
    ],
)
def test_cutoffs(module: Module, size: int, spread: float, top_k: int, top_p: float, way: str) -> None:
    target, _ = related_logits(2, 0, size)
    given = case(2, 0, size, shaping_of(2, [1.0], [top_k], [top_p]))
    given = replace(given, target=(target[:1] * spread).expand(2, -1, -1).contiguous(), draft=None)
    if spread == 0:
        given.target[:, 0, 4000:4003] = 1.0  # and some above the tie
    row = given.target[0, 0]
    probability = (row.double() if not top_k else row.double().topk(top_k).values).softmax(-1)
    nucleus = int((probability.sort(descending=True).values.cumsum(-1) < top_p).sum()) + 1
    shares = 32 * -(-size // 4096)
    at_hand = logits_at_hand(row, top_k or min(512, shares * 7 // 8))
    expected = {
        "all of it": size <= FITS,
        "by shares": size > FITS and at_hand <= FITS and (top_k > 0 or nucleus < at_hand),
        "whole, the nucleus being too large": size > FITS and at_hand < nucleus,
        "whole, the k being too many": size > FITS and top_k > FITS,
        "whole, for ties": size > FITS and at_hand > FITS and top_k == 7,
    }
    assert expected[way]
    check(module, given, way)
