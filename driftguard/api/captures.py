"""POST and GET /api/v1/captures: token ids of sampled requests, in and out as JSON Lines."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import chain
from typing import Annotated

import msgspec
from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import StreamingResponse

from driftguard.api import openapi_examples
from driftguard.api.auth import require_key
from driftguard.api.context import Context, get_context
from driftguard.api.exports import exporting
from driftguard.api.filters import CaptureQuery, refuse_repeated
from driftguard.api.openapi import BATCH_COUNTS, batch_problems, example, json_line, problem, reference
from driftguard.api.problems import record_errors
from driftguard.api.request_body import Body, split_items
from driftguard.errors import BadInput, Busy, Forbidden, TooLarge
from driftguard.records import FUTURE_TOLERANCE, RecordError, check_names, check_text, decode_line
from driftguard.settings import Settings
from driftguard.store.captures import (
    CapturedRequest,
    CaptureFilter,
    insert_captures,
    read_captures,
    to_wire,
)
from driftguard.store.database import Database

router = APIRouter(tags=["captures"], dependencies=[Depends(require_key)])
_JSON_LINES = "application/x-ndjson"
_FIRST_PAGE, _LARGEST_PAGE = 10, 500  # requests
_PAGE_TOKENS = 500_000  # of some fifty bytes each while they are read
GROWTH = 20  # a token id of two bytes takes forty in memory: an integer, and its reference in a list
_decode = msgspec.json.Decoder(CapturedRequest).decode
_encode = msgspec.json.Encoder().encode

_BODY = {
    "requestBody": {
        "required": True,
        "description": "Captured requests as JSON Lines or as a JSON array; gzip is supported.",
        "content": {
            _JSON_LINES: {"schema": {"type": "string"}, "example": json_line(openapi_examples.CAPTURE)},
            "application/json": {
                "schema": {"type": "array", "items": reference(CapturedRequest)},
                "example": [openapi_examples.CAPTURE],
            },
        },
    }
}
_ANSWERS = (
    example("batch", BATCH_COUNTS)
    | batch_problems("captures")
    | problem(Forbidden, "capture is off; set capture.enabled to keep token ids of sampled requests")
    | problem(Busy, "other large bodies are being processed; send it again later")
)
_LINES = {"schema": {"type": "string"}, "example": json_line(openapi_examples.CAPTURE)}


@router.post("/api/v1/captures", responses=_ANSWERS, openapi_extra=_BODY)
async def post_captures(request: Request, context: Annotated[Context, Depends(get_context)]) -> Response:
    """Stores captured requests. 403 while capture is off (`capture.enabled`).

    Answers as POST /api/v1/records does: good lines are stored even when others are refused.
    """
    settings = context.settings
    if not settings.capture.enabled:
        raise Forbidden("capture is off; set capture.enabled to keep token ids of sampled requests")
    content_type, most = request.headers.get("content-type", ""), settings.ingest.max_batch_bytes
    async with context.bodies.read(request, max_bytes=most, growth=GROWTH) as body:
        now = datetime.now(UTC)
        good, errors = await run_in_threadpool(parse_captures, body, content_type, settings, now)
        accepted = await run_in_threadpool(_store, context, good)
    counts = {"accepted": accepted, "duplicates": len(good) - accepted}
    for outcome, count in (
        ("accepted", accepted),
        ("duplicate", counts["duplicates"]),
        ("refused", len(errors)),
    ):
        context.metrics.ingest.captures.labels(outcome).inc(count)
    if errors:
        raise BadInput(
            f"{len(errors)} of {len(errors) + len(good)} captures are refused; first: {errors[0]}",
            **counts,
            **record_errors(errors),
        )
    return Response(_encode(counts), media_type="application/json")


@router.get(
    "/api/v1/captures",
    dependencies=[Depends(refuse_repeated)],
    response_class=StreamingResponse,
    responses={200: {"content": {_JSON_LINES: _LINES}}},
)
def list_captures(
    query: Annotated[CaptureQuery, Query()], context: Annotated[Context, Depends(get_context)]
) -> StreamingResponse:
    """Exports captured requests as JSON Lines, in the order of arrival. `since` and `until` are times of
    capture."""
    wanted = CaptureFilter(query.server, query.target, query.segment, query.since, query.until)

    def begun() -> Iterator[bytes]:
        pages = _lines(context.database, wanted)
        return chain([next(pages)], pages)

    return exporting(context.exports, begun, media_type=_JSON_LINES)


def parse_captures(
    body: Body, content_type: str, settings: Settings, now: datetime
) -> tuple[list[CapturedRequest], list[RecordError]]:
    """The valid captures, and the errors of the others. Raises MalformedBody, TooLarge."""
    good: list[CapturedRequest] = []
    errors: list[RecordError] = []
    most = settings.ingest.max_batch_records
    oldest = now - timedelta(days=settings.retention.captures_days)
    for count, (number, text) in enumerate(split_items(body, content_type), start=1):
        if count > most:
            raise TooLarge(f"more than {most} captures in one batch; send smaller ones", max_records=most)
        try:
            good.append(_decode_capture(text, number, oldest, now))
        except RecordError as error:
            errors.append(error.with_traceback(None))  # its frames hold the body
    return good, errors


def _decode_capture(text: Body, line: int, oldest: datetime, now: datetime) -> CapturedRequest:
    capture = decode_line(_decode, text, line)
    for name in ("server", "target", "draft_version", "segment"):
        check_text(name, getattr(capture, name), line)
    check_names(("server", "target", "segment"), capture, line)
    if not oldest <= capture.captured_at <= now + FUTURE_TOLERANCE:
        raise RecordError(
            f"{capture.captured_at.isoformat()} is not between {oldest.isoformat()} "
            f"(retention.captures_days) and now ({now.isoformat()})",
            field="captured_at",
            line=line,
        )
    return capture


def _store(context: Context, captured: list[CapturedRequest]) -> int:
    with context.database.session() as session:
        return insert_captures(
            session, captured, max_per_segment=context.settings.capture.max_requests_per_segment
        )


def _lines(database: Database, wanted: CaptureFilter) -> Iterator[bytes]:
    # Page by page, each in a transaction of its own: a slow reader must not hold one open.
    # A page is as long as the tokens of the one before it allow.
    after_id, limit = 0, _FIRST_PAGE
    while True:
        with database.session() as session:
            page = read_captures(session, wanted, after_id=after_id, limit=limit)
        yield b"".join(_encode(to_wire(capture)) + b"\n" for capture in page)
        if len(page) < limit:
            return
        after_id = page[-1].id
        tokens = sum(len(each.prompt_token_ids) + len(each.output_token_ids) for each in page)
        limit = max(1, min(2 * limit, _LARGEST_PAGE, _PAGE_TOKENS * len(page) // max(tokens, 1)))
