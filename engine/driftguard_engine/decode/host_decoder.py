"""The host's loop: one verification for a batch of sequences, whose outcome is known at once."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from driftguard_engine.decode.base import RowOutcome
from driftguard_engine.drafters.base import Drafter, DraftRow
from driftguard_engine.kernels.reference.sampling import SamplingBatch
from driftguard_engine.kernels.tensor_checks import InvalidLogits, checked_sampling
from driftguard_engine.models.base import TokenModel
from driftguard_engine.sequence import RunningSequence
from driftguard_engine.speculation import SpeculativeStep

logger = logging.getLogger(__name__)


class HostDecoder:
    """See `StepDecoder`: sequences of any lengths and K without padding, outcomes at once."""

    in_flight = False

    def __init__(self, target: TokenModel, device: torch.device) -> None:
        self._target = target
        self._device = device
        self._sampling_of: tuple[tuple[str, ...], SamplingBatch] | None = None

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
        positions = [len(row.token_ids) for row in rows]
        drafts, vocabulary = max(draft_counts), self._target.vocabulary
        step = SpeculativeStep(self._sampling(rows), positions, drafts, vocabulary, self._device)
        self._draft(rows, draft_counts, step)
        token_ids, spans = [], []
        for row, proposal in zip(rows, step.proposals, strict=True):
            token_ids += [row.token_ids[-1], *proposal]
            spans.append(row.step_span(len(proposal)))
        logits = self._target.forward(token_ids, spans)  # [N, V]
        outcomes = _outcomes(step, _padded(logits, step.proposals), range(len(rows)))
        return list(zip(rows, outcomes, strict=True))

    def _sampling(self, rows: Sequence[RunningSequence]) -> SamplingBatch:
        """The rows' sampling parameters; kept while the batch stays the same."""
        names = tuple(row.request.request_id for row in rows)
        if self._sampling_of is None or self._sampling_of[0] != names:
            params = [row.request.params for row in rows]
            sampling = checked_sampling(
                torch.tensor([each.temperature for each in params], dtype=torch.float32),
                torch.tensor([each.top_k for each in params]),
                torch.tensor([each.top_p for each in params], dtype=torch.float32),
                torch.tensor([each.seed for each in params]),
                len(params),
                torch.device("cpu"),
            )
            self._sampling_of = (names, sampling)
        return self._sampling_of[1]

    def _draft(
        self, rows: Sequence[RunningSequence], draft_counts: Sequence[int], step: SpeculativeStep
    ) -> None:
        """Rows of one batch may have different drafts, or none."""
        by_drafter: dict[Drafter, list[DraftRow]] = {}
        for index, (row, count) in enumerate(zip(rows, draft_counts, strict=True)):
            if row.draft.drafter is not None and count > 0:
                name, prompt = row.request.request_id, row.request.prompt_token_ids
                wanted = DraftRow(name, row.slot, index, row.token_ids, count, len(prompt) - 1)
                by_drafter.setdefault(row.draft.drafter, []).append(wanted)
        for drafter, wanting in by_drafter.items():
            try:
                drafter.propose(wanting, step)
            except InvalidLogits as error:
                # The target needs no draft: the requests go on without one.
                logger.error("the draft gives no usable logits (%s); this step is not drafted", error)
                step.withdraw(row.index for row in wanting)


def _padded(logits: Tensor, proposals: Sequence[Sequence[int]]) -> Tensor:
    """Logits [N, V] of 1 + drafts tokens of each row, row after row -> [B, 1 + the longest, V]."""
    counts = [1 + len(proposal) for proposal in proposals]
    if min(counts) == max(counts):
        return logits.view(len(counts), counts[0], -1)
    return torch.nn.utils.rnn.pad_sequence(list(torch.split(logits, counts)), batch_first=True)


def _outcomes(step: SpeculativeStep, target_logits: Tensor, rows: Sequence[int]) -> list[RowOutcome]:
    """The outcomes of these R rows, from target_logits [R, 1 + the longest proposal, V].

    A row without usable logits gets an error; the others are verified without it.
    """
    try:
        emitted = step.verify(target_logits, rows)
    except InvalidLogits as error:
        logger.error("%d of %d rows: %s", len(error.rows), len(rows), error)
        bad, failed = set(error.rows), RowOutcome([], 0, 0, f"the model gave no usable logits: {error}")
    else:
        drafted = [len(step.proposals[row]) for row in rows]
        return [
            RowOutcome(tokens, count, len(tokens) - 1) for tokens, count in zip(emitted, drafted, strict=True)
        ]
    good = [at for at in range(len(rows)) if at not in bad]
    longest = max((len(step.proposals[rows[at]]) for at in good), default=0)
    kept = target_logits[good, : 1 + longest]
    others = iter(_outcomes(step, kept, [rows[at] for at in good]) if good else [])
    return [failed if at in bad else next(others) for at in range(len(rows))]
