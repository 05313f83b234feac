"""Detects the upstream's engine: every serving engine puts its name into `owned_by` of its list of models.

SGLang is then asked again and again which draft was loaded into it while it ran: streamed answers of its
OpenAI API do not tell.
"""

from __future__ import annotations

import asyncio
from typing import Final

import aiohttp
import structlog

from driftguard.adapters.answers import sglang
from driftguard.adapters.answers.counts import AnswerUnreadable
from driftguard.adapters.answers.engines import Engine, engine_owning, owner_of
from driftguard.outgoing.connection_errors import why_not_connected
from driftguard.settings import ProxySettings

_log = structlog.get_logger(__name__)

RETRY_SECONDS: Final = 5.0  # where it refuses to tell
FOLLOW_SECONDS: Final = 1.0
ASK_AGAIN_SECONDS: Final = 30.0  # where it lists no model: a router may not have found its engines yet
TIMEOUT: Final = aiohttp.ClientTimeout(total=10.0)


class Upstream:
    """`engine` is "unknown" until it is detected; nothing is added to requests before. `was_asked`: it was
    detected, or the first attempt has failed.

    `loaded`: version of the draft that was loaded live; None: the one that it was started with serves.
    """

    def __init__(self, settings: ProxySettings) -> None:
        self.url = (settings.upstream or "").rstrip("/").removesuffix("/v1")
        self._models_url = self.url + "/v1/models"
        self.loaded: str | None = None
        key = settings.upstream_api_key
        self._headers = {"Accept-Encoding": "identity"}  # nothing is decompressed here
        if key:
            self._headers["Authorization"] = f"Bearer {key.get_secret_value()}"
        self.engine: Engine = "unknown" if settings.engine == "auto" else settings.engine
        self.was_asked = asyncio.Event()

    async def identify(self, session: aiohttp.ClientSession) -> None:
        """Asks until the engine is known, also where the upstream refuses to list its models."""
        told = ""
        while self.engine == "unknown":
            pause = FOLLOW_SECONDS
            try:
                owner, status = await self._owner(session)
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                why = _why(error)
                if why != told:
                    _log.info("the upstream's engine is not known yet", url=self._models_url, error=why)
            else:
                why, pause = f"HTTP {status}", ASK_AGAIN_SECONDS
                self.engine = "unknown" if owner is None else engine_owning(owner)
                if self.engine in ("unknown", "other") and why != told:
                    self._warn(owner, status)
            told = why
            self.was_asked.set()
            if self.engine == "unknown":
                await asyncio.sleep(pause)
        self.was_asked.set()
        _log.info("upstream", engine=self.engine)
        if self.engine == "driftguard":
            _log.warning("the built-in engine sends records itself (--sidecar): its requests pass unrecorded")

    async def follow(self, session: aiohttp.ClientSession) -> None:
        """Identifies it, then keeps `loaded` up to date."""
        await self.identify(session)
        refused_with = 0
        while self.engine == "sglang":
            pause = FOLLOW_SECONDS
            try:
                async with session.get(
                    self.url + "/model_info", headers=self._headers, timeout=TIMEOUT
                ) as answer:
                    content = await answer.read()
                if answer.ok:
                    self._note(sglang.weight_version_in(content))
                    refused_with = 0
                elif answer.status < 500:
                    pause = RETRY_SECONDS
                    if answer.status in (401, 403, 404):  # it may be another server; others pass
                        self.loaded = None
                    if answer.status != refused_with:
                        refused_with = answer.status
                        _log.warning(
                            "the upstream does not tell which draft serves; if it needs a key, set "
                            "proxy.upstream_api_key",
                            path="/model_info",
                            status=answer.status,
                            draft_version=self.loaded or "as in the settings",
                        )
            except (aiohttp.ClientError, TimeoutError, OSError, AnswerUnreadable) as error:
                _log.debug("the upstream does not tell its weight version", error=str(error))
            await asyncio.sleep(pause)

    def _note(self, version: str) -> None:
        if version.startswith(sglang.LOADING):
            return
        is_loaded = version.startswith(sglang.LOADED)
        found = version.removeprefix(sglang.LOADED) if is_loaded else None
        if found != self.loaded:
            _log.info("another draft serves", draft_version=found or "as in the settings")
        self.loaded = found

    async def _owner(self, session: aiohttp.ClientSession) -> tuple[str | None, int]:
        """(the owner of the first model, None if none is listed; the status). Raises aiohttp.ClientError,
        TimeoutError, OSError."""
        async with session.get(self._models_url, headers=self._headers, timeout=TIMEOUT) as answer:
            content = await answer.read()
        if answer.status >= 500:
            raise aiohttp.ClientError(f"HTTP {answer.status}")
        return owner_of(content), answer.status

    def _warn(self, owner: str | None, status: int) -> None:
        _log.warning(
            "unknown engine: requests pass unchanged; if it is vllm, sglang or llamacpp, set --engine",
            url=self._models_url,
            status=status,
            owned_by=owner,
        )


def _why(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientConnectorError):
        return why_not_connected(error)
    return str(error) or type(error).__name__
