"""Finished request -> AcceptanceRecord, sent to the sidecar; no decoding step ever waits for it.

The engine thread appends to a bounded deque. One background thread writes what arrived to the spool every
0.5 s, and every second (or with 500 records) sends the spool in batches; a record is deleted from the disk
when the sidecar has acknowledged it. So kill -9 loses at most the last 0.5 s; a loss of power also loses what
the kernel had not written to the disk yet.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import threading
import time
from collections import deque
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from urllib.parse import urlsplit
from uuid import UUID

import httpx
import msgspec
import structlog

from driftguard.records import PROBE_SEGMENT, AcceptanceRecord, encode_record, new_record_id
from driftguard_engine.core import FinishedRequest
from driftguard_engine.telemetry.sender import CaptureForbidden, Lane, LaneCounts
from driftguard_engine.telemetry.spool import SEGMENT_LINES, Spool, lock_directory
from driftguard_http import is_loopback

log = structlog.get_logger("driftguard_engine.telemetry")

COLLECT_EVERY_SECONDS = 0.5
RETRY_CAPTURE_AFTER_SECONDS = 60.0
RESTART_AFTER_SECONDS = 1.0
JOIN_GRACE_SECONDS = 5.0  # a name look-up in progress cannot be cancelled
REQUEST_TIMEOUT = httpx.Timeout(30.0, connect=2.0)  # the sidecar answers after its commit
MAX_CAPTURE_BYTES = 16_000_000
NO_DRAFT = "none"


class UnreadableAuthorities(Exception):
    """SSL_CERT_FILE: no certificates in {file} ({why})"""


class UnusableProxy(Exception):
    """HTTP_PROXY, HTTPS_PROXY or ALL_PROXY: the sidecar cannot be asked through it ({why})"""


@dataclass(frozen=True, slots=True)
class TelemetryState:
    """A snapshot for metrics. Counts are lines since the start of the process."""

    records: LaneCounts
    captures: LaneCounts
    waiting_records: int
    spooled_records: int
    spool_bytes: int


def record_of(finished: FinishedRequest, record_id: UUID, server: str, target: str) -> AcceptanceRecord:
    """The record of one finished request; with speculation off draft, draft_version and method are "none"."""
    request, counts, draft = finished.request, finished.counts, finished.draft
    speculates = draft.method != "none" and finished.num_speculative_tokens > 0
    varied = finished.adaptive_k and speculates
    return AcceptanceRecord(
        record_id=record_id,
        kind="request",
        started_at=finished.started_at,
        ended_at=finished.ended_at,
        server=server,
        target=target,
        draft=draft.name if speculates else NO_DRAFT,
        draft_version=draft.version if speculates else NO_DRAFT,
        method=draft.method if speculates else NO_DRAFT,
        segment=request.segment,
        session=request.session,
        steps=counts.steps,
        drafted=counts.drafted,
        accepted=counts.accepted,
        emitted=counts.emitted,
        drafted_per_position=counts.drafted_per_position,
        accepted_per_position=counts.accepted_per_position,
        # Null where K changed from step to step: it follows from drafted tokens per step and position.
        num_speculative_tokens=None if varied else finished.num_speculative_tokens,
        acceptance_rule="greedy" if request.params.temperature == 0 else "rejection",
        verification="greedy" if request.params.temperature == 0 else finished.verification,
        temperature=request.params.temperature,
        prompt_tokens=len(request.prompt_token_ids),
        cached_tokens=finished.reused_prompt_tokens,
        output_tokens=len(finished.output_token_ids),
        time_to_first_token_seconds=finished.time_to_first_token_seconds,
        time_per_output_token_seconds=finished.time_per_output_token_seconds,
        concurrency=finished.concurrency,
        fidelity="request",
    )


def _authorities_for(url: str) -> ssl.SSLContext:
    """By which the sidecar is trusted: SSL_CERT_FILE and SSL_CERT_DIR of the environment, else those of
    certifi; none for http://. Raises UnreadableAuthorities."""
    if urlsplit(url).scheme != "https":
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        return httpx.create_ssl_context()
    except OSError as error:  # ssl's own errors too
        file = os.environ.get("SSL_CERT_FILE")
        raise UnreadableAuthorities(f"SSL_CERT_FILE: no certificates in {file} ({error})") from error


