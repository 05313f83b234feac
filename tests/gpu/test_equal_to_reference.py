"""On a device, the kernels give the reference's tokens and distributions, bit for bit, in any batch."""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import pytest
import torch
from driftguard_engine.kernels import self_test
from driftguard_engine.kernels import verify as verify_kernels
from driftguard_engine.kernels.cuda.launcher import SUFFIXES
from driftguard_engine.kernels.cuda.loader import Kernels
from driftguard_engine.kernels.reference.verify import Rule

from tests.engine.kernels.cases import (
    SPECIAL,
    Case,
    Shared,
    answer,
    assert_equal_to_reference,
    assert_same,
    case,
    outcome_of,
    run,
)
from tests.engine.kernels.step_cases import assert_equal, ran, step_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

SMALL = [1, 2, 7, 255, 257, 2048, 4097, 9001]
LARGE = [32_000, 50_257, 128_256, 151_936, 262_144]
RULES = pytest.mark.parametrize("rule", get_args(Rule))


@RULES
@pytest.mark.parametrize("dtype", SUFFIXES, ids=str)
@pytest.mark.parametrize("size", SMALL)
def test_small_vocabularies(engine_kernels: Kernels, size: int, dtype: torch.dtype, rule: Rule) -> None:
    for filtered in (False, True):
        given = replace(case(40, 3, size, dtype, filtered), rule=rule)
        space = run(engine_kernels, given, engine_kernels.device)
        assert_equal_to_reference(given, space, f"V={size}, {dtype}, filtered={filtered}")


@pytest.mark.parametrize(
    ("dtype", "rule"), [*((dtype, "token") for dtype in SUFFIXES), (torch.bfloat16, "block")], ids=str
)
@pytest.mark.parametrize("size", LARGE)
def test_large_vocabularies(engine_kernels: Kernels, size: int, dtype: torch.dtype, rule: Rule) -> None:
    given = replace(case(6, 2, size, dtype), rule=rule)
    assert_equal_to_reference(given, run(engine_kernels, given, engine_kernels.device), f"V={size}, {dtype}")


@RULES
@pytest.mark.parametrize("name", SPECIAL)
def test_special_cases(engine_kernels: Kernels, name: str, rule: Rule) -> None:
    given = replace(SPECIAL[name](), rule=rule)
    assert_equal_to_reference(given, run(engine_kernels, given, engine_kernels.device), name)


@RULES
def test_most_drafts(engine_kernels: Kernels, rule: Rule) -> None:
    given = case(4, verify_kernels.MOST_DRAFTS, 300)
    given = replace(given, lengths=torch.tensor([31, 30, 0, 17]), rule=rule)
    assert_equal_to_reference(given, run(engine_kernels, given, engine_kernels.device), "31 drafts")


@pytest.mark.parametrize("with_model", [True, False])
@pytest.mark.parametrize("drafts", [0, 1, 4, 31])
def test_steps(engine_kernels: Kernels, drafts: int, with_model: bool) -> None:
    for seed in range(24):
        slots, positions = [(3, 32), (40, 33), (200, 300)][seed % 3]
        given = step_case(seed, slots, positions, drafts, with_model)
        found = ran(given, engine_kernels, engine_kernels.device)
        assert_equal(found, ran(given, None), f"seed {seed}")


def test_the_self_test_passes(engine_kernels: Kernels) -> None:
    self_test.check(engine_kernels, engine_kernels.device)


def wide() -> Case:
    """Every kind of row, over 128 tiles, for blocks to share."""
    given = case(12, 2, 262_144, torch.bfloat16)
    return replace(given, lengths=torch.arange(12) % 2 + 1)


@RULES
def test_blocks_of_a_row_change_nothing(engine_kernels: Kernels, rule: Rule) -> None:
    given = replace(wide(), rule=rule)
    expected = answer(given)
    for blocks in range(1, 17):
        for _ in range(3):
            found = outcome_of(run(Shared(engine_kernels, blocks), given, engine_kernels.device))
            assert_same(found, expected, f"{blocks} blocks per row")


def test_batch_and_place_change_nothing(engine_kernels: Kernels) -> None:
    given = wide()
    whole = outcome_of(run(engine_kernels, given, engine_kernels.device))
    random = torch.Generator().manual_seed(3)
    many = torch.randint(0, 12, (200,), generator=random)
    for index in (torch.randperm(12, generator=random), torch.tensor([7]), torch.tensor([4, 2]), many):
        found = outcome_of(run(engine_kernels, given.rows(index), engine_kernels.device))
        expected = replace(
            whole,
            drawn=whole.drawn[index],
            tokens=whole.tokens[index],
            accepted=whole.accepted[index],
            status=whole.status[index],
        )
        assert_same(found, expected, f"rows {index.tolist()[:12]}")


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", SUFFIXES, ids=str)
def test_rows_without_a_law_have_a_status_and_harm_no_other(
    engine_kernels: Kernels, dtype: torch.dtype, value: float
) -> None:
    given = case(8, 2, 5000, dtype)
    given = replace(given, lengths=torch.tensor([2, 2, 2, 1, 0, 2, 2, 2]))
    temperature = given.sampling.temperature.copy()
    temperature[[1, 2, 3]] = 1.0
    given = replace(given, sampling=replace(given.sampling, temperature=temperature))
    clean = answer(given)
    harmed = replace(given, target=given.target.clone(), draft=given.draft.clone(), tokens=clean.drawn)
    for logits, row, step in (
        (harmed.target, 1, 2),
        (harmed.draft, 2, 1),
        (harmed.target, 3, 2),  # past its length: nobody reads it
    ):
        if value == -torch.inf:
            logits[row, step] = value  # everywhere
        else:
            logits[row, step, 4567] = value
    found = outcome_of(run(engine_kernels, harmed, engine_kernels.device))
    assert found.status.tolist() == [0, 1, 2, 0, 0, 0, 0, 0]
    assert found.tokens[1:3].tolist() == [[-1] * 3] * 2
    assert found.accepted[1:3].tolist() == [-1, -1]
    others = torch.tensor([0, 3, 4, 5, 6, 7])
    assert torch.equal(found.tokens[others], clean.tokens[others])
    assert torch.equal(found.accepted[others], clean.accepted[others])
