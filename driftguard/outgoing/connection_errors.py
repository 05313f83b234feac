"""The reason of a failed connection, in the words of the operating system."""

from __future__ import annotations

import os

import aiohttp


def why_not_connected(error: aiohttp.ClientConnectorError) -> str:
    """For example: Connection refused; Name or service not known."""
    cause = error.os_error
    if cause.errno is not None and cause.errno > 0:  # failed name look-ups have numbers of their own
        return os.strerror(cause.errno)
    return cause.strerror or str(cause)
