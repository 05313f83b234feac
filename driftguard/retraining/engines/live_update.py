"""Puts another draft into a running server: what is the same whatever the server is.

A draft is loaded while requests wait, and they go on whatever happened. Where half a draft may have been
loaded, now or by an update that was cut off, the draft before is loaded again.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import Any, Final

import httpx
import structlog

from driftguard.masking import Secrets, address, secrets_of_url, storable
from driftguard.records import UNREADABLE_JSON
from driftguard.retraining.engines.engine_admin import EngineRefused, beginning_of
from driftguard.retraining.engines.order import Order

ANSWER_SECONDS: Final = 30.0  # of one that changes little; requests of clients wait for a paused server
LOAD_SECONDS: Final = 120.0
_RESUME_TRIES: Final = 5
_RESUME_PAUSE_SECONDS: Final = 1.0
log = structlog.get_logger(__name__)


class NotOffered(EngineRefused):
    """This server loads drafts when it starts only; nothing was changed."""


class MayBePaused(EngineRefused):
    """The server could not be told to go on, and may answer no request until it is."""


class MayBeLoaded(EngineRefused):
    """The server was told to load the draft, and no answer says that it has."""


class Answered(EngineRefused):
    """An answer that is no success."""

    def __init__(self, detail: str, code: int) -> None:
        super().__init__(detail)
        self.code = code


class LiveUpdate(ABC):
    """One running server. Every method raises EngineRefused."""

    def __init__(self, url: str, key: str | None) -> None:
        self._url = url.rstrip("/")
        self.shown = address(url)
        self._secrets = Secrets([*secrets_of_url(url), key or ""])
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._was_cut_off = False  # an update before this one, which may have loaded half a draft

    @abstractmethod
    def version(self) -> str:
        """Of the draft that was loaded last; the server's own word where none was since its start."""

    @abstractmethod
    def recover(self, version: str) -> str | None:
        """Resumes a server into which this version was being loaded, and ends a session that was left.

        Returns why the version must not be loaded again now; None: it may be. Raises MayBePaused.
        """

    def replace(self, order: Order, digest: str | None) -> None:
        """The draft of the order is served when this returns.

        `digest`: of the list of checksums that its files must have; None: they may have any list, or none.
        Raises NotOffered, MayBePaused, or EngineRefused, which says what became of the draft before.
        """
        try:
            self._offered(order)
        except NotOffered:
            raise
        except EngineRefused as error:
            raise (_either if self._was_cut_off else _not_replaced)(error.detail, order) from error
        try:
            self._load(order.draft_path, order.draft_version, digest)
        except MayBePaused:
            raise
        except EngineRefused as error:
            if self._was_cut_off or isinstance(error, MayBeLoaded):
                self._look_again(order, error.detail)
                return
            self._end_session()
            self._leave_alone()
            raise _not_replaced(error.detail, order) from error

    def _look_again(self, order: Order, reason: str) -> None:
        """Returns where only the answer was lost. Else it puts the draft before back, and raises."""
        self._end_session()
        previous = order.previous_version
        try:
            if self._serves(order.draft_version):
                return
            if untouched := self._is_untouched(previous):
                self._leave_alone()
            else:
                self._load(order.previous_path, previous, None)
        except MayBePaused:
            raise
        except EngineRefused as error:
            raise _either(
                f"{reason}; draft {previous} could not be put back ({error.detail})", order
            ) from None
        if untouched:
            raise _not_replaced(reason, order)
        raise EngineRefused(f"{reason}; draft {previous} was put back and serves")

    @abstractmethod
    def _offered(self, order: Order) -> None:
        """Raises NotOffered, or EngineRefused: it is, but not now."""

    @abstractmethod
    def _load(self, path: str | None, version: str, digest: str | None) -> None:
        """Pauses, loads and resumes. Raises MayBePaused, MayBeLoaded, or EngineRefused: it loaded nothing."""

    @abstractmethod
    def _serves(self, version: str) -> bool:
        """Whether this version, which was to be loaded, is."""

    @abstractmethod
    def _is_untouched(self, previous: str) -> bool:
        """Whether the draft before is known to serve on, though the new one was to be loaded."""

    @abstractmethod
    def _leave_alone(self) -> None:
        """Takes back what the server was told before nothing was loaded."""

    @abstractmethod
    def _end_session(self) -> None:
        """Ends a session that was begun. There may be none: that is no error."""

    @abstractmethod
    def _goes_on(self) -> bool:
        """Tells the server to go on with requests; whether it says that it does."""

    def _resume(self) -> None:
        reason = ""
        for _ in range(_RESUME_TRIES):
            try:
                if self._goes_on():
                    return
                reason = "it says that it is paused"
            except EngineRefused as error:
                reason = error.detail
            time.sleep(_RESUME_PAUSE_SECONDS)
        log.error("the server may be paused, and is not resumed", url=self.shown, reason=reason)
        raise MayBePaused(f"the server at {self.shown} may be paused, and cannot be resumed: {reason}")

    def _call(
        self, method: str, path: str, body: Any = None, timeout_seconds: float | None = None
    ) -> dict[str, Any]:
        """`body`: of the request, as JSON; bytes are JSON already."""
        # A connection of its own each: vLLM closes one on which it answered 500.
        sent = {"content": body} if isinstance(body, bytes) else {"json": body}
        headers = {**self._headers, "Content-Type": "application/json"} if body is not None else self._headers
        try:
            answer = httpx.request(
                method, self._url + path, headers=headers, timeout=timeout_seconds or ANSWER_SECONDS, **sent
            )
            found = answer.json() if answer.content else {}
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            told = self._secrets.masked(str(error) or type(error).__name__)
            raise EngineRefused(f"{self.shown} does not answer {path}: {told}") from error
        except UNREADABLE_JSON:
            found = {}
        if not answer.is_success:
            told = self._secrets.masked(storable(self._reason(found)) or beginning_of(answer))
            raise Answered(
                f"{self.shown} answered {path} with {answer.status_code}: {told}", answer.status_code
            )
        return found if isinstance(found, dict) else {}

    def _asked(
        self, method: str, path: str, body: Any = None, timeout_seconds: float | None = None
    ) -> dict[str, Any]:
        """Raises NotOffered where it has no such route, or refuses the request."""
        try:
            return self._call(method, path, body, timeout_seconds)
        except Answered as error:
            if error.code < httpx.codes.INTERNAL_SERVER_ERROR:
                denied = error.code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN)
                hint = " (is engines.api_key its key?)" if denied else ""
                raise NotOffered(f"{error.detail}{hint}") from None
            raise

    def _reason(self, body: Any) -> str:
        """Why a request was refused, in the body of the answer."""
        if not isinstance(body, dict):
            return ""
        error = body.get("error", body.get("message", ""))
        return str(error.get("message", "") if isinstance(error, dict) else error)


def _not_replaced(reason: str, order: Order) -> EngineRefused:
    return EngineRefused(f"{reason}; draft {order.previous_version} was not replaced")


def _either(reason: str, order: Order) -> EngineRefused:
    return EngineRefused(
        f"{reason}; draft {order.previous_version}, draft {order.draft_version}, or a mix of both, serves "
        "until the server is restarted"
    )
