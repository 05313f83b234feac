"""Names the server of an OTLP resource, by the attributes of the resource."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from uuid import UUID

from driftguard.adapters.window import Identity
from driftguard.records import DEFAULT_SEGMENT

PREFIX: Final = "driftguard."  # of DriftGuard's own names
ADDRESS: Final = ("server.address", "server.port")
INSTANCE: Final = "service.instance.id"
_STABLE: Final = (ADDRESS[0], "service.name")
_NOT_NAMED: Final = "unknown_service"  # what an SDK calls a service that nobody named, for all of them
TARGET: Final = ("driftguard.target", "gen_ai.response.model", "gen_ai.request.model")

# The first attribute that is present.
SOURCES: Final[Mapping[str, tuple[str, ...]]] = {
    "server": ("driftguard.server", INSTANCE, *_STABLE),
    "target": TARGET,
    "draft": ("driftguard.draft",),
    "draft_version": ("driftguard.draft_version",),
    "method": ("driftguard.method",),
    "segment": ("driftguard.segment",),
    "num_speculative_tokens": ("driftguard.num_speculative_tokens",),
}
_KNOWN: Final = {name for names in SOURCES.values() for name in names}


class BadResource(ValueError):
    """{which attribute is missing or wrong}"""


def identity(attributes: Mapping[str, Any]) -> Identity:
    """Raises BadResource."""
    for name in sorted(attributes):
        if name.startswith(PREFIX) and name not in _KNOWN:
            raise BadResource(f"{name}: unknown attribute of a resource")
    lasting = _first(attributes, _STABLE)
    if _is_random(attributes.get(INSTANCE)) and lasting and not str(lasting).startswith(_NOT_NAMED):
        attributes = {name: value for name, value in attributes.items() if name != INSTANCE}
    found = {field: _first(attributes, names) for field, names in SOURCES.items()}
    for field, value in found.items():
        if "\x00" in str(value):
            raise BadResource(f"{field}: the resource's attribute has a NUL character")
    if not found["server"]:
        raise BadResource("the resource names no server; set driftguard.server or service.instance.id")
    return Identity(
        server=str(found["server"]),
        segment=str(found["segment"] or DEFAULT_SEGMENT),
        num_speculative_tokens=_k(found["num_speculative_tokens"]),
        **{field: _text(found[field]) for field in ("target", "draft", "draft_version", "method")},
    )


def _first(attributes: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    name = next((name for name in names if attributes.get(name) not in (None, "")), None)
    if name == ADDRESS[0] and attributes.get(ADDRESS[1]):
        return f"{attributes[ADDRESS[0]]}:{attributes[ADDRESS[1]]}"
    return None if name is None else attributes[name]


def _is_random(instance: Any) -> bool:
    """Whether an SDK made it up at its start, as the semantic conventions recommend: after a restart it would
    be another server, with another baseline. SDKs write hyphens, which ids that last, such as that of a
    machine, often lack."""
    try:
        found = UUID(str(instance))
    except ValueError:
        return False
    return found.version in (1, 4) and str(found) == str(instance).lower()


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _k(value: Any) -> int | None:
    """Attributes from the environment of a collector are text."""
    if value is None:
        return None
    if not (isinstance(value, int | str) and str(value).isdecimal() and 1 <= int(value) <= 1024):
        raise BadResource(
            f"driftguard.num_speculative_tokens: {str(value)[:20]!r} is not a number from 1 to 1024"
        )
    return int(value)
