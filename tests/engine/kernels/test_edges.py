"""The kernels equal the reference where settings, ids, logits and shapes are at their limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import torch
from driftguard_engine.kernels import verify as verify_kernels
from driftguard_engine.kernels.layer_launches import AttentionScratch
from driftguard_engine.kernels.reference import tiles
from driftguard_engine.kernels.reference import verify as reference
from driftguard_engine.kernels.reference.distribution import token_distributions
from driftguard_engine.kernels.reference.exp2 import Singles, fused_exp2
from driftguard_engine.kernels.reference.sampling import SamplingBatch
from driftguard_engine.kernels.reference.verify import Rule
from driftguard_engine.kernels.verify import SamplingTensors, Workspace
from torch import Tensor

from tests.engine.kernels import cases
from tests.engine.kernels.cases import Case, Shared, answer, assert_equal_to_reference, cycle
from tests.engine.kernels.emulated import Emulated
from tests.engine.simt.emulator import Module

CPU = torch.device("cpu")
INF = torch.inf
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
HUGE = 2**40


def sampling_of(
    rows: int, temperature: Sequence[float], top_k: Sequence[int] = (0,), top_p: Sequence[float] = (1.0,)
) -> SamplingBatch:
    """Each cycled over the rows."""
    t, k, p = (cycle(list(values), rows) for values in (temperature, top_k, top_p))
    return SamplingBatch.of(t, k, p, cases.seeds(rows))


def case(rows: int, drafts: int, size: int, sampling: SamplingBatch | None = None) -> Case:
    """Logits in float32; every draft is offered."""
    given = cases.case(rows, drafts, size)
    sampling = sampling or sampling_of(rows, [1.0])
    return replace(given, sampling=sampling, lengths=torch.full((rows,), drafts))


def in_type(given: Case, dtype: torch.dtype) -> Case:
    return replace(given, target=given.target.to(dtype), draft=given.draft.to(dtype))


def check(module: Module, given: Case, context: str = "", seed: int = 0) -> Workspace:
    space = cases.run(Emulated(module, seed), given, CPU)
    assert_equal_to_reference(given, space, context)
    return space


@DTYPES
@pytest.mark.parametrize("size", [1, 2, 3, 4, 2047, 2048, 2049, 4097, 12_301])
def test_rows_that_start_anywhere(module: Module, size: int, dtype: torch.dtype) -> None:
    padding = {torch.bfloat16: 3, torch.float16: 5, torch.float32: 1}[dtype]
    given = replace(cases.case(3, 1, size, dtype), padding=padding)
    check(module, given, f"V={size}, {dtype}", seed=2)


@DTYPES
def test_settings_at_their_limits(module: Module, dtype: torch.dtype) -> None:
    size, rows = 300, 25
    sampling = sampling_of(
        rows,
        [1.0, 1e30, 0.0, 1e-30, 1.0, 1e-45],
        [0, 1, size - 1, size, HUGE],
        [1.0, 0.0, 1e-12, 1 - 1e-7],
    )
    check(module, in_type(case(rows, 1, size, sampling), dtype))


def test_temperatures_beyond_what_float32_divides_by(module: Module) -> None:
    """Every token that is not ruled out is as likely as any other; it is no greedy choice."""
    rows, size = 24, 300
    given = case(rows, 1, size, sampling_of(rows, [1.0]))
    temperature = torch.tensor([1e37, 1e38, 1e300, 1.7e308] * (rows // 4), dtype=torch.float64)
    given = replace(given, sampling=replace(given.sampling, temperature=temperature.numpy()))
    for logits in (given.target, given.draft):
        logits[..., : size // 2] = -INF
    space = check(module, given)
    assert int(space.tokens[:, 0].min()) >= size // 2
    assert len(set(space.draft_tokens[:, 0].tolist())) > rows // 2


def test_a_top_p_that_float32_cannot_tell_from_1_is_off() -> None:
    asked = torch.tensor([1 - 1e-9, 0.9], dtype=torch.float64)
    none = torch.zeros(2, dtype=torch.int64)
    sampling = SamplingBatch.of(torch.ones(2), none, asked, none)
    assert sampling.narrows(10).tolist() == [False, True]
    assert sampling.top_p.tolist() == asked.float().tolist()


def single_rows(logits: Tensor) -> Tensor:
    """[B, 1, V], rows of the batch apart, which the stride of the steps does not say."""
    rows = torch.full((len(logits), logits.shape[2] + 7), torch.nan)[:, :-7]
    rows.copy_(logits[:, 0])
    return rows.unsqueeze(1)


@pytest.mark.parametrize("drafts", [0, 1])
def test_single_rows_apart(module: Module, drafts: int) -> None:
    sampling = sampling_of(5, [1.0, 0.0, 0.6], [0, 0, 0, 4], [1.0, 1.0, 1.0, 1.0, 0.5])
    given = case(5, drafts, 501, sampling)
    if drafts:
        given = replace(given, draft=single_rows(given.draft))
    else:
        given = replace(given, target=single_rows(given.target))
    space = Workspace.empty(5, drafts, 501, CPU)
    cases.spoil(space)
    settings = SamplingTensors.of(sampling, given.position, 501, CPU)
    if drafts:
        verify_kernels.draw_drafts(Emulated(module), given.draft[:, 0], settings, space, 0)
    verify_kernels.verify(Emulated(module), given.target, given.draft, given.lengths.int(), settings, space)
    assert_equal_to_reference(given, space, f"K={drafts}")


@DTYPES
def test_logits_around_the_lowest_that_is_weighed_exactly(module: Module, dtype: torch.dtype) -> None:
    """At a temperature of 1 it is 62.5 below the peak. A tile without any below it takes fewer steps."""
    below = [62.25, 62.5, 62.75, 63.0, 87.5, 125.0, 1000.0, INF]
    given = case(len(below), 0, 2 * tiles.TILE)
    given.target[:] = torch.tensor([-difference for difference in below]).view(-1, 1, 1)
    given.target[..., 5] = 0.0
    given.target[..., tiles.TILE + 300 : tiles.TILE + 303] = torch.tensor([-3.0, 0.0, -20.0])
    space = check(module, in_type(given, dtype))
    weights = fused_exp2(given.target[:, 0].numpy(), given.sampling.scale[:, np.newaxis])
    expected = tiles.lane_sums(weights.reshape(len(below), 2, -1, tiles.CHUNK))
    assert space.target.lane_sums.tolist() == expected.reshape(len(below), -1).tolist()


@pytest.mark.parametrize("rule", get_args(Rule))
def test_memory_of_the_kernels_does_not_depend_on_torchs_default_dtype(rule: Rule) -> None:
    """Which is another one while transformers loads a draft: of half the size they would write behind it."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        space = Workspace.empty(2, 3, 501, CPU, rule=rule)
        scratch = AttentionScratch.empty(2, 4, 16, 300, CPU)
    finally:
        torch.set_default_dtype(torch.float32)
    written = [space.tile_masses, *space.target.read(), *space.draft.read()]
    written += [scratch.values, scratch.maxima, scratch.sums]
    assert torch.bfloat16 not in {each.dtype for each in written if isinstance(each, Tensor)}


