"""POST /api/v1/unrecorded: counts of requests that were answered and not recorded."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Final

import msgspec
from fastapi import APIRouter, Depends, Request, Response
from fastapi.concurrency import run_in_threadpool

from driftguard.api import openapi_examples
from driftguard.api.auth import require_key
from driftguard.api.context import Context, get_context
from driftguard.api.openapi import BATCH_COUNTS, batch_problems, example, json_line, problem, reference
from driftguard.api.problems import record_errors
from driftguard.api.request_body import Body, split_items
from driftguard.errors import BadInput, Busy, TooLarge
from driftguard.records import RecordError, UnrecordedRequests, decode_unrecorded
from driftguard.store import unrecorded_requests

router = APIRouter(tags=["records"])
MOST_BYTES: Final = 64_000  # some hundred counts
GROWTH: Final = 8
_BODY = {
    "requestBody": {
        "required": True,
        "description": "UnrecordedRequests as JSON Lines or as a JSON array; gzip is supported.",
        "content": {
            "application/x-ndjson": {
                "schema": {"type": "string"},
                "example": json_line(openapi_examples.UNRECORDED),
            },
            "application/json": {
                "schema": {"type": "array", "items": reference(UnrecordedRequests)},
                "example": [openapi_examples.UNRECORDED],
            },
        },
    }
}
_ANSWERS = (
    example("batch", BATCH_COUNTS)
    | batch_problems("counts")
    | problem(
        TooLarge, f"the body is larger than {MOST_BYTES} bytes; send smaller batches", max_bytes=MOST_BYTES
    )
    | problem(Busy, "other bodies are being processed; send it again later")
)


@router.post(
    "/api/v1/unrecorded", dependencies=[Depends(require_key)], responses=_ANSWERS, openapi_extra=_BODY
)
async def post_unrecorded(request: Request, context: Annotated[Context, Depends(get_context)]) -> Response:
    """Stores how many requests were answered and not recorded, by server, hour and reason.

    Each count is of all requests of one reporter in that hour so far: the largest is kept, so that it may be
    sent again. Answers as POST /api/v1/records does; `duplicates` told nothing new.
    """
    content_type = request.headers.get("content-type", "")
    async with context.bodies.read(request, max_bytes=MOST_BYTES, growth=GROWTH) as body:
        counts = await run_in_threadpool(_take, body, content_type, context)
    return Response(msgspec.json.encode(counts), media_type="application/json")


def _take(body: Body, content_type: str, context: Context) -> dict[str, int]:
    """Raises BadInput where lines are refused; the others are stored."""
    now, most = datetime.now(UTC), context.settings.ingest.max_streams
    good: list[tuple[int, UnrecordedRequests]] = []
    errors: list[RecordError] = []
    for number, text in split_items(body, content_type):
        try:
            good.append((number, decode_unrecorded(text, now, line=number)))
        except RecordError as error:
            errors.append(error.with_traceback(None))  # its frames hold the body
    with context.database.session() as session:
        accepted, no_room = unrecorded_requests.store(session, [count for _, count in good], most, now)
    total = len(good) + len(errors)
    errors += [
        RecordError(
            f"{count.server!r} would be one server more than ingest.max_streams ({most})",
            field="server",
            line=number,
        )
        for number, count in good
        if count.server in no_room
    ]
    answer = {"accepted": accepted, "duplicates": total - len(errors) - accepted}
    if errors:
        errors.sort(key=lambda error: error.line or 0)
        raise BadInput(
            f"{len(errors)} of {total} counts are refused; first: {errors[0]}",
            **answer,
            **record_errors(errors),
        )
    return answer
