"""Puts another draft into a running vLLM, by the routes of its weight transfer and the plugin's backend.

    /is_paused, /init_weight_transfer_engine   is it offered?
    /start_draft_weight_update                 a session begins in every worker
    /update_weights                            every worker looks at the directory; nothing has changed yet
    /pause?mode=keep                           requests wait, and the prefix cache is cleared: it holds what
                                               the old draft computed
    /finish_weight_update                      every worker loads the draft; then the server takes its version
    /resume                                    whatever happened

The routes are those of vllm.entrypoints.rl.online.api_router in vLLM 0.32.0 and 0.33.0.
"""

from __future__ import annotations

import re
from typing import Any, Final

import httpx
import structlog

from driftguard.retraining.engines import live_update
from driftguard.retraining.engines.engine_admin import EngineRefused
from driftguard.retraining.engines.live_update import Answered, LiveUpdate, MayBeLoaded, NotOffered
from driftguard.retraining.engines.order import Order

_WORKER_SAID: Final = re.compile(r"Worker failed with error '(.*)', please check", re.DOTALL)
_NO_SESSION: Final = re.compile("without a matching start|must be called before update_weights")
log = structlog.get_logger(__name__)


class VllmUpdate(LiveUpdate):
    """Every method raises EngineRefused."""

    def __init__(self, url: str, key: str | None, look_seconds: float) -> None:
        """`look_seconds`: longest time in which workers read a draft's files to verify their checksums."""
        super().__init__(url, key)
        self._look_seconds = look_seconds
        self._not_ended = ""  # why a session may be left, in which no other can begin

    def version(self) -> str:
        return str(self._call("GET", "/weight_info").get("weight_version"))

    def recover(self, version: str) -> str | None:
        """Workers look at a draft before they load it, so that loading it again does no harm."""
        del version
        self._resume()
        self._was_cut_off = True
        self._end_session()
        return None

    def _offered(self, order: Order) -> None:
        del order
        try:
            is_paused = self._call("GET", "/is_paused").get("is_paused")
        except Answered as error:
            if error.code < httpx.codes.INTERNAL_SERVER_ERROR:
                hint = "is VLLM_SERVER_DEV_MODE=1 set? For SGLang set engines.update_engine"
                raise NotOffered(f"{error.detail} ({hint})") from None
            raise
        try:
            self._call("POST", "/init_weight_transfer_engine", {"init_info": {"driftguard": True}})
        except Answered as error:
            if error.code <= httpx.codes.INTERNAL_SERVER_ERROR:  # so workers refuse it
                raise NotOffered(error.detail) from None
            raise
        if is_paused:
            raise EngineRefused(f"the server at {self.shown} was paused by somebody else")

    def _load(self, path: str | None, version: str, digest: str | None) -> None:
        if path is None:
            raise EngineRefused(f"the files of draft {version} are gone")
        told = {"directory": path, "checksums_sha256": digest}
        try:
            self._call("POST", "/start_draft_weight_update")
        except Answered as error:
            if not self._not_ended:
                raise
            reason = f"{error.detail}; the session before was not ended: {self._not_ended}"
            raise EngineRefused(reason) from error
        self._call("POST", "/update_weights", {"update_info": told}, self._look_seconds)
        try:
            self._call("POST", "/pause?mode=keep")
            try:
                served = {"weight_version": version}
                self._call("POST", "/finish_weight_update", served, live_update.LOAD_SECONDS)
            except EngineRefused as error:
                raise MayBeLoaded(error.detail) from error
        finally:
            self._resume()

    def _serves(self, version: str) -> bool:
        return self.version() == version

    def _is_untouched(self, previous: str) -> bool:
        """vLLM does not tell what a load that failed has left."""
        del previous
        return False

    def _leave_alone(self) -> None:
        """It was told nothing that lasts."""

    def _end_session(self) -> None:
        """Where workers hold a directory they let go of it."""
        for path in ("/update_weights", "/finish_weight_update"):
            self._not_ended = ""
            try:
                self._call("POST", path, {"update_info": {}} if path == "/update_weights" else {})
            except EngineRefused as error:
                if isinstance(error, Answered) and _NO_SESSION.search(error.detail):
                    log.info("no session of a weight update to end", path=path, answer=error.detail)
                    continue
                self._not_ended = error.detail
                log.warning("a session of a weight update may be left", path=path, reason=error.detail)

    def _goes_on(self) -> bool:
        try:
            self._call("POST", "/resume")
            return not self._call("GET", "/is_paused").get("is_paused")
        except Answered as error:
            if error.code == httpx.codes.NOT_FOUND:
                return True  # it has started again, without what could pause it
            raise

    def _reason(self, body: Any) -> str:
        """What a worker said, out of vLLM's message around it."""
        message = super()._reason(body)
        found = _WORKER_SAID.search(message)
        return found[1] if found else message