def test_as_many_drafts_as_there_may_be(module: Module) -> None:
    given = case(4, verify_kernels.MOST_DRAFTS, 40, sampling_of(4, [0.7, 0.0]))
    given.target[:2, :-1] = given.draft[:2] = 60 * given.target[:2, :-1]  # nothing is rejected
    space = check(module, replace(given, lengths=torch.tensor([31, 31, 30, 1])))
    assert space.accepted[:2].tolist() == [31, 31]
    with pytest.raises(ValueError, match="0 to 31 drafts at a time, not 32"):
        Workspace.empty(1, 32, 40, CPU)
    with pytest.raises(ValueError, match="vocabularies of up to 4194304 tokens, not 4194305"):
        Workspace.empty(1, 0, 4_194_305, CPU)


def test_ids_that_the_vocabulary_lacks(module: Module) -> None:
    size = 77
    given = case(12, 2, size, sampling_of(12, [1.0, 0.0], [0, 0, 5]))
    tokens = given.target[:, :2].argmax(-1)
    bad = [-1, size, HUGE, -(2**40), 2**32, 2**31]
    tokens[torch.arange(12), torch.arange(12) % 2] = torch.tensor(bad * 2)
    given = replace(given, tokens=tokens)
    space = check(module, given)
    assert bool((space.accepted <= torch.arange(12) % 2).all())
    # What is beyond a row's length is not even looked at.
    check(module, replace(given, lengths=torch.arange(12) % 2))


@DTYPES
def test_certain_drafts(module: Module, dtype: torch.dtype) -> None:
    size, rows = 4100, 8
    sampling = sampling_of(rows, [1.0, 0.0, 0.7, 1.0], [0, 0, 0, 3, 0], [1.0, 1.0, 0.8])
    given = in_type(case(rows, 2, size, sampling), dtype)
    tokens = given.target[:, :-1].argmax(-1)
    tokens[0] = torch.tensor([5, 4099])
    tokens[1, 1], tokens[2, 0], tokens[3, 1] = -1, 4098, size
    given.target[4, 0, tokens[4, 0]] = 60  # what it is certain of has nearly all mass
    given.target[5, 0] = -INF
    given.target[5, 0, tokens[5, 0]] = 0  # or all of it
    check(module, replace(given, certain=True, tokens=tokens))


