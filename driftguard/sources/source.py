"""One scraped server: its address, its engine, and its newest reading."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from urllib.parse import SplitResult, urlsplit, urlunsplit
from urllib.request import getproxies, proxy_bypass

from driftguard.adapters.adapter import Adapter
from driftguard.adapters.condition import Condition
from driftguard.adapters.kinds import ADAPTERS
from driftguard.adapters.reading import Reading, Unfinished
from driftguard.adapters.window import Drafted, Identity
from driftguard.errors import BadSettings
from driftguard.masking import Secrets, secrets_of_url
from driftguard.records import AcceptanceRecord
from driftguard.settings import SourceSettings

THIS_MACHINE = ("localhost", "127.0.0.1", "::1")
USUAL_PATHS = ("/prometheus/metrics", "/metrics")  # reading TensorRT-LLM's /metrics consumes it


@dataclass(frozen=True, slots=True)
class Windows:
    """Those that end at one reading, as they are stored. `goes_on`, `unfinished`: as of
    `driftguard.sources.condition.Judged`."""

    records: Sequence[AcceptanceRecord]
    reading: Reading
    condition: Condition
    goes_on: bool
    unfinished: Unfinished | None


@dataclass(slots=True)
class Source:
    """The settings of a source, and its state so far."""

    identity: Identity
    target: str | None  # as the settings say; `identity` has the one that the server told where they do not
    draft_version: str | None  # as the settings say; `identity` has that in service
    url: str
    paths: tuple[str, ...]  # to try, until one answers with metrics of an engine
    adapter: Adapter | None
    is_kind_given: bool  # otherwise detected again when the metrics are those of another engine
    api_key: str | None
    proxy: str | None  # HTTP proxy through which it is reached
    before: Reading | None = None  # the reading at which the next window begins
    unfinished: Unfinished | None = None  # where that goes on: as it was judged with the newest reading
    unanswered: Windows | None = None  # were sent to the database, and may be stored
    left_processes: tuple[str | float, ...] = ()  # the last after which another one answered
    taking_turns_at: datetime | None = None  # when one of those was last seen to answer again
    drafted: Drafted | None = None  # what it did with last, also before its last start
    has_contradicted: bool = False  # whether no record could hold the counts of its last window
    version: str | None = None  # of the engine, as it told it last
    version_asked_at: datetime | None = None  # None: ask with the next scrape

    @classmethod
    def of(cls, settings: SourceSettings) -> Source:
        """Raises BadSettings: no such kind."""
        parts = urlsplit(settings.url)
        adapter = _adapter(settings.kind) if settings.kind else None
        given = parts.path.strip("/")
        usual = (adapter.path,) if adapter else USUAL_PATHS
        known = Identity(
            server=settings.server or parts.netloc.rpartition("@")[2],
            target=settings.target,
            draft=settings.draft,
            draft_version=settings.draft_version,
            method=settings.method,
            segment=settings.segment,
            num_speculative_tokens=settings.num_speculative_tokens,
        )
        return cls(
            identity=known,
            target=settings.target,
            draft_version=settings.draft_version,
            url=settings.url,
            paths=(parts.path,) if given else usual,
            adapter=adapter,
            is_kind_given=adapter is not None,
            api_key=settings.api_key.get_secret_value() if settings.api_key else None,
            proxy=_proxy(parts),
        )

    def ask_again(self) -> None:
        """Forgets what the server was asked for: it may have come back as another."""
        self.version_asked_at = None
        self.identity = replace(self.identity, target=self.target)

    def begin_at(self, reading: Reading) -> None:
        """Makes the next window begin at this reading, with counters that it lacks as they were before."""
        self.before = reading.after(self.before) if self.before else reading

    def at(self, path: str) -> str:
        """The server's address with another path; without its credentials if a key is sent."""
        parts = urlsplit(self.url)
        place = parts.netloc.rpartition("@")[2] if self.api_key else parts.netloc
        return urlunsplit((parts.scheme, place, path, parts.query, ""))

    @property
    def secrets(self) -> Secrets:
        proxied = secrets_of_url(self.proxy or "")
        return Secrets([*secrets_of_url(self.url), *proxied, self.api_key or ""])

    @property
    def shown_url(self) -> str:
        """Without credentials."""
        parts = urlsplit(self.url)
        return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))

    @property
    def kind(self) -> str:
        return self.adapter.kind if self.adapter else "unknown"


def _proxy(url: SplitResult) -> str | None:
    """As the environment says: HTTP_PROXY, HTTPS_PROXY, NO_PROXY. None for a server on this machine, whose
    address is to a proxy that of its own."""
    found = getproxies().get(url.scheme)
    if found is None or url.hostname in THIS_MACHINE or proxy_bypass(url.netloc.rpartition("@")[2]):
        return None
    return found if "://" in found else f"http://{found}"


def _adapter(kind: str) -> Adapter:
    adapter = next((adapter for name, adapter in ADAPTERS.items() if name == kind.replace("-", "_")), None)
    if adapter is None:
        raise BadSettings(
            f"sources: {kind!r} is not a supported kind of server; use one of {', '.join(ADAPTERS)}"
        )
    return adapter


def sources_of(settings: Sequence[SourceSettings]) -> list[Source]:
    """Raises BadSettings: no such kind, or two with the same name, whose records could not be
    distinguished."""
    found = [Source.of(item) for item in settings]
    names: set[str] = set()
    for source in found:
        name = source.identity.server
        if name in names:
            raise BadSettings(f"sources: two are called {name!r}; give each a `server` of its own")
        names.add(name)
    return found


@dataclass(frozen=True, slots=True)
class Scraped:
    """The outcome of one scrape. `detail`: one line that says what to do about it; empty if nothing."""

    condition: Condition
    detail: str
    at: datetime
