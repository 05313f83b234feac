"""Drawing and verifying inside a step: by the kernels, or by the reference where the device is the CPU.

Both read the same distributions and the same noise as `driftguard_engine.verify`, and check nothing: a row
without a distribution (its logits have no finite maximum) draws -1, and its status says so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from driftguard_engine.kernels import verify as verify_kernels
from driftguard_engine.kernels.backend import Verified
from driftguard_engine.kernels.cuda.launcher import Launcher
from driftguard_engine.kernels.reference import verify as reference
from driftguard_engine.kernels.reference.sampling import Integers, SamplingBatch
from driftguard_engine.kernels.reference.verify import Chain
from driftguard_engine.kernels.steps import RowState
from driftguard_engine.kernels.verify import SamplingTensors, Workspace


@dataclass(frozen=True, slots=True)
class Shape:
    """What determines the shapes of a step. narrows: whether any row may ask for top-k or top-p."""

    batch: int
    drafts: int
    narrows: bool


class Verification(Protocol):
    """For steps of one shape: B rows, K drafts, V tokens."""

    draft_tokens: Tensor  # [B, K] int64: what is to be verified
    draft_logits: Tensor  # [B, K, V]: where a draft model writes its logits

    def draw(self, rows: RowState, step: int) -> None:
        """Draws draft token `step` of every row from draft_logits[:, step], into draft_tokens."""
        ...

    def verify(self, rows: RowState, target_logits: Tensor, *, certain: bool) -> Verified:
        """Verifies the first rows.drafted of draft_tokens against target_logits [B, K + 1, V].

        certain: the drafts were not drawn; their distribution is a point mass (n-grams).
        """
        ...


class KernelVerification:
    """See `Verification`."""

    def __init__(
        self, launcher: Launcher, shape: Shape, vocabulary: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._launcher, self._narrows = launcher, shape.narrows
        self._space = Workspace.empty(shape.batch, shape.drafts, vocabulary, device, shape.narrows)
        self.draft_logits = torch.empty(shape.batch, shape.drafts, vocabulary, dtype=dtype, device=device)
        self.draft_tokens = self._space.draft_tokens

    def draw(self, rows: RowState, step: int) -> None:
        logits = self.draft_logits[:, step]
        verify_kernels.draw_drafts(self._launcher, logits, self._sampling(rows), self._space, step)

    def verify(self, rows: RowState, target_logits: Tensor, *, certain: bool) -> Verified:
        draft_logits = None if certain or not self._space.drafts else self.draft_logits
        sampling = self._sampling(rows)
        verify_kernels.verify(
            self._launcher, target_logits, draft_logits, rows.drafted, sampling, self._space
        )
        return Verified(self._space.tokens, self._space.accepted, self._space.status)

    def _sampling(self, rows: RowState) -> SamplingTensors:
        return SamplingTensors(rows.scales, rows.top_ks, rows.top_ps, rows.seeds, rows.lengths, self._narrows)


class ReferenceVerification:
    """See `Verification`."""

    def __init__(self, shape: Shape, vocabulary: int) -> None:
        self.draft_tokens = torch.zeros(shape.batch, shape.drafts, dtype=torch.int64)
        self.draft_logits = torch.zeros(shape.batch, shape.drafts, vocabulary)

    def draw(self, rows: RowState, step: int) -> None:
        valid, kept = _valid_rows(self.draft_logits[:, step])
        drawn = reference.sample_draft(kept, _sampling(rows), _positions(rows) + step)
        self.draft_tokens[:, step] = torch.where(valid, drawn, -1)
        self.draft_logits[:, step] = kept

    def verify(self, rows: RowState, target_logits: Tensor, *, certain: bool) -> Verified:
        valid, kept = _valid_rows(target_logits.float())
        chain = Chain(
            kept,
            _point_masses(self.draft_tokens, kept.shape[-1]) if certain else self.draft_logits,
            self.draft_tokens,
            rows.drafted.long(),
            _sampling(rows),
            _positions(rows),
        )
        tokens, accepted = reference.verify_chain(chain)
        return Verified(tokens, accepted, (chain.read & ~valid).any(-1).int())


def _sampling(rows: RowState) -> SamplingBatch:
    return SamplingBatch.of(rows.state.temperatures[rows.slots], rows.top_ks, rows.top_ps, rows.seeds)


def _positions(rows: RowState) -> Integers:
    return np.array(rows.lengths.tolist())


def _valid_rows(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Which rows of [..., V] have a distribution, and the logits, 0 in rows without one."""
    valid = logits.amax(-1).isfinite()
    return valid, torch.where(valid[..., None], logits, 0.0)


def _point_masses(tokens: Tensor, size: int) -> Tensor:
    """[B, K, V]: logit 0 at the token, -inf elsewhere."""
    logits = torch.full((*tokens.shape, size), -torch.inf)
    return logits.scatter_(-1, tokens.clamp(0, size - 1)[..., None], 0.0)
