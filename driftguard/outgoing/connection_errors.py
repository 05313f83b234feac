"""The reason of a failed connection, in the words of the operating system or of TLS."""

from __future__ import annotations

import os
import ssl

import aiohttp


def why_not_connected(error: aiohttp.ClientConnectorError) -> str:
    """For example: Connection refused; Name or service not known."""
    cause = error.os_error
    if isinstance(cause, ssl.SSLCertVerificationError):
        told = cause.verify_message.rstrip(".")
        return f"its certificate is not trusted ({told}); SSL_CERT_FILE names whom to trust"
    if isinstance(cause, ssl.SSLError):  # its number is none of the system's
        return f"TLS failed ({(cause.reason or str(cause)).replace('_', ' ').lower()})"
    if cause.errno is not None and cause.errno > 0:  # failed name look-ups have numbers of their own
        return os.strerror(cause.errno)
    return cause.strerror or str(cause)
