"""Who may write, administrate and read captured text.

On a loopback address everybody on the machine may. On any other address, and through a reverse proxy, a
caller needs an API key, made by `driftguard keys create`: as `Authorization: Bearer KEY`, or in a browser as
the password of a login.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, Final

from fastapi import Request, Security
from fastapi.concurrency import run_in_threadpool
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.types import Scope

from driftguard.api.context import get_context
from driftguard.errors import BadSettings, DatabaseUnavailable, Unauthorized
from driftguard.store.database import Database
from driftguard.store.keys import is_valid
from driftguard_http import Refusal, is_forwarded, is_loopback


def refuse_open_bind(host: str, *, has_keys: bool) -> None:
    """Called at start. Raises BadSettings when `host` is reachable by others and there is no API key."""
    if not is_loopback(host) and not has_keys:
        raise BadSettings(
            f"host: {host} is reachable by other machines and there is no API key yet; "
            "make one with `driftguard keys create NAME`, or bind to 127.0.0.1"
        )


def is_open(scope: Scope, host: str) -> bool:
    """Whether a request comes from this machine, as far as it tells, so that it needs no key. Those of a
    reverse proxy on this machine come from loopback too. `host`: what the sidecar is bound to."""
    return is_loopback(host) and not is_forwarded(scope["headers"])


CHECKS_AT_ONCE: Final = 4  # unknown keys must not take all connections to the database
MOST_CHECKS: Final = 64  # waiting ones included
CHECK_SECONDS: Final = 5.0
VALID_SECONDS: Final = 30.0
KEYS_REMEMBERED: Final = 1_000
_ASK: Final = {"WWW-Authenticate": 'Bearer realm="driftguard"'}
_LATER: Final = {"Retry-After": "5"}
_bearer = HTTPBearer(
    auto_error=False,
    scheme_name="apiKey",
    description="`driftguard keys create NAME` makes one. Bound to loopback, none is needed.",
)


async def require_key(
    request: Request, given: Annotated[HTTPAuthorizationCredentials | None, Security(_bearer)]
) -> None:
    """FastAPI dependency of writes, admin calls and captured text. Raises Unauthorized."""
    if is_allowed(request):
        return
    if given is None:
        raise Unauthorized("this call needs an API key: Authorization: Bearer KEY")
    if not await run_in_threadpool(_is_stored, get_context(request).database, given.credentials.strip()):
        raise Unauthorized("this API key is unknown or revoked")


def is_allowed(request: Request) -> bool:
    """Whether the caller may write and read captured text: it needs no key, or its key has been checked
    (guarding.py)."""
    here = is_open(request.scope, get_context(request).settings.host)
    return here or getattr(request.state, "key_checked", False)


def _is_stored(database: Database, key: str) -> bool:
    with database.session() as session:
        return is_valid(session, key)


class KeyChecks:
    """The check of a key before the request is routed. A valid key is accepted for VALID_SECONDS without
    another look-up, even if it is revoked meanwhile."""

    def __init__(self, database: Database) -> None:
        self._database = database
        # Threads of its own: a look-up that hangs occupies one until the database's own limit ends it.
        self._threads = ThreadPoolExecutor(CHECKS_AT_ONCE, thread_name_prefix="key check")
        self._asking = 0
        self._valid: OrderedDict[bytes, float] = OrderedDict()  # digest -> until, monotonic seconds

    async def check(self, authorization: str | None) -> None:
        """Raises Refusal: 401, or 503 if the database does not answer."""
        key = key_in(authorization or "")
        if not key:
            raise Refusal(401, "this call needs an API key: Authorization: Bearer KEY", headers=_ASK)
        digest = hashlib.sha256(key.encode()).digest()
        if self._valid.get(digest, 0.0) > time.monotonic():
            return
        if not await self._is_valid(key):
            raise Refusal(401, "this API key is unknown or revoked", headers=_ASK)
        self._valid[digest] = time.monotonic() + VALID_SECONDS
        while len(self._valid) > KEYS_REMEMBERED:
            self._valid.popitem(last=False)

    async def _is_valid(self, key: str) -> bool:
        """Raises Refusal (503) if the database does not answer, or if too many look-ups wait."""
        if self._asking >= MOST_CHECKS:
            raise Refusal(503, "too many API keys are being checked", headers=_LATER)
        self._asking += 1
        looked_up = asyncio.wrap_future(self._threads.submit(_is_stored, self._database, key))
        looked_up.add_done_callback(self._looked_up)
        try:
            return await asyncio.wait_for(asyncio.shield(looked_up), CHECK_SECONDS)
        except (TimeoutError, DatabaseUnavailable):
            detail = "the API key cannot be checked now: the database does not answer"
            raise Refusal(503, detail, headers=_LATER) from None

    def _looked_up(self, future: asyncio.Future[bool]) -> None:
        self._asking -= 1
        if not future.cancelled():
            future.exception()  # retrieved here if nobody waits for it any more


def key_in(authorization: str) -> str:
    """The key in an Authorization header; empty if it has none. In a login (RFC 7617) it is the password."""
    scheme, _, given = authorization.partition(" ")
    if scheme.lower() == "bearer":
        return given.strip()
    if scheme.lower() != "basic":
        return ""
    try:
        return base64.b64decode(given.strip(), validate=True).decode().partition(":")[2]
    except ValueError:
        return ""
