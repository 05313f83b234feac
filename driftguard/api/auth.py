"""Who may write, administrate and read captured text.

On a loopback address everybody on the machine may. On any other address a caller needs an API key:
`Authorization: Bearer KEY`, made by `driftguard keys create`.
"""

from __future__ import annotations

import ipaddress
from typing import Annotated

from fastapi import Request, Security
from fastapi.concurrency import run_in_threadpool
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer

from driftguard.api.context import Context, get_context
from driftguard.errors import BadSettings, Unauthorized
from driftguard.store.keys import create_key, has_keys, is_valid, list_keys, revoke_key

__all__ = [
    "create_key",
    "has_keys",
    "is_loopback",
    "list_keys",
    "refuse_open_bind",
    "require_key",
    "revoke_key",
]


def is_loopback(host: str) -> bool:
    """True for 127.0.0.0/8, ::1 and `localhost`; any other name may resolve to anything."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def refuse_open_bind(host: str, *, has_keys: bool) -> None:
    """Called at start. Raises BadSettings when `host` is reachable by others and there is no API key."""
    if not is_loopback(host) and not has_keys:
        raise BadSettings(
            f"host: {host} is reachable by other machines and there is no API key yet; "
            "make one with `driftguard keys create NAME`, or bind to 127.0.0.1"
        )


_bearer = HTTPBearer(
    auto_error=False,
    scheme_name="apiKey",
    description="`driftguard keys create NAME` makes one. Bound to loopback, none is needed.",
)


async def require_key(
    request: Request, given: Annotated[HTTPAuthorizationCredentials | None, Security(_bearer)]
) -> None:
    """FastAPI dependency of writes, admin calls and captured text. Raises Unauthorized."""
    context = get_context(request)
    if is_loopback(context.settings.host):
        return
    if given is None:
        raise Unauthorized("this call needs an API key: Authorization: Bearer KEY")
    if not await run_in_threadpool(_is_known, context, given.credentials.strip()):
        raise Unauthorized("this API key is unknown or revoked")


def _is_known(context: Context, key: str) -> bool:
    with context.database.session() as session:
        return is_valid(session, key)
