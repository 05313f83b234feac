"""POST /v1/traces: acceptance records out of the spans of an OpenTelemetry exporter (OTLP/HTTP)."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Request, Response
from fastapi.concurrency import run_in_threadpool

from driftguard.api import examples
from driftguard.api.auth import require_key
from driftguard.api.body import read_body
from driftguard.api.context import Context, get_context
from driftguard.api.ingest import ParsedBatch, parse_batch
from driftguard.api.openapi import problem
from driftguard.api.otlp_spans import (
    answer_json,
    answer_protobuf,
    from_json,
    from_protobuf,
    record_line,
)
from driftguard.api.problems import MissingExtra, UnsupportedContent, UnsupportedEncoding
from driftguard.errors import Busy, TooLarge
from driftguard.settings import Settings

router = APIRouter(tags=["otlp"])
PROTOBUF: Final = "application/x-protobuf"
JSON: Final = "application/json"
REASONS: Final = 5  # told in the answer

_BINARY = {"schema": {"type": "string", "format": "binary"}}
_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "description": "ExportTraceServiceRequest; gzip is understood.",
        "content": {PROTOBUF: _BINARY, JSON: {"schema": {"type": "object"}, "example": examples.SPANS}},
    }
}
_REJECTED = {"partialSuccess": {"rejectedSpans": "1", "errorMessage": "span 1: steps: missing"}}
_ANSWERS = (
    {
        200: {
            "description": "Taken, but for the rejected spans (OTLP's partial success).",
            "content": {PROTOBUF: _BINARY, JSON: {"schema": {"type": "object"}, "example": _REJECTED}},
        }
    }
    | problem(TooLarge, "more than 10000 records in one batch; send smaller ones", max_records=10_000)
    | problem(UnsupportedEncoding, "Content-Encoding 'br' is not understood; send gzip or none")
    | problem(Busy, "50000 records wait for the database and 50000 is the limit; send the batch again later")
    | problem(MissingExtra, "protobuf needs opentelemetry-proto; pip install 'driftguard[otlp]'")
)


@router.post(
    "/v1/traces",
    dependencies=[Depends(require_key)],
    response_class=Response,
    responses=_ANSWERS,
    openapi_extra=_BODY,
)
async def export_traces(request: Request, context: Annotated[Context, Depends(get_context)]) -> Response:
    """OTLP/HTTP receiver: spans with `driftguard.drafted_tokens` become records, all others are ignored.

    Answers after the commit. A span that makes no record is rejected in a partial success, and the others are
    stored; exporting one again is harmless.
    """
    body = await read_body(request, max_bytes=context.settings.ingest.max_batch_bytes)
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type not in (PROTOBUF, JSON):
        raise UnsupportedContent(f"Content-Type {media_type!r} is not understood; send {PROTOBUF} or {JSON}")
    batch, ignored = await run_in_threadpool(
        _parse, body, media_type == JSON, context.settings, datetime.now(UTC)
    )
    context.metrics.otlp_ignored_spans.inc(ignored)
    counted = context.metrics.ingest_records.labels
    counted("refused").inc(len(batch.errors))
    result = await asyncio.wrap_future(context.ingest.submit(batch.records))
    counted("accepted").inc(result.accepted)
    counted("duplicate").inc(result.duplicates)
    answer = answer_json if media_type == JSON else answer_protobuf
    told = "; ".join(str(error).replace("line", "span", 1) for error in batch.errors[:REASONS])
    return Response(answer(len(batch.errors), told), media_type=media_type)


def _parse(body: bytes, is_json: bool, settings: Settings, now: datetime) -> tuple[ParsedBatch, int]:
    """The records, and how many spans hold none. Raises MalformedBody, MissingExtra, TooLarge."""
    spans = list(from_json(body) if is_json else from_protobuf(body))
    lines = [record_line(span) for span in spans if span.is_ours]
    if not lines:
        return ParsedBatch([], []), len(spans)
    batch = parse_batch(b"\n".join(lines), "application/x-ndjson", settings, now)
    return batch, len(spans) - len(lines)
