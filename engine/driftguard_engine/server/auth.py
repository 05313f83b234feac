"""The key that /admin asks for. On a loopback address it is optional, on any other address required."""

from __future__ import annotations

import re
from hashlib import sha256

from driftguard_http import is_loopback

KEY_VARIABLE = "DRIFTGUARD_API_KEY"


class KeyMissing(Exception):
    """host {host}: any address other than loopback needs an API key for /admin; set DRIFTGUARD_API_KEY"""


class InvalidKeyHash(ValueError):
    """api_key_hash: must be the 64 hex digits of a SHA-256"""


class InvalidKey(ValueError):
    """DRIFTGUARD_API_KEY: not a key"""


def key_of(variable: str | None) -> str | None:
    """White space around the key, as of a file that ends its line, is no part of it. Raises InvalidKey,
    without the key: it has characters that no header can hold, so that no record would ever be sent."""
    key = (variable or "").strip()
    if not all("!" <= character <= "~" for character in key):
        raise InvalidKey(
            f"{KEY_VARIABLE}: not a key: it has other characters than letters, digits and signs of ASCII"
        )
    return key or None


def hash_of(key: str) -> str:
    return sha256(key.encode()).hexdigest()


def choose_key_hash(host: str, key: str | None, key_hash: str | None) -> str | None:
    """The hash that /admin checks, or None when no key is needed. Raises KeyMissing, InvalidKeyHash."""
    if key_hash is not None and not re.fullmatch(r"[0-9a-fA-F]{64}", key_hash):
        raise InvalidKeyHash("api_key_hash: must be the 64 hex digits of a SHA-256 (sha256sum of the key)")
    chosen = key_hash.lower() if key_hash else hash_of(key) if key else None
    if chosen is None and not is_loopback(host):
        raise KeyMissing(
            f"host {host}: any address other than loopback needs an API key for /admin; "
            f"set {KEY_VARIABLE} (or --api-key-hash), or bind 127.0.0.1"
        )
    return chosen