@DTYPES
@pytest.mark.parametrize("certain", [False, True])
def test_residuals_of_aligned_rows(module: Module, certain: bool, dtype: torch.dtype) -> None:
    """Whole tiles and a part; cuts in, between and beyond them, where equal logits stay up to a token. So
    little is left of the target's row that hardly any token that is proposed stays: tiles are summed."""
    size, rows = 2 * 4096 + 5 * 256 + 8, 12
    top_ks = [60, 20, 100, 60] if certain else [0, 5000, 100, 4095, 4096, 4097, 0]
    sampling = sampling_of(rows, [1.0, 0.7], top_ks, [1.0, 1.0, 1.0, 1.0, 0.4])
    given = case(rows, 1, size, sampling)
    given.draft[:] = (given.draft * 2).round() / 2
    given.draft[3:9] = 1.25
    given.target[:] = given.draft[:, :1]
    places = torch.tensor([0, 4095, 4096, size - 1]).repeat(3).unsqueeze(1)
    offered = places.unsqueeze(2)
    if certain:
        given.draft[:] = torch.full_like(given.draft, -INF).scatter_(2, offered, 0.0)
    given.target[:, 0, 40::400] += 0.5
    given.target[:, :1].scatter_(2, offered, -INF)
    given.target[5, 0, :5], given.draft[6, 0, -5:-1] = -INF, -INF
    given = in_type(replace(given, tokens=places, certain=certain), dtype)
    space = check(module, given)
    assert not bool(space.accepted.any())
    p, q = (shares(logits[:, :1], sampling) for logits in (given.target, given.draft))
    expected = torch.from_numpy(tiles.tile_sums(tiles.chunked(np.maximum(p - q, 0), 0)))
    summed = ~space.tile_masses.isnan().any(1) & expected.any(1)
    assert int(summed.sum()) >= rows // 2
    assert torch.equal(space.tile_masses[summed], expected[summed])


def shares(logits: Tensor, sampling: SamplingBatch) -> Singles:
    """[B, 1, V] -> [B, V]: of the whole, as the kernels round them."""
    singles = logits.float().numpy()
    found = token_distributions(singles, sampling, fused_exp2)
    weights = found.weigh(singles, np.arange(singles.shape[-1]), fused_exp2)[:, 0]
    return weights * (1 / found.normaliser).astype(np.float32)


