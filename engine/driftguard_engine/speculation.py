"""One speculative step of a batch: draws drafts, and verifies them with the same distributions.

A drafter gives logits and gets tokens. The distribution of each token is kept here, so that no other one can
be used to verify it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from driftguard_engine.kernels import backend as by_kernels
from driftguard_engine.kernels.backend import BackendName, launcher_of
from driftguard_engine.kernels.cuda.launcher import Launcher
from driftguard_engine.kernels.reference import verify as reference
from driftguard_engine.kernels.reference.distribution import TokenDistributions
from driftguard_engine.kernels.reference.exp2 import Singles
from driftguard_engine.kernels.reference.sampling import EVERY, Index, Integers, SamplingBatch
from driftguard_engine.kernels.reference.verify import Arrays, Chain, StepNoise, singles
from driftguard_engine.kernels.tensor_checks import expect_distributions


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """The outcome of one verification for each of B rows."""

    tokens: Tensor  # [B, K+1] int64, padded with -1
    accepted: Tensor  # [B] int64: draft tokens kept
    emitted: Tensor  # [B] int64: accepted + 1


class SpeculativeStep:
    """Of B rows with up to K drafts each, over V tokens. `proposals` [B] are the drafts so far.

    In the reference, verification computes the target's distributions only: the drafts' are kept from
    drawing.
    """

    def __init__(
        self,
        sampling: SamplingBatch,
        positions: Sequence[int],
        drafts: int,
        vocabulary: int,
        device: torch.device,
        backend: BackendName = "auto",
    ) -> None:
        """positions [B]: index in each row's sequence of the first token that this step gives it, >= 0.

        drafts: K. device: of the logits. Raises BackendUnavailable.
        """
        self.proposals: list[list[int]] = [[] for _ in positions]
        self._sampling, self._positions = sampling, np.array(positions)
        self._words = StepNoise(sampling.seed, self._positions, drafts + 1)
        self._device, self._launcher = device, launcher_of(device, backend)
        self._vocabulary = vocabulary
        read_on = torch.device("cpu") if self._launcher is None else device
        self._logits = torch.zeros(len(positions), drafts, vocabulary, device=read_on)
        # Of the reference only: the kernels keep none.
        self._draft_distributions = TokenDistributions.certain(sampling, drafts, vocabulary)

    def draw(self, draft_logits: Tensor, rows: Sequence[int]) -> None:
        """Draws the next draft token of these R rows, which have equally many, from raw logits [R, V].

        Raises ValueError, InvalidLogits.
        """
        step = len(self.proposals[rows[0]])
        if any(len(self.proposals[row]) != step for row in rows):
            raise ValueError(f"rows {list(rows)} must have equally many drafts")
        self._expect_shape("draft_logits", draft_logits, len(rows))
        index = self._index(rows)
        if self._launcher is None:
            tokens = self._draw_by_reference(singles(draft_logits), step, index)
        else:
            self._logits[index, step] = draft_logits.float()
            sampling, position = self._sampling.rows(index), self._positions[index] + step
            tokens = _draw_by_kernels(self._launcher, draft_logits, sampling, position).tolist()
        for row, token in zip(rows, tokens, strict=True):
            self.proposals[row].append(token)

    def guess(self, row: int, token_ids: Iterable[int]) -> None:
        """Adds draft tokens of a row that were not drawn: the distribution of each is a point mass."""
        for token in token_ids:
            kept = self._logits[row, len(self.proposals[row])]
            kept.fill_(-torch.inf)
            kept[token] = 0
            self.proposals[row].append(token)

    def offer(self, draft_logits: Tensor, draft_tokens: Tensor, lengths: Sequence[int]) -> None:
        """Takes all drafts at once, which the caller has drawn from these raw logits [B, K, V].

        lengths [B]: how many of draft_tokens [B, K] each row has. An id outside the vocabulary is rejected.
        """
        pairs = zip(draft_tokens.tolist(), lengths, strict=True)
        self.proposals = [tokens[:length] for tokens, length in pairs]
        if self._launcher is not None:
            self._logits = draft_logits
            return
        logits = singles(draft_logits)
        self._logits = torch.from_numpy(logits)
        self._draft_distributions = reference.draft_distributions(logits, self._sampling)

    def withdraw(self, rows: Iterable[int]) -> None:
        """Drops the drafts of these rows."""
        for row in rows:
            self.proposals[row] = []

    def verify(self, target_logits: Tensor, rows: Sequence[int]) -> list[list[int]]:
        """The tokens that these rows emit: the accepted drafts and one token of the target's own.

        Arguments and errors as in `outcome`.
        """
        result = self.outcome(target_logits, rows)
        return [
            row[:count] for row, count in zip(result.tokens.tolist(), result.emitted.tolist(), strict=True)
        ]

    def outcome(self, target_logits: Tensor, rows: Sequence[int]) -> VerifyResult:
        """Verifies these R rows, ascending, by the rule of `verify.verify_chain`.

        The result's tensors are on the device that computed them.

        target_logits: raw, [R, 1 + the longest proposal, V]. Raises ValueError, InvalidLogits.
        """
        proposals = [self.proposals[row] for row in rows]
        lengths = np.array([len(tokens) for tokens in proposals])
        drafts = int(lengths.max())
        self._expect_shape("target_logits", target_logits, len(rows), drafts + 1)
        tokens = np.array([offered + [-1] * (drafts - len(offered)) for offered in proposals], np.int64)
        if self._launcher is None:
            accepted, own = self._verify_by_reference(singles(target_logits), tokens, lengths, rows)
            emitted = reference.emitted(tokens, accepted, own)
            return VerifyResult(*(torch.from_numpy(each) for each in (emitted, accepted, accepted + 1)))
        index = self._index(rows)
        offered, there = (torch.from_numpy(each).to(self._device) for each in (tokens, lengths))
        sampling, position = self._sampling.rows(index), self._positions[index]
        draft_logits = self._logits[index, :drafts]
        return _verify_by_kernels(
            self._launcher, Chain(target_logits, draft_logits, offered, there, sampling, position)
        )

    def _draw_by_reference(self, logits: Singles, step: int, index: Index) -> list[int]:
        expect_distributions("draft_logits", logits)
        sampling = self._sampling.rows(index)
        if sampling.all_greedy:
            tokens = logits.argmax(-1)
        else:
            distributions = reference.draft_distributions(logits[:, np.newaxis], sampling)
            words = self._words.draft[:, index, step]
            tokens = reference.draw_drafts(logits, distributions, sampling, words)
            self._logits.numpy()[index, step] = logits
            self._draft_distributions.put(index, slice(step, step + 1), distributions)
        drawn: list[int] = tokens.tolist()
        return drawn

    def _verify_by_reference(
        self, target: Singles, tokens: Integers, lengths: Integers, rows: Sequence[int]
    ) -> tuple[Integers, Integers]:
        draft, distributions = self._logits.numpy(), self._draft_distributions
        sampling, words = self._sampling, self._words
        drafts, index = tokens.shape[1], self._index(rows)
        if index is not EVERY or drafts < draft.shape[1]:
            draft, sampling = draft[index, :drafts], sampling.rows(index)
            distributions = distributions.rows(index, slice(drafts))
            words = StepNoise(sampling.seed, self._positions[index], drafts + 1)
        known = tokens.view(np.uint64) < self._vocabulary  # read as unsigned, an id below 0 is too large
        given = Arrays(target, draft, distributions, tokens, lengths, known, sampling)
        accepted, own, valid = reference.verify(given, words)
        if not valid:
            _expect_all_distributions(given)
        return accepted, own

    def _expect_shape(self, name: str, logits: Tensor, *shape: int) -> None:
        if logits.shape != (*shape, self._vocabulary):
            wanted = [*shape, self._vocabulary]
            raise ValueError(f"{name} must have shape {wanted}, got {list(logits.shape)}")

    def _index(self, rows: Sequence[int]) -> Index:
        return EVERY if len(rows) == len(self.proposals) else np.array(rows)


def _draw_by_kernels(
    launcher: Launcher, logits: Tensor, sampling: SamplingBatch, position: Integers
) -> Tensor:
    """Of logits [B, V]: int64 [B]. Raises InvalidLogits."""
    drawn = by_kernels.sample_draft(launcher, logits, sampling, position)
    if bool((drawn < 0).any()):
        expect_distributions("draft_logits", singles(logits))
    return drawn


def _verify_by_kernels(launcher: Launcher, chain: Chain) -> VerifyResult:
    """Raises InvalidLogits."""
    verified = by_kernels.verify_chain(launcher, chain)
    if bool(verified.status.any()):
        _expect_all_distributions(Arrays.of(chain))
        raise AssertionError(f"kernels report rows without a distribution: {verified.status.tolist()}")
    return VerifyResult(verified.tokens, verified.accepted, verified.accepted + 1)


def _expect_all_distributions(given: Arrays) -> None:
    """Checks the rows that will be read: those of the draft only where its tokens were drawn."""
    read = np.arange(given.target.shape[1]) <= given.lengths[:, np.newaxis]
    expect_distributions("target_logits", given.target, read)
    stochastic = ~given.sampling.greedy[:, np.newaxis]
    expect_distributions("draft_logits", given.draft, given.proposed & stochastic)
