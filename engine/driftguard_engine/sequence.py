"""One running request: its tokens, text, counts and times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from driftguard_engine.core import (
    FinishedRequest,
    FinishReason,
    Request,
    RequestOutput,
    SpeculationCounts,
    VerificationRule,
)
from driftguard_engine.detokenizer import Detokenizer, StopFilter
from driftguard_engine.drafters.loaded import LoadedDraft


@dataclass(frozen=True, slots=True)
class Moment:
    """The same instant on both clocks: UTC for the record, monotonic seconds for durations."""

    utc: datetime
    monotonic_seconds: float


@dataclass(slots=True, eq=False)
class RunningSequence:
    """`token_ids` are prompt and output; the KV cache holds all but the last one."""

    request: Request
    slot: int
    draft: LoadedDraft
    num_speculative_tokens: int
    max_length: int
    eos_token_ids: frozenset[int]
    tokenizer: Any
    arrived: Moment
    adaptive_k: bool = False
    verification: VerificationRule = "token"
    token_ids: list[int] = field(init=False)
    counts: SpeculationCounts = field(init=False, default_factory=SpeculationCounts)
    reused_prompt_tokens: int = field(init=False, default=0)
    _detokenizer: Detokenizer | None = field(init=False, default=None)
    _stop: StopFilter = field(init=False)
    _text: list[str] = field(init=False, default_factory=list)
    _first_token_seconds: float | None = field(init=False, default=None)
    _last_token_seconds: float = field(init=False, default=0.0)
    _concurrency_sum: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.prompt_token_ids)
        self._stop = StopFilter(self.request.params.stop)

    @property
    def output_count(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_token_ids)

    @property
    def draft_count(self) -> int:
        """Draft tokens worth asking for: a step emits one more, and must not go beyond the limits."""
        return max(0, min(self.num_speculative_tokens, self._remaining() - 1))

    def _remaining(self) -> int:
        return min(self.request.params.max_tokens - self.output_count, self.max_length - len(self.token_ids))

    def commit(
        self, emitted: Sequence[int], drafted: int, accepted: int, concurrency: int, now: Moment
    ) -> RequestOutput:
        """Appends the tokens of one verification, up to the end of the request.

        Tokens behind an EOS or a stop string are cut: `emitted` then counts what the user receives (the
        ending token included), `accepted` the draft tokens among these; `drafted` stays.
        """
        kept, text, reason = self._take(emitted)
        self.token_ids.extend(kept)
        self.counts.add_step(drafted, min(accepted, len(kept)), len(kept))
        self._concurrency_sum += concurrency
        self._last_token_seconds = now.monotonic_seconds
        if self._first_token_seconds is None:
            self._first_token_seconds = now.monotonic_seconds
        if reason is None and self._remaining() == 0:
            reason = "length"
        if reason is None:
            self._text.append(text)
            return self._output(kept, text)
        text += self._flush()
        self._text.append(text)
        return self._output(kept, text, self._finished(reason, now))

    def _take(self, emitted: Sequence[int]) -> tuple[list[int], str, FinishReason | None]:
        ends = frozenset() if self.request.params.ignore_eos else self.eos_token_ids
        kept = list(emitted)
        reason: FinishReason | None = None
        for index, token in enumerate(kept):
            if token in ends:
                kept, reason = kept[: index + 1], "stop"
                break
        shown = kept if reason is None else kept[:-1]  # not all tokenizers call all ending tokens special
        if not self.request.params.stop:
            return kept, self._decoded(shown), reason
        text = ""
        for index, token in enumerate(shown):
            # One by one: the token that completes a stop string is the last one counted.
            text += self._stop.push(self._decoded([token]))
            if self._stop.stopped:
                return kept[: index + 1], text, "stop"
        return kept, text, reason

    def _decoded(self, token_ids: list[int]) -> str:
        if self._detokenizer is None:  # at admission, a tokenizer that fails would end more than one request
            self._detokenizer = Detokenizer(self.tokenizer, self.request.prompt_token_ids)
        return self._detokenizer.push(token_ids)

    def _flush(self) -> str:
        if self._stop.stopped or self._detokenizer is None:
            return ""
        return self._stop.push(self._detokenizer.flush()) + self._stop.flush()

    def end(self, reason: FinishReason, now: Moment, error: str | None = None) -> RequestOutput:
        """Ends the request from outside (abort, error); the tokens that it has stay counted, and text that
        was held back is left out: the tokenizer may be what failed."""
        return self._output((), "", self._finished(reason, now, error))

    def _output(
        self, token_ids: Sequence[int], text: str, finished: FinishedRequest | None = None
    ) -> RequestOutput:
        has_draft = self.num_speculative_tokens > 0
        return RequestOutput(self.request.request_id, tuple(token_ids), text, finished, has_draft)

    def _finished(self, reason: FinishReason, now: Moment, error: str | None = None) -> FinishedRequest:
        first, steps = self._first_token_seconds, self.counts.steps
        per_token = None
        if first is not None and self.output_count > 1:
            per_token = (self._last_token_seconds - first) / (self.output_count - 1)
        # The end is arrival plus elapsed time: a clock that is set back cannot put it before the arrival.
        elapsed = timedelta(seconds=now.monotonic_seconds - self.arrived.monotonic_seconds)
        return FinishedRequest(
            request=self.request,
            output_token_ids=tuple(self.token_ids[len(self.request.prompt_token_ids) :]),
            text="".join(self._text),
            finish_reason=reason,
            counts=self.counts,
            draft=self.draft.info,
            num_speculative_tokens=self.num_speculative_tokens,
            started_at=self.arrived.utc,
            ended_at=self.arrived.utc + elapsed,
            time_to_first_token_seconds=None if first is None else first - self.arrived.monotonic_seconds,
            time_per_output_token_seconds=per_token,
            concurrency=round(self._concurrency_sum / steps) if steps else 1,
            error=error,
            reused_prompt_tokens=self.reused_prompt_tokens,
            adaptive_k=self.adaptive_k,
            verification=self.verification,
        )
