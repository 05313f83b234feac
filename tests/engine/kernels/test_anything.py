"""Random shapes, settings, ids and kinds of drafts: the kernels give the reference's bits for all of them."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from driftguard_engine.kernels.reference import verify as reference
from driftguard_engine.kernels.reference.exp2 import fused_exp2
from driftguard_engine.kernels.reference.sampling import SamplingBatch

from tests.engine.kernels.cases import Case, assert_equal_to_reference, case, run
from tests.engine.kernels.emulated import Emulated
from tests.engine.simt.emulator import Module

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


def random_case(chance: random.Random) -> tuple[Case, str]:
    rows, drafts = chance.randint(1, 3), chance.randint(0, 3)
    size = chance.choice([chance.randint(1, 40), chance.randint(41, 1000), chance.randint(4000, 5000)])
    dtype = chance.choice([torch.bfloat16, torch.float16, torch.float32])
    given, sharpness = case(rows, drafts, size), chance.choice([0.02, 1.0, 8.0])

    def some(values: list[Any]) -> torch.Tensor:
        return torch.tensor(chance.choices(values, k=rows))

    given = replace(
        given,
        target=(given.target * sharpness).to(dtype),
        draft=(given.draft * sharpness).to(dtype),
        lengths=some(list(range(drafts + 1))),
        sampling=SamplingBatch.of(
            some([0.0, 0.3, 1.0, 1.0, 2.5]),
            some([0, 0, 1, 7, size // 2, size]),
            some([1.0, 1.0, 0.05, 0.5, 0.95]),
            torch.from_numpy(given.sampling.seed),
        ),
        padding=chance.choice([0, 0, 1, 5]),
    )
    if chance.random() < 0.6:
        tokens = reference.draw_chain(given.draft, given.sampling, given.position, given.rule, fused_exp2)
        for row in range(rows):
            for step in range(drafts):
                if chance.random() < 0.3:
                    tokens[row, step] = chance.choice([-1, 0, size - 1, size, 2**40])
        given = replace(given, tokens=tokens, certain=chance.random() < 0.5)
    return given, f"B={rows}, K={drafts}, V={size}, {dtype}, {given.sampling}, certain={given.certain}"


@pytest.mark.parametrize("seed", range(16))
def test_anything(module: Module, seed: int) -> None:
    given, context = random_case(random.Random(seed))
    assert_equal_to_reference(given, run(Emulated(module, seed), given, CPU), f"seed {seed}: {context}")
