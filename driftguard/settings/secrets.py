"""Finds every secret in the settings by walking all of them, so that no new setting is forgotten."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from pydantic import BaseModel, SecretStr

from driftguard.masking import MASK, Secrets, secrets_of_url
from driftguard.settings import Settings


def key_given() -> str:
    """DRIFTGUARD_API_KEY, empty where there is none. White space around it, as of a file that ends its line,
    is no part of it."""
    return os.environ.get("DRIFTGUARD_API_KEY", "").strip()


def secrets_of(settings: Settings, *more: str) -> Secrets:
    """`more`: secrets outside of the settings."""
    return Secrets([*_secrets(settings, ""), *more])


def _secrets(value: object, name: str) -> Iterator[str]:
    """`name`: of the setting; if it contains webhook, the path and query of the URL are secrets too."""
    if isinstance(value, BaseModel):
        for field in type(value).model_fields:
            yield from _secrets(getattr(value, field), field)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _secrets(item, name)
    elif isinstance(value, SecretStr):
        yield value.get_secret_value()
        yield from _secrets(value.get_secret_value(), name)
    elif isinstance(value, str) and "://" in value:
        yield from secrets_of_url(value, is_webhook="webhook" in name)


def masked_command(command: Sequence[str]) -> list[str]:
    """Its program, and a mask for each argument: any may be a secret."""
    return [*command[:1], *[MASK] * len(command[1:])]
