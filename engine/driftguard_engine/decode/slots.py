"""The state of every running request on the device, by slot.

The last slot is spare, for no request: the rows that fill up a batch use it, and so do writes to be
discarded.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from driftguard_engine.core import SamplingParams
from driftguard_engine.kernels.reference.sampling import SamplingBatch
from driftguard_engine.upload import upload

_LENGTH, _LIMIT, _ENDED, _HEEDS_ENDS, _SEED = range(5)
_TEMPERATURE, _SCALE, _TOP_P = range(3)


@dataclass(frozen=True, slots=True)
class RowState:
    """The state of the B rows of a step, before it."""

    slots: Tensor  # [B] int64
    lengths: Tensor  # [B] int64: tokens of the sequence
    limits: Tensor  # [B] int64: how many tokens it may have
    ended: Tensor  # [B] bool
    heeds_ends: Tensor  # [B] bool: ends with an end-of-sequence token
    seeds: Tensor  # [B] int64
    temperatures: Tensor  # [B] float32
    scales: Tensor  # [B] float32, see `SamplingBatch.scale`
    top_ps: Tensor  # [B] float32
    top_ks: Tensor  # [B] int32


class SlotTable:
    """S slots of up to N tokens, on the device."""

    def __init__(
        self, slots: int, positions: int, eos_token_ids: Collection[int], device: torch.device
    ) -> None:
        self.token_ids = torch.zeros(slots + 1, positions, dtype=torch.int64, device=device)
        self.eos_token_ids = torch.tensor(sorted(eos_token_ids), dtype=torch.int64, device=device)
        self.spare = slots
        self._integers = torch.ones(5, slots + 1, dtype=torch.int64, device=device)
        self._floats = torch.zeros(3, slots + 1, device=device)
        self._top_ks = torch.zeros(slots + 1, dtype=torch.int32, device=device)
        self._device = device

    def admit(self, slot: int, token_ids: list[int], limit: int, params: SamplingParams) -> None:
        """A request begins: its prompt, and the number of tokens at which it ends."""
        asked = (params.temperature, params.top_k, params.top_p, params.seed)
        sampling = SamplingBatch.of(*(torch.tensor([value]) for value in asked))
        integers = [len(token_ids), limit, 0, int(not params.ignore_eos), params.seed]
        floats = [params.temperature, float(sampling.scale[0]), params.top_p]
        self.token_ids[slot, : len(token_ids)] = upload(token_ids, self._device)
        self._integers[:, slot] = upload(integers, self._device)
        self._floats[:, slot] = upload(floats, self._device)
        self._top_ks[slot : slot + 1] = upload([min(max(params.top_k, 0), 2**31 - 1)], self._device)

    def rows(self, slots: Tensor) -> RowState:
        integers, floats = self._integers[:, slots], self._floats[:, slots]
        return RowState(
            slots=slots,
            lengths=integers[_LENGTH],
            limits=integers[_LIMIT],
            ended=integers[_ENDED] != 0,
            heeds_ends=integers[_HEEDS_ENDS] != 0,
            seeds=integers[_SEED],
            temperatures=floats[_TEMPERATURE],
            scales=floats[_SCALE],
            top_ps=floats[_TOP_P],
            top_ks=self._top_ks[slots],
        )

    def tokens_at(self, rows: RowState, starts: Tensor, count: int) -> Tensor:
        """[B, count] from position starts[b] on."""
        positions = starts[:, None] + torch.arange(count, device=self._device)
        return self.token_ids[rows.slots[:, None], positions]

    def append(self, rows: RowState, tokens: Tensor, counts: Tensor, ended: Tensor) -> None:
        """Appends the first counts[b] of tokens [B, K + 1] to row b; ended[b]: the request ends with them."""
        column = torch.arange(tokens.shape[1], device=self._device)
        kept = column < counts[:, None]
        slots = torch.where(kept, rows.slots[:, None], self.spare)
        positions = torch.where(kept, rows.lengths[:, None] + column, column)
        self.token_ids[slots, positions] = tokens.clamp(min=0)
        self._integers[_LENGTH, rows.slots] = rows.lengths + counts
        self._integers[_ENDED, rows.slots] = ended.long()
