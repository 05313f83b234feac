"""Drafting with a model of another vocabulary than the target's (Timor et al. 2025, arXiv:2502.05202).

Of both drafters here the draft reads the text so far in its own tokens, at its own positions.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from itertools import takewhile

import torch
from torch import Tensor

from driftguard_engine.core import InvalidModel
from driftguard_engine.drafters.base import Drafter
from driftguard_engine.drafters.own_text import OwnText, whole_characters
from driftguard_engine.kernels import steps
from driftguard_engine.kernels.cuda.launcher import Launcher
from driftguard_engine.kernels.steps import RowState
from driftguard_engine.kv_cache import Span
from driftguard_engine.models.base import TokenModel
from driftguard_engine.models.loading import LoadedModel
from driftguard_engine.models.token_texts import TokenTexts, shared_tokens, token_texts
from driftguard_engine.speculation import Verification

logger = logging.getLogger(__name__)

_READ_AT_ONCE = 32  # tokens whose logits are computed although only the last one's are needed


class _OtherVocabulary(Drafter):
    """What a draft of another vocabulary reads. A prompt is read with the first draft, whole: what the target
    has read of another prompt is of no use to it."""

    obstacle = "it reads text on the host, for which each step waits"
    drafts_fewer = True

    def __init__(self, model: TokenModel, target: TokenTexts, own: TokenTexts) -> None:
        self._model, self._target, self._own = model, target, own
        self._texts: dict[int, OwnText] = {}  # by slot

    def prefill(self, token_ids: Sequence[int], spans: Sequence[Span], _features: Tensor | None, /) -> None:
        pass

    def copy(self, source: int, span: Span) -> None:
        pass

    def forget(self, slot: int) -> None:
        self._texts.pop(slot, None)

    def _begin(self, rows: RowState) -> _Chains:
        """Reads what is new in the rows that are drafted for."""
        chains = _Chains(self._model)
        told = (rows.slots.tolist(), rows.lengths.tolist(), rows.drafted.tolist())
        for row, (slot, length, count) in enumerate(zip(*told, strict=True)):
            if not count:
                continue
            text = self._texts.setdefault(slot, OwnText(self._target, self._own))
            text.extend(rows.state.token_ids[slot, text.read : length].tolist())
            token_ids = text.token_ids
            if not token_ids or len(token_ids) > self._model.max_length:
                continue  # nothing that it could read, or more than it can
            chains.add(row, slot, token_ids, min(text.unchanged, len(token_ids) - 1), count)
            text.unchanged = len(token_ids)
        chains.begin()
        return chains


class _Chains:
    """One pass of the draft after another, for the rows that go on."""

    def __init__(self, model: TokenModel) -> None:
        self._model = model
        self.rows: list[int] = []  # that have logits
        self.logits = torch.empty(0)  # [len(rows), V]
        self._spans: dict[int, Span] = {}  # by row: what is read next
        self._new: dict[int, list[int]] = {}
        self._left: dict[int, int] = {}  # drafts that it may have

    def add(self, row: int, slot: int, token_ids: Sequence[int], first: int, count: int) -> None:
        """Reads token_ids[first:]. Ids that only the draft's tokenizer has are read as 0: a poor draft, but
        no error."""
        known = self._model.vocabulary
        self._spans[row] = Span(slot, first, len(token_ids) - first)
        self._new[row] = [token if token < known else 0 for token in token_ids[first:]]
        self._left[row] = min(count, self._model.max_length - len(token_ids) + 1)

    def begin(self) -> None:
        before_ids: list[int] = []
        before: list[Span] = []
        for row, span in self._spans.items():
            if span.count > _READ_AT_ONCE:
                before_ids += self._new[row][:-1]
                before.append(Span(span.slot, span.start, span.count - 1))
                self._new[row], self._spans[row] = self._new[row][-1:], Span(span.slot, span.end - 1, 1)
        if before:
            self._model.prefill(before_ids, before)
        self._read()

    def go_on(self, tokens: dict[int, int]) -> None:
        """The draft's own tokens of the rows that go on."""
        self._left = {row: self._left[row] - 1 for row in tokens if self._left[row] > 1}
        self._spans = {row: Span(self._spans[row].slot, self._spans[row].end, 1) for row in self._left}
        self._new = {row: [tokens[row]] for row in self._left}
        self._read()

    def _read(self) -> None:
        self.rows = list(self._spans)
        if not self.rows:
            return
        spans = list(self._spans.values())
        found = self._model.forward([token for each in self._new.values() for token in each], spans)
        ends = torch.tensor([span.count for span in spans]).cumsum(0) - 1
        self.logits = found[ends.to(found.device)]
        usable = torch.isfinite(self.logits.amax(-1)).tolist()
        if not all(usable):
            # The target needs no draft: the requests go on with what is usable.
            logger.error("the draft gives no usable logits")
            self.rows = [row for row, known in zip(self.rows, usable, strict=True) if known]
            self.logits = self.logits[usable]


