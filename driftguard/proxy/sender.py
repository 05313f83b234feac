"""Records on their way to the sidecar: a bounded queue in memory, emptied in the background.

A batch is sent until the sidecar answers; each record carries its id, so sent twice it is stored once.
While the sidecar is away the queue fills, then its oldest records are dropped and counted: traffic never
waits, and nothing is written to disk.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, Final

import aiohttp
import msgspec
import structlog
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception_type, wait_random_exponential

from driftguard.proxy.metrics import ProxyMetrics
from driftguard.records import AcceptanceRecord, encode_record

_log = structlog.get_logger(__name__)

PATH: Final = "/api/v1/records"
BATCH: Final = 500
GATHER_SECONDS: Final = 1.0
FIRST_WAIT_SECONDS: Final = 0.2
LONGEST_WAIT_SECONDS: Final = 5.0
TIMEOUT: Final = aiohttp.ClientTimeout(total=30.0, connect=2.0)  # the sidecar answers after its commit
HEADERS: Final = {"Content-Type": "application/x-ndjson"}
LOGGED_REASONS: Final = 5


class SidecarAway(Exception):
    """{what the sidecar answered, or why it cannot be reached}; worth another attempt"""


class Sender:
    """`put` never blocks; `run` sends until it is cancelled; `flush` sends what is left, for a while."""

    def __init__(
        self, sidecar: str, api_key: str | None, max_records: int, metrics: ProxyMetrics,
        gather_seconds: float = GATHER_SECONDS,
    ) -> None:  # fmt: skip
        self._url = sidecar.rstrip("/") + PATH
        self._headers = HEADERS | ({"Authorization": f"Bearer {api_key}"} if api_key else {})
        self._max = max_records
        self._metrics = metrics
        self._gather_seconds = gather_seconds
        self._lines: deque[bytes] = deque()
        self._sending: list[bytes] = []
        self._filled = asyncio.Event()
        self._batch = BATCH
        self._is_away = False
        self._away_dropped = 0  # since the sidecar last answered

    @property
    def waiting(self) -> int:
        return len(self._lines) + len(self._sending)

    def put(self, record: AcceptanceRecord) -> None:
        if len(self._lines) >= self._max:
            self._lines.popleft()
            self._metrics.records_dropped.inc()
            self._away_dropped += 1
        self._lines.append(encode_record(record))
        self._filled.set()

    async def run(self, session: aiohttp.ClientSession) -> None:
        while True:
            await self._filled.wait()
            self._filled.clear()
            await asyncio.sleep(self._gather_seconds)
            await self._empty(session)

    async def flush(self, session: aiohttp.ClientSession, limit_seconds: float) -> None:
        """After `run` was cancelled. What the sidecar has not taken then is lost, counted and logged."""
        self._lines.extendleft(reversed(self._sending))
        self._sending = []
        try:
            async with asyncio.timeout(limit_seconds):
                await self._empty(session)
        except TimeoutError:
            lost = self.waiting
            self._metrics.records_dropped.inc(lost)
            _log.error("records are lost: the sidecar does not take them", records=lost, sidecar=self._url)

    async def _empty(self, session: aiohttp.ClientSession) -> None:
        while self._lines:
            self._sending = [self._lines.popleft() for _ in range(min(self._batch, len(self._lines)))]
            await self._send(session)
            self._sending = []

    async def _send(self, session: aiohttp.ClientSession) -> None:
        retrying = AsyncRetrying(
            retry=retry_if_exception_type(SidecarAway),
            wait=wait_random_exponential(multiplier=FIRST_WAIT_SECONDS, max=LONGEST_WAIT_SECONDS),
            before_sleep=self._note_failure,
        )
        status: int
        answer: dict[str, Any]
        status, answer = await retrying(self._post, session)
        self._note_answer()
        if status == 413 and len(self._sending) > 1:
            self._batch = len(self._sending) // 2
            self._lines.extendleft(reversed(self._sending))
            return
        refused = 0 if status < 300 else _refused(answer, len(self._sending))
        if refused:
            self._metrics.records_refused.inc(refused)
            _log.error("the sidecar refused records; they are not sent again", records=refused,
                       status=status, reasons=_reasons(answer))  # fmt: skip
        self._metrics.records_sent.inc(len(self._sending) - refused)

    async def _post(self, session: aiohttp.ClientSession) -> tuple[int, dict[str, Any]]:
        body = b"\n".join(self._sending) + b"\n"
        try:
            async with session.post(self._url, data=body, headers=self._headers, timeout=TIMEOUT) as answer:
                content = await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise SidecarAway(f"{type(error).__name__}: {error}") from None
        if answer.status < 300 or answer.status in (400, 413, 422):
            return answer.status, _object(content)
        raise SidecarAway(f"HTTP {answer.status}: {_object(content).get('detail', '')}")

    def _note_failure(self, state: RetryCallState) -> None:
        self._metrics.send_failures.inc()
        if not self._is_away:
            self._is_away = True
            error = state.outcome.exception() if state.outcome else None
            _log.warning(
                "the sidecar takes no records; they wait in memory", sidecar=self._url, error=str(error)
            )

    def _note_answer(self) -> None:
        if self._is_away or self._away_dropped:
            _log.info("the sidecar answers again", waiting=self.waiting, dropped=self._away_dropped)
        self._is_away = False
        self._away_dropped = 0


def _object(content: bytes) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {}
    return value if isinstance(value, dict) else {}


def _refused(answer: dict[str, Any], lines: int) -> int:
    total = answer.get("errors_total")
    return min(lines, total) if isinstance(total, int) else lines


def _reasons(answer: dict[str, Any]) -> list[str]:
    errors = answer.get("errors")
    if not isinstance(errors, list):
        return [str(answer.get("detail", ""))]
    return [f"{error.get('field')}: {error.get('detail')}" for error in errors[:LOGGED_REASONS]]
