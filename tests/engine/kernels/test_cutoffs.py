"""Each of the three ways in which the kernels find where top-k and top-p end gives the reference's cut."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from driftguard_engine.kernels.reference.sampling import SamplingBatch
from torch import Tensor

from tests.engine.kernels.cases import assert_equal_to_reference, case, run, seeds
from tests.engine.kernels.emulated import Emulated
from tests.engine.simt.emulator import Module

CPU = torch.device("cpu")


def logits_at_hand(row: Tensor, rank: int) -> int:
    """How many reach the `rank`-th largest of the maxima of the lanes' shares of tiles."""
    size = -(-len(row) // 4096) * 4096
    whole = torch.full((size,), -torch.inf)
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
    given = case(2, 0, size)
    asked = (torch.ones(2), torch.tensor([top_k] * 2), torch.tensor([top_p] * 2))
    sampling = SamplingBatch.of(*asked, seeds(2))
    target = (given.target[:1] * spread).expand(2, -1, -1).contiguous()
    given = replace(given, target=target, sampling=sampling)
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
    assert_equal_to_reference(given, run(Emulated(module), given, CPU), way)
