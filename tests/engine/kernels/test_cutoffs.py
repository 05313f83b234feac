"""Where top-k and top-p end: the reference's cut by every way to it, and how much of a row each way reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from driftguard_engine.kernels import verify as verify_kernels
from driftguard_engine.kernels.cuda.launcher import Argument, Size
from driftguard_engine.kernels.reference.sampling import SamplingBatch
from driftguard_engine.kernels.reference.tiles import TILE
from driftguard_engine.kernels.verify import SamplingTensors, Workspace
from torch import Tensor

from tests.engine.kernels.cases import Case, assert_equal_to_reference, case, run, seeds
from tests.engine.kernels.emulated import Emulated
from tests.engine.simt.emulator import Module

CPU = torch.device("cpu")
COUNTED = Path(__file__).parent / "counted.cu"
FLAT, STEEP = 0.01, 3.0


@pytest.fixture(scope="module")
def counted(compiled: Callable[..., Module]) -> Module:
    return compiled(COUNTED)


@dataclass(frozen=True)
class Counting:
    """A launcher that counts the logits which `row_cutoffs` reads. blocks: of each row, 0 leaves them."""

    kernels: Module
    counted: Module
    blocks: int = 0

    def launch(self, kernel: str, grid: Size, block: int, arguments: Sequence[Argument]) -> None:
        if kernel.startswith("row_cutoffs"):
            blocks = self.blocks or grid[1]
            Emulated(self.counted).launch(f"counted_{kernel}", (grid[0], blocks, 1), block, arguments)
        else:
            Emulated(self.kernels).launch(kernel, grid, block, arguments)

    def take_count(self) -> int:
        count = np.zeros(1, np.uint64)
        self.counted.launch("take_count", grid=(1,), block=(1,), args=[count])
        return int(count[0])


def of_rows(rows: Tensor, top_k: int, top_p: float) -> Case:
    """Rows [B, V] to draw from, without drafts."""
    count, size = rows.shape
    asked = (torch.ones(count), torch.tensor([top_k] * count), torch.tensor([top_p] * count))
    given = case(count, 0, size)
    return replace(given, target=rows.unsqueeze(1), sampling=SamplingBatch.of(*asked, seeds(count)))


def passes(launcher: Counting, given: Case, context: str) -> float:
    """How often a row is read until its cut is known, which must be the reference's."""
    launcher.take_count()
    assert_equal_to_reference(given, run(launcher, given, CPU), context)
    return launcher.take_count() / given.target.numel()


@pytest.mark.parametrize(
    ("size", "spread", "top_k", "top_p", "way", "least", "most"),
    [
        (4096, FLAT, 0, 0.95, "all of it is sorted", 1, 1),
        (4096, STEEP, 4095, 0.5, "all of it is sorted", 1, 1),
        (9000, STEEP, 40, 1.0, "by shares", 0.1, 0.6),
        (9000, STEEP, 40, 0.8, "by shares", 0.1, 0.6),
        (9000, STEEP, 0, 0.5, "by shares", 0.1, 0.6),
        (9000, 1.0, 0, 0.5, "by weight", 1.4, 2),
        (9000, 1.0, 4500, 0.9, "by weight, for each of both", 2, 4),
        (40_000, FLAT, 0, 0.5, "by weight, then by a digit", 2.5, 3),
        (5000, 0.0, 7, 1.0, "equal logits that do not fit", 4, 7.1),
        (5000, 0.0, 7, 0.5, "equal logits that do not fit", 4, 7.1),
        (5000, 0.0, 7, 0.9, "equal logits that do not fit", 4, 7.1),
    ],
)
def test_cutoffs(
    module: Module,
    counted: Module,
    size: int,
    spread: float,
    top_k: int,
    top_p: float,
    way: str,
    least: float,
    most: float,
) -> None:
    rows = (case(2, 0, size).target[:1, 0] * spread).expand(2, -1).contiguous()
    if spread == 0:
        rows[:, 4000:4003] = 1.0  # and some above the tie
    assert least <= passes(Counting(module, counted), of_rows(rows, top_k, top_p), way) <= most


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("spread", [1.0, 3.0, 5.0])
def test_a_row_of_a_real_vocabulary_is_read_at_most_three_times(
    module: Module, counted: Module, spread: float, dtype: torch.dtype
) -> None:
    random = torch.Generator().manual_seed(3)
    row = (spread * torch.randn(1, 128_256, generator=random)).to(dtype)
    launcher = Counting(module, counted)
    tile = TILE / row.shape[1] if dtype == torch.bfloat16 else 0  # in which equal logits are looked for
    assert passes(launcher, of_rows(row, 0, 0.9), "top-p") <= 2 + tile
    assert passes(launcher, of_rows(row, 50, 1.0), "top-k") <= 0.1
    assert passes(launcher, of_rows(row, 50, 0.9), "few, then top-p") <= 0.1
    assert passes(launcher, of_rows(row, 2000, 0.9), "many, then top-p") <= 3


