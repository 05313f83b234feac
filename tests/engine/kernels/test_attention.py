"""The kernels of attention are the torch function, but for roundings; a sequence's bits are its own."""

from __future__ import annotations

import pytest
import torch
from driftguard_engine.kernels import layer_launches
from driftguard_engine.kernels.layer_launches import AttentionScratch

from tests.engine.kernels.emulated import Emulated
from tests.engine.kernels.layer_cases import Attending, check_attend
from tests.engine.simt.emulator import Module

CPU = torch.device("cpu")
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.parametrize(
    ("shape", "starts", "length", "dtype"),
    [
        ((1, 2, 2, 64), [0, 300], 520, BF16),
        ((5, 4, 1, 128), [251, 0, 600], 700, BF16),  # the first ends with its split; 20 rows: two tiles
        ((3, 7, 1, 64), [253, 256], 512, FP16),
        ((1, 4, 2, 128), [255, 256], 257, FP16),  # the second fills its slot
        ((16, 3, 1, 64), [240], 300, BF16),  # three tiles, over the end of a split
        ((32, 3, 1, 64), [0], 300, FP16),  # two times round
        ((2, 4, 2, 64), [255, 20, 510], 520, FP32),
        ((2, 2, 1, 96), [300], 400, BF16),
        ((2, 2, 1, 16), [300], 400, FP16),
        ((1, 2, 1, 256), [300], 400, FP32),
    ],
    ids=str,
)
def test_attend(
    module: Module, shape: tuple[int, int, int, int], starts: list[int], length: int, dtype: torch.dtype
) -> None:
    check_attend(Emulated(module, shape[0]), Attending.make(shape, starts, length, dtype, CPU))


def test_more_sequences_than_a_warp_has_lanes(module: Module) -> None:
    starts = [(at * 37) % 290 for at in range(35)]
    check_attend(Emulated(module), Attending.make((1, 1, 1, 16), starts, 300, FP32, CPU))


def test_a_sequence_ends_where_its_slot_does(module: Module) -> None:
    """The same question by the slot's last token and by the one after it: both see the whole slot, once."""
    for dtype in (BF16, FP32):
        given = Attending.make((2, 1, 1, 64), [29], 30, dtype, CPU)
        given.queries[0, 1] = given.queries[0, 0]
        last, past = given.by_kernels(Emulated(module), 1)
        assert torch.isfinite(last).all()
        assert torch.equal(last, past)


def test_what_the_kernels_cannot_attend_with(module: Module) -> None:
    for dim, said in ((24, "multiple of 16, not 24"), (272, "up to 256, not 272")):
        with pytest.raises(ValueError, match=said):
            Attending.make((1, 1, 1, dim), [0], 8, FP32, CPU).by_kernels(Emulated(module), 1)
    given, small = Attending.make((2, 1, 1, 16), [0], 8, FP32, CPU), AttentionScratch.empty(1, 1, 16, 8, CPU)
    mixed = torch.empty(2, 16)
    with pytest.raises(ValueError, match="scratch of attention is too small for 1 x 2 tokens"):
        layer_launches.attend(Emulated(module), given.queries, given.rows, given.cache, small, mixed)
