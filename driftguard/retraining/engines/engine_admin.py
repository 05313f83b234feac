"""The engine's admin API: the draft in service, loading a draft, activating it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import httpx
import msgspec

from driftguard.errors import BadSettings, DriftGuardError
from driftguard.masking import Secrets, address, secrets_of_url, storable
from driftguard.records import UNREADABLE_JSON
from driftguard.settings import EngineSettings, Settings

_TIMEOUT_SECONDS = 60.0
_STOPS = "engine_unavailable"
_LOAD_TIMEOUT_SECONDS = 600.0  # the weights are read, then prepared between the steps of running requests


class EngineRefused(DriftGuardError):
    """The engine cannot be reached, or refuses; the message names the address and the reason."""

    status = 502
    title = "Engine refused"


class EngineAway(EngineRefused):
    """The engine is stopping or not there, and has not taken what it was asked to; once it serves again, it
    may."""


class EngineDraft(msgspec.Struct, frozen=True):
    """A draft that the engine has loaded. `directory` is None where there is no model (n-gram lookup);
    `corpus`: that of a hybrid, beside its model."""

    name: str
    version: str
    method: str
    directory: str | None = None
    corpus: str | None = None

    @property
    def renewed(self) -> str | None:
        """The directory of what a retraining makes anew: of a hybrid its corpus, the model stays."""
        return self.corpus if self.method == "hybrid" else self.directory


class EngineInfo(msgspec.Struct, frozen=True):
    """What the engine serves now. Unknown members are ignored: later versions may add some. `ngram_tokens`:
    least and most of a match; not told by an engine whose n-gram lookup takes no corpus. `activated`: the
    draft was put into service, and is not just what the engine was started with; not told by earlier ones.
    `uptime_seconds`: since it was started. `given_up`: the version in its --state-dir with which it ended
    again and again."""

    server: str
    target: str
    target_directory: str | None
    draft: EngineDraft
    num_speculative_tokens: int
    suffix_min_match: int = 1
    ngram_tokens: tuple[int, int] | None = None
    drafts: list[EngineDraft] = []
    activated: bool = True
    uptime_seconds: float = 0.0
    given_up: str | None = None


for _kind in (EngineDraft, EngineInfo):
    msgspec.json.Decoder(_kind)  # looks at the type now: see store.column_types.Document


def engine_of(settings: Settings, server: str | None) -> EngineSettings:
    """The engine of this server in the settings; without a name the only one. Raises BadSettings."""
    names = [engine.server for engine in settings.engines]
    if not names:
        raise BadSettings("engines: none is set, so no draft can be promoted; add [[engines]]")
    if server is None and len(names) > 1:
        raise BadSettings(f"server: there are several engines, name one of {', '.join(names)}")
    for engine in settings.engines:
        if server in (None, engine.server):
            return engine
    raise BadSettings(f"server: {server!r} is not among the engines in the settings: {', '.join(names)}")


Answer = TypeVar("Answer", EngineDraft, EngineInfo)


class EngineAdmin:
    """Calls of one engine. Every method raises EngineRefused.

    `server`: what it must call itself, or nothing that it says is taken; None: anything."""

    def __init__(self, url: str, key: str | None, server: str | None = None) -> None:
        self._server = server
        self._url = url.rstrip("/")
        self._shown = address(url)
        self._secrets = Secrets([*secrets_of_url(url), key or ""])
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}

    def info(self) -> EngineInfo:
        found = self._decode(self._call("GET", "/admin/info"), EngineInfo)
        if self._server not in (None, found.server):
            raise EngineRefused(
                f"the engine calls itself {found.server!r}, the settings call it {self._server!r}: "
                "no records of that name will be found; start it with --server-name, or change engines.server"
            )
        return found

    def load(self, directory: Path, version: str) -> EngineDraft:
        """Loads a draft beside the one in service; loading it again changes nothing."""
        body = {"directory": str(directory), "version": version}
        return self._decode(self._call("POST", "/admin/drafts", body, _LOAD_TIMEOUT_SECONDS), EngineDraft)

    def activate(self, version: str) -> EngineDraft:
        """Puts a loaded draft into service; doing it again changes nothing."""
        return self._decode(
            self._call("POST", f"/admin/drafts/{quote(version, safe='')}/activate"), EngineDraft
        )

    def _call(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        timeout_seconds: float = _TIMEOUT_SECONDS,
    ) -> bytes:
        try:
            answer = httpx.request(
                method, self._url + path, json=body, headers=self._headers, timeout=timeout_seconds
            )
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            told = self._secrets.masked(str(error))
            was_sent = not isinstance(error, (httpx.ConnectError, httpx.ConnectTimeout))
            raise (EngineRefused if was_sent else EngineAway)(
                f"the engine at {self._shown} cannot be reached: {told}"
            ) from error
        if not answer.is_success:
            problem = _problem(answer)
            detail = self._secrets.masked(storable(problem.detail) or beginning_of(answer))
            # The engine's own word: what stands before it answers 503 too where the engine has just ended.
            stops = answer.status_code == httpx.codes.SERVICE_UNAVAILABLE and problem.code == _STOPS
            raise (EngineAway if stops else EngineRefused)(
                f"the engine at {self._shown} answered {path} with {answer.status_code}: {detail}"
            )
        return answer.content

    def _decode(self, content: bytes, kind: type[Answer]) -> Answer:
        try:
            return msgspec.json.decode(content, type=kind)
        except UNREADABLE_JSON as error:
            raise EngineRefused(f"no DriftGuard engine answers at {self._shown}: {error}") from error


def beginning_of(answer: httpx.Response) -> str:
    """Of its body, whatever that is: it may be no text."""
    return storable(answer.content[:200].decode(errors="replace"))


class _Problem(msgspec.Struct):
    """What of a refusal is read (RFC 9457)."""

    detail: str = ""
    code: str = ""


_decode_problem = msgspec.json.Decoder(_Problem).decode


def _problem(answer: httpx.Response) -> _Problem:
    try:
        return _decode_problem(answer.content)
    except UNREADABLE_JSON:
        return _Problem()