@pytest.mark.parametrize("blocks", [1, 2, 3, 7])
def test_blocks_that_share_a_row_find_the_same_cut(module: Module, counted: Module, blocks: int) -> None:
    size = 20_000
    given = case(7, 1, size)
    given.target[6] = 0.25
    asked = (torch.tensor([0, 40, 0, 9000, 0, 1000, 0]), torch.tensor([0.9, 1.0, 0.5, 0.9, 0.999, 1.0, 0.9]))
    sampling = SamplingBatch.of(torch.tensor([1.0, 1.0, 0.7, 1.0, 1e3, 1.0, 1.0]), *asked, seeds(7))
    given = replace(given, sampling=sampling, lengths=torch.arange(7) % 2)
    launcher = Counting(module, counted, blocks)
    assert_equal_to_reference(given, run(launcher, given, CPU), f"{blocks} blocks")


def rows_of_many_values() -> tuple[Tensor, list[tuple[int, float, float]]]:
    """Rows [B, V], and top-k, top-p and temperature of each: so even that most shares are read."""
    size = 12_000
    random = torch.Generator().manual_seed(11)

    def normal(spread: float, middle: float = 0.0) -> Tensor:
        return middle + spread * torch.randn(size, generator=random)

    with_zeros, tiny, few_tiny, far_below = normal(1.0, 3.0), normal(1e-9), normal(0.5, 2.5), normal(20.0)
    with_zeros[2::5], with_zeros[3::50] = 0.0, -0.0
    tiny[:4000] = 3.0
    few_tiny[::9] = normal(1e-9)[::9]
    far_below[3000:] -= 500.0
    around_zero = normal(2e-8).clamp(-5e-8, 5e-8)
    around_zero[3000:] = -7e-8 - normal(1e-8)[3000:].abs()
    ruled_out = normal(1.0)
    ruled_out[1::2] = -torch.inf
    cases: list[tuple[Tensor, tuple[int, float, float]]] = [
        (normal(3.0), (0, 0.9, 3.0)),
        (normal(3.0, -30.0), (0, 0.95, 3.0)),
        (normal(2.0), (0, 0.97, 2.0)),  # down to numbers below 0
        (normal(0.3), (0, 0.9, 1.0)),  # no number is far from 0
        (normal(1e-9), (9000, 0.9, 1e-9)),  # nor from its bin
        (around_zero, (0, 0.9, 1e-7)),
        (with_zeros, (0, 0.95, 3.0)),
        (with_zeros, (9500, 1.0, 3.0)),
        (tiny, (0, 0.9, 5.0)),  # numbers nearer to 0 than have bins, more than can be sorted
        (few_tiny, (0, 0.999, 9.0)),
        (few_tiny, (11_500, 0.99, 9.0)),
        (normal(1.0, 300.0), (0, 0.9, 1.0)),
        (normal(1.0, -300.0), (0, 0.9, 1.0)),
        (far_below, (7000, 1.0, 400.0)),  # the cut lies below all bins
        (far_below, (7000, 0.5, 400.0)),  # of top-k; that of top-p does not
        (far_below, (2500, 0.9, 20.0)),
        (ruled_out, (5900, 0.95, 1.0)),
        (ruled_out, (8000, 1.0, 1.0)),  # more than there are
        (torch.full((size,), 1.5), (5000, 0.7, 1.0)),
    ]
    return torch.stack([row for row, _ in cases]), [asked for _, asked in cases]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("blocks", [1, 3])
def test_values_of_every_size_are_cut_alike(
    module: Module, counted: Module, blocks: int, dtype: torch.dtype
) -> None:
    rows, asked = rows_of_many_values()
    top_k, top_p, temperature = (torch.tensor(each) for each in zip(*asked, strict=True))
    sampling = SamplingBatch.of(temperature, top_k, top_p, seeds(len(rows)))
    given = replace(case(len(rows), 0, rows.shape[1]), target=rows.unsqueeze(1).to(dtype), sampling=sampling)
    launcher = Counting(module, counted, blocks)
    assert_equal_to_reference(given, run(launcher, given, CPU), f"{blocks} blocks, {dtype}")


@pytest.mark.parametrize("spread", [1.0, 5.0])
def test_everything_stays_where_all_weights_together_do_not_reach_top_p(
    module: Module, counted: Module, spread: float
) -> None:
    """A sum of weights that rounding made too large: whatever was left unread is read then."""
    size = 9000
    given = of_rows(spread * case(1, 0, size).target[0], 0, 0.9)
    given.target[0, 0, 77] = -torch.inf
    space, launcher = Workspace.empty(1, 0, size, CPU), Counting(module, counted)
    settings = SamplingTensors.of(given.sampling, given.position, size, CPU)
    where = (given.target, None, settings, space.target, 1, 0, space.meetings)
    verify_kernels.find_distributions(AfterSums(launcher, space.target.tile_sums), *where)
    assert float(space.target.cut) == float(given.target[given.target > -torch.inf].min())
    assert launcher.take_count() > size
    assert not any(bool(left.any()) for left in space.meetings.all())


@dataclass(frozen=True)
class AfterSums:
    """A launcher that enlarges the sums of weights before they are used."""

    launcher: Counting
    tile_sums: Tensor

    def launch(self, kernel: str, grid: Size, block: int, arguments: Sequence[Argument]) -> None:
        if kernel.startswith("row_cutoffs"):
            self.tile_sums.mul_(1.2)
        self.launcher.launch(kernel, grid, block, arguments)
