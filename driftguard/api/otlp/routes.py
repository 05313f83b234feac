"""OTLP/HTTP: makes acceptance records from spans and metrics of exporters and collectors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Request, Response
from fastapi.concurrency import run_in_threadpool

from driftguard.api import openapi_examples
from driftguard.api.auth import require_key
from driftguard.api.context import Context, get_context
from driftguard.api.ingest_records import ParsedBatch, parse_batch
from driftguard.api.otlp.encoding import JSON, PROTOBUF
from driftguard.api.otlp.errors import OtlpRoute, media_type, refusals
from driftguard.api.otlp.metrics import METRICS
from driftguard.api.otlp.spans import TRACES, record_line
from driftguard.api.problems import UnsupportedContent
from driftguard.api.request_body import Body
from driftguard.records import RecordError
from driftguard.settings import Settings
from driftguard.store.partitions import oldest_kept

router = APIRouter(tags=["otlp"], route_class=OtlpRoute)
GROWTH: Final = 50  # bytes in memory per byte, within the limits of fields and items
REASONS: Final = 5  # listed in the answer

_BINARY = {"schema": {"type": "string", "format": "binary"}}


def _body(message: str, example: dict[str, Any]) -> dict[str, Any]:
    content = {PROTOBUF: _BINARY, JSON: {"schema": {"type": "object"}, "example": example}}
    described = f"{message}; gzip is supported."
    return {"requestBody": {"required": True, "description": described, "content": content}}


def _answers(things: str, rejected: dict[str, str]) -> dict[int | str, dict[str, Any]]:
    example = {"partialSuccess": rejected}
    content = {PROTOBUF: _BINARY, JSON: {"schema": {"type": "object"}, "example": example}}
    taken = {
        200: {
            "description": f"Accepted, except for the rejected {things} (partial success).",
            "content": content,
        }
    }
    return taken | refusals()


@router.post(
    "/v1/traces",
    dependencies=[Depends(require_key)],
    response_class=Response,
    responses=_answers("spans", {"rejectedSpans": "1", "errorMessage": "span 1: steps: missing"}),
    openapi_extra=_body(TRACES.request, openapi_examples.SPANS),
)
async def export_traces(request: Request, context: Annotated[Context, Depends(get_context)]) -> Response:
    """Receives spans (OTLP/HTTP). Those with `driftguard.drafted_tokens` become records, all others are
    ignored.

    Answers after the commit. A span that is not a valid record is rejected in a partial success, and the
    others are stored. Idempotent: an export that is sent again is stored once.
    """
    counted = context.metrics.ingest.records.labels
    async with _read(request, context) as (kind, body):
        batch, ignored, telling = await run_in_threadpool(
            _parse, kind, body, context.settings, datetime.now(UTC)
        )
        context.metrics.ingest.otlp_ignored_spans.inc(ignored)
        counted("refused").inc(len(batch.errors))
        result = await asyncio.wrap_future(context.ingest.submit(batch.records))
    counted("accepted").inc(result.accepted)
    counted("duplicate").inc(result.duplicates)
    errors = batch.refused(result)
    counted("refused").inc(len(errors) - len(batch.errors))
    told = "; ".join(_told(error) for error in errors[:REASONS])
    context.otlp_rejections.note("spans", len(errors), told)
    context.otlp_rejections.note_spans(with_counts=bool(batch.records or errors), of_generations=telling)
    return Response(TRACES.answer(kind, len(errors), told), media_type=kind)


@router.post(
    "/v1/metrics",
    dependencies=[Depends(require_key)],
    response_class=Response,
    responses=_answers(
        "data points",
        {"rejectedDataPoints": "3", "errorMessage": "tgi-1: TGI does not report how many tokens it drafts"},
    ),
    openapi_extra=_body(METRICS.request, openapi_examples.METRICS),
)
async def export_metrics(request: Request, context: Annotated[Context, Depends(get_context)]) -> Response:
    """Receives metrics (OTLP/HTTP). The increase of an engine's counters since its last export becomes a
    window.

    Answers after the commit. Invalid data points are rejected in a partial success, those of other metrics
    are ignored. Idempotent: an export that is sent again is stored once.
    """
    async with _read(request, context) as (kind, body):
        exports = await run_in_threadpool(METRICS.read, kind, body, context.settings.ingest)
        now = datetime.now(UTC)
        receipt = await context.pushed.take(exports, now, oldest_kept(now, context.settings.retention))
        del exports
    context.metrics.ingest.otlp_ignored_points.inc(receipt.ignored)
    context.metrics.ingest.otlp_rejected_points.inc(receipt.rejected)
    told = "; ".join(receipt.reasons[:REASONS])
    context.otlp_rejections.note("data points", receipt.rejected, told)
    return Response(METRICS.answer(kind, receipt.rejected, told), media_type=kind)


def _told(error: RecordError) -> str:
    """In words of a span: it is read as a line of records, with its unknown attributes as fields."""
    told = str(error).replace("line", "span", 1)
    return told.replace("unknown field; docs/record.md", "unknown attribute; docs/otlp.md")


@asynccontextmanager
async def _read(request: Request, context: Context) -> AsyncIterator[tuple[str, Body]]:
    """Media type and body. Raises UnsupportedContent, and what Bodies.read raises."""
    kind = media_type(request)
    if kind not in (PROTOBUF, JSON):
        raise UnsupportedContent(f"Content-Type {kind!r} is not supported; send {PROTOBUF} or {JSON}")
    most = context.settings.ingest.max_batch_bytes
    async with context.bodies.read(request, max_bytes=most, growth=GROWTH) as body:
        yield kind, body


def _parse(kind: str, body: Body, settings: Settings, now: datetime) -> tuple[ParsedBatch, int, bool]:
    """The records, the number of spans without one, and whether a generation is among those of an export in
    which all are without. Raises MalformedBody, MissingExtra, TooLarge."""
    spans = TRACES.read(kind, body, settings.ingest)
    ours = [span for span in spans if span.is_ours]
    lines = [record_line(span) for span in ours[: settings.ingest.max_batch_records + 1]]  # more is refused
    if not lines:
        return ParsedBatch(), len(spans), any(span.is_of_generation for span in spans)
    batch = parse_batch(b"\n".join(lines), "application/x-ndjson", settings, now)
    return batch, len(spans) - len(ours), False
