"""Drafting without a model: what followed the same few tokens earlier in the sequence.

Prompt lookup (Saxena 2023). Drafts are not sampled, so the distribution of each is a point mass.
"""

from __future__ import annotations

from driftguard_engine.drafters.base import Drafter
from driftguard_engine.kernels import ngram, steps
from driftguard_engine.kernels.cuda.launcher import Launcher
from driftguard_engine.kernels.steps import RowState
from driftguard_engine.speculation import Verification


class NgramDrafter(Drafter):
    """See `Drafter`."""

    captured = True

    def __init__(self, min_tokens: int, max_tokens: int) -> None:
        self.min_tokens = min_tokens
        self.max_tokens = max_tokens

    def draft(self, rows: RowState, verification: Verification, launcher: Launcher | None) -> None:
        sequences, tokens = rows.state.token_ids, verification.draft_tokens
        sizes = self.min_tokens, self.max_tokens
        if launcher is None:
            tokens.copy_(ngram.reference(sequences, rows.slots, rows.lengths, *sizes, tokens.shape[1]))
        else:
            ngram.look_up(launcher, sequences, rows.slots, rows.lengths, *sizes, tokens)
        steps.feed(launcher, rows, tokens, 0, tokens.shape[1])
