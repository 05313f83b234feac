"""Which headers pass (RFC 9110 §7.6.1), and which are this proxy's own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from multidict import CIMultiDict, CIMultiDictProxy

_HOP_BY_HOP: Final = (
    "Connection", "Keep-Alive", "Proxy-Connection", "TE", "Trailer", "Transfer-Encoding", "Upgrade",
)  # fmt: skip
_REQUEST_ONLY: Final = ("Host", "Expect")
VIA: Final = "1.1 driftguard"


def to_upstream(headers: CIMultiDictProxy[str], client: str | None) -> CIMultiDict[str]:
    """Of a request; `client` is the address that it came from."""
    passing = _passing(headers, (*_HOP_BY_HOP, *_REQUEST_ONLY))
    passing["Via"] = ", ".join([*headers.getall("Via", []), VIA])
    if client:
        passing["X-Forwarded-For"] = ", ".join([*headers.getall("X-Forwarded-For", []), client])
    return passing


def to_client(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """Of an answer. Without a Server header it would get one that names a library."""
    passing = _passing(headers, _HOP_BY_HOP)
    passing.setdefault("Server", "driftguard")
    return passing


def _passing(headers: CIMultiDictProxy[str], dropped: Iterable[str]) -> CIMultiDict[str]:
    passing = CIMultiDict(headers)
    named = headers.get("Connection", "").split(",")
    for name in (*dropped, *(name.strip() for name in named)):
        passing.popall(name, None)
    return passing
