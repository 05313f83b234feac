"""Which headers are passed on (RFC 9110 §7.6.1), and which the proxy sets itself."""

from __future__ import annotations

import re
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
# Bytes that are not UTF-8, as aiohttp reads them; it would leave them out where it writes them.
UNREADABLE: Final = re.compile("[\udc80-\udcff]")


def to_upstream(headers: CIMultiDictProxy[str], client: str | None) -> CIMultiDict[str]:
    """The headers of a request to the upstream; `client`: its source address."""
    passing = _passing(headers, _NOT_UPSTREAM)
    _append(passing, _VIA, VIA)
    if client:
        _append(passing, _FORWARDED_FOR, client)
    return passing


def to_client(headers: CIMultiDictProxy[str]) -> CIMultiDict[str]:
    """The headers of an answer to the client. Without a Server header the library would add its own name."""
    passing = _passing(headers, _HOP_BY_HOP)
    passing.setdefault(_SERVER, "driftguard")
    if any(map(UNREADABLE.search, passing.values())):
        passing = CIMultiDict((name, _from_latin_1(value)) for name, value in passing.items())
    return passing


def _from_latin_1(value: str) -> str:
    """The text of a header that is not UTF-8; the client gets it as that."""
    if UNREADABLE.search(value) is None:
        return value
    return value.encode("utf-8", "surrogateescape").decode("latin-1")


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