@pytest.mark.parametrize("size", [1, 64, 4500])
def test_equal_logits_and_a_single_one(module: Module, size: int) -> None:
    """Ties across every cut; beyond 4,096 of them the row is searched whole."""
    rows = 6
    sampling = sampling_of(rows, [1.0], [0, 1, size // 2, size - 1, 0, 0], [1.0, 1.0, 1.0, 0.3, 0.5, 1e-12])
    given = case(rows, 1, size, sampling)
    given.target[:, 0] = 3.5
    given.target[:, 1] = -INF
    given.target[:, 1, -1] = -2.0
    given.draft[:] = given.target[:, :1]
    check(module, given)


def test_both_zeros_are_one_logit(module: Module) -> None:
    given = case(4, 1, 40, sampling_of(4, [1.0, 0.0, 1.0], [3, 0], [1.0, 0.5]))
    given.target[:] = -1.0
    given.target[..., 5:15:2], given.target[..., 4:15:2] = 0.0, -0.0
    given.draft[:] = given.target[:, :1]
    check(module, given)


@pytest.mark.parametrize("rule", ["token", "block"])
def test_an_empty_residual_leaves_the_target_s_law(module: Module, rule: Rule) -> None:
    size = 9001
    given = case(4, 1, size, sampling_of(4, [1.0, 0.7], [0, 0, 20, 0], [1.0, 1.0, 1.0, 0.9]))
    given.target[:, 0, 17] = -INF
    given = replace(given, draft=given.target[:, :1].clone(), tokens=torch.full((4, 1), 17), rule=rule)
    for seed in (0, 1):
        space = cases.run(Shared(Emulated(module, seed), 4), given, CPU)
        assert_equal_to_reference(given, space, f"order {seed}")
        assert not bool(space.accepted.any())
        assert 17 not in space.tokens[:, 0]


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("blocks", [1, 2, 4, 16])
def test_blocks_that_share_a_row_change_nothing(module: Module, blocks: int, rule: Rule) -> None:
    given = replace(case(5, 1, 4500, sampling_of(5, [1.0, 1.0, 0.0, 1.0], [0, 10, 0, 0])), rule=rule)
    given.target[1:4, 0].neg_()  # the draft is wrong
    space = cases.run(Shared(Emulated(module, blocks), blocks), given, CPU)
    assert_equal_to_reference(given, space, f"{blocks} blocks")
    assert space.accepted[1:4].tolist() == [0, 0, 0]


def test_a_row_of_many_tiles(module: Module) -> None:
    """36 tiles: warps take one after another, or one each, or there is a block to every tile."""
    given = case(2, 1, 36 * tiles.TILE - 5)
    given.target[:, 0].neg_()
    for blocks in (1, 3, 5, 36):
        space = cases.run(Shared(Emulated(module, blocks), blocks), given, CPU)
        assert_equal_to_reference(given, space, f"{blocks} blocks")
    assert space.accepted.tolist() == [0, 0]


def test_a_long_block_of_which_some_is_accepted(module: Module) -> None:
    """By the block rule: the runs of every length compete, over several tiles, also where rows are cut."""
    given = case(8, 6, 4500, sampling_of(8, [1.0, 0.8], [0, 0, 300, 0], [1.0, 0.95]))
    space = check(module, replace(given, rule="block"))
    assert len(set(space.accepted.tolist())) >= 3


def test_the_largest_vocabulary(module: Module) -> None:
    """More tiles than a warp has lanes; the greedy choice in the last one, the nucleus among 2,048 shares."""
    given = case(2, 0, 262_144, sampling_of(2, [0.0, 0.5], [0], [1.0, 0.7]))
    given.target[0, 0, -3:] = 50.0
    space = check(module, given)
    assert int(space.tokens[0, 0]) == 262_141


def test_a_row_alone_is_a_row_in_a_batch(module: Module) -> None:
    rows = 7
    sampling = sampling_of(rows, [1.0, 0.0, 0.7], [0, 0, 0, 0, 9], [1.0, 1.0, 1.0, 0.6])
    given = replace(case(rows, 3, 4200, sampling), lengths=torch.arange(rows) % 4)
    together = cases.run(Emulated(module), given, CPU)
    for row in (0, 3, 4, 6):
        alone = cases.run(Emulated(module, row), given.rows(torch.tensor([row])), CPU)
        for name in ("draft_tokens", "tokens", "accepted"):
            assert torch.equal(getattr(alone, name)[0], getattr(together, name)[row]), f"{name} of row {row}"


def with_distributions_missing(given: Case) -> tuple[Case, list[int]]:
    """The same with logits that have no distribution, and the status that each row must get."""
    target, draft = given.target.clone(), given.draft.clone()
    tokens = reference.draw_chain(given.draft, given.sampling, given.position, given.rule, fused_exp2)
    target[0, 0, -1] = torch.nan
    target[1, 2, 3] = INF  # after the last draft
    target[2, 1] = -INF
    draft[3, 1, -2] = torch.nan
    draft[4, 0, 0], target[4, 1, 0] = INF, torch.nan
    target[5, 2], draft[5, 1] = torch.nan, -INF  # beyond its length
    draft[6, 0], tokens[6, 0] = torch.nan, -1  # no proposal: there is no draft distribution to read
    draft[7] = torch.nan  # greedy: nobody reads it
    target[8, 0, 5] = torch.nan  # greedy too
    return replace(given, target=target, draft=draft, tokens=tokens), [1, 1, 1, 2, 1, 0, 0, 0, 1, 0]


@pytest.mark.parametrize(
    ("size", "dtype"),
    [(70, torch.float32), (70, torch.bfloat16), (70, torch.float16), (4099, torch.bfloat16)],
)
def test_rows_without_a_law_harm_no_other_row(module: Module, size: int, dtype: torch.dtype) -> None:
    rows = 10
    sampling = sampling_of(rows, [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 1.0], [0, 5, 3], [1.0, 0.9])
    healthy = replace(case(rows, 2, size, sampling), lengths=torch.tensor([2, 2, 2, 2, 2, 1, 2, 2, 2, 2]))
    given, status = with_distributions_missing(in_type(healthy, dtype))
    space = cases.run(Emulated(module, 1), given, CPU)
    assert space.status.tolist() == status
    invalid = space.status > 0
    assert bool((space.tokens[invalid] == -1).all())
    assert bool((space.accepted[invalid] == -1).all())
    known = answer(given)
    assert torch.equal(space.tokens[~invalid], known.tokens[~invalid])
    assert torch.equal(space.accepted[~invalid], known.accepted[~invalid].int())


def test_a_draft_without_a_law_draws_nothing(module: Module) -> None:
    given = case(4, 1, 50, sampling_of(4, [1.0, 0.0], [0, 0, 3]))
    space, logits = Workspace.empty(4, 1, 50, CPU), given.draft
    settings = SamplingTensors.of(given.sampling, given.position, 50, CPU)
    logits[0, 0, 7], logits[1, 0, 8], logits[2, 0] = torch.nan, torch.nan, -INF
    verify_kernels.draw_drafts(Emulated(module), logits[:, 0], settings, space, 0)
    assert space.draft_tokens[:3, 0].tolist() == [-1, -1, -1]
    assert int(space.draft_tokens[3, 0]) == int(logits[3, 0].argmax())
