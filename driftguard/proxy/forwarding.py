"""One request: to the upstream, and its answer back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from time import perf_counter
from types import SimpleNamespace
from typing import Final

import aiohttp
import msgspec
import structlog
from aiohttp import web
from multidict import istr
from yarl import URL

from driftguard.outgoing.connection_errors import why_not_connected
from driftguard.proxy import headers
from driftguard.proxy.ambiguity import ambiguity_of
from driftguard.proxy.backlog import Backlog
from driftguard.proxy.connections import BadBody, close_if_last
from driftguard.proxy.counts import Outcome
from driftguard.proxy.delivery import ClientGone, Delivery
from driftguard.proxy.events import StreamedAnswer
from driftguard.proxy.intake import Intake, take_in, target_of
from driftguard.proxy.metrics import ProxyMetrics
from driftguard.proxy.recording import NotRecorded, Passage, Recorder, is_missing
from driftguard.proxy.upstream import Upstream
from driftguard.records import AcceptanceRecord, UnrecordedReason
from driftguard.settings import ProxySettings
from driftguard_http.room import Room, Share

_log = structlog.get_logger(__name__)

_CONTENT_LENGTH: Final = istr("Content-Length")
_ACCEPT_ENCODING: Final = istr("Accept-Encoding")
# What the library would add to a request that does not have it.
_ADDED_BY_LIBRARY: Final = (
    *map(istr, ("Accept", "Content-Type", "User-Agent")),
    _ACCEPT_ENCODING,
)
SENT_AT_MOST: Final = 5  # times, on as many connections
CLOSED: Final = (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError)  # by the upstream
_KEPT_UP_TO_BYTES: Final = 65_536  # the record of a larger answer is made at once, so that few wait in memory


@dataclass(slots=True)
class _Course:
    """The progress of a request."""

    share: Share
    outcome: Outcome = "client_gone"  # unless another outcome is set
    intake: Intake | None = None
    asked_at: float = 0.0  # perf_counter()
    delivery: Delivery | None = None


@dataclass(slots=True)
class ConnectionUsed:
    """By one request to the upstream."""

    again: bool = False  # it had served another one before


def noting_reuse() -> aiohttp.TraceConfig:
    """For the session of a Forwarder: tells its requests that their connection is not a new one."""

    async def note(_: object, trace: SimpleNamespace, __: object) -> None:
        if isinstance(trace.trace_request_ctx, ConnectionUsed):
            trace.trace_request_ctx.again = True

    traces = aiohttp.TraceConfig()
    traces.on_connection_reuseconn.append(note)
    return traces


class _Finished(msgspec.Struct, frozen=True):
    """An answered request of which a record is to be made."""

    passage: Passage
    answer: StreamedAnswer | bytes
    ended: float  # perf_counter()


class Forwarder:
    """Hands each record to `put`, and to `count_unrecorded` the server and the reason of each answered
    request of which there is none though there should be."""

    def __init__(
        self,
        settings: ProxySettings,
        upstream: Upstream,
        session: aiohttp.ClientSession,
        put: Callable[[AcceptanceRecord], None],
        count_unrecorded: Callable[[str, UnrecordedReason], None],
        metrics: ProxyMetrics,
    ) -> None:
        self._settings = settings
        self._upstream = upstream
        self._session = session
        self._put = put
        self._count_unrecorded = count_unrecorded
        self._metrics = metrics
        self._recorder = Recorder(settings)
        self._room = Room(settings.max_held_bytes)
        self._backlog = Backlog(self._record)

    def settle(self) -> None:
        """Makes the records of all finished requests now."""
        self._backlog.drain()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        course = _Course(self._room.share())
        in_flight = self._metrics.begin()
        try:
            response = await self._pass_on(request, course, in_flight)
            close_if_last(request, response)
            return response
        finally:
            self._metrics.end()
            self._account_for(course)
            course.share.give_back()

    async def _pass_on(self, request: web.BaseRequest, course: _Course, in_flight: int) -> web.StreamResponse:
        if request.method == "CONNECT" or "websocket" in request.headers.get("Upgrade", "").lower():
            course.outcome = "refused"
            return self._problem(501, "this proxy does not support WebSocket and tunnels")
        if ambiguity := ambiguity_of(request):
            course.outcome = "refused"
            return self._problem(400, ambiguity)
        target = target_of(request)
        if not target.startswith("/"):
            course.outcome = "refused"
            return self._problem(400, "this proxy only supports requests for a path")
        try:
            course.intake = await take_in(
                request, target, self._settings, self._upstream, in_flight, course.share
            )
            course.asked_at = perf_counter()
            async with await self._asked(request, target, course.intake) as answer:
                course.delivery = Delivery(request, answer, self._settings.max_inspected_bytes, course.share)
                response = await course.delivery.run(course.intake.passage)
        except ClientGone:
            return _cut(request, course.delivery)
        except BadBody:
            return self._bad_body(request, course)
        except TimeoutError:
            course.outcome = "timeout"
            return _cut(request, course.delivery, self._problem(504, "no answer in time"))
        except aiohttp.ClientConnectorError as error:
            course.outcome = "unreachable"
            return self._problem(502, f"it cannot be reached ({why_not_connected(error)})")
        except aiohttp.ClientError as error:
            if isinstance(request.content.exception(), BadBody):  # which the library reports as its own error
                return self._bad_body(request, course)
            course.outcome = "broken_off"
            problem = self._problem(502, _what_broke(error))
            return _cut(request, course.delivery, problem)
        course.outcome = "answered"
        return response

    def _bad_body(self, request: web.BaseRequest, course: _Course) -> web.StreamResponse:
        course.outcome = "refused"
        return _cut(request, course.delivery, self._problem(400, "the body breaks its Transfer-Encoding"))

    def _account_for(self, course: _Course) -> None:
        intake, delivery = course.intake, course.delivery
        answered = course.outcome == "answered" and delivery is not None and delivery.is_good
        if intake is None or intake.passage is None:
            refusal = (intake and intake.refusal) or NotRecorded("not_generation")
            self._refused(course.outcome, refusal, answered=answered)
        elif delivery is None or delivery.heard is None:
            refusal = (delivery and delivery.refusal) or NotRecorded("failed")
            self._refused(course.outcome, refusal, answered=answered)
        else:  # a client may disconnect as soon as it has the whole answer
            self._backlog.add(_Finished(intake.passage, delivery.heard, delivery.ended))
            course.outcome = "answered"
            if isinstance(delivery.heard, bytes) and len(delivery.heard) > _KEPT_UP_TO_BYTES:
                self._backlog.drain()
        if course.outcome == "answered" and intake is not None and intake.passage is not None:
            added_before = course.asked_at - intake.passage.started
            self._metrics.added(added_before + (delivery.added_seconds if delivery else 0.0))

    def _record(self, finished: _Finished) -> None:
        try:
            self._put(self._recorder.record(finished.passage, finished.answer, finished.ended))
        except NotRecorded as refusal:
            self._refused("answered", refusal, answered=True)
        except Exception as error:  # noqa: BLE001 (other requests' records must not be lost with this one)
            # Its message may hold content of the answer.
            _log.error("an answer could not be recorded", error=type(error).__name__)
            self._refused("answered", NotRecorded("malformed_answer"), answered=True)
        else:
            self._metrics.count("answered", None)

    def _refused(self, outcome: Outcome, refusal: NotRecorded, *, answered: bool) -> None:
        """`answered`: with 200 and to its end."""
        reason = refusal.reason
        self._metrics.count(outcome, "failed" if is_missing(reason) and not answered else reason)
        if answered and is_missing(reason):
            self._recorder.note(reason, refusal.detail)
            self._count_unrecorded(self._recorder.server, reason)

    async def _asked(self, request: web.BaseRequest, target: str, intake: Intake) -> aiohttp.ClientResponse:
        """The answer's head. A server may close an idle connection while it is used again: what asks for
        tokens only is then sent again, unless the connection was a new one, which it may have broken."""
        for _ in range(SENT_AT_MOST - 1):
            connection = ConnectionUsed()
            try:
                return await self._ask(request, target, intake, connection)
            except CLOSED as error:
                is_safe = intake.passage is not None and isinstance(intake.body, bytes)
                if not (is_safe and connection.again and not _has_begun(error)):
                    raise
        return await self._ask(request, target, intake, ConnectionUsed())

    async def _ask(
        self, request: web.BaseRequest, target: str, intake: Intake, connection: ConnectionUsed
    ) -> aiohttp.ClientResponse:
        passing = headers.to_upstream(request.headers, request.remote)
        if isinstance(intake.body, bytes) and _CONTENT_LENGTH in passing:
            del passing[_CONTENT_LENGTH]
        if intake.passage is not None:
            passing[_ACCEPT_ENCODING] = "identity"
        return await self._session.request(
            request.method,
            URL(self._upstream.url + target, encoded=True),
            headers=passing,
            skip_auto_headers=[name for name in _ADDED_BY_LIBRARY if name not in passing] or None,
            data=intake.body,
            allow_redirects=False,
            trace_request_ctx=connection,
        )

    def _problem(self, status: int, what: str) -> web.Response:
        """A problem document (RFC 9457)."""
        body = {
            "type": "about:blank",
            "title": HTTPStatus(status).phrase,
            "status": status,
            "detail": f"upstream {self._upstream.url}: {what}",
        }
        return web.Response(
            status=status, body=msgspec.json.encode(body), content_type="application/problem+json"
        )


def _what_broke(error: aiohttp.ClientError) -> str:
    """Never the library's own message, which may hold what the upstream has sent."""
    if isinstance(error, aiohttp.ClientResponseError):
        return "the head of its answer is no HTTP/1.1 that can be read; is it a server for HTTP?"
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "it closed the connection before its answer had begun"
    return f"the connection broke off ({type(error).__name__})"


def _has_begun(error: aiohttp.ClientError) -> bool:
    """Did part of an answer come? The library gives it in place of a message."""
    return isinstance(error, aiohttp.ServerDisconnectedError) and not isinstance(error.message, str)


def _cut(
    request: web.BaseRequest, delivery: Delivery | None, problem: web.Response | None = None
) -> web.StreamResponse:
    """The problem document; if an answer has begun, the connection is closed, so that the client sees the
    break."""
    response = None if delivery is None else delivery.response
    if response is None and problem is not None:
        return problem
    if request.transport is not None:
        request.transport.close()
    return response or web.Response()
