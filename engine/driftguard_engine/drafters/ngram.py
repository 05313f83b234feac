"""Drafting without a model: what followed the same few tokens earlier in the sequence.

Prompt lookup (Saxena 2023). Drafts are not sampled, so the distribution of each is a point mass.
"""

from __future__ import annotations

from collections.abc import Sequence

from driftguard_engine.kernels import ngram, steps
from driftguard_engine.kernels.cuda.launcher import Launcher
from driftguard_engine.kernels.steps import RowState
from driftguard_engine.kv_cache import Span
from driftguard_engine.speculation import Verification


class NgramDrafter:
    """See `Drafter`."""

    context = None
    captured = True
    obstacle = None

    def __init__(self, min_tokens: int, max_tokens: int) -> None:
        self.min_tokens = min_tokens
        self.max_tokens = max_tokens

    def prefill(self, token_ids: Sequence[int], spans: Sequence[Span]) -> None:
        """Nothing to read: the step has the sequences."""

    def copy(self, source: int, span: Span) -> None:
        """Nothing was read."""

    def draft(self, rows: RowState, verification: Verification, launcher: Launcher | None) -> None:
        sequences, tokens = rows.state.token_ids, verification.draft_tokens
        sizes = self.min_tokens, self.max_tokens
        if launcher is None:
            tokens.copy_(ngram.reference(sequences, rows.slots, rows.lengths, *sizes, tokens.shape[1]))
        else:
            ngram.look_up(launcher, sequences, rows.slots, rows.lengths, *sizes, tokens)
        steps.feed(launcher, rows, tokens, 0, tokens.shape[1])
