"""Sends the lines of one spool to one URL of the sidecar, oldest first, until each is acknowledged."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import httpx
import msgspec
import structlog
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_random_exponential

from driftguard_engine.telemetry.spool import Segment, Spool

log = structlog.get_logger("driftguard_engine.telemetry")

Verdict = Literal["stored", "refused", "too_large", "forbidden", "retry"]
FIRST_WAIT_SECONDS = 0.2
LONGEST_WAIT_SECONDS = 5.0
LONGEST_RETRY_AFTER_SECONDS = 300.0
LOGGED_REFUSALS = 5
HEADERS = {"Content-Type": "application/x-ndjson"}


class SidecarUnavailable(Exception):
    """{what the sidecar answered, or why it could not be reached}; the batch is sent again"""

    def __init__(self, detail: str, retry_after_seconds: float | None = None) -> None:
        super().__init__(detail)
        self.retry_after_seconds = retry_after_seconds


class CaptureForbidden(Exception):
    """The sidecar does not accept captured token ids (403)."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What one response means for the lines of its batch."""

    verdict: Verdict
    detail: str = ""
    refusals: tuple[str, ...] = ()
    refused_lines: int = 0
    retry_after_seconds: float | None = None


@dataclass(slots=True)
class LaneCounts:
    """Lines since the start: stored by the sidecar, refused by it, or dropped here; and failed batches."""

    sent: int = 0
    refused: int = 0
    dropped: int = 0
    failed_attempts: int = 0


def read_answer(status: int, headers: Mapping[str, str], body: bytes, lines: int) -> Answer:
    """What one response means for a batch of `lines` lines. One that is no sidecar's, as of a login page or a
    gateway, neither stores nor refuses them: a sidecar that refuses says why in `detail`."""
    told = _json_object(body)
    detail = f"HTTP {status}: {body[:300].decode('utf-8', 'replace')}"
    if 200 <= status < 300:
        if isinstance(told.get("accepted"), int):
            return Answer("stored")
        return Answer("retry", f"it does not answer like a sidecar: {detail}")
    if status in (400, 422) and isinstance(told.get("detail"), str):
        errors, total = told.get("errors"), told.get("errors_total")
        refusals = tuple(map(_readable, errors)) if isinstance(errors, list) else (detail,)
        refused = min(lines, total) if isinstance(total, int) else lines
        return Answer("refused", detail, refusals, refused)
    if status == 413:
        return Answer("too_large", detail)
    if status == 403:
        return Answer("forbidden", detail)
    return Answer("retry", detail, retry_after_seconds=_retry_after(headers))


def _json_object(body: bytes) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(body)
    except (ValueError, RecursionError):  # not JSON, not UTF-8, nested without end
        return {}
    return value if isinstance(value, dict) else {}


def _readable(error: Any) -> str:
    if not isinstance(error, dict):
        return str(error)
    return ": ".join(str(error[key]) for key in ("line", "field", "detail") if error.get(key) is not None)


def _retry_after(headers: Mapping[str, str]) -> float | None:
    text = headers.get("retry-after", "")
    return min(float(text), LONGEST_RETRY_AFTER_SECONDS) if text.isdecimal() else None


class Lane:
    """One queue of lines to one URL. Runs in one event loop, beside the task that appends to the spool.

    A batch is sent again until the sidecar answers. That is idempotent: each line has an id.
    """

    def __init__(self, client: httpx.AsyncClient, path: str, spool: Spool, counts: LaneCounts) -> None:
        self._client = client
        self._path = path
        self._spool = spool
        self._counts = counts
        self._batch_lines: int | None = None  # set by the first 413; None sends whole segments
        self._away = False
        self.wake = asyncio.Event()

    async def run(self) -> None:
        """Sends the whole spool, waits for `wake`, and so on without end. Raises CaptureForbidden (403)."""
        while True:
            segment = self._spool.take()
            if segment is None:
                self.wake.clear()
                await self.wake.wait()
                continue
            await self._send_segment(segment)
            self._spool.remove(segment)

    async def _send_segment(self, segment: Segment) -> None:
        try:
            lines = self._spool.read(segment)
        except OSError as error:
            self._counts.dropped += segment.lines
            log.error("a spool file is lost", lines=segment.lines, error=str(error))
            return
        while lines:
            size = self._batch_lines or len(lines)
            if await self._send_batch(lines[:size]):
                lines = lines[size:]

    async def _send_batch(self, lines: list[bytes]) -> bool:
        """False: too large, try again with the smaller batch size now set."""
        answer = await self._post_until_answered(lines)
        if answer.verdict == "too_large" and len(lines) > 1:
            self._batch_lines = len(lines) // 2
            log.warning("the sidecar takes smaller batches only", lines=self._batch_lines, path=self._path)
            return False
        refused = len(lines) if answer.verdict == "too_large" else answer.refused_lines
        if refused:
            log.error(
                "the sidecar refused lines; they are not sent again",
                lines=refused,
                path=self._path,
                reasons=list(answer.refusals[:LOGGED_REFUSALS]) or answer.detail,
            )
        self._counts.refused += refused
        self._counts.sent += len(lines) - refused
        return True

    async def _post_until_answered(self, lines: list[bytes]) -> Answer:
        backoff = wait_random_exponential(multiplier=FIRST_WAIT_SECONDS, max=LONGEST_WAIT_SECONDS)

        def wait(state: RetryCallState) -> float:
            error = state.outcome.exception() if state.outcome else None
            asked = getattr(error, "retry_after_seconds", None)
            return backoff(state) if asked is None else float(asked)

        retrying = AsyncRetrying(
            retry=retry_if_exception_type(SidecarUnavailable), wait=wait, before_sleep=self._note_failure
        )
        answer: Answer = await retrying(self._post, b"\n".join(lines) + b"\n", len(lines))
        if self._away:
            self._away = False
            log.info("the sidecar answers again", path=self._path, waiting_lines=self._spool.lines)
        return answer

    async def _post(self, body: bytes, lines: int) -> Answer:
        try:
            response = await self._client.post(self._path, content=body, headers=HEADERS)
        except httpx.RequestError as error:
            raise SidecarUnavailable(f"{type(error).__name__}: {error}") from error
        answer = read_answer(response.status_code, response.headers, response.content, lines)
        if answer.verdict == "forbidden" and self._path.endswith("/captures"):
            raise CaptureForbidden(answer.detail)
        if answer.verdict in ("retry", "forbidden"):
            raise SidecarUnavailable(answer.detail, answer.retry_after_seconds)
        return answer

    def _note_failure(self, state: RetryCallState) -> None:
        self._counts.failed_attempts += 1
        if not self._away:
            self._away = True
            error = state.outcome.exception() if state.outcome else None
            log.warning(
                "the sidecar does not take telemetry; it waits here", path=self._path, error=str(error)
            )
