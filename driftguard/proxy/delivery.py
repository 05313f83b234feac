"""An answer that is passed to the client, chunk by chunk as it arrives."""

from __future__ import annotations

from collections.abc import AsyncIterator
from http import HTTPStatus
from time import perf_counter
from typing import Final

import aiohttp
from aiohttp import web

from driftguard.proxy import headers
from driftguard.proxy.asking import NOTHING, Excess
from driftguard.proxy.connections import close_if_last
from driftguard.proxy.events import EventStream, StreamedAnswer, reduced
from driftguard.proxy.intake import chained, read_up_to
from driftguard.proxy.recording import NotRecorded, Passage
from driftguard_http.room import Share

COPIED_AT_ONCE_BYTES: Final = 65_536


class ClientGone(Exception):
    """The client closed its connection."""


class Delivery:
    """One answer. After `run`, `heard` holds the counts of the answer, or `refusal` says why it has none.

    If the answer was not streamed, `heard` is the whole answer.
    """

    def __init__(
        self, request: web.BaseRequest, answer: aiohttp.ClientResponse, max_inspected_bytes: int, share: Share
    ) -> None:
        self.response: web.StreamResponse | None = None
        self.heard: StreamedAnswer | bytes | None = None
        self.refusal: NotRecorded | None = None
        self.ended = 0.0  # perf_counter()
        self.added_seconds = 0.0
        self._request = request
        self._answer = answer
        self._headers = headers.to_client(answer.headers)
        self._max = max_inspected_bytes
        self._share = share

    @property
    def is_good(self) -> bool:
        return self._answer.status == HTTPStatus.OK

    async def run(self, passage: Passage | None) -> web.StreamResponse:
        """Raises ClientGone, aiohttp.ClientError and TimeoutError (the upstream)."""
        if passage is None:
            return await self._copy()
        if not self.is_good:
            self.refusal = NotRecorded("failed")
        elif "Content-Encoding" in self._answer.headers:
            self.refusal = NotRecorded("encoded")
        elif self._answer.content_type == "text/event-stream":
            return await self._stream(passage.asked.excess)
        elif self._answer.content_type == "application/json":
            return await self._whole(passage.asked.excess)
        else:
            self.refusal = NotRecorded("malformed_answer")
        return await self._copy()

    async def _copy(self) -> web.StreamResponse:
        length = self._answer.content_length
        if self._request.method != "HEAD" and length is not None and 0 < length <= COPIED_AT_ONCE_BYTES:
            return await self._send(await self._answer.read())
        return await self._pass(self._answer.content.iter_any())

    async def _whole(self, excess: Excess) -> web.StreamResponse:
        body, too_much = await read_up_to(self._answer.content, self._max, self._share)
        self.ended = perf_counter()
        if too_much:
            self.refusal = NotRecorded(too_much)
            held = [body]
            del body
            return await self._pass(chained(held, self._answer.content.iter_any(), self._share))
        self.heard = body
        response = await self._send(body if excess == NOTHING else reduced(body, excess, is_event=False))
        self.added_seconds = perf_counter() - self.ended
        return response

    async def _stream(self, excess: Excess) -> web.StreamResponse:
        if excess != NOTHING:
            self._headers.popall("Content-Length", None)
        came_at = perf_counter()
        response = await self._begin()
        self.added_seconds = perf_counter() - came_at
        events = EventStream(excess, self._max)
        try:
            async for chunk in self._answer.content.iter_any():
                kept = events.feed(chunk, perf_counter())
                if events.is_done:
                    self._heard_all(events)  # before it is written: the client may disconnect at once
                if kept:
                    await self._write(response, kept)
        except (aiohttp.ClientError, TimeoutError):  # the upstream broke off
            if rest := events.end():
                await self._write(response, rest)
            raise
        self._heard_all(events)
        if rest := events.end():
            await self._write(response, rest)
        await _end(response)
        return response

    def _heard_all(self, events: EventStream) -> None:
        if events.is_too_large:
            self.refusal = NotRecorded("too_large")
        elif self.heard is None:
            self.heard, self.ended = events.heard, perf_counter()

    async def _pass(self, chunks: AsyncIterator[bytes]) -> web.StreamResponse:
        response = await self._begin()
        async for chunk in chunks:
            await self._write(response, chunk)
        await _end(response)
        return response

    async def _write(self, response: web.StreamResponse, chunk: bytes) -> None:
        """Waits while the client does not read: the library would buffer another 64 kB."""
        try:
            await response.write(chunk)
            if self._request.protocol.writing_paused:
                await self._request.writer.drain()
        except ConnectionResetError:
            raise ClientGone from None

    async def _begin(self) -> web.StreamResponse:
        return await self._prepare(
            web.StreamResponse(status=self._answer.status, reason=self._answer.reason, headers=self._headers)
        )

    async def _send(self, body: bytes) -> web.StreamResponse:
        self._headers.popall("Content-Length", None)
        status, reason = self._answer.status, self._answer.reason
        response = await self._prepare(
            web.Response(status=status, reason=reason, headers=self._headers, body=body)
        )
        await _end(response)
        return response

    async def _prepare(self, response: web.StreamResponse) -> web.StreamResponse:
        self.response = response
        close_if_last(self._request, response)
        try:
            await response.prepare(self._request)
        except ConnectionResetError:
            raise ClientGone from None
        return response


async def _end(response: web.StreamResponse) -> None:
    try:
        await response.write_eof()
    except ConnectionResetError:
        raise ClientGone from None
