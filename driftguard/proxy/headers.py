"""Which headers pass (RFC 9110 §7.6.1), and which are this proxy's own."""

from __future__ import annotations

from typing import Final

from multidict import CIMultiDict, CIMultiDictProxy, istr

_HOP_BY_HOP: Final = tuple(
    map(
        istr,
        ("Connection", "Keep-Alive", "Proxy-Connection", "TE", "Trailer", "Transfer-Encoding", "Upgrade"),
    )
)
_NOT_UPSTREAM: Final = (*_HOP_BY_HOP, istr("Host"), istr("Expect"))
_CONNECTION: Final = _HOP_BY_HOP[0]
_VIA: Final = istr("Via")
_FORWARDED_FOR: Final = istr("X-Forwarded-For")
_SERVER: Final = istr("Server")
VIA: Final = "1.1 driftguard"


def to_upstream(headers: CIMultiDictProxy[str], client: str | None) -> CIMultiDict[str]:
    """Of a request; `client` is the address that it came from."""
    passing = _passing(headers, _NOT_UPSTREAM)
    _append(passing, _VIA, VIA)
    if client:
        _append(passing, _FORWARDED_FOR, client)
    return passing


def to_client(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """Of an answer. Without a Server header it would get one that names a library."""
    passing = _passing(headers, _HOP_BY_HOP)
    passing.setdefault(_SERVER, "driftguard")
    return passing


def _append(passing: CIMultiDict[str], name: str, value: str) -> None:
    passing[name] = ", ".join([*passing.getall(name), value]) if name in passing else value


def _passing(headers: CIMultiDictProxy[str], dropped: tuple[istr, ...]) -> CIMultiDict[str]:
    passing = CIMultiDict(headers)
    if _CONNECTION in passing:
        for name in ",".join(passing.getall(_CONNECTION)).split(","):
            passing.popall(name.strip(), None)
    for own in dropped:
        if own in passing:
            del passing[own]
    return passing