class TliDrafter(_OtherVocabulary):
    """Token-level intersection, Algorithm 4: the draft draws from those of its tokens that the target has,
    too.

    Its distribution, with the others masked and renormalised, is over the target's ids before a token is
    drawn. A token that the draft has not is never drafted; the target emits it as often as without drafts.
    """

    def __init__(self, model: TokenModel, size: int, target: TokenTexts, own: TokenTexts) -> None:
        """size: of the target's vocabulary. Raises InvalidModel."""
        super().__init__(model, target, own)
        shared = [
            (ours, theirs)
            for ours, theirs in shared_tokens(target, own)
            if ours < size and theirs < model.vocabulary
        ]
        if not shared:
            raise InvalidModel("draft: its tokenizer has no token of the target's", field="draft")
        self._own_ids = dict(shared)
        self._ours, self._theirs = (torch.tensor(each) for each in zip(*shared, strict=True))
        logger.info("the draft has %d of the target's %d tokens", len(shared), size)

    def draft(self, rows: RowState, verification: Verification, launcher: Launcher | None) -> None:
        tokens, logits = verification.draft_tokens, verification.draft_logits
        ours, theirs = self._ours.to(logits.device), self._theirs.to(logits.device)
        chains = self._begin(rows)
        for step in range(tokens.shape[1]):
            if not bool((rows.drafted > step).any()):
                return
            logits[:, step].fill_(-torch.inf)
            if chains.rows:
                places = torch.tensor(chains.rows, device=logits.device)[:, None]
                logits[places, step, ours] = chains.logits[:, theirs].to(logits)
            verification.draw(step)  # nothing where a row has no logits
            steps.feed(launcher, rows, tokens, step, 1)
            drawn = zip(chains.rows, tokens[chains.rows, step].tolist(), strict=True)
            chains.go_on({row: self._own_ids[token] for row, token in drawn if token >= 0})


class SlemDrafter(_OtherVocabulary):
    """String-level exact match, Algorithm 2: the draft writes text, and what the target's tokenizer makes of
    it are guesses.

    The draft writes its likeliest tokens, so that the guesses depend on nothing but the text.
    """

    def __init__(self, model: TokenModel, size: int, target: TokenTexts, own: TokenTexts) -> None:
        """size: of the target's vocabulary."""
        super().__init__(model, target, own)
        self._size = size

    def draft(self, rows: RowState, verification: Verification, launcher: Launcher | None) -> None:
        tokens = verification.draft_tokens
        found = torch.full(tokens.shape, -1)
        chains = self._begin(rows)
        written: dict[int, bytes] = {}
        marks = {*self._own.marks.values()}
        while chains.rows:
            likeliest = dict(zip(chains.rows, chains.logits.argmax(-1).tolist(), strict=True))
            going_on = {row: token for row, token in likeliest.items() if token not in marks}
            for row, token in going_on.items():
                written[row] = written.get(row, b"") + self._own.texts.get(token, b"")
            chains.go_on(going_on)
        slots = rows.slots.tolist()
        for row, text in written.items():
            guesses = self._guesses(self._texts[slots[row]], text)[: int(rows.drafted[row])]
            found[row, : len(guesses)] = torch.tensor(guesses, dtype=torch.int64)
        tokens.copy_(found)
        steps.feed(launcher, rows, tokens, 0, tokens.shape[1])

    def _guesses(self, text: OwnText, written: bytes) -> list[int]:
        """The target's tokens of what was written. The text before it decides how it is cut; where the target
        would have joined the two, what was written is cut by itself. They end before an id that only the
        target's tokenizer has."""
        written = written[: whole_characters(text.unfinished + written) - len(text.unfinished)]
        for before in (text.end + text.unfinished, b"\n"):
            try:
                token_ids = self._target.encode(before + written)
            except UnicodeDecodeError:
                continue
            found = self._target.last(token_ids, len(written))
            if found is not None:
                return [*takewhile(self._size.__gt__, found)]
        return []


def open_tli(target: LoadedModel, draft: LoadedModel) -> TliDrafter:
    """Raises InvalidModel."""
    return TliDrafter(draft.model, target.model.vocabulary, *_texts(target, draft))


def open_slem(target: LoadedModel, draft: LoadedModel) -> SlemDrafter:
    """Raises InvalidModel."""
    return SlemDrafter(draft.model, target.model.vocabulary, *_texts(target, draft))


def _texts(target: LoadedModel, draft: LoadedModel) -> tuple[TokenTexts, TokenTexts]:
    return (
        token_texts(target.tokenizer, target.directory, field="target"),
        token_texts(draft.tokenizer, draft.directory, field="draft"),
    )
