"""POST /api/v1/records: acceptance records in, acknowledged after they are committed."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Annotated, Final

import msgspec
from fastapi import APIRouter, Depends, Request, Response
from fastapi.concurrency import run_in_threadpool

from driftguard.api import openapi_examples
from driftguard.api.auth import require_key
from driftguard.api.context import Context, get_context
from driftguard.api.openapi import BATCH_COUNTS, batch_problems, example, json_line, problem, reference
from driftguard.api.problems import MalformedBody, record_errors
from driftguard.api.request_body import Body, is_json, split_items
from driftguard.errors import BadInput, Busy, TooLarge
from driftguard.records import AcceptanceRecord, RecordError, check_clock, decode_record
from driftguard.settings import Settings
from driftguard.store.partitions import oldest_kept
from driftguard.store.records import BatchResult

router = APIRouter(tags=["records"])
GROWTH: Final = 12  # the objects of a record, most for its counts per position, and its copy for the database
MAX_RECORD_BYTES: Final = 64_000  # more than a record has whose fields are all as long as allowed

_BODY = {
    "requestBody": {
        "required": True,
        "description": "AcceptanceRecords as JSON Lines or as a JSON array; gzip is supported.",
        "content": {
            "application/x-ndjson": {
                "schema": {"type": "string"},
                "example": json_line(openapi_examples.RECORD),
            },
            "application/json": {
                "schema": {"type": "array", "items": reference(AcceptanceRecord)},
                "example": [openapi_examples.RECORD],
            },
        },
    }
}
_ANSWERS = (
    example("batch", BATCH_COUNTS)
    | batch_problems("records")
    | problem(Busy, "50000 records wait for the database and 50000 is the limit; send the batch again later")
)


@dataclass(frozen=True, slots=True)
class ParsedBatch:
    """The records of valid lines, the numbers of those lines, and the errors of the others."""

    records: list[AcceptanceRecord] = field(default_factory=list)
    errors: list[RecordError] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)

    def refused(self, result: BatchResult) -> list[RecordError]:
        """Every line that is not stored, in order."""
        late = (RecordError(why, line=self.lines[place]) for place, why in result.refusals(self.records))
        return sorted([*self.errors, *late], key=lambda error: error.line or 0)


@router.post("/api/v1/records", dependencies=[Depends(require_key)], responses=_ANSWERS, openapi_extra=_BODY)
async def post_records(request: Request, context: Annotated[Context, Depends(get_context)]) -> Response:
    """Stores the valid records of a batch; idempotent by `record_id`.

    200 `{"accepted", "duplicates"}`. When lines are refused: 422 with `accepted`, `duplicates` (the valid
    lines are stored), `errors` (at most 100, each with line, field and detail) and `errors_total`.
    """
    content_type, most = request.headers.get("content-type", ""), context.settings.ingest.max_batch_bytes
    metrics = context.metrics
    counted = metrics.ingest.records.labels
    async with context.bodies.read(request, max_bytes=most, growth=GROWTH) as body:
        batch = await run_in_threadpool(parse_batch, body, content_type, context.settings, datetime.now(UTC))
        counted("refused").inc(len(batch.errors))
        with metrics.ingest.commit_seconds.time():
            result = await asyncio.wrap_future(context.ingest.submit(batch.records))
    counted("accepted").inc(result.accepted)
    counted("duplicate").inc(result.duplicates)
    errors = batch.refused(result)
    counted("refused").inc(len(errors) - len(batch.errors))
    counts = {"accepted": result.accepted, "duplicates": result.duplicates}
    if errors:
        raise BadInput(
            f"{len(errors)} of {len(batch.errors) + len(batch.records)} records are refused; "
            f"first: {errors[0]}",
            **counts,
            **record_errors(errors),
        )
    return Response(msgspec.json.encode(counts), media_type="application/json")


def parse_batch(body: Body, content_type: str, settings: Settings, now: datetime) -> ParsedBatch:
    """Checks every record of a body. Raises MalformedBody (no JSON at all), TooLarge (too many records)."""
    batch = ParsedBatch()
    most = settings.ingest.max_batch_records
    oldest = oldest_kept(now, settings.retention)
    first: Body = b""
    for count, (number, text) in enumerate(split_items(body, content_type), start=1):
        if count > most:
            raise TooLarge(f"more than {most} records in one batch; send smaller ones", max_records=most)
        first = first or text
        try:
            record = _decode(text, number)
            check_clock(record, now, line=number)
            _check_retention(record, oldest, settings, number)
        except RecordError as error:
            batch.errors.append(error.with_traceback(None))  # its frames hold the body
        else:
            batch.records.append(record)
            batch.lines.append(number)
    if batch.errors and not batch.records and not is_json(first):
        raise MalformedBody(
            f"the body is not JSON; send one record per line (JSON Lines) or a JSON array ({batch.errors[0]})"
        )
    return batch


def _decode(text: Body, line: int) -> AcceptanceRecord:
    """Raises RecordError."""
    if len(text) > MAX_RECORD_BYTES:
        raise RecordError(f"more than {MAX_RECORD_BYTES} bytes, which no record has", line=line)
    return decode_record(text, line=line)


def _check_retention(record: AcceptanceRecord, oldest: datetime, settings: Settings, line: int) -> None:
    if record.ended_at - record.started_at > timedelta(days=settings.retention.records_days):
        raise RecordError(
            f"{record.started_at.isoformat()} is more than {settings.retention.records_days} days before "
            f"ended_at ({record.ended_at.isoformat()})",
            field="started_at",
            line=line,
        )
    if record.ended_at < oldest:
        raise RecordError(
            f"{record.ended_at.isoformat()} is older than the {settings.retention.records_days} days that "
            "records are kept (retention.records_days)",
            field="ended_at",
            line=line,
        )
