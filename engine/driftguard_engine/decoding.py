"""One verification for a batch of sequences: draft, run the target, accept or resample."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from driftguard_engine.drafters.base import Drafter, DraftRow, Proposal, Sampling
from driftguard_engine.models.base import TokenModel
from driftguard_engine.sequence import RunningSequence
from driftguard_engine.verify import InvalidLogits, verify_chain

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RowOutcome:
    """What one verification gave one sequence: accepted + 1 tokens, or the reason why it gave none."""

    emitted: list[int]
    drafted: int
    accepted: int
    error: str | None = None


class StepDecoder(Protocol):
    """Runs one verification per step for each of any rows."""

    @property
    def in_flight(self) -> bool:
        """Is there an outcome that nobody has been told yet?"""
        ...

    def admit(self, row: RunningSequence) -> None:
        """The row's prompt is about to be read; it will be decoded."""
        ...

    def forget(self, row: RunningSequence) -> None:
        """The row has left."""
        ...

    def reset(self) -> None:
        """After a failure: outcomes that nobody has been told are given up."""
        ...

    def step(
        self, rows: Sequence[RunningSequence], draft_counts: Sequence[int]
    ) -> list[tuple[RunningSequence, RowOutcome]]:
        """Decodes these rows, each with so many draft tokens, at most its `draft_count`. Returns what has
        become known of rows that have not left: of this step or the one before."""
        ...


class Decoder:
    """See `StepDecoder`: sequences of any lengths and K without padding, outcomes at once."""

    in_flight = False

    def __init__(self, target: TokenModel, device: torch.device) -> None:
        self._target = target
        self._device = device
        self._sampling_of: tuple[tuple[str, ...], Sampling] | None = None
        self._no_proposal = Proposal([], torch.empty(0, target.vocabulary, device=device))

    def admit(self, row: RunningSequence) -> None:
        """Nothing is kept of it."""

    def forget(self, row: RunningSequence) -> None:
        """Nothing is kept of it."""

    def reset(self) -> None:
        """Nothing is in flight."""

    def step(
        self, rows: Sequence[RunningSequence], draft_counts: Sequence[int]
    ) -> list[tuple[RunningSequence, RowOutcome]]:
        """One outcome per row."""
        sampling = self._sampling(rows)
        proposals = self._propose(rows, draft_counts, sampling)
        token_ids, spans = [], []
        for row, proposal in zip(rows, proposals, strict=True):
            token_ids += [row.token_ids[-1], *proposal.token_ids]
            spans.append(row.step_span(len(proposal.token_ids)))
        logits = self._target.forward(token_ids, spans)  # [N, V]
        positions = [len(row.token_ids) for row in rows]
        outcomes = _assemble(logits, proposals, positions, sampling).outcomes()
        return list(zip(rows, outcomes, strict=True))

    def _sampling(self, rows: Sequence[RunningSequence]) -> Sampling:
        """Kept while the batch stays the same."""
        names = tuple(row.request.request_id for row in rows)
        if self._sampling_of is None or self._sampling_of[0] != names:
            params = [row.request.params for row in rows]
            sampling = Sampling(
                torch.tensor([each.temperature for each in params], dtype=torch.float32, device=self._device),
                torch.tensor([each.top_k for each in params], device=self._device),
                torch.tensor([each.top_p for each in params], dtype=torch.float32, device=self._device),
                torch.tensor([each.seed for each in params], device=self._device),
            )
            self._sampling_of = (names, sampling)
        return self._sampling_of[1]

    def _propose(
        self, rows: Sequence[RunningSequence], draft_counts: Sequence[int], sampling: Sampling
    ) -> list[Proposal]:
        """One proposal per row, empty without speculation; rows of one batch may have different drafts."""
        by_drafter: dict[Drafter, list[DraftRow]] = {}
        for index, (row, count) in enumerate(zip(rows, draft_counts, strict=True)):
            if row.draft.drafter is not None and count > 0:
                name, prompt = row.request.request_id, row.request.prompt_token_ids
                wanted = DraftRow(name, row.slot, index, row.token_ids, count, len(prompt) - 1)
                by_drafter.setdefault(row.draft.drafter, []).append(wanted)
        proposals = [self._no_proposal] * len(rows)
        for drafter, wanting in by_drafter.items():
            try:
                drawn = drafter.propose(wanting, sampling)
            except InvalidLogits as error:
                # The target needs no draft: the requests go on without one.
                logger.error("the draft gives no usable logits (%s); this step is not drafted", error)
                continue
            for draft_row, proposal in zip(wanting, drawn, strict=True):
                proposals[draft_row.index] = proposal
        return proposals


