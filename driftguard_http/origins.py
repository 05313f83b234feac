"""Under which host names a server may be reached, and which web pages may send writes to it.

A page of any web site can make a browser send requests to a server on loopback: with a form or a fetch it can
write without reading the answer; with a name that later resolves to 127.0.0.1 (DNS rebinding) it can also
read. Sources: RFC 6454 (Origin); W3C Fetch Metadata (Sec-Fetch-Site).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

SAFE_METHODS: Final = frozenset({"GET", "HEAD"})
_FORWARDING: Final = frozenset(  # RFC 7239, RFC 9110 section 7.6.3, and what came before them
    {b"forwarded", b"via", b"x-forwarded-for", b"x-forwarded-host", b"x-forwarded-proto", b"x-real-ip"}
)
_USUAL_PORTS: Final = {"http": 80, "https": 443}
_SAME_SITE: Final = frozenset({b"same-origin", b"none"})  # none: typed in, or a bookmark


def is_loopback(host: str) -> bool:
    """True for 127.0.0.0/8, ::1 and `localhost`; any other name may resolve to anything."""
    if host.lower() == "localhost":
        return True
    address = _address(host.strip("[]"))
    return address is not None and address.is_loopback


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def is_forwarded(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether a request came through a reverse proxy, by what it adds to the headers, or by a Host that no
    caller on this machine would use. A proxy that hides itself is not noticed."""
    return any(
        name in _FORWARDING or (name == b"host" and value and not is_loopback(_name_of(value)))
        for name, value in headers
    )


def url_of(host: str, port: int) -> str:
    """Of a server that is bound there; an IPv6 address stands in brackets (RFC 3986 section 3.2.2)."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@dataclass(frozen=True, slots=True)
class Origins:
    """`bound`: the address that the server is bound to. `names`: other names under which it is reached.
    `external`: the URL under which people reach it, if it differs, such as that of a reverse proxy.
    `hint`: what to do about a refused name.

    On loopback only its own names are accepted; on another address any name, unless `names` are given: then
    those, and addresses, by which health checks and Prometheus come.
    """

    bound: str
    names: Collection[str] = field(default=())
    external: str | None = None
    hint: str = "see http.allowed_hosts"

    def host_problem(self, host: bytes | None) -> str | None:
        """What is wrong with a request's Host header; None if nothing. HTTP/1.0 needs none."""
        if host is None or not (self.names or is_loopback(self.bound)):
            return None
        name = _name_of(host)
        if is_loopback(name) or (name and name in map(_named, self.names)):
            return None
        if name == self.bound.lower().strip("[]") or (self.external and name == _name_in(self.external)):
            return None
        is_address = _address(name) is not None  # no page of another site has it, see above
        if is_address and not is_loopback(self.bound):
            return None
        return f"Host {host.decode('latin-1')!r} is not a name of this server; {self.hint}"

    def write_problem(self, site: bytes | None, origin: bytes | None, host: bytes | None) -> str | None:
        """What is wrong with a write, by its Sec-Fetch-Site, Origin and Host; None if nothing. Only
        browsers send the first two."""
        if site is not None:
            if site in _SAME_SITE:
                return None
            return f"a page of another site may not write here (Sec-Fetch-Site: {site.decode('latin-1')})"
        if origin is None or self._is_own(origin.decode("latin-1"), host):
            return None
        return f"a page of another site may not write here (Origin: {origin.decode('latin-1')})"

    def _is_own(self, origin: str, host: bytes | None) -> bool:
        if (given := _origin_of(origin)) is None:
            return False
        if self.external is not None and given == _origin_of(self.external):
            return True
        # The scheme is not compared: TLS may end at a proxy in front.
        scheme = origin.partition("://")[0]
        return host is not None and given == _origin_of(f"{scheme}://{host.decode('latin-1')}")


def _name_of(host: bytes) -> str:
    """The host name without port, brackets and trailing dot."""
    try:
        name = urlsplit(f"//{host.decode('latin-1')}").hostname or ""
    except ValueError:
        return ""
    return name.lower().removesuffix(".")


def _named(given: str) -> str:
    """The same of a name in the settings, which may be given as a Host is told: with its port."""
    is_bare_ipv6 = given.count(":") > 1 and not given.startswith("[")
    return given.lower() if is_bare_ipv6 else _name_of(given.encode("latin-1", "replace"))


def _name_in(url: str) -> str:
    return (urlsplit(url).hostname or "").lower()


def _origin_of(url: str) -> tuple[str, str, int | None] | None:
    """Scheme, host in small letters, and port, which browsers leave out where it is the usual one; None where
    there is no host."""
    try:
        parts = urlsplit(url)
        port = parts.port or _USUAL_PORTS.get(parts.scheme)
    except ValueError:
        return None
    return (parts.scheme, parts.hostname, port) if parts.hostname else None
