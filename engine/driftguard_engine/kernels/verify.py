"""Which kernels run, on what, in which order; by any `Launcher`, on a GPU or in an emulator.

Tensors are used where they are, memory is allocated only once, and nothing is copied to the host: all of it
can be captured in a CUDA graph. Shapes and values are checked by `driftguard_engine.verify`, not here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from driftguard_engine.kernels.cuda.launcher import SUFFIXES, Argument, Launcher
from driftguard_engine.kernels.reference.sampling import Integers, SamplingBatch
from driftguard_engine.kernels.reference.tiles import LANES, TILE, tiles_of
from driftguard_engine.kernels.reference.verify import Rule

MOST_DRAFTS = 31  # of a request: one lane of a warp decides each step
Sums = Literal["rarely", "often", "always"]
_VERIFY: dict[Rule, str] = {"token": "verify_chain", "block": "verify_block"}

MOST_TOKENS = 2048 * TILE  # of a vocabulary: a draw looks at so many tiles

# As in csrc: threads of a block.
_CUT_THREADS, _DRAW_THREADS = 512, 256
_DRAWING_WARPS = _DRAW_THREADS // 32  # of a block: each sums one tile after another
_DRAWING_BLOCKS = 3  # that a multiprocessor runs at a time
_CUT_VALUES, _CUT_BINS = 8192, 2048  # as in csrc
_CUT_BLOCKS = 256  # of a launch, at most: several share a row where there are fewer rows


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """A `SamplingBatch` on the device, and the position at which the random numbers start. All [B]."""

    scale: Tensor  # float32, powers of two per unit of logit; 0 is greedy
    top_k: Tensor  # int32
    top_p: Tensor  # float32
    seed: Tensor  # int64
    position: Tensor  # int64
    narrows: bool  # whether any of them may ask for top-k or top-p

    @classmethod
    def of(
        cls, sampling: SamplingBatch, position: Integers, size: int, device: torch.device
    ) -> SamplingTensors:
        """position [B]: index in the sequence of the first token drawn. size: V."""

        def there(values: NDArray[Any]) -> Tensor:
            return torch.from_numpy(values).to(device)

        return cls(
            there(sampling.scale),
            there(sampling.top_k.clip(0, 2**31 - 1).astype(np.int32)),
            there(sampling.top_p.astype(np.float32)),
            there(sampling.seed),
            there(position),
            bool(sampling.narrows(size).any()),
        )


@dataclass(frozen=True, slots=True)
class DistributionTable:
    """Distributions of R rows of V logits in T tiles, as the kernels leave them: see `TokenDistributions`.

    A row's peak is the largest of its tiles' maxima, and its normaliser the sum of their weights against it.
    """

    tile_maxima: Tensor  # [R, T] float32
    tile_sums: Tensor  # [R, T] float32: of weights against the tile's maximum
    lane_sums: Tensor  # [R, T * 32] float32: the parts of them that each lane added up
    lane_maxima: Tensor  # [R, T * 32] float32
    cut: Tensor  # [R] float32
    cut_token: Tensor  # [R] int32
    kept: Tensor  # [R] float64: the normaliser, where there is a cut

    @classmethod
    def empty(cls, rows: int, size: int, device: torch.device) -> DistributionTable:
        def room(kind: torch.dtype, *shape: int) -> Tensor:
            return torch.empty(rows, *shape, dtype=kind, device=device)

        single, double, tiles = torch.float32, torch.float64, tiles_of(size)
        of_tiles = room(single, tiles), room(single, tiles)
        of_lanes = room(single, tiles * LANES), room(single, tiles * LANES)
        return cls(*of_tiles, *of_lanes, room(single), room(torch.int32), room(double))

    def read(self) -> list[Argument]:
        return [self.tile_maxima, self.tile_sums, self.lane_sums, self.cut, self.cut_token, self.kept]


@dataclass(frozen=True, slots=True)
class RowMeetings:
    """Where the blocks that share one of R rows meet; zero between launches.

    R' = min(R, 128): of more rows, each has one block, which needs no bins. 0 without top-k and top-p.
    """

    arrivals: Tensor  # [R] int32
    bin_counts: Tensor  # [R', 8192] int32
    bin_masses: Tensor  # [R', 2048] int64

    @classmethod
    def empty(cls, rows: int, narrows: bool, device: torch.device) -> RowMeetings:
        def zeros(*shape: int, kind: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=kind, device=device)

        shared = min(rows, _CUT_BLOCKS // 2) if narrows else 0
        return cls(zeros(rows), zeros(shared, _CUT_VALUES), zeros(shared, _CUT_BINS, kind=torch.int64))

    def all(self) -> list[Tensor]:
        return [self.arrivals, self.bin_counts, self.bin_masses]


@dataclass(frozen=True, slots=True)
class Workspace:
    """Memory for batches of up to B requests with up to K drafts over V tokens."""

    drafts: int
    size: int
    rule: Rule
    target: DistributionTable  # row b * (K + 1) + s
    draft: DistributionTable  # row b * K + s
    tile_masses: Tensor  # [B, T] float32; by the block rule [B, K + 1, T]
    meetings: RowMeetings  # R = B * (K + 1)
    draft_tokens: Tensor  # [B, K] int64
    tokens: Tensor  # [B, K + 1] int64: padded with -1
    accepted: Tensor  # [B] int32: -1 where a row has no distribution
    status: Tensor  # [B] int32: 0, or which logits have no distribution (1 the target's, 2 the draft's)

    @classmethod
    def empty(
        cls,
        batch: int,
        drafts: int,
        size: int,
        device: torch.device,
        narrows: bool = True,
        rule: Rule = "token",
    ) -> Workspace:
        """narrows: whether a request may ask for top-k or top-p. rule: of drawing and verification."""

        def room(*shape: int, kind: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(shape, dtype=kind, device=device)

        if not 0 <= drafts <= MOST_DRAFTS:
            raise ValueError(f"the kernels verify 0 to {MOST_DRAFTS} drafts at a time, not {drafts}")
        if size > MOST_TOKENS:
            raise ValueError(f"the kernels draw from vocabularies of up to {MOST_TOKENS} tokens, not {size}")
        return cls(
            drafts,
            size,
            rule,
            DistributionTable.empty(batch * (drafts + 1), size, device),
            DistributionTable.empty(max(batch * drafts, 1), size, device),
            room(batch, *[drafts + 1] * (rule == "block"), tiles_of(size), kind=torch.float32),
            RowMeetings.empty(batch * (drafts + 1), narrows, device),
            room(batch, drafts, kind=torch.int64),
            room(batch, drafts + 1, kind=torch.int64),
            room(batch),
            room(batch),
        )


def draw_drafts(
    launcher: Launcher, logits: Tensor, sampling: SamplingTensors, space: Workspace, step: int
) -> None:
    """Draws draft token `step` of each request into space.draft_tokens; keeps its distribution in space.

    logits: [B, V] of the draft, each row contiguous.
    """
    suffix, drafts, batch = SUFFIXES[logits.dtype], space.drafts, len(logits)
    blocks = _blocks_of_row(logits.device, batch, space.size, "often") if sampling.narrows else 1
    find_distributions(
        launcher, logits.unsqueeze(1), None, sampling, space.draft, drafts, step, space.meetings
    )
    launcher.launch(
        f"draw_drafts_{suffix}",
        (batch, blocks, 1),
        _DRAW_THREADS,
        [
            *(logits, np.int64(logits.stride(0)), np.int32(space.size), np.int32(drafts), np.int32(step)),
            *(sampling.scale, sampling.seed, sampling.position, np.int32(space.rule == "block")),
            *space.draft.read(),
            *(space.tile_masses, space.meetings.arrivals, space.draft_tokens),
        ],
    )


def verify(
    launcher: Launcher,
    target_logits: Tensor,
    draft_logits: Tensor | None,
    lengths: Tensor,
    sampling: SamplingTensors,
    space: Workspace,
) -> None:
    """Verifies space.draft_tokens by space.rule, with what `draw_drafts` kept, into the outputs of space.

    target_logits [B, K + 1, V], draft_logits [B, K, V] of the same dtype, rows at a constant stride, or None
    for drafts that were not drawn (n-grams); lengths [B] int32.
    """
    suffix, (batch, steps, size) = SUFFIXES[target_logits.dtype], target_logits.shape
    sums: Sums = "always" if space.rule == "block" else "often" if sampling.narrows else "rarely"
    find_distributions(launcher, target_logits, lengths, sampling, space.target, steps, 0, space.meetings)
    launcher.launch(
        f"{_VERIFY[space.rule]}_{suffix}",
        (batch, _blocks_of_row(target_logits.device, batch, size, sums), 1),
        _DRAW_THREADS,
        [
            *(target_logits, _row_stride(target_logits), draft_logits),
            *(
                np.int64(0) if draft_logits is None else _row_stride(draft_logits),
                space.draft_tokens,
                lengths,
            ),
            *(sampling.scale, sampling.seed, sampling.position, np.int32(steps), np.int32(size)),
            *(*space.target.read(), *space.draft.read()),
            *(space.tile_masses, space.meetings.arrivals, space.tokens, space.accepted, space.status),
        ],
    )


def find_distributions(
    launcher: Launcher,
    logits: Tensor,  # [B, S, V]
    lengths: Tensor | None,
    sampling: SamplingTensors,
    table: DistributionTable,
    table_stride: int,
    table_offset: int,
    meetings: RowMeetings,
) -> None:
    """Distributions of every row, at row b * table_stride + table_offset + s of the table.

    lengths [B] int32: only rows s <= lengths[b] are read; None: all. meetings: of B * S rows or more.
    """
    suffix, (batch, steps, size) = SUFFIXES[logits.dtype], logits.shape
    row_stride, asked = _row_stride(logits), [sampling.scale, sampling.top_k, sampling.top_p]
    where = [np.int32(table_stride), np.int32(table_offset)]
    launcher.launch(
        f"row_statistics_{suffix}",
        (batch, steps, tiles_of(size)),
        LANES,
        [
            *(logits, row_stride, np.int32(steps), np.int32(size), lengths, *asked, *where),
            *(table.tile_maxima, table.tile_sums, table.lane_sums, table.lane_maxima),
            *(table.cut, table.cut_token),
        ],
    )
    if sampling.narrows:
        blocks = max(1, min(_CUT_BLOCKS // (batch * steps), tiles_of(size) // 4))
        launcher.launch(
            f"row_cutoffs_{suffix}",
            (batch * steps, blocks, 1),
            _CUT_THREADS,
            [
                *(logits, row_stride, np.int32(steps), np.int32(size), lengths, *asked, *where),
                *(table.tile_maxima, table.tile_sums, table.lane_maxima),
                *(table.cut, table.cut_token, table.kept, *meetings.all()),
            ],
        )


@cache
def _blocks_of_row(device: torch.device, batch: int, size: int, sums: Sums) -> int:
    """Blocks that share a row: at most as many as run at a time. sums: how often its masses are added up."""
    processors, tiles = 1, tiles_of(size)
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    wanted = -(-tiles // _DRAWING_WARPS)  # a tile for every warp
    if sums == "rarely":
        wanted = min(wanted, batch)  # the more rows, the likelier is it that one of them needs all
    elif sums == "always":
        wanted = max(wanted, min(tiles, processors // batch))
    return max(1, min(wanted, processors * _DRAWING_BLOCKS // batch))


def _row_stride(logits: Tensor) -> np.int64:
    """Elements from one row of [B, S, V] to the next; with S = 1 the rows are those of the batch."""
    return np.int64(logits.stride(1 if logits.shape[1] > 1 else 0))