@dataclass(frozen=True, slots=True)
class _Verification:
    """B rows, K = the longest draft among them; shorter ones are padded, `lengths` says how many are real."""

    target_logits: Tensor  # [B, K+1, V]
    draft_logits: Tensor  # [B, K, V]
    draft_tokens: Tensor  # [B, K]
    lengths: Tensor  # [B]
    position: Tensor  # [B]
    sampling: Sampling

    def outcomes(self) -> list[RowOutcome]:
        """A row without usable logits gets an error; the others are verified without it."""
        try:
            return self._verify()
        except InvalidLogits as error:
            logger.error("%d of %d rows: %s", len(error.rows), self.lengths.shape[0], error)
            bad, failed = set(error.rows), RowOutcome([], 0, 0, f"the model gave no usable logits: {error}")
        good = [row for row in range(self.lengths.shape[0]) if row not in bad]
        outcomes = iter(self._only(good).outcomes() if good else [])
        return [failed if row in bad else next(outcomes) for row in range(self.lengths.shape[0])]

    def _verify(self) -> list[RowOutcome]:
        result = verify_chain(
            self.target_logits,
            self.draft_logits,
            self.draft_tokens,
            self.lengths,
            self.sampling.temperature,
            self.sampling.top_k,
            self.sampling.top_p,
            self.sampling.seed,
            self.position,
        )
        counts = zip(result.tokens.tolist(), self.lengths.tolist(), result.accepted.tolist(), strict=True)
        return [RowOutcome(row[: accepted + 1], drafted, accepted) for row, drafted, accepted in counts]

    def _only(self, rows: Sequence[int]) -> _Verification:
        index = torch.tensor(rows, device=self.lengths.device)
        return _Verification(
            self.target_logits[index],
            self.draft_logits[index],
            self.draft_tokens[index],
            self.lengths[index],
            self.position[index],
            self.sampling.rows(index),
        )


def _assemble(
    target_logits: Tensor, proposals: Sequence[Proposal], positions: Sequence[int], sampling: Sampling
) -> _Verification:
    """target_logits [N, V]: for every row its 1 + draft tokens' logits, one row after another."""
    device, vocabulary = target_logits.device, target_logits.shape[-1]
    counts = [len(proposal.token_ids) for proposal in proposals]
    longest, batch = max(counts), len(counts)
    if min(counts) == longest:
        padded = target_logits.view(batch, longest + 1, vocabulary)
        draft_logits = torch.stack([proposal.logits for proposal in proposals])
    else:
        parts = torch.split(target_logits, [count + 1 for count in counts])
        padded = torch.nn.utils.rnn.pad_sequence(list(parts), batch_first=True)
        draft_logits = torch.nn.utils.rnn.pad_sequence(
            [proposal.logits for proposal in proposals], batch_first=True
        )
    tokens = [proposal.token_ids + [-1] * (longest - len(proposal.token_ids)) for proposal in proposals]
    return _Verification(
        padded,
        draft_logits,
        torch.tensor(tokens, dtype=torch.int64, device=device).view(batch, longest),
        torch.tensor(counts, device=device),
        torch.tensor(positions, device=device),
        sampling,
    )
