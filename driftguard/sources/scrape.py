"""One scrape: fetch, parse, compare with the previous scrape, store the window.

The reading that a window begins at is kept until the window is stored. So no counts are lost while
the database is unavailable: the next window is longer. One whose commit was not answered may be stored,
so it is sent again, as the same record, before the next one is made: no counts are in two windows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from typing import Final, NamedTuple

import aiohttp
import msgspec

from driftguard.adapters import versions
from driftguard.adapters.adapter import Adapter
from driftguard.adapters.bentoml import has_engine
from driftguard.adapters.condition import Condition
from driftguard.adapters.kinds import detect
from driftguard.adapters.reading import START_HEADER, Reading, Unreadable, has_restarted
from driftguard.adapters.window import Drafted, Incomplete
from driftguard.errors import Busy, DatabaseUnavailable, DriftGuardError
from driftguard.outgoing.connection_errors import why_not_connected
from driftguard.records import UNREADABLE_JSON, AcceptanceRecord, RecordError
from driftguard.settings import ScrapingSettings
from driftguard.sources.announced_draft import Follow, nothing_announced
from driftguard.sources.condition import Judged, WasProbed, judge, never_probed
from driftguard.sources.source import USUAL_PATHS, Scraped, Source, Windows
from driftguard.store.records import BatchResult

MAX_BYTES: Final = 32 * 2**20
KEPT_INTERVALS: Final = 2  # for which an idle connection is kept open, if the server allows it
VERSION_AFTER: Final = timedelta(minutes=5)  # asked again; at once after a restart
TURNS_FOR: Final = timedelta(minutes=10)
LEFT_PROCESSES_KEPT: Final = 64
HIDDEN: Final = frozenset({404, 405, 501})
FORBIDDEN: Final = frozenset({401, 403})

Submit = Callable[[Sequence[AcceptanceRecord]], Future[BatchResult]]


class _Stopped(Exception):
    """Raised when there is no window, with the condition of the server as the reason."""

    def __init__(self, condition: Condition, detail: str) -> None:
        super().__init__(detail)
        self.condition = condition
        self.detail = detail


class _Answer(NamedTuple):
    """`process`: tells the process that answered from others; empty where it does not say."""

    text: str
    process: str


class _Model(msgspec.Struct, frozen=True):
    id: str


class _Models(msgspec.Struct, frozen=True):
    data: list[_Model]


def open_client(
    settings: ScrapingSettings, traces: Sequence[aiohttp.TraceConfig] = ()
) -> aiohttp.ClientSession:
    """On a running event loop. Servers that hang do not delay others: there may be as many connections
    as servers. Compression is not requested: decompressing would cost more than it saves."""
    kept_seconds = KEPT_INTERVALS * settings.interval_seconds
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=kept_seconds),
        timeout=aiohttp.ClientTimeout(total=settings.timeout_seconds),
        headers={"Accept-Encoding": "identity"},
        cookie_jar=aiohttp.DummyCookieJar(),
        trace_configs=list(traces),
    )


async def scrape(
    client: aiohttp.ClientSession,
    source: Source,
    submit: Submit,
    was_probed: WasProbed = never_probed,
    follow: Follow = nothing_announced,
) -> Scraped:
    """Stores the counts since the last stored window. Errors are returned as a condition, not raised."""
    try:
        if (told := await _send_again(source, submit)) is None:
            told = await _scrape(client, source, submit, was_probed, follow)
        condition, detail = told
    except _Stopped as stopped:
        condition, detail = stopped.condition, stopped.detail
        source.ask_again()
    except Incomplete as error:
        condition, detail = "incomplete", str(error)
    return Scraped(condition, detail, datetime.now(UTC))


async def _scrape(
    client: aiohttp.ClientSession, source: Source, submit: Submit, was_probed: WasProbed, follow: Follow
) -> tuple[Condition, str]:
    adapter, reading = await _read(client, source)
    if _do_several_take_turns(source, reading):
        source.before, source.unfinished = reading, None
        raise Incomplete(
            "several servers answer at its `url` in turns, as behind a load balancer: no window is of one of "
            "them; give each a source of its own"
        )
    if source.before is None or has_restarted(source.before, reading):
        source.ask_again()
    await _ask_version(client, source, adapter.kind, reading)
    judged = judge(
        adapter,
        source.before,
        reading,
        source.identity,
        source.url,
        was_probed,
        source.unfinished,
        drafted=source.drafted,
    )
    speculates = judged.condition != "not_speculating"
    if speculates and not adapter.names_target and source.identity.target is None:
        source.identity = replace(source.identity, target=await _served_model(client, source))
    try:
        if why := await _why_left_out(source, reading, judged, follow):
            source.begin_at(reading)
            source.unfinished = None
            return judged.condition, f"a window was left out: {why}"
        records = [window.record(source.identity) for window in judged.windows]
        source.drafted = drafted_with(records) or source.drafted
        source.has_contradicted = False
        windows = Windows(records, reading, judged.condition, judged.goes_on, judged.unfinished)
        refusals = await _store(source, windows, submit)
    except RecordError as error:
        return judged.condition, _note_contradiction(source, reading, error)
    except DriftGuardError as error:
        return judged.condition, _not_stored_yet(error)
    if refusals:
        return "incomplete", f"not stored: {refusals[0]}"
    return judged.condition, judged.detail


async def _send_again(source: Source, submit: Submit) -> tuple[Condition, str] | None:
    """What is not known to be stored. None: nothing is left of it."""
    windows, source.unanswered = source.unanswered, None
    if windows is None:
        return None
    try:
        await _store(source, windows, submit)
    except DriftGuardError as error:
        return windows.condition, _not_stored_yet(error)
    return None


async def _store(source: Source, windows: Windows, submit: Submit) -> list[str]:
    """Makes the next window begin where these end; returns why some are refused. Raises as `submit` does."""
    records, refused = windows.records, []
    if records:
        try:
            refused = (await asyncio.wrap_future(submit(records))).refusals(records)
        except (Busy, DatabaseUnavailable):  # where it is busy, they may have been stored before
            source.unanswered = windows
            raise
    source.unfinished = windows.unfinished
    if not windows.goes_on:
        source.begin_at(windows.reading)
    return [why for _, why in refused]


def _not_stored_yet(error: DriftGuardError) -> str:
    return f"not stored yet: {error.detail}"


def drafted_with(records: Sequence[AcceptanceRecord]) -> Drafted | None:
    """None: nothing was drafted."""
    return next((Drafted(record.draft, record.method) for record in records if record.drafted), None)


def _do_several_take_turns(source: Source, reading: Reading) -> bool:
    """Whether a process answers again after which another one did: none comes back after a restart. Until
    that has not happened for TURNS_FOR, since two readings in a row may be of the same."""
    before = source.before.told_process if source.before else None
    now = reading.told_process
    if before is not None and now is not None and before != now:
        if now in source.left_processes:
            source.taking_turns_at = reading.at
        source.left_processes = (*source.left_processes, before)[-LEFT_PROCESSES_KEPT:]
    at = source.taking_turns_at
    return at is not None and reading.at - at < TURNS_FOR


def _note_contradiction(source: Source, reading: Reading, error: RecordError) -> str:
    """Says what becomes of counts that no record can hold. The server may have updated them while it printed
    them: at the end of the window, or at its beginning, from which each longer window contradicts itself
    too."""
    is_again, source.has_contradicted = source.has_contradicted, not source.has_contradicted
    if not is_again:
        return f"no record can hold its counts ({error}); they are read again with the next scrape"
    source.begin_at(reading)
    source.unfinished = None
    return f"a window was left out: no record can hold its counts ({error})"


async def _why_left_out(source: Source, reading: Reading, judged: Judged, follow: Follow) -> str:
    """Why the counts from `source.before` to `reading` are no window; empty if they may be one. Raises
    DatabaseUnavailable."""
    if await follow(source, reading):
        return f"draft {source.identity.draft_version} came into service in it"
    newest = source.unfinished.newest if source.unfinished else source.before
    # Until the clock has caught up, which may take hours, such a window would end before it began.
    is_set_back = newest is not None and reading.at < newest.at
    if is_set_back and (judged.windows or judged.goes_on):
        return "the sidecar's clock was set back in it"
    return ""


async def _read(client: aiohttp.ClientSession, source: Source) -> tuple[Adapter, Reading]:
    """Reads from the first path that answers with metrics of an engine, and keeps that path."""
    refused: list[_Stopped] = []
    for path in source.paths:
        try:
            answer = await _get(client, source, path)
            adapter = _recognised(source, answer.text)
            reading = Reading.parse(answer.text, adapter.names, datetime.now(UTC), answer.process)
        except _Stopped as stopped:
            refused.append(stopped)
        except Unreadable as error:
            refused.append(_Stopped("unreadable", str(error)))
        else:
            source.paths = (path,)
            return adapter, reading
    raise refused[-1]


def _recognised(source: Source, text: str) -> Adapter:
    adapter = _adapter_of(source, text)
    if not has_engine(adapter, text):
        raise _Stopped("metrics_hidden", f"no metric of its vLLM: {adapter.show_metrics}")
    return adapter


def _adapter_of(source: Source, text: str) -> Adapter:
    if source.adapter is not None and source.adapter.prefix in text:
        return source.adapter
    if text.lstrip().startswith("<"):
        raise _Stopped("metrics_hidden", "it answers with a web page, not with metrics: is this the address?")
    found = detect(text)
    if source.adapter is not None and source.is_kind_given:
        given = source.adapter
        if found is None:
            raise _Stopped("metrics_hidden", f"no metric of {given.name}: {given.show_metrics}")
        is_another = f"its metrics are of {found.name}, not of {given.name}"
        raise _Stopped("metrics_hidden", f"{is_another}: set `kind` to {found.kind}, or leave it out")
    if found is None:
        raise _Stopped("metrics_hidden", "its metrics are not those of a supported serving engine")
    source.adapter, source.before, source.version = found, None, None
    return found


async def _get(client: aiohttp.ClientSession, source: Source, path: str) -> _Answer:
    headers = {"Authorization": f"Bearer {source.api_key}"} if source.api_key else {}
    try:
        async with client.get(source.at(path), headers=headers, proxy=source.proxy) as answer:
            if answer.status in HIDDEN:
                hint = f"; {source.adapter.show_metrics}" if source.adapter else ""
                raise _Stopped("metrics_hidden", f"{path} is answered with {answer.status}{hint}")
            if answer.status in FORBIDDEN:
                raise _Stopped("unreadable", f"{path} is answered with {answer.status}; set `api_key`")
            if answer.status != HTTPStatus.OK:
                raise _Stopped("unreadable", f"{path} is answered with {answer.status}")
            return _Answer(await _text(answer), answer.headers.get(START_HEADER, ""))
    except TimeoutError:
        raise _Stopped("unreachable", "no answer within scraping.timeout_seconds") from None
    except aiohttp.ClientConnectorError as error:
        raise _Stopped(
            "unreachable", f"no connection to {error.host}:{error.port}: {why_not_connected(error)}"
        ) from None
    except (aiohttp.ClientError, OSError) as error:
        told = source.secrets.masked(str(error))
        raise _Stopped("unreachable", told or type(error).__name__) from None


async def _text(answer: aiohttp.ClientResponse) -> str:
    body = bytearray()
    async for chunk in answer.content.iter_any():
        body += chunk
        if len(body) > MAX_BYTES:
            raise _Stopped("unreadable", f"more than {MAX_BYTES:,} bytes")
    return body.decode(errors="replace")


async def _ask_version(client: aiohttp.ClientSession, source: Source, kind: str, reading: Reading) -> None:
    """Notes the engine's version where it tells one; it keeps its last one where it does not answer."""
    if source.paths[0] not in USUAL_PATHS:
        return  # that of a gateway, whose root is another server
    asked_at = source.version_asked_at
    if asked_at is not None and reading.at < asked_at + VERSION_AFTER:
        return
    source.version_asked_at = reading.at
    for path in versions.paths(kind):
        try:
            found = versions.version_in(kind, (await _get(client, source, path)).text)
        except _Stopped:
            continue
        if found is not None:
            source.version = found
            return


async def _served_model(client: aiohttp.ClientSession, source: Source) -> str:
    """The model's name in the OpenAI-compatible API. Raises Incomplete."""
    try:
        models = msgspec.json.decode((await _get(client, source, "/v1/models")).text, type=_Models)
        return models.data[0].id
    except (_Stopped, *UNREADABLE_JSON, IndexError) as error:
        raise Incomplete(f"/v1/models does not name its model ({error}); set `target`") from None
