"""The plugin's settings, from the environment of vLLM."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Self

from driftguard.client import protocol

PREFIX: Final = "DRIFTGUARD_VLLM_"
API_KEY: Final = "DRIFTGUARD_API_KEY"
NAMES: Final = ("SIDECAR", "SERVER", "TARGET", "DRAFT", "DRAFT_VERSION", "CAPTURE_FRACTION")


class BadEnvironment(ValueError):
    """The message names the variable."""


@dataclass(frozen=True, slots=True)
class PluginSettings:
    """`target` and `draft` are by default what vLLM serves and speculates with. `capture_fraction`: part of
    the requests whose token ids are sent too."""

    sidecar: str
    server: str
    draft_version: str
    capture_fraction: float = 0.0
    target: str | None = None
    draft: str | None = None
    api_key: str | None = None

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Self | None:
        """None where no sidecar is named: the plugin does nothing then. Raises BadEnvironment."""
        ours = [name for name in environment if name.startswith(PREFIX)]
        given = {name.removeprefix(PREFIX): environment[name] for name in ours}
        if unknown := sorted(set(given) - set(NAMES)):
            known = ", ".join(PREFIX + name for name in NAMES)
            raise BadEnvironment(f"{PREFIX}{unknown[0]} is not known; known are {known}")
        sidecar = given.get("SIDECAR")
        if sidecar is None:
            return None
        try:
            address = protocol.address_of(sidecar)
        except ValueError as error:
            raise BadEnvironment(f"{PREFIX}SIDECAR: {error}") from None
        try:
            protocol.authorities_for(address)
        except ValueError as error:
            raise BadEnvironment(str(error)) from None
        return cls(
            sidecar=sidecar,
            server=given.get("SERVER") or socket.gethostname(),
            draft_version=given.get("DRAFT_VERSION") or "unknown",
            capture_fraction=_fraction(given.get("CAPTURE_FRACTION") or "0"),
            target=given.get("TARGET"),
            draft=given.get("DRAFT"),
            api_key=_key(environment.get(API_KEY)),
        )


def _key(text: str | None) -> str | None:
    try:
        protocol.headers(text)
    except ValueError as error:  # it does not show the key
        raise BadEnvironment(f"{API_KEY}: {error}") from None
    return text


def _fraction(text: str) -> float:
    with suppress(ValueError):
        if 0.0 <= (fraction := float(text)) <= 1.0:
            return fraction
    raise BadEnvironment(f"{PREFIX}CAPTURE_FRACTION is {text!r}: not a number between 0 and 1")
