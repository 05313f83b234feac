"""The interface of a drafter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from driftguard_engine.kernels.cuda.launcher import Launcher
from driftguard_engine.kernels.steps import DraftContext, RowState
from driftguard_engine.kv_cache import Span
from driftguard_engine.speculation import TreeVerification, Verification


@dataclass(frozen=True, slots=True)
class TreeOutcome:
    """Of a step with trees: what is known to the drafter beside the tokens."""

    accepted: Tensor  # [B]: nodes accepted; -1 where the step failed
    path: Tensor  # [B, D]: their columns, padded with -1
    features: Tensor | None  # [B, D + 1, F]: of the newest token and of them, as in `Drafter.observe`
    probe_logits: Tensor  # [B, P, V]: the target's, raw, at the columns `TreeVerification.probes`
    probe_features: Tensor | None  # [B, P, F]. Where a row lacks a probe, both have no meaning


class Drafter:
    """Guesses the next tokens of running sequences. Whatever it guesses, the output has the target's law, if:

    - A token that is drawn is drawn by `Verification.draw`, from logits that do not depend on it, nor on any
      random number that draws or verifies it. So its distribution q is fixed before the token is.
    - A token that is guessed with certainty is only written into `Verification.draft_tokens`; where other
      rows of the step are drawn, by `Verification.guess`, before anything is drawn: if the choice between the
      two knew a draw, the draws that are kept would not be draws from q.
    - A chain is never cut by what was drawn, for example by the confidence in a drawn token: if those of
      small q were left unverified, those that remain would not be draws from q, which the acceptance rule
      takes them for. It may be cut by what was known before the draw. No node of a tree is taken back.
    """

    context: DraftContext | None = None  # of a draft model: `steps.begin` then makes its inputs
    captured: bool = False  # whether `draft` by kernels waits for no value, so that it can be captured
    drafts_fewer: bool = False  # whether fewer drafts than `context` has room for are no fault
    obstacle: str | None = None  # why it is slower on a GPU than it could be
    features: tuple[int, ...] = ()  # layers of the target that it reads, as `Features` counts them
    exit_layer: int | None = None  # of the target, which `ahead` reads in the middle of its pass
    trees: bool = False  # whether it drafts trees: by `draft_tree` and `observe_tree`
    recurrent: bool = False  # as `TokenModel.recurrent`

    def prefill(self, token_ids: Sequence[int], spans: Sequence[Span], features: Tensor | None, /) -> None:
        """Reads tokens of prompts (not each prompt's last one) as `TokenModel.prefill`, and where `features`
        asks for hidden states, these [N, F] of the same tokens, layers side by side. Where it does not, also
        what was decoded in steps without drafts."""

    def copy(self, source: int, span: Span) -> None:
        """As `TokenModel.copy`. Behind what is copied of a prompt `prefill` goes on."""

    def share(self, slot: int) -> None:
        """As `TokenModel.share`."""

    def draft(self, rows: RowState, verification: Verification, launcher: Launcher | None) -> None:
        """Puts rows.drafted tokens of each row into the verification, and feeds them by `steps.feed`, which
        lowers rows.drafted where there are fewer. launcher: None: on the CPU."""
        raise NotImplementedError

    def ahead(self, rows: RowState, verification: Verification, exit_states: Tensor | None) -> None:
        """Begins work beside the target's pass and returns at once; the next step's `draft` takes its result.

        Called behind `draft`, or where `exit_layer` names a layer, when the target has come to it, with what
        this layer reads: exit_states [N, H] of the tokens that the target needs, row after row. What is
        drafted then must not depend on the random numbers that verify this step, but by the tokens that it
        emits: surest is to draft exactly what would be drafted without this work.
        """

    def draft_tree(self, rows: RowState, tree: TreeVerification) -> None:
        """Puts a tree of at most rows.drafted tokens in depth behind each row's newest token, and probes."""
        raise NotImplementedError

    def observe_tree(self, rows: RowState, tree: TreeVerification, outcome: TreeOutcome, /) -> None:
        """The outcome of a step; where `features` asks for hidden states, also of one without drafts. What
        was drafted beside the path must not be read later."""

    def observe(self, rows: RowState, features: Tensor, accepted: Tensor) -> None:
        """The outcome of a step, also of one without drafts; called where `features` asks for hidden states.

        features [B, T, F]: of the tokens that the target read, from position rows.starts on. Only the first
        accepted[b] + 1 of row b belong to its sequence (accepted [B], -1 where the step failed); those behind
        them are of rejected tokens and must not be read later.
        """

    def forget(self, slot: int) -> None:
        """The request in this slot has ended. Its prompt may still be copied, and be gone on with."""
