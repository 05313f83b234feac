"""Requests that were answered, and of which there is no record: how many, and why.

What is missing is no random part of the traffic, so acceptance of the others may be another one than that of
all. Not counted are requests that are missing on purpose or were not answered: canary probes, requests that
another sender records, that generate nothing, that fail, and that a client gives up.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Annotated, Final, Literal, NamedTuple, get_args
from uuid import UUID

import msgspec

from driftguard.records.acceptance_record import (
    FUTURE_TOLERANCE,
    Instant,
    RecordError,
    Text,
    check_text,
    decode_line,
)

UnrecordedReason = Literal[
    "stop_string",
    "no_numbers",
    "setting_needed",
    "several_answers",
    "too_large",
    "no_room",
    "encoded",
    "malformed_request",
    "malformed_answer",
    "contradiction",
    "bad_label",
]
UNRECORDED_REASONS: Final[tuple[UnrecordedReason, ...]] = get_args(UnrecordedReason)
HOUR: Final = timedelta(hours=1)
LATEST_AFTER: Final = timedelta(days=2)  # the status tells of one day


class Why(NamedTuple):
    """In words: `cause` follows "because", `remedy` is a sentence without its full stop."""

    cause: str
    remedy: str


_LOOK: Final = "The documentation of the record (docs/record.md) says what fits"
WHY: Final[Mapping[UnrecordedReason, Why]] = {
    "stop_string": Why(
        "they ended on a stop string, and vLLM's answers to these hold no counts",
        "Inside vLLM all are recorded (docs/vllm-plugin.md)",
    ),
    "no_numbers": Why(
        "their answers hold no counts of speculation",
        "vLLM needs --per-request-spec-decode-metrics summary, and tells nothing by /v1/responses and "
        "/v1/messages, whose requests its plugin records (docs/vllm-plugin.md); for a server that does not "
        "speculate set --method none, and its latency is recorded",
    ),
    "setting_needed": Why(
        "their answers do not tell K", "Give the proxy --num-speculative-tokens (docs/proxy.md)"
    ),
    "several_answers": Why(
        "they ask for several answers", "Inside vLLM all are recorded (docs/vllm-plugin.md)"
    ),
    "too_large": Why(
        "they or their answers are larger than proxy.max_inspected_bytes", "Raise that setting of the proxy"
    ),
    "no_room": Why(
        "more than proxy.max_held_bytes would have been held in memory", "Raise that setting of the proxy"
    ),
    "encoded": Why(
        "they or their answers were compressed",
        "Let clients send requests as they are, and the server answers",
    ),
    "malformed_request": Why(
        "the requests cannot be read, or have more than 1,000 members", "Look at what these clients send"
    ),
    "malformed_answer": Why("their answers cannot be read", "Look at what the server answers"),
    "contradiction": Why("their numbers contradict each other, or --method none", _LOOK),
    "bad_label": Why("they name a segment or session that no record can hold", _LOOK),
}


class UnrecordedRequests(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How many requests of a server that one reporter did not record for one reason, in one hour.

    `reporter`: an id that it makes when it starts. `hour`: its beginning, UTC. `requests`: all of that hour
    so far, so that a count that is sent again, or late, counts once: the largest is kept.
    """

    reporter: UUID
    server: Text
    hour: Instant
    reason: UnrecordedReason
    requests: Annotated[int, msgspec.Meta(ge=1, le=2**40)]


_decode = msgspec.json.Decoder(UnrecordedRequests).decode
encode_unrecorded = msgspec.json.Encoder().encode


def decode_unrecorded(
    text: bytes | bytearray | str, now: datetime, *, line: int | None = None
) -> UnrecordedRequests:
    """Parses and checks one count. Raises RecordError that names the field and the line."""
    found = decode_line(_decode, text, line)
    check_text("server", found.server, line)
    if (found.hour.minute, found.hour.second, found.hour.microsecond) != (0, 0, 0) or found.hour.utcoffset():
        detail = f"{found.hour.isoformat()} is not the beginning of an hour of UTC"
        raise RecordError(detail, field="hour", line=line)
    if not now - LATEST_AFTER <= found.hour <= now + FUTURE_TOLERANCE:
        detail = f"{found.hour.isoformat()} is not in the last two days (this clock: {now.isoformat()})"
        raise RecordError(detail, field="hour", line=line)
    return found


def hour_of(moment: datetime) -> datetime:
    """The beginning of the hour that holds it. `moment`: UTC."""
    return moment.replace(minute=0, second=0, microsecond=0)
