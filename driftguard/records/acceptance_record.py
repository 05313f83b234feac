"""The AcceptanceRecord: counts of one request, one scrape window or one canary probe.

JSON Lines of exactly these field names is the interchange format of ingest, replay and exports.
A field that a source does not provide is null, never guessed. Unknown keys are refused by name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from json import JSONDecodeError
from typing import Annotated, Final, Literal, TypeVar
from uuid import UUID

import msgspec
from msgspec import structs

Struct = TypeVar("Struct", bound=msgspec.Struct)
Text = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**40)]  # sums of millions of records still fit a bigint
Instant = Annotated[datetime, msgspec.Meta(tz=True)]
MAX_NAMES_BYTES: Final = 2_600  # of one row of an index, which holds 2,704 with its header
MAX_POSITIONS = 1_024  # and the largest K
PerPosition = Annotated[list[Count], msgspec.Meta(max_length=MAX_POSITIONS)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]  # 31 years; sums of millions stay finite
Temperature = Annotated[float, msgspec.Meta(ge=0)]

Kind = Literal["request", "window", "probe"]
AcceptanceRule = Literal["rejection", "greedy", "typical", "unknown"]
Verification = Literal["token", "block", "tree", "greedy", "typical", "unknown"]
Fidelity = Literal["request", "counter", "gauge"]

DEFAULT_SEGMENT = "default"
OTHER_SEGMENT = "other"
PROBE_SEGMENT = "driftguard-probe"  # marks a canary probe for its server: the sender records it
MAX_SEGMENTS_PER_STREAM = 64
FUTURE_TOLERANCE = timedelta(seconds=60)  # clocks of two machines differ by this much in practice
# What reading the JSON of others raises: it is none or of another form, not UTF-8, nested too deeply.
UNREADABLE_JSON: Final = (msgspec.DecodeError, JSONDecodeError, UnicodeDecodeError, RecursionError)


class RecordError(ValueError):
    """{field}: {detail}"""

    def __init__(self, detail: str, *, field: str | None = None, line: int | None = None) -> None:
        self.detail = detail
        self.field = field
        self.line = line
        place = f"line {line}: " if line is not None else ""
        super().__init__(place + (f"{field}: " if field else "") + detail)


class AcceptanceRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Speculative decoding counts of one request (or window, or probe). Fields: docs/record.md.

    `acceptance rate` = accepted / drafted; `acceptance length` = emitted / steps (with the bonus token).
    """

    record_id: UUID
    kind: Kind
    started_at: Instant
    ended_at: Instant
    server: Text
    target: Text
    draft: Text
    draft_version: Text
    method: Text
    steps: Count
    drafted: Count
    accepted: Count
    emitted: Count
    fidelity: Fidelity
    segment: Text = DEFAULT_SEGMENT
    session: Text | None = None
    drafted_per_position: PerPosition | None = None
    accepted_per_position: PerPosition | None = None
    num_speculative_tokens: Annotated[int, msgspec.Meta(ge=0, le=MAX_POSITIONS)] | None = None
    acceptance_rule: AcceptanceRule = "unknown"
    verification: Verification = "unknown"
    temperature: Temperature | None = None
    prompt_tokens: Count | None = None
    cached_tokens: Count | None = None
    output_tokens: Count | None = None
    time_to_first_token_seconds: Seconds | None = None
    time_per_output_token_seconds: Seconds | None = None
    concurrency: Count | None = None
    waiting_requests: Count | None = None
    started_requests: Count | None = None

    @property
    def stream_key(self) -> StreamKey:
        return StreamKey(self.server, self.target, self.draft_version, self.method)


def verified_at_once(verification: str) -> Literal["token", "block", "tree"]:
    """What a server accepts or rejects at once. Greedy and typical acceptance, which acceptance_rule tells as
    well, and what is not told count as token by token: no one knows better, and few servers do otherwise."""
    return verification if verification in ("block", "tree") else "token"  # type: ignore[return-value]


class StreamKey(msgspec.Struct, frozen=True, order=True):
    """What one detector watches: (server, target, draft version, method)."""

    server: str
    target: str
    draft_version: str
    method: str


_decode = msgspec.json.Decoder(AcceptanceRecord).decode
_encode = msgspec.json.Encoder().encode
_UNKNOWN = re.compile(r"unknown field `([^`]+)`")
_MISSING = re.compile(r"missing required field `([^`]+)`")
_PATH = re.compile(r"(.*) - at `\$\.?([^`]*)`$", re.DOTALL)


def decode_record(text: bytes | bytearray | str, *, line: int | None = None) -> AcceptanceRecord:
    """Parses and checks one record. Raises RecordError that names the field and the line."""
    record = decode_line(_decode, text, line)
    _check_rules(record, line)
    return record


def decode_line(
    decode: Callable[[bytes | bytearray | str], Struct], text: bytes | bytearray | str, line: int | None
) -> Struct:
    """What `decode` makes of it. Raises RecordError that names the field and the line."""
    try:
        return decode(text)
    except msgspec.ValidationError as error:
        raise readable_error(str(error), line) from None
    except UNREADABLE_JSON as error:
        raise RecordError(f"not valid JSON ({error})", line=line) from None


