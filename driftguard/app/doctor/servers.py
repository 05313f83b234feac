"""Other servers: the sidecar itself, sources, engines, and where pages go."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any, Final, Literal, NamedTuple, TypeVar
from uuid import uuid4

import aiohttp
import httpx

from driftguard.alerting import destination
from driftguard.alerting.alertmanager import ALERTNAME
from driftguard.alerting.retries import failure_of
from driftguard.app.doctor.finding import Finding, State, clock
from driftguard.errors import DriftGuardError
from driftguard.outgoing.posting import NotAnswered, post
from driftguard.retraining.engines.engine_admin import EngineAdmin
from driftguard.retraining.engines.live_update import LiveUpdate
from driftguard.retraining.engines.restarted_engine import live_update_of
from driftguard.settings import EngineSettings, RetrainingSettings, Settings
from driftguard.settings.secrets import key_given, secrets_of
from driftguard.sources.scrape import open_client, scrape
from driftguard.sources.source import Scraped, Source, sources_of
from driftguard.store.records import BatchResult
from driftguard_http.origins import url_of

SECONDS: Final = 10.0
T = TypeVar("T")
TEST_PAGE: Final = "Test page of `driftguard doctor`: nothing has happened."


_UNREAD: Final = ("unreachable", "unreadable", "metrics_hidden")
_UNUSABLE: Final = (*_UNREAD, "not_speculating", "incomplete")
# It is read, and users wait, or speculation gives nothing. Exports stop also where a server is taken away.
_ILL: Final = ("stalled", "drafting_stopped", "stale")
_SOURCE_FIX: Final = "url, kind and api_key of this source, and that it is reached from here"
LOOKS: Final = 4  # at a source, since a load balancer may choose the same server for two in a row


class _Reading(NamedTuple):
    source: Source
    scraped: Scraped
    date: datetime | None  # by the server's clock
    processes: frozenset[float]  # when those started that have answered, where they tell


def _sidecar_url(settings: Settings) -> str:
    return url_of("127.0.0.1" if settings.host in ("0.0.0.0", "::") else settings.host, settings.port)


def _asked(url: str, headers: Mapping[str, str] | None = None) -> httpx.Response:
    """On this machine: by no proxy of the environment."""
    return httpx.get(url, headers=headers, timeout=SECONDS, trust_env=False)


def _asked_with_key(url: str) -> httpx.Response:
    """With DRIFTGUARD_API_KEY where one is asked for, so that no other server gets it."""
    answer, key = _asked(url), key_given()
    is_needed = answer.status_code == httpx.codes.UNAUTHORIZED and key
    return _asked(url, {"Authorization": f"Bearer {key}"}) if is_needed else answer


def sidecar(settings: Settings) -> Iterator[Finding]:
    """The sidecar of these settings, where it runs on this machine."""
    url = _sidecar_url(settings)
    try:
        found = _in_time(lambda: _asked(f"{url}/readyz")).json()
    except (httpx.HTTPError, httpx.InvalidURL):
        yield Finding("sidecar", "warning", f"none answers at {url}", "driftguard serve")
    except (ValueError, RecursionError):
        yield Finding("sidecar", "failed", f"another server answers at {url}", "driftguard serve --port")
    else:
        is_ready = isinstance(found, dict) and found.get("status") == "ready"
        why = found.get("detail", found) if isinstance(found, dict) else found
        told = f"ready at {url}" if is_ready else f"not ready at {url}: {why}"
        fix = "" if is_ready else "the log of driftguard serve says more"
        yield Finding("sidecar", "ok" if is_ready else "failed", told, fix)


def _in_time(ask: Callable[[], T]) -> T:
    """Its result, within SECONDS in all: the client's own limits are never reached by a server that sends a
    byte now and then, or while a name is looked up. Raises what it raises, and httpx.ReadTimeout."""
    made: Future[T] = Future()

    def run() -> None:
        try:
            made.set_result(ask())
        except Exception as error:  # noqa: BLE001 it is raised below
            made.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        return made.result(SECONDS)
    except TimeoutError:
        raise httpx.ReadTimeout(f"no answer within {SECONDS:g} s") from None


def sources(settings: Settings) -> Iterator[Finding]:
    """Each is read as by the sidecar, a few times; nothing is stored. With none in the settings, what the
    running sidecar says of its own: its command line may name some."""
    if not settings.sources:
        told = _scraped_by_the_sidecar(settings)
        fix = "[[sources]] or --source, if your servers do not send records by themselves"
        yield from told or [Finding("sources", "ok", f"none are scraped; {fix}")]
        return
    try:
        looks = [sources_of(settings.sources) for _ in range(LOOKS)]
    except DriftGuardError as error:
        yield Finding("sources", "failed", str(error), "[[sources]] in the settings")
        return
    for reading in asyncio.run(_read_all(settings, list(zip(*looks, strict=True)))):
        yield _source(reading)
        if reading.date is not None:
            name = f"clock of {reading.source.identity.server}"
            yield clock(name, reading.date, reading.scraped.at, tolerance_seconds=1.0)


def _scraped_by_the_sidecar(settings: Settings) -> list[Finding]:
    url = f"{_sidecar_url(settings)}/api/v1/status"
    try:
        answer = _in_time(lambda: _asked_with_key(url))
        if answer.status_code == httpx.codes.UNAUTHORIZED:
            told = "not known: the sidecar asks for an API key (http.require_key_to_read)"
            return [Finding("sources", "warning", told, "DRIFTGUARD_API_KEY = one of its keys")]
        found = [
            (f"source {source['server']}", f"{source['url']}: {source['condition']}", source)
            for source in answer.json()["sources"]
        ]
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, RecursionError, KeyError, TypeError):
        return []  # what is wrong with the sidecar is a check of its own
    return [_as_told(check, f"{told}, says the sidecar", source) for check, told, source in found]


def _as_told(check: str, told: str, source: Mapping[str, str]) -> Finding:
    condition = source["condition"]
    if condition not in (*_UNUSABLE, *_ILL):
        return Finding(check, "ok", told)
    return Finding(
        check, "warning" if condition in _ILL else "failed", told, source.get("detail") or _SOURCE_FIX
    )


async def _read_all(settings: Settings, found: Sequence[Sequence[Source]]) -> list[_Reading]:
    return await asyncio.gather(*(_read_again(settings, same) for same in found))


async def _read_again(settings: Settings, same: Sequence[Source]) -> _Reading:
    """Over a connection of its own each time, until it is known that one alone does not answer."""
    processes: frozenset[float] = frozenset()
    for source in same:
        reading = await _read(settings, source)
        processes |= reading.processes
        if not reading.processes or len(processes) > 1:
            break
    return reading._replace(processes=processes)


async def _read(settings: Settings, source: Source) -> _Reading:
    dates: list[datetime] = []

    async def note(_client: object, _context: object, ended: aiohttp.TraceRequestEndParams) -> None:
        if (date := _date(ended.response.headers.get("date", ""))) is not None:
            dates.append(date)

    trace = aiohttp.TraceConfig()
    trace.on_request_end.append(note)
    async with open_client(settings.scraping, [trace]) as client:
        scraped = await scrape(client, source, _store_nothing)
    started_at = source.before.started_at if source.before else None
    processes = frozenset() if started_at is None else frozenset([started_at])
    return _Reading(source, scraped, dates[-1] if dates else None, processes)


def _store_nothing(_records: Sequence[object]) -> Future[BatchResult]:
    raise DriftGuardError("a first reading makes no records")


def _date(text: str) -> datetime | None:
    try:
        return parsedate_to_datetime(text).astimezone(UTC)
    except (ValueError, OverflowError):
        return None


def _source(reading: _Reading) -> Finding:
    source, scraped = reading.source, reading.scraped
    check, where = f"source {source.identity.server}", source.shown_url
    if scraped.condition in _UNREAD:
        return Finding(check, "failed", f"{where}: {scraped.condition}: {scraped.detail}", _SOURCE_FIX)
    if len(reading.processes) > 1:
        told = "several servers answer in turns, as behind a load balancer: no window would be of one of them"
        return Finding(
            check, "failed", f"{where}: {told}", "a source of its own for each, at its own address"
        )
    name = source.adapter.name if source.adapter else "unknown"
    if scraped.condition == "not_speculating":
        return Finding(check, "failed", f"{where}: no counters of acceptance", scraped.detail)
    if scraped.condition == "incomplete":
        return Finding(check, "failed", f"{where}: {name}, incomplete", scraped.detail)
    fidelity = source.adapter.fidelity if source.adapter else "unknown"
    version = f" {source.version}" if source.version else ""
    return Finding(check, "ok", f"{where}: {name}{version}, counters of acceptance are there ({fidelity})")


def engines(settings: Settings) -> Iterator[Finding]:
    for engine in settings.engines:
        if engine.admin_url is not None:
            yield _engine(engine, engine.admin_url)
        elif (live := live_update_of(engine, settings.retraining)) is not None:
            yield _updated(engine, live, settings.retraining)


def _engine(engine: EngineSettings, url: str) -> Finding:
    admin = EngineAdmin(url, engine.api_key.get_secret_value() if engine.api_key else None)
    try:
        info = _in_time(admin.info)
    except (DriftGuardError, httpx.ReadTimeout) as error:
        fix = "admin_url and api_key of this engine, and that it runs"
        return Finding(f"engine {engine.server}", "failed", str(error), fix)
    if info.server != engine.server:
        told = f"the engine at {engine.admin_address} calls itself {info.server!r}"
        return Finding(f"engine {engine.server}", "failed", told, f'engines.server = "{info.server}"')
    return Finding(
        f"engine {engine.server}", "ok", f"{engine.admin_address} serves draft {info.draft.version}"
    )


def _updated(engine: EngineSettings, live: LiveUpdate, rules: RetrainingSettings) -> Finding:
    """Whether the server is one that tells which draft was loaded last: it is asked nothing that changes
    it. Where it does not answer, a draft is put into service by a restart, if the settings say how."""
    check = f"engine {engine.server}"
    try:
        version = _in_time(live.version)
        found = f"{live.shown} tells no weight version" if version == str(None) else ""
    except (DriftGuardError, httpx.ReadTimeout) as error:
        found = str(error)
    if not found:
        return Finding(check, "ok", f"{live.shown} answers with weight version {version}")
    state: State = "warning" if rules.promote_command or rules.promote_webhook else "failed"
    return Finding(
        check, state, found, "update_url, update_engine and api_key of this engine, and that it runs"
    )


def destinations(settings: Settings, *, send_test_page: bool) -> Iterator[Finding]:
    """Without a test page, only whether something answers there."""
    rules = settings.alerting
    if not rules.webhook_urls and not rules.alertmanager_urls:
        fix = "alerting.webhook_urls or alerting.alertmanager_urls, or alert rules: driftguard alert-rules"
        yield Finding("destinations", "warning", "no page is sent by the sidecar", fix)
    if rules.external_url is None and (rules.webhook_urls or rules.alertmanager_urls):
        told = "links in pages lead to the address that the sidecar binds"
        yield Finding("links", "warning", told, "alerting.external_url = the address that people open")
    for check, url in _named("webhook", rules.webhook_urls):
        yield _destination(settings, check, url, _document(settings), send_test_page)
    for check, url in _named("alertmanager", rules.alertmanager_urls):
        posted = f"{url.rstrip('/')}/api/v2/alerts"
        yield _destination(settings, check, posted, _alerts(settings), send_test_page)


def _named(kind: Literal["alertmanager", "webhook"], urls: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Each with what its check is called: of several at one host, which differ in what may not be shown, also
    the place in the settings."""
    names = [destination.shown(destination.identity(kind, url)) for url in urls]
    for number, (name, url) in enumerate(zip(names, urls, strict=True), start=1):
        yield name if names.count(name) == 1 else f"{name} (number {number} of {kind}_urls)", url


