"""Requests that another server could read differently from this one."""

from __future__ import annotations

import re
from typing import Final

from aiohttp import HttpVersion10, web
from multidict import istr

from driftguard.proxy.headers import UNREADABLE

_HOST: Final = re.compile(r"(?:\[[0-9A-Za-z:.%_~-]+\]|[0-9A-Za-z._~!$&'()*+,;=%-]*)(?::[0-9]*)?")
_HOST_NAME: Final = istr("Host")
_CODING: Final = istr("Transfer-Encoding")


def ambiguity_of(request: web.BaseRequest) -> str | None:
    """What is wrong with it; None if nothing. The parser has already refused contradictory lengths.

    Sources: RFC 9112 §3.2 (Host; a target has no fragment), §6.1 (Transfer-Encoding).
    """
    headers = request.headers
    if _CODING in headers:
        if request.version <= HttpVersion10:
            return "HTTP/1.0 has no Transfer-Encoding"
        if [coding.lower() for coding in headers.getall(_CODING)] != ["chunked"]:
            return "this proxy supports no Transfer-Encoding but chunked"
    if _HOST.fullmatch(headers.get(_HOST_NAME, "")) is None:
        return "Host is not a name or an address"
    if any(UNREADABLE.search(value) for value in headers.values()):
        return "a header is not UTF-8"
    if "#" in request.raw_path:
        return "a request target must not have a fragment"
    return None
