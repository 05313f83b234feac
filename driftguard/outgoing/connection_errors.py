"""Why no connection came about, in the system's words."""

from __future__ import annotations

import os

import aiohttp


def why_not_connected(error: aiohttp.ClientConnectorError) -> str:
    """For example: Connection refused; Name or service not known."""
    cause = error.os_error
    if cause.errno is not None and cause.errno > 0:  # names that are not found have numbers of their own
        return os.strerror(cause.errno)
    return cause.strerror or str(cause)
