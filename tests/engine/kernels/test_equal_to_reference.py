"""The kernels give the reference's tokens and distributions bit for bit, in any order of threads."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from driftguard_engine.kernels.reference.verify import Rule

from tests.engine.kernels.cases import SPECIAL, assert_equal_to_reference, case, run
from tests.engine.kernels.emulated import Emulated
from tests.engine.simt.emulator import Module

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


RULES = pytest.mark.parametrize("rule", ["token", "block"])


@RULES
@pytest.mark.parametrize("size", [1, 2, 7, 255, 257, 2048, 9001])
@pytest.mark.parametrize("filtered", [False, True])
def test_tokens_and_laws(module: Module, size: int, filtered: bool, rule: Rule) -> None:
    given = replace(case(10, 3, size, filtered=filtered), rule=rule)
    for seed in (0, 1):
        space = run(Emulated(module, seed), given, CPU)
        assert_equal_to_reference(given, space, f"V={size}, filtered={filtered}, order {seed}")


@RULES
@pytest.mark.parametrize("name", SPECIAL)
def test_special_cases(module: Module, name: str, rule: Rule) -> None:
    given = replace(SPECIAL[name]().rows(torch.arange(3)), rule=rule)  # the rest on a GPU
    assert_equal_to_reference(given, run(Emulated(module), given, CPU), name)
