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
import time
from typing import Any, Final

import httpx
import structlog

from driftguard.masking import Secrets, address, secrets_of_url
from driftguard.retraining.engines.engine_admin import EngineRefused
from driftguard.retraining.engines.order import Order

_ANSWER_SECONDS: Final = 30.0  # of one that changes little; requests of clients wait for a paused server
_LOAD_SECONDS: Final = 120.0
_RESUME_TRIES: Final = 5
_RESUME_PAUSE_SECONDS: Final = 1.0
_WORKER_SAID: Final = re.compile(r"Worker failed with error '(.*)', please check", re.DOTALL)
log = structlog.get_logger(__name__)


class NotOffered(EngineRefused):
    """This server loads drafts when it starts only; nothing was changed."""


class MayBePaused(EngineRefused):
    """The server could not be told to go on, and may answer no request until it is."""


class _MayBeLoaded(EngineRefused):
    """Workers were told to load the draft, and no answer says that they have."""


class _Answered(EngineRefused):
    """An answer that is no success."""

    def __init__(self, detail: str, code: int) -> None:
        super().__init__(detail)
        self.code = code


class LiveUpdate:
    """Every method raises EngineRefused."""

    def __init__(self, url: str, key: str | None, look_seconds: float) -> None:
        """`look_seconds`: longest time in which workers read a draft's files to verify their checksums."""
        self._url = url.rstrip("/")
        self._shown = address(url)
        self._secrets = Secrets([*secrets_of_url(url), key or ""])
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._look_seconds = look_seconds

    def version(self) -> str:
        """Of the weights that were loaded last; vLLM's own word where none were since its start."""
        return str(self._call("GET", "/weight_info").get("weight_version"))

    def recover(self) -> None:
        """Resumes the server, and ends a session that was left. Raises MayBePaused."""
        self._resume()
        self._end_session()

    def replace(self, order: Order, digest: str | None) -> None:
        """The draft of the order is served when this returns.

        `digest`: of the list of checksums that its files must have; None: they may have any list, or none.
        Raises NotOffered, MayBePaused, or EngineRefused, which says what became of the draft before.
        """
        self._offered()
        try:
            self._load(order.draft_path, order.draft_version, digest)
        except MayBePaused:
            raise
        except _MayBeLoaded as error:
            self._look_again(order, error.detail)
        except EngineRefused as error:
            self._end_session()
            raise EngineRefused(f"{error.detail}; draft {order.previous_version} was not replaced") from error

    def _offered(self) -> None:
        try:
            is_paused = self._call("GET", "/is_paused").get("is_paused")
        except _Answered as error:
            if error.code < httpx.codes.INTERNAL_SERVER_ERROR:
                raise NotOffered(f"{error.detail} (is VLLM_SERVER_DEV_MODE=1 set?)") from None
            raise
        try:
            self._call("POST", "/init_weight_transfer_engine", {"init_info": {"driftguard": True}})
        except _Answered as error:
            if error.code <= httpx.codes.INTERNAL_SERVER_ERROR:  # so workers refuse it
                raise NotOffered(error.detail) from None
            raise
        if is_paused:
            raise EngineRefused(f"the server at {self._shown} was paused by somebody else")

    def _load(self, path: str | None, version: str, digest: str | None) -> None:
        if path is None:
            raise EngineRefused(f"the files of draft {version} are gone")
        told = {"directory": path, "checksums_sha256": digest}
        self._call("POST", "/start_draft_weight_update")
        self._call("POST", "/update_weights", {"update_info": told}, self._look_seconds)
        try:
            self._call("POST", "/pause?mode=keep")
            try:
                self._call("POST", "/finish_weight_update", {"weight_version": version}, _LOAD_SECONDS)
            except EngineRefused as error:
                raise _MayBeLoaded(error.detail) from error
        finally:
            self._resume()

    def _look_again(self, order: Order, reason: str) -> None:
        """Returns where only the answer was lost. Else it puts the draft before back, and raises."""
        self._end_session()
        previous = order.previous_version
        try:
            if self.version() == order.draft_version:
                return
            self._load(order.previous_path, previous, None)
        except MayBePaused:
            raise
        except EngineRefused as error:
            raise EngineRefused(
                f"{reason}; draft {previous} could not be put back ({error.detail}): either draft, or a mix "
                "of both, serves until the server is restarted"
            ) from None
        raise EngineRefused(f"{reason}; draft {previous} was put back and serves")

    def _end_session(self) -> None:
        """Where workers hold a directory they let go of it. There may be no session: that is no error."""
        for path in ("/update_weights", "/finish_weight_update"):
            try:
                self._call("POST", path, {"update_info": {}} if path == "/update_weights" else {})
            except EngineRefused as error:
                log.info("no session of a weight update to end", path=path, answer=error.detail)

    def _resume(self) -> None:
        reason = ""
        for _ in range(_RESUME_TRIES):
            try:
                self._call("POST", "/resume")
                if not self._call("GET", "/is_paused").get("is_paused"):
                    return
                reason = "it says that it is paused"
            except EngineRefused as error:
                if isinstance(error, _Answered) and error.code == httpx.codes.NOT_FOUND:
                    return  # it has started again, without what could pause it
                reason = error.detail
            time.sleep(_RESUME_PAUSE_SECONDS)
        log.error("the server may be paused, and is not resumed", url=self._shown, reason=reason)
        raise MayBePaused(f"the server at {self._shown} may be paused, and POST /resume fails: {reason}")

    def _call(
        self, method: str, path: str, body: Any = None, timeout_seconds: float | None = None
    ) -> dict[str, Any]:
        # A connection of its own each: vLLM closes one on which it answered 500.
        try:
            answer = httpx.request(
                method,
                self._url + path,
                json=body,
                headers=self._headers,
                timeout=timeout_seconds or _ANSWER_SECONDS,
            )
            found = answer.json() if answer.content else {}
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            told = self._secrets.masked(str(error) or type(error).__name__)
            raise EngineRefused(f"{self._shown} does not answer {path}: {told}") from error
        except ValueError:
            found = {}
        if not answer.is_success:
            told = self._secrets.masked(_reason(found) or answer.text[:200])
            raise _Answered(
                f"{self._shown} answered {path} with {answer.status_code}: {told}", answer.status_code
            )
        return found if isinstance(found, dict) else {}


def _reason(body: Any) -> str:
    """What a worker said, out of vLLM's message around it."""
    error = body.get("error", "") if isinstance(body, dict) else ""
    message = str(error.get("message", "") if isinstance(error, dict) else error)
    found = _WORKER_SAID.search(message)
    return found[1] if found else message
