"""Budgets of instructions for the loops over the vocabulary, in the machine code for an H100 or H200.

An H200 moves 2,100 logits of 16 bits per nanosecond, and issues 14 instructions for each in that time: beyond
that, instructions and not memory decide how long a kernel takes.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from statistics import median

import pytest
from driftguard_engine.kernels.cuda.compiler import Compiled, Source, read_sources

from tests.engine.kernels.disassembly import PACKAGE, Kernel, Stretch, disassembler, kernels
from tests.gpu.check.resources import resources

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(disassembler() is None, reason=f"no nvdisasm: pip install {PACKAGE}"),
]

LOADED = {"bf16": 8, "fp16": 8, "fp32": 4}  # logits, by one load of 16 bytes
TILE_OF_LANE = 64  # logits of a tile that one lane weighs


@pytest.fixture(scope="module")
def disassembled(
    compiled_for: Callable[[Source, str], Compiled], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], dict[str, Kernel]]:
    """disassembled(file): its kernels, which keep everything in registers."""

    def disassemble(file: str) -> dict[str, Kernel]:
        (source,) = (source for source in read_sources() if source.name == file)
        compiled = compiled_for(source, "sm_90a")
        assert not [kernel for kernel in resources(compiled.log) if kernel.uses_local_memory]
        nvdisasm = disassembler()
        assert nvdisasm is not None
        return kernels(compiled.cubin, nvdisasm, tmp_path_factory.mktemp("cubin"))

    return disassemble


@pytest.fixture(scope="module")
def statistics(disassembled: Callable[[str], dict[str, Kernel]]) -> dict[str, Kernel]:
    return disassembled("statistics.cu")


@pytest.fixture(scope="module")
def cutoffs(disassembled: Callable[[str], dict[str, Kernel]]) -> dict[str, Kernel]:
    return disassembled("cutoffs.cu")


@pytest.fixture(scope="module")
def verification(disassembled: Callable[[str], dict[str, Kernel]]) -> dict[str, Kernel]:
    return disassembled("verify.cu")


def of_most(kernel: Kernel, operation: str) -> Stretch:
    """The code without branches that has the most of this operation."""
    return max(kernel.blocks, key=lambda block: kernel.count(block, operation))


@pytest.mark.parametrize("suffix", ["bf16", "fp16"])
def test_statistics(statistics: dict[str, Kernel], suffix: str) -> None:
    """Of a whole tile, loaded at once: all that a warp executes, and the weights alone. Where one has to be
    limited, because its logit is far below the others, another stretch limits all."""
    kernel = statistics[f"row_statistics_{suffix}"]
    stretches = [block for block in kernel.blocks if kernel.count(block, "FFMA") == 6 * TILE_OF_LANE]
    near, far = sorted(stretches, key=len)
    assert (kernel.count(near, "FMNMX"), kernel.count(far, "FMNMX")) == (0, TILE_OF_LANE)
    assert kernel.shortest_through(near) / TILE_OF_LANE <= 13
    assert len(far) / TILE_OF_LANE <= 12.1
    assert max(kernel.count(block, "LDG.E.128") for block in kernel.blocks) == TILE_OF_LANE / LOADED[suffix]
    # Nor does a row's last tile, which ends earlier, wait for a maximum before all of it is under way: loads
    # follow upon maxima once, between the code of the two.
    order = [i.name for i in kernel.instructions if i.operation.startswith(("LDG.E.128", "VHMNMX"))]
    assert sum(pair == ("VHMNMX", "LDG") for pair in pairwise(order)) == 1


def test_statistics_in_float32(statistics: dict[str, Kernel]) -> None:
    """A tile does not fit into registers, and is read twice: for its maximum, and for the weights."""
    kernel = statistics["row_statistics_fp32"]
    loops = [
        loop for loop in kernel.loops if kernel.count(loop, "LDG.E.128") and kernel.count(loop, "BRA") == 1
    ]
    assert len(loops) == 2
    assert sum(len(loop) for loop in loops) / (8 * LOADED["fp32"]) <= 13


@pytest.mark.parametrize(("suffix", "runs"), [("bf16", 4), ("fp16", 4), ("fp32", 2)])
def test_residuals(verification: dict[str, Kernel], suffix: str, runs: int) -> None:
    """Of several runs of two rows: all loads before the barrier, and behind it weights without a branch."""
    kernel = verification[f"verify_chain_{suffix}"]
    weights = of_most(kernel, "FFMA")
    loads = range(weights.start - 60, weights.start)
    logits = 2 * 8 * runs
    assert kernel.count(weights, "FFMA") == 6 * logits
    assert len(weights) / logits <= 16
    assert kernel.count(weights, "LDG") == 0
    assert kernel.count(loads, "LDG.E.128") == logits / LOADED[suffix]


def test_bits_are_compared_as_unsigned_numbers(
    statistics: dict[str, Kernel], cutoffs: dict[str, Kernel], verification: dict[str, Kernel]
) -> None:
    """Where a warp looks for its largest. Of an int, CUDA compares signed numbers."""
    names = [
        instruction.operation
        for kernel in (*statistics.values(), *cutoffs.values(), *verification.values())
        for instruction in kernel.instructions
        if instruction.operation.startswith(("REDUX", "CREDUX"))
    ]
    assert names
    assert not [name for name in names if "S32" in name]


@pytest.mark.parametrize("suffix", LOADED)
def test_cutoffs(cutoffs: dict[str, Kernel], suffix: str) -> None:
    """From one counted logit's weight to the next one's; no atomic addition that may have to try again."""
    kernel = cutoffs[f"row_cutoffs_{suffix}"]
    every = range(len(kernel.instructions))
    weights = [at for at in every if kernel.instructions[at].operation.startswith("F2I.U64")]
    assert median(later - earlier for earlier, later in pairwise(weights)) <= 45
    assert kernel.count(every, "ATOMS.CAS") == 0


def test_counts_of_values(cutoffs: dict[str, Kernel]) -> None:
    """Of two runs of bfloat16 logits that are loaded together: the bins, and an addition to each."""
    kernel = cutoffs["row_cutoffs_bf16"]
    (loop,) = (
        loop
        for loop in kernel.loops
        if (kernel.count(loop, "ATOMS"), kernel.count(loop, "LDG"), kernel.count(loop, "LDG.E.128"))
        == (16, 2, 2)
    )
    assert len(loop) / 16 <= 13
    assert kernel.count(loop, "S2UR") == 0  # where shared memory begins is not asked for each
