"""An answered request -> AcceptanceRecord, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from time import perf_counter
from typing import Final, Literal, TypeGuard, get_args
from urllib.parse import urlsplit

import msgspec
import structlog
from msgspec import structs

from driftguard.adapters.answers.counts import AnswerCounts, AnswerUnreadable, SettingNeeded
from driftguard.adapters.answers.openai import common
from driftguard.adapters.answers.reading import counts_of, ended_on_stop_string, parts_of, token_counts
from driftguard.proxy.asking import Asked, Unreadable
from driftguard.proxy.events import StreamedAnswer
from driftguard.proxy.labels import BadLabel, label
from driftguard.records import (
    DEFAULT_SEGMENT,
    UNRECORDED_REASONS,
    WHY,
    AcceptanceRecord,
    RecordError,
    UnrecordedReason,
    check_record,
    new_record_id,
)
from driftguard.settings import ProxySettings

_log = structlog.get_logger(__name__)

NotCounted = Literal[  # for these the sidecar is not told that a request is missing
    "not_generation",  # this path or method generates no tokens
    "probe",  # the sender of a canary probe records it
    "reports_itself",  # the built-in engine
    "failed",  # not answered with 200, or not to its end, or an event of it tells of an error
]
Reason = NotCounted | UnrecordedReason
REASONS: Final[tuple[Reason, ...]] = (*get_args(NotCounted), *UNRECORDED_REASONS)
NONE: Final = "none"
UNKNOWN: Final = "unknown"


def is_missing(reason: Reason) -> TypeGuard[UnrecordedReason]:
    """Whether an answered request without a record for this reason is missing from the sample."""
    return reason in UNRECORDED_REASONS


class NotRecorded(Exception):
    """{reason}: {detail}"""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


class Passage(msgspec.Struct, frozen=True):
    """One request on its way. `started`: perf_counter(); `concurrency`: requests in flight, including this
    one; `loaded`: version of the draft that was loaded live by then."""

    asked: Asked
    headers: Mapping[str, str]
    path: str
    concurrency: int
    started: float
    loaded: str | None = None


class Recorder:
    """Makes records as the settings say. Logs each reason for which no record is made when it first
    occurs."""

    def __init__(self, settings: ProxySettings) -> None:
        self._settings = settings
        self.server = settings.server or urlsplit(settings.upstream or "").netloc
        self._logged: set[str] = set()

    def record(self, passage: Passage, answer: StreamedAnswer | bytes, ended: float) -> AcceptanceRecord:
        """`answer`: the counts of a streamed answer, or the whole of another one. Raises NotRecorded."""
        heard = StreamedAnswer(parts_of(answer), answer) if isinstance(answer, bytes) else answer
        if heard.has_failed:
            raise NotRecorded("failed")
        try:
            found = common(heard.model_part)
            if found.choices is not None and len(found.choices) > 1:
                raise NotRecorded("several_answers")
            told = counts_of(heard.parts, self._settings.num_speculative_tokens)
            record = self._record(passage, heard, self._counts(told, heard), found.model, ended)
            check_record(record)
        except AnswerUnreadable as error:
            raise NotRecorded("malformed_answer", str(error)) from None
        except Unreadable as error:
            raise NotRecorded("malformed_request", str(error)) from None
        except SettingNeeded as error:
            raise NotRecorded("setting_needed", str(error)) from None
        except RecordError as error:
            raise NotRecorded("contradiction", str(error)) from None
        except BadLabel as error:
            raise NotRecorded("bad_label", str(error)) from None
        return record

    def note(self, reason: UnrecordedReason, detail: str) -> None:
        """Logs each once; never content of a request or an answer."""
        if reason not in self._logged:
            self._logged.add(reason)
            why = WHY[reason]
            hint = detail if reason == "setting_needed" else f"{why.cause}. {why.remedy}"
            _log.warning("requests pass unrecorded", reason=reason, hint=hint)

    def _counts(self, told: AnswerCounts | None, heard: StreamedAnswer) -> AnswerCounts:
        if self._settings.method == NONE:
            if told is not None and told.drafted:
                raise NotRecorded("contradiction")
            if told is None:
                prompt, cached, output = token_counts(heard.parts)
                told = AnswerCounts(
                    0, 0, 0, 0, prompt_tokens=prompt, cached_tokens=cached, output_tokens=output
                )
            return structs.replace(told, steps=0, emitted=0, num_speculative_tokens=0)
        if told is None:
            raise NotRecorded("stop_string" if ended_on_stop_string(heard.parts) else "no_numbers")
        return told

    def _record(
        self, passage: Passage, heard: StreamedAnswer, told: AnswerCounts, model: str | None, ended: float
    ) -> AcceptanceRecord:
        """Raises BadLabel, Unreadable."""
        settings, speculates = self._settings, self._settings.method != NONE
        temperature = _temperature(passage.asked)
        first, each = _times(passage, heard, told)
        ended_at = datetime.now(UTC) - timedelta(seconds=perf_counter() - ended)
        return AcceptanceRecord(
            record_id=new_record_id(),
            kind="request",
            started_at=ended_at - timedelta(seconds=ended - passage.started),
            ended_at=ended_at,
            server=self.server,
            target=settings.target or model or _text(passage.asked.field("model")) or UNKNOWN,
            draft=settings.draft if speculates else NONE,
            draft_version=(passage.loaded or settings.draft_version) if speculates else NONE,
            method=settings.method,
            segment=_label(settings.segment_from, passage) or DEFAULT_SEGMENT,
            session=_label(settings.session_from, passage),
            steps=told.steps,
            drafted=told.drafted,
            accepted=told.accepted,
            emitted=told.emitted,
            accepted_per_position=told.accepted_per_position,
            num_speculative_tokens=(
                settings.num_speculative_tokens
                if told.num_speculative_tokens is None
                else told.num_speculative_tokens
            ),
            acceptance_rule="greedy" if temperature == 0 else "unknown",
            verification="greedy" if temperature == 0 else "unknown",
            temperature=temperature,
            prompt_tokens=told.prompt_tokens,
            cached_tokens=told.cached_tokens,
            output_tokens=told.output_tokens,
            time_to_first_token_seconds=first,
            time_per_output_token_seconds=each,
            concurrency=passage.concurrency,
            fidelity="request",
        )


def _label(source: str, passage: Passage) -> str | None:
    """Raises BadLabel, Unreadable."""
    return label(source, passage.headers, passage.path, passage.asked.fields)


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _temperature(asked: Asked) -> float | None:
    """Raises Unreadable."""
    inner = asked.sampling("temperature")  # SGLang /generate
    for value in (asked.field("temperature"), inner, asked.field("sampling_param_temperature")):
        if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0:
            try:
                return float(value)
            except OverflowError:
                raise Unreadable("the temperature is larger than any float") from None
    return None


def _times(passage: Passage, heard: StreamedAnswer, told: AnswerCounts) -> tuple[float | None, float | None]:
    """(to the first token, per output token) in seconds: the engine's, else measured here in a stream."""
    first, each = told.time_to_first_token_seconds, told.time_per_output_token_seconds
    if heard.first_output_at is None or heard.last_output_at is None:
        return first, each
    if first is None:
        first = heard.first_output_at - passage.started
    if each is None and told.output_tokens is not None and told.output_tokens > 1:
        each = (heard.last_output_at - heard.first_output_at) / (told.output_tokens - 1)
    return first, each
