"""Which headers pass (RFC 9110 §7.6.1), and which are this proxy's own."""

from __future__ import annotations

from typing import Final

from multidict import CIMultiDict, CIMultiDictProxy

_HOP_BY_HOP: Final = frozenset(
    {"connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade"}
)
_REQUEST_ONLY: Final = frozenset({"host", "expect"})
VIA: Final = "1.1 driftguard"


def to_upstream(headers: CIMultiDictProxy[str], client: str | None) -> CIMultiDict[str]:
    """Of a request; `client` is the address that it came from."""
    passing = _passing(headers, _HOP_BY_HOP | _REQUEST_ONLY)
    passing["Via"] = ", ".join([*headers.getall("Via", []), VIA])
    if client:
        passing["X-Forwarded-For"] = ", ".join([*headers.getall("X-Forwarded-For", []), client])
    return passing


def to_client(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """Of an answer. Without a Server header it would get one that names a library."""
    passing = _passing(headers, _HOP_BY_HOP)
    passing.setdefault("Server", "driftguard")
    return passing


def _passing(headers: CIMultiDictProxy[str], dropped: frozenset[str]) -> CIMultiDict[str]:
    if connection := headers.get("Connection"):
        dropped |= {name.strip().lower() for name in connection.split(",")}
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in dropped)
