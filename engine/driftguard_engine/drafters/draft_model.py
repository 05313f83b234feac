"""Drafting with a small model: K forward passes of one token each."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional as F

from driftguard_engine.drafters.base import DraftRow
from driftguard_engine.kv_cache import Span
from driftguard_engine.models.base import TokenModel
from driftguard_engine.speculation import SpeculativeStep


class DraftModelDrafter:
    """See `Drafter`. Keeps per sequence what it fed last: (length at that time, drafted tokens fed)."""

    def __init__(self, model: TokenModel, vocabulary: int) -> None:
        """vocabulary: the target's V; the draft's logits are cut or filled with -inf to it."""
        self.model = model
        self.vocabulary = vocabulary
        self._fed: dict[str, tuple[int, list[int]]] = {}

    def prefill(self, token_ids: Sequence[int], spans: Sequence[Span]) -> None:
        """Leaves out positions beyond the draft's own context: it will not draft there."""
        kept_ids: list[int] = []
        kept_spans: list[Span] = []
        first = 0
        for span in spans:
            count = min(span.count, self.model.max_length - span.start)
            if count > 0:
                kept_ids.extend(token_ids[first : first + count])
                kept_spans.append(Span(span.slot, span.start, count))
            first += span.count
        if kept_spans:
            self.model.prefill(self._known(kept_ids), kept_spans)

    def copy(self, source: int, span: Span) -> None:
        self.model.copy(source, span)

    def propose(self, rows: Sequence[DraftRow], step: SpeculativeStep) -> None:
        counts = [min(row.count, self.most_drafts(len(row.token_ids))) for row in rows]
        for drawn in range(max(counts, default=0)):
            active = [row for row, count in zip(rows, counts, strict=True) if count > drawn]
            step.draw(self._forward(active, step.proposals), [row.index for row in active])
        for row in rows:
            if tokens := step.proposals[row.index]:
                self._fed[row.request_id] = (len(row.token_ids), tokens[:-1])

    def most_drafts(self, length: int) -> int:
        """How many tokens its context allows behind a sequence of this length."""
        return max(0, self.model.max_length - length + 1)

    def forget(self, request_id: str) -> None:
        self._fed.pop(request_id, None)

    def _forward(self, rows: Sequence[DraftRow], proposals: Sequence[list[int]]) -> Tensor:
        """Feeds what the cache lacks of each sequence with its proposal; last tokens' logits [R, V]."""
        ids: list[int] = []
        spans: list[Span] = []
        lasts: list[int] = []
        for row in rows:
            tokens = proposals[row.index]
            fed = tokens[-1:] or self._pending(row)
            length = len(row.token_ids) + len(tokens)
            ids.extend(fed)
            spans.append(Span(row.slot, length - len(fed), len(fed)))
            lasts.append(len(ids) - 1)
        logits = self.model.forward(self._known(ids), spans)
        last = logits if len(lasts) == len(ids) else logits[lasts]
        return fitted(last, self.vocabulary)

    def _pending(self, row: DraftRow) -> Sequence[int]:
        """Tokens that the cache lacks: one, two when all drafts were accepted (the last is never fed), more
        after steps without drafts.

        The cache is valid up to the first drafted token fed that was not accepted.
        """
        cached, fed = self._fed.get(row.request_id, (row.prefilled, []))
        for token in fed:
            if cached >= len(row.token_ids) - 1 or row.token_ids[cached] != token:
                break
            cached += 1
        return row.token_ids[cached:]

    def _known(self, token_ids: list[int]) -> list[int]:
        """Replaces padding ids that only the target has by 0: a poor draft, but no error."""
        if self.model.vocabulary >= self.vocabulary:
            return token_ids
        return [token if token < self.model.vocabulary else 0 for token in token_ids]


def fitted(logits: Tensor, vocabulary: int) -> Tensor:
    """Logits [R, V of the draft] -> [R, V of the target]: models may pad the same vocabulary differently."""
    missing = vocabulary - logits.shape[-1]
    if missing == 0:
        return logits
    return F.pad(logits, (0, missing), value=float("-inf")) if missing > 0 else logits[:, :missing]
