"""The traffic of a retraining: captured requests, or a JSON Lines file of token ids."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec

from driftguard.errors import BadInput
from driftguard.records import DEFAULT_SEGMENT, UNREADABLE_JSON
from driftguard.retraining.training.plan import CapturedRequest
from driftguard.store import captures
from driftguard.store.database import Database
from driftguard.store.serving_scores import ServedCapture

_ROWS_AT_ONCE = 20  # a request of 32,000 tokens takes two megabytes

TokenIds = tuple[str, Sequence[int], Sequence[int]]  # key, prompt, output


@dataclass(frozen=True, slots=True)
class Traffic:
    """The requests, and functions that read the token ids of some of them, and which have one that a target
    of so many tokens lacks."""

    requests: Sequence[CapturedRequest]
    read: Callable[[Sequence[str]], Iterator[TokenIds]]
    beyond: Callable[[int], Collection[str]]


def captured_traffic(database: Database, server: str, target: str) -> Traffic:
    """All captured requests of this server and target, of any draft: the target decided the answers."""
    with database.session() as session:
        requests = [
            CapturedRequest(str(row.record_id), row.segment, row.captured_at, row.tokens, row.output_tokens)
            for row in captures.outline(session, server, target)
        ]

    def read(keys: Sequence[str]) -> Iterator[TokenIds]:
        for start in range(0, len(keys), _ROWS_AT_ONCE):
            with database.session() as session:
                wanted = [UUID(key) for key in keys[start : start + _ROWS_AT_ONCE]]
                for row in captures.token_ids(session, wanted):
                    yield str(row.record_id), row.prompt_token_ids, row.output_token_ids

    def beyond(vocabulary: int) -> set[str]:
        with database.session() as session:
            return {str(key) for key in captures.beyond_vocabulary(session, server, target, vocabulary)}

    return Traffic(requests, read, beyond)


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line of a traffic file; it may have the members of a capture, so that an export can be used."""

    prompt_token_ids: list[int]
    output_token_ids: list[int]
    segment: str = DEFAULT_SEGMENT
    record_id: UUID | None = None
    server: str | None = None
    target: str | None = None
    draft_version: str | None = None
    captured_at: datetime | None = None


def traffic_of_file(path: Path) -> Traffic:
    """Every request of the file; equal lines count once. A token that the target lacks is left to the
    training, which refuses it by its line. Raises BadInput that names the line."""
    lines = {_key(line): line for line in _lines(path)}
    if not lines:
        raise BadInput(f"{path}: no requests in the file; one JSON object per line is needed")
    now = datetime.now(UTC)
    requests = [
        CapturedRequest(
            key,
            line.segment,
            _aware(line.captured_at) if line.captured_at else now,
            len(line.prompt_token_ids) + len(line.output_token_ids),
            len(line.output_token_ids),
        )
        for key, line in lines.items()
    ]

    def read(keys: Sequence[str]) -> Iterator[TokenIds]:
        for key in keys:
            yield key, lines[key].prompt_token_ids, lines[key].output_token_ids

    return Traffic(requests, read, beyond=lambda _: ())


def write_requests(path: Path, rows: Iterable[TokenIds], groups: Mapping[str, str]) -> Counter[str]:
    """Writes a file for the training process; returns how many of each group. A capture deleted meanwhile is
    left out."""
    written: Counter[str] = Counter()
    encoder = msgspec.json.Encoder()
    with path.open("wb") as file:
        for key, prompt, output in rows:
            line: dict[str, Any] = {
                "segment": groups[key],
                "prompt_token_ids": prompt,
                "output_token_ids": output,
            }
            file.write(encoder.encode(line) + b"\n")
            written[groups[key]] += 1
    return written


def write_served(path: Path, requests: Iterable[ServedCapture]) -> None:
    """Writes a file for the scoring process."""
    encoder = msgspec.json.Encoder()
    with path.open("wb") as file:
        for one in requests:
            line: dict[str, Any] = {
                "segment": one.captured.segment,
                "prompt_token_ids": one.captured.prompt,
                "output_token_ids": one.captured.output,
                "temperature": one.temperature,
                "num_speculative_tokens": one.num_speculative_tokens,
                "drafting_steps": one.drafting_steps,
                "verification": one.verification,
            }
            file.write(encoder.encode(line) + b"\n")


def _lines(path: Path) -> Iterator[_Line]:
    decoder = msgspec.json.Decoder(_Line)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror})") from None
    for number, text in enumerate(content.splitlines(), start=1):
        if text.strip():
            try:
                line = decoder.decode(text)
            except UNREADABLE_JSON as error:
                raise BadInput(f"{path}, line {number}: {error}", line=number) from None
            yield _checked(path, number, line)


def _checked(path: Path, number: int, line: _Line) -> _Line:
    for field in ("prompt_token_ids", "output_token_ids"):
        ids: list[int] = getattr(line, field)
        if not ids or min(ids) < 0:
            given = "is empty" if not ids else f"holds {min(ids)}"
            raise BadInput(
                f"{path}, line {number}: {field} {given}; at least one token id of 0 or more is needed",
                line=number,
                field=field,
            )
    return line


def _aware(at: datetime) -> datetime:
    """It decides the order alone: one without an offset is taken to be in UTC."""
    return at if at.tzinfo else at.replace(tzinfo=UTC)


def _key(line: _Line) -> str:
    if line.record_id is not None:
        return str(line.record_id)
    text = msgspec.json.encode([line.segment, line.prompt_token_ids, line.output_token_ids])
    return hashlib.sha256(text).hexdigest()