def _destination(settings: Settings, check: str, url: str, body: object, send_test_page: bool) -> Finding:
    fix = f"alerting.{check.partition(':')[0]}_urls, and that it is reached from here"
    if not send_test_page:
        try:
            _in_time(lambda: httpx.head(url, timeout=SECONDS))
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            return Finding(
                check, "failed", secrets_of(settings).masked(str(error) or type(error).__name__), fix
            )
        return Finding(check, "ok", "answers; --send-test-page tells whether it takes pages")
    try:
        failure = failure_of(post(url, body, {}))
    except NotAnswered as error:
        return Finding(check, "failed", f"the test page was not taken: {error}", fix)
    if failure is not None:
        return Finding(check, "failed", f"the test page was not taken: {failure.reason}", fix)
    return Finding(check, "ok", "took the test page: look whether it arrived")


def _document(settings: Settings) -> dict[str, Any]:
    """What a webhook gets, with the members that receivers show."""
    return {
        "event": "test",
        "url": settings.alerting.external_url or url_of(settings.host, settings.port),
        "summary": TEST_PAGE,
    }


def _alerts(settings: Settings) -> list[dict[str, Any]]:
    now = datetime.now(UTC)
    return [
        {
            "labels": {
                **settings.alerting.labels,
                "alertname": ALERTNAME,
                "severity": "critical",
                "incident": f"test-{uuid4()}",
            },
            "annotations": {"summary": TEST_PAGE},
            "startsAt": now.isoformat(),
            "endsAt": (now + timedelta(minutes=2)).isoformat(),
            "generatorURL": settings.alerting.external_url or url_of(settings.host, settings.port),
        }
    ]
