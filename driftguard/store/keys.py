"""API keys: shown once, stored as SHA-256 digests (a key is 32 random bytes, so no salt or stretching)."""

from __future__ import annotations

import hashlib
import secrets
from datetime import UTC, datetime
from itertools import count

from sqlalchemy import exists, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from driftguard.errors import BadInput, Conflict, NotFound
from driftguard.store.tables import ApiKey

PREFIX = "dg_"
_RANDOM_BYTES = 32
_MAX_NAME = 100
_LEAST_CHARACTERS = 32  # of a key made elsewhere: its digest has no salt, so it must be random


def create_key(session: Session, name: str) -> str:
    """Makes a key and returns it; it cannot be shown again. Raises BadInput, Conflict (the name is taken)."""
    key = PREFIX + secrets.token_urlsafe(_RANDOM_BYTES)
    _store(session, name, key)
    return key


def add_key(session: Session, name: str, key: str) -> bool:
    """Stores a key that was made elsewhere. False: it is stored under this name already.

    Raises BadInput (name, key), Conflict (the name or the key is taken, or the key was revoked).
    """
    known = _working_name(session, key)
    if known is None:
        _store(session, name, key)
        return True
    if known != name:
        raise Conflict(f"this key is stored already, as {known!r}")
    return False


def add_deployment_key(session: Session, name: str, key: str) -> tuple[str, bool]:
    """Stores the key of a deployment, which does so at every start and may have been given another one: as
    `name`, or as the first of `name`-2, `name`-3, ... that no other key has. Earlier keys keep working until
    they are revoked. Returns the name under which it is stored, and False where it was stored already.

    Raises BadInput (name, key), Conflict (the key was revoked).
    """
    numbered = name
    numbers = count(2)
    while True:
        if (known := _working_name(session, key)) is not None:  # also of another that starts at this moment
            return known, False
        if _stored(session, numbered, key):
            return numbered, True
        numbered = f"{name}-{next(numbers)}"


def _working_name(session: Session, key: str) -> str | None:
    """The name under which a key made elsewhere is stored. Raises BadInput, Conflict (it was revoked)."""
    if len(key) < _LEAST_CHARACTERS or not key.isascii() or not key.isprintable() or " " in key:
        raise BadInput(f"key: needs {_LEAST_CHARACTERS} or more random ASCII characters without spaces")
    known = session.scalar(select(ApiKey).where(ApiKey.digest == _digest(key)))
    if known is not None and known.revoked_at is not None:
        raise Conflict(f"this key was revoked, as {known.name!r}; make a new one")
    return None if known is None else known.name


def _store(session: Session, name: str, key: str) -> None:
    if not _stored(session, name, key):
        raise Conflict(f"there is a key named {name!r} already; names are never used again")


def _stored(session: Session, name: str, key: str) -> bool:
    """False: the name is taken."""
    if not name.strip() or len(name) > _MAX_NAME or not name.isprintable():
        raise BadInput(f"name: {name!r} does not fit; 1 to {_MAX_NAME} printable characters")
    added = session.execute(
        insert(ApiKey)
        .values(name=name, digest=_digest(key), created_at=datetime.now(UTC))
        .on_conflict_do_nothing(index_elements=["name"])
        .returning(ApiKey.id)
    )
    return added.first() is not None


def revoke_key(session: Session, name: str) -> None:
    """The key stops working at once. Raises NotFound."""
    revoked = session.execute(
        update(ApiKey)
        .where(ApiKey.name == name, ApiKey.revoked_at.is_(None))
        .values(revoked_at=datetime.now(UTC))
        .returning(ApiKey.id)
    )
    if revoked.first() is None:
        raise NotFound(f"there is no working key named {name!r}; `driftguard keys list` shows them")


def list_keys(session: Session) -> list[ApiKey]:
    """All keys, revoked ones too, oldest first."""
    return list(session.scalars(select(ApiKey).order_by(ApiKey.id)))


def has_keys(session: Session) -> bool:
    """True when at least one key works."""
    return bool(session.scalar(select(exists().where(ApiKey.revoked_at.is_(None)))))


def is_valid(session: Session, key: str) -> bool:
    working = exists().where(ApiKey.digest == _digest(key), ApiKey.revoked_at.is_(None))
    return bool(session.scalar(select(working)))


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()
