"""The state of every running request on the device, by slot.

The last slot is spare, for no request: the rows that fill up a batch use it.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from driftguard_engine.core import SamplingParams
from driftguard_engine.kernels.reference.sampling import SamplingBatch
from driftguard_engine.kernels.steps import SlotState
from driftguard_engine.upload import upload


class SlotTable:
    """S slots of up to N tokens, on the device."""

    def __init__(
        self, slots: int, positions: int, eos_token_ids: Collection[int], device: torch.device
    ) -> None:
        self.spare = slots
        # Packed, so that a request is admitted by few copies. The spare slot's sequence has ended.
        self._integers = torch.ones(5, slots + 1, dtype=torch.int64, device=device)
        self._floats = torch.zeros(3, slots + 1, dtype=torch.float32, device=device)
        lengths, limits, ended, heeds_ends, seeds = self._integers
        temperatures, scales, top_ps = self._floats
        self.state = SlotState(
            token_ids=torch.zeros(slots + 1, positions, dtype=torch.int64, device=device),
            lengths=lengths,
            limits=limits,
            ended=ended,
            heeds_ends=heeds_ends,
            seeds=seeds,
            temperatures=temperatures,
            scales=scales,
            top_ps=top_ps,
            top_ks=torch.zeros(slots + 1, dtype=torch.int32, device=device),
            eos_token_ids=torch.tensor(sorted(eos_token_ids), dtype=torch.int64, device=device),
        )
        self._device = device
        self._sampling: dict[tuple[int, ...], SamplingBatch] = {}

    def admit(self, slot: int, token_ids: list[int], limit: int, params: SamplingParams) -> None:
        """A request begins: its prompt, and the number of tokens at which it ends."""
        self._sampling.clear()
        shaping = torch.tensor([[params.temperature], [params.top_p]], dtype=torch.float32)
        sampling = SamplingBatch.of(
            shaping[0], torch.tensor([params.top_k]), shaping[1], torch.tensor([params.seed])
        )
        integers = [len(token_ids), limit, 0, int(not params.ignore_eos), params.seed]
        floats = [params.temperature, float(sampling.scale[0]), params.top_p]
        self.state.token_ids[slot, : len(token_ids)] = upload(token_ids, self._device)
        self._integers[:, slot] = upload(integers, self._device)
        self._floats[:, slot] = upload(floats, self._device, torch.float32)
        self.state.top_ks[slot : slot + 1] = upload([min(max(params.top_k, 0), 2**31 - 1)], self._device)

    def sampling(self, slots: Tensor) -> SamplingBatch:
        """How the requests in these slots [B] sample, on the CPU. Kept: a batch stays as it is for long."""
        asked, state = tuple(slots.tolist()), self.state
        if asked not in self._sampling:
            values = (state.temperatures, state.top_ks, state.top_ps, state.seeds)
            self._sampling[asked] = SamplingBatch.of(*(each[slots] for each in values))
        return self._sampling[asked]
