"""One request: to the upstream, and its answer back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from time import perf_counter

import aiohttp
import msgspec
from aiohttp import web
from yarl import URL

from driftguard.proxy import headers
from driftguard.proxy.delivery import ClientGone, Delivery
from driftguard.proxy.intake import Intake, take_in, target_of
from driftguard.proxy.metrics import Outcome, ProxyMetrics
from driftguard.proxy.recording import NotRecorded, Recorder
from driftguard.proxy.upstream import Upstream
from driftguard.records import AcceptanceRecord
from driftguard.settings import ProxySettings


@dataclass(slots=True)
class _Course:
    """What became of a request so far."""

    outcome: Outcome = "client_gone"  # unless it comes to another end
    intake: Intake | None = None
    asked_at: float = 0.0  # perf_counter()
    delivery: Delivery | None = None


class Forwarder:
    """Hands each record to `put`."""

    def __init__(
        self,
        settings: ProxySettings,
        upstream: Upstream,
        session: aiohttp.ClientSession,
        put: Callable[[AcceptanceRecord], None],
        metrics: ProxyMetrics,
    ) -> None:
        self._settings = settings
        self._upstream = upstream
        self._session = session
        self._put = put
        self._metrics = metrics
        self._recorder = Recorder(settings)
        self.in_flight = 0

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        course = _Course()
        self.in_flight += 1
        try:
            return await self._pass_on(request, course)
        finally:
            self.in_flight -= 1
            self._account_for(course)

    async def _pass_on(self, request: web.BaseRequest, course: _Course) -> web.StreamResponse:
        if "Upgrade" in request.headers or request.method == "CONNECT":
            course.outcome = "refused"
            return self._problem(501, "WebSocket and tunnels do not pass through this proxy")
        if not target_of(request).startswith("/"):
            course.outcome = "refused"
            return self._problem(400, "only requests for a path pass through this proxy")
        course.intake = await take_in(request, self._settings, self._upstream.engine, self.in_flight)
        course.asked_at = perf_counter()
        try:
            async with self._ask(request, course.intake) as answer:
                course.delivery = Delivery(request, answer, self._settings.max_inspected_bytes)
                response = await course.delivery.run(course.intake.passage)
        except ClientGone:
            return _cut(request, course.delivery)
        except TimeoutError:
            course.outcome = "timeout"
            return _cut(request, course.delivery, self._problem(504, "no answer in time"))
        except aiohttp.ClientConnectorError as error:
            course.outcome = "unreachable"
            reason = error.os_error.strerror or str(error.os_error)
            return self._problem(502, f"it cannot be reached ({reason})")
        except aiohttp.ClientError as error:
            course.outcome = "broken_off"
            problem = self._problem(502, f"it broke off ({type(error).__name__})")
            return _cut(request, course.delivery, problem)
        course.outcome = "answered"
        return response

    def _account_for(self, course: _Course) -> None:
        refusal = self._record(course.intake, course.delivery)
        if course.delivery is not None and course.delivery.heard is not None:
            course.outcome = "answered"  # a client may leave as soon as it has all
        if course.outcome == "answered" and course.intake is not None and course.intake.passage is not None:
            added_before = course.asked_at - course.intake.passage.started
            added_after = course.delivery.added_seconds if course.delivery else 0.0
            self._metrics.added_seconds.observe(added_before + added_after)
        self._metrics.count(course.outcome, refusal.reason if refusal else None)
        if refusal is not None:
            self._recorder.note(refusal)

    def _record(self, intake: Intake | None, delivery: Delivery | None) -> NotRecorded | None:
        if intake is None:
            return NotRecorded("not_generation")
        if intake.passage is None:
            return intake.refusal
        if delivery is None or delivery.heard is None:
            return (delivery and delivery.refusal) or NotRecorded("failed")
        try:
            self._put(self._recorder.record(intake.passage, delivery.heard, delivery.ended))
        except NotRecorded as refusal:
            return refusal
        return None

    def _ask(self, request: web.BaseRequest, intake: Intake) -> aiohttp.client._RequestContextManager:
        passing = headers.to_upstream(request.headers, request.remote)
        if isinstance(intake.body, bytes):
            passing.popall("Content-Length", None)
        if intake.passage is not None:
            passing["Accept-Encoding"] = "identity"
        url = URL(self._upstream.url + target_of(request), encoded=True)
        return self._session.request(
            request.method, url, headers=passing, data=intake.body, allow_redirects=False
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


def _cut(
    request: web.BaseRequest, delivery: Delivery | None, problem: web.Response | None = None
) -> web.StreamResponse:
    """The problem, or the end of the connection where an answer has begun, so that it is seen to be cut."""
    response = None if delivery is None else delivery.response
    if response is None and problem is not None:
        return problem
    if request.transport is not None:
        request.transport.close()
    return response or web.Response()
