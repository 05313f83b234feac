"""Where notifications go, and by what name the database knows the place."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from typing import Literal

from driftguard.masking import address

_DIGEST_CHARACTERS = 16


def identity(kind: Literal["alertmanager", "webhook"], url: str) -> str:
    """For example webhook:https://hooks.example.com#0a1b2c3d4e5f6789: what may be shown of its address, and a
    digest of all of it, because a password in it must not be stored."""
    return f"{kind}:{address(url)}#{hashlib.sha256(url.encode()).hexdigest()[:_DIGEST_CHARACTERS]}"


def shown(destination: str) -> str:
    """An identity without its digest."""
    return destination.partition("#")[0]


def alertmanagers(urls: Collection[str]) -> list[str]:
    return [identity("alertmanager", url.rstrip("/")) for url in urls]


def identities(alertmanager_urls: Collection[str], webhook_urls: Collection[str]) -> tuple[str, ...]:
    """Of all to which a sidecar posts."""
    return (*alertmanagers(alertmanager_urls), *webhooks(webhook_urls))


def webhooks(urls: Collection[str]) -> list[str]:
    return [identity("webhook", url) for url in urls]