def encode_record(record: AcceptanceRecord) -> bytes:
    """One line of JSON without the newline."""
    return _encode(record)


def check_record(record: AcceptanceRecord) -> None:
    """Checks a record that was made in Python, whose types and bounds nothing has checked yet. Raises
    RecordError where decode_record would refuse it."""
    try:
        msgspec.convert(structs.asdict(record), AcceptanceRecord)
    except msgspec.ValidationError as error:
        raise readable_error(str(error), None) from None
    _check_rules(record, None)


def _check_rules(record: AcceptanceRecord, line: int | None) -> None:
    """What the types and bounds of the fields do not say. Raises RecordError."""

    def refuse(field: str, detail: str) -> None:
        raise RecordError(detail, field=field, line=line)

    if record.accepted > record.drafted:
        refuse("accepted", f"{record.accepted} is more than drafted ({record.drafted}); at most drafted")
    if record.emitted > record.accepted + record.steps:
        refuse(
            "emitted",
            f"{record.emitted} is more than accepted + steps ({record.accepted + record.steps}): "
            "each step emits its accepted tokens and at most one bonus token",
        )
    cached, prompt = record.cached_tokens, record.prompt_tokens
    if cached is not None and prompt is not None and cached > prompt:
        refuse(
            "cached_tokens",
            f"{cached} is more than prompt_tokens ({prompt}), of which they are a part",
        )
    if record.ended_at < record.started_at:
        refuse(
            "ended_at",
            f"{record.ended_at.isoformat()} is before started_at ({record.started_at.isoformat()})",
        )
    try:
        record.ended_at.astimezone(UTC)
    except OverflowError:
        refuse("ended_at", f"{record.ended_at.isoformat()} is after the year 9999 in UTC")
    for name in ("temperature", "time_to_first_token_seconds", "time_per_output_token_seconds"):
        value = getattr(record, name)
        if value is not None and not math.isfinite(value):
            refuse(name, f"{value} is not a finite number")
    for name in ("server", "target", "draft", "draft_version", "method", "segment", "session"):
        check_text(name, getattr(record, name), line)
    check_names(("server", "target", "draft_version", "method"), record, line)
    if record.started_requests is not None and record.kind != "window":
        refuse("started_requests", f"is of windows only, and this is a {record.kind}")
    _check_positions(record, line)


def check_text(name: str, value: str | None, line: int | None) -> None:
    """Raises RecordError where the database could not hold the field's value."""
    if value is not None and "\x00" in value:
        raise RecordError("holds a NUL character, which no text field may hold", field=name, line=line)


def check_names(fields: Sequence[str], given: msgspec.Struct, line: int | None) -> None:
    """Raises RecordError where these names are together too long for an index of the database."""
    names = [getattr(given, field) for field in fields]
    if 4 * sum(map(len, names)) <= MAX_NAMES_BYTES:  # the most that UTF-8 makes of them
        return
    size = sum(len(name.encode(errors="surrogatepass")) for name in names)
    if size > MAX_NAMES_BYTES:
        others = ", ".join(fields[1:])
        raise RecordError(
            f"has with {others} {size} bytes in UTF-8; at most {MAX_NAMES_BYTES}", field=fields[0], line=line
        )


def _check_positions(record: AcceptanceRecord, line: int | None) -> None:
    drafted, accepted = record.drafted_per_position, record.accepted_per_position
    if drafted is not None and sum(drafted) > record.drafted:
        raise RecordError(
            f"adds up to {sum(drafted)}, more than drafted ({record.drafted})",
            field="drafted_per_position",
            line=line,
        )
    if accepted is None:
        return
    if sum(accepted) > record.accepted:
        raise RecordError(
            f"adds up to {sum(accepted)}, more than accepted ({record.accepted})",
            field="accepted_per_position",
            line=line,
        )
    if drafted is not None and len(drafted) != len(accepted):
        raise RecordError(
            f"has {len(accepted)} positions, drafted_per_position has {len(drafted)}; they must agree",
            field="accepted_per_position",
            line=line,
        )
    for position, count in enumerate(accepted):
        most = drafted[position] if drafted is not None else record.steps
        if count > most:
            raise RecordError(
                f"position {position} accepted {count} of {most} drafted",
                field="accepted_per_position",
                line=line,
            )


def check_clock(record: AcceptanceRecord, now: datetime, *, line: int | None = None) -> None:
    """Refuses a record from the future (by more than FUTURE_TOLERANCE). Raises RecordError."""
    if record.ended_at > now + FUTURE_TOLERANCE:
        raise RecordError(
            f"{record.ended_at.isoformat()} is in the future (this clock: {now.isoformat()}); "
            "check the sender's clock and time zone",
            field="ended_at",
            line=line,
        )


def readable_error(message: str, line: int | None) -> RecordError:
    """msgspec's message as a RecordError that names the field."""
    if found := _UNKNOWN.search(message):
        return RecordError("unknown field; docs/record.md lists all of them", field=found[1], line=line)
    if found := _MISSING.search(message):
        return RecordError("missing; this field is required", field=found[1], line=line)
    if found := _PATH.fullmatch(message):
        detail = found[1].replace("`", "")
        return RecordError(detail[:1].lower() + detail[1:], field=found[2] or None, line=line)
    return RecordError(message, line=line)