def _capture_line(finished: FinishedRequest, record: AcceptanceRecord) -> bytes:
    return msgspec.json.encode(
        {
            "record_id": record.record_id,
            "segment": record.segment,
            "server": record.server,
            "target": record.target,
            "captured_at": record.ended_at,
            "prompt_token_ids": finished.request.prompt_token_ids,
            "output_token_ids": finished.output_token_ids,
            "draft_version": record.draft_version,
        }
    )


def is_sampled(request_id: str, fraction: float) -> bool:
    """Whether this request is captured: a pseudo-random `fraction` of all request ids, always the same."""
    digest = blake2b(request_id.encode(), digest_size=8).digest()
    return int.from_bytes(digest) < fraction * 2**64


class Telemetry:
    """Sends one record per finished request to the sidecar at `url`; with no url it does nothing.

    spool_dir: unsent records wait there, at most `max_spool_bytes`, the oldest dropped first and counted, and
    a later process sends them; None keeps them in memory. capture_fraction: part of the requests whose token
    ids are sent too; 0 keeps none, and erases what an earlier process captured and could not send.
    send_every_seconds: how long a batch that is not full gathers before it is sent.
    """

    def __init__(
        self,
        url: str | None,
        spool_dir: Path | None,
        server: str,
        target: str,
        api_key: str | None = None,
        capture_fraction: float = 0.0,
        max_buffered: int = 10_000,
        max_spool_bytes: int = 64_000_000,
        send_every_seconds: float = 1.0,
    ) -> None:
        """Raises SpoolError (the directory cannot be used, or another engine has it), ValueError,
        UnreadableAuthorities, UnusableProxy."""
        if not 0 <= capture_fraction <= 1:
            raise ValueError(f"capture_fraction: {capture_fraction} is not between 0 and 1")
        self._url = url.rstrip("/") if url else None
        self._authorities = _authorities_for(url or "")
        self._api_key = api_key
        if url:
            self._check_proxy()
        self._server = server
        self._target = target
        self._capture_fraction = capture_fraction if url else 0.0
        self._capture_from = 0.0  # time.monotonic(); later than now while the sidecar forbids capture
        self._send_every_seconds = send_every_seconds
        self._arrived: deque[FinishedRequest] = deque()
        self._max_buffered = max_buffered
        self._overflowed = 0
        self._record_counts = LaneCounts()
        self._capture_counts = LaneCounts()
        directory = spool_dir if url else None
        self._lock = lock_directory(directory) if directory else None
        self._records = Spool(directory / "records" if directory else None, max_bytes=max_spool_bytes)
        self._captures = Spool(directory / "captures" if directory else None, max_bytes=MAX_CAPTURE_BYTES)
        if self._capture_fraction == 0 and (erased := self._captures.clear()):
            log.info("capture is off: erased token ids that an earlier process captured", requests=erased)
        self._closing = threading.Event()
        self._close_limit_seconds = 0.0
        self._thread = threading.Thread(target=self._run, name="telemetry", daemon=True)

    def start(self) -> None:
        if self._url:
            self._thread.start()

    def finished(self, finished: FinishedRequest) -> None:
        """Takes one finished request; O(1), never blocks. When the buffer is full its oldest is dropped.

        A canary probe is neither sent nor captured: it is no user's traffic, and its sender records it.
        """
        if self._url is None or finished.request.segment == PROBE_SEGMENT:
            return
        if len(self._arrived) >= self._max_buffered:
            try:
                self._arrived.popleft()
                self._overflowed += 1
            except IndexError:  # the background thread has emptied the buffer meanwhile
                log.debug("telemetry buffer emptied while full")
        self._arrived.append(finished)

    @property
    def state(self) -> TelemetryState:
        records = LaneCounts(
            self._record_counts.sent,
            self._record_counts.refused,
            self._record_counts.dropped + self._overflowed,
            self._record_counts.failed_attempts,
        )
        return TelemetryState(
            records=records,
            captures=self._capture_counts,
            waiting_records=len(self._arrived) + self._records.lines,
            spooled_records=self._records.written_lines,
            spool_bytes=self._records.size_bytes,
        )

    def close(self, limit_seconds: float = 2.0) -> None:
        """Spools everything, then sends for at most `limit_seconds`; the next start sends what is left."""
        if self._thread.is_alive():
            self._close_limit_seconds = limit_seconds
            self._closing.set()
            self._thread.join(limit_seconds + JOIN_GRACE_SECONDS)
        if self._lock is not None:
            self._lock.close()

    def _run(self) -> None:
        while True:
            try:
                asyncio.run(self._main())
            except Exception:
                # The spool is intact (see its invariant), so starting again loses nothing.
                log.exception("telemetry failed unexpectedly; it starts again")
            else:
                return
            if self._closing.wait(RESTART_AFTER_SECONDS):
                self._spool_arrived()
                return

    def _check_proxy(self) -> None:
        """Now, and not in the thread, which would end each time that it makes a client. Raises
        UnusableProxy."""
        try:
            self._new_client()
        except (ImportError, ValueError, httpx.InvalidURL) as error:
            raise UnusableProxy(
                f"HTTP_PROXY, HTTPS_PROXY or ALL_PROXY: the sidecar cannot be asked through it ({error})"
            ) from error

    def _new_client(self) -> httpx.AsyncClient:
        headers = {"Authorization": f"Bearer {self._api_key}"} if self._api_key else {}
        url = self._url or ""
        # A sidecar beside the engine is never reached through the environment's proxy.
        is_beside = is_loopback(urlsplit(url).hostname or "")
        return httpx.AsyncClient(
            base_url=url,
            headers=headers,
            timeout=REQUEST_TIMEOUT,
            trust_env=not is_beside,
            verify=self._authorities,
        )

    async def _main(self) -> None:
        async with self._new_client() as client:
            records = Lane(client, "/api/v1/records", self._records, self._record_counts)
            captures = Lane(client, "/api/v1/captures", self._captures, self._capture_counts)
            senders = [asyncio.create_task(records.run()), asyncio.create_task(self._run_captures(captures))]
            try:
                await self._collect(records, captures, senders)
                await self._send_rest(senders)
            finally:
                for sender in senders:
                    sender.cancel()
                await asyncio.gather(*senders, return_exceptions=True)

    async def _collect(self, records: Lane, captures: Lane, senders: list[asyncio.Task[None]]) -> None:
        send_at = 0.0
        while True:
            closing = self._closing.is_set()  # read first: what arrived before it was set is spooled below
            if self._arrived:
                self._spool_arrived()
            now = time.monotonic()
            if closing or now >= send_at or self._records.lines >= SEGMENT_LINES:
                send_at = now + self._send_every_seconds
                records.wake.set()
                captures.wake.set()
            _check_running(senders)
            if closing:
                return
            await asyncio.sleep(COLLECT_EVERY_SECONDS)

    def _spool_arrived(self) -> None:
        records, captures = [], []
        capturing = self._capture_fraction > 0 and time.monotonic() >= self._capture_from
        try:
            while self._arrived:
                finished = self._arrived.popleft()
                record = record_of(finished, new_record_id(), self._server, self._target)
                records.append(encode_record(record))
                if capturing and self._wants(finished):
                    captures.append(_capture_line(finished, record))
        finally:
            self._record_counts.dropped += self._records.append(records)
            self._capture_counts.dropped += self._captures.append(captures)

    def _wants(self, finished: FinishedRequest) -> bool:
        complete = finished.finish_reason in ("stop", "length") and finished.output_token_ids
        return bool(complete) and is_sampled(finished.request.request_id, self._capture_fraction)

    async def _run_captures(self, lane: Lane) -> None:
        warned = False
        while True:
            try:
                await lane.run()
            except CaptureForbidden as error:
                self._capture_from = time.monotonic() + RETRY_CAPTURE_AFTER_SECONDS
                self._capture_counts.dropped += self._captures.clear()
                if not warned:
                    told = "the sidecar keeps no captured token ids; it is asked again every minute"
                    log.warning(told, error=str(error))
                warned = True

    async def _send_rest(self, senders: list[asyncio.Task[None]]) -> None:
        deadline = time.monotonic() + self._close_limit_seconds
        while self._records.lines + self._captures.lines and time.monotonic() < deadline:
            _check_running(senders)
            await asyncio.sleep(0.02)
        self._account_for_rest()

    def _account_for_rest(self) -> None:
        for spool in (self._records, self._captures):
            spool.save()
        lost = self._records.lines_in_memory()
        waiting = self._records.lines - lost
        self._record_counts.dropped += lost
        if waiting:
            log.warning("records wait in the spool for the next start", records=waiting)
        if lost:
            log.error("records are lost: the sidecar is away and they are not on disk", records=lost)


def _check_running(senders: list[asyncio.Task[None]]) -> None:
    """Raises the error that ended a sender; without an error none ends."""
    for sender in senders:
        if sender.done():
            sender.result()
