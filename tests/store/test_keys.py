"""API keys: shown once, stored as digests, revoked for good."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from sqlalchemy import text

from driftguard.errors import BadInput, Conflict, NotFound
from driftguard.store.database import Database
from driftguard.store.keys import (
    add_deployment_key,
    add_key,
    create_key,
    has_keys,
    is_valid,
    list_keys,
    revoke_key,
)


def test_a_key_works_until_it_is_revoked(database: Database) -> None:
    with database.session() as session:
        assert not has_keys(session)
        key = create_key(session, "engine")
    with database.session() as session:
        assert has_keys(session)
        assert is_valid(session, key)
        assert not is_valid(session, key + "x")
        revoke_key(session, "engine")
    with database.session() as session:
        assert not is_valid(session, key)
        assert not has_keys(session)
        assert [(item.name, item.revoked_at is None) for item in list_keys(session)] == [("engine", False)]


def test_the_key_itself_is_nowhere_in_the_database(database: Database) -> None:
    with database.session() as session:
        key = create_key(session, "engine")
        stored = session.scalar(text("SELECT api_keys::text FROM api_keys"))
    assert key.startswith("dg_")
    assert len(key) >= 46
    assert stored is not None
    assert key.removeprefix("dg_") not in stored


def test_names_are_checked(database: Database) -> None:
    with database.session() as session:
        create_key(session, "engine")
        with pytest.raises(Conflict, match="'engine' already"):
            create_key(session, "engine")
        for name in ("", "  ", "x" * 101, "new\nline"):
            with pytest.raises(BadInput, match="name"):
                create_key(session, name)
        with pytest.raises(NotFound, match="'nobody'"):
            revoke_key(session, "nobody")


def test_a_key_made_elsewhere_is_stored_once(database: Database) -> None:
    key = "k" * 32
    with database.session() as session:
        assert add_key(session, "cluster", key)
        assert not add_key(session, "cluster", key)
        assert is_valid(session, key)
        with pytest.raises(Conflict, match="as 'cluster'"):
            add_key(session, "other", key)
        with pytest.raises(Conflict, match="'cluster' already"):
            add_key(session, "cluster", "n" * 32)
        revoke_key(session, "cluster")
        with pytest.raises(Conflict, match="revoked"):
            add_key(session, "cluster", key)
    with database.session() as session:
        assert not is_valid(session, key)


@pytest.mark.parametrize("key", ["", "short", "k" * 31, "with space" * 4, "ü" * 40])
def test_a_key_that_can_be_guessed_or_not_be_sent_is_refused(database: Database, key: str) -> None:
    with database.session() as session, pytest.raises(BadInput, match="key: needs 32"):
        add_key(session, "cluster", key)


def test_a_deployment_may_be_given_another_key(database: Database) -> None:
    """By whatever way its key came in: nobody has to know under which name."""
    first, second, third = "a" * 32, "b" * 32, "c" * 32
    with database.session() as session:
        add_key(session, "cluster-2", third)
        assert add_deployment_key(session, "cluster", first) == ("cluster", True)
        assert add_deployment_key(session, "cluster", first) == ("cluster", False)
        assert add_deployment_key(session, "cluster", second) == ("cluster-3", True)
        assert add_deployment_key(session, "cluster", second) == ("cluster-3", False)
        assert add_deployment_key(session, "cluster", third) == ("cluster-2", False)
        assert all(is_valid(session, key) for key in (first, second, third))
        revoke_key(session, "cluster-3")
        with pytest.raises(Conflict, match="this key was revoked, as 'cluster-3'"):
            add_deployment_key(session, "cluster", second)
        with pytest.raises(BadInput, match="key: needs 32"):
            add_deployment_key(session, "cluster", "short")


def test_pods_that_start_together_store_their_key_once(database: Database) -> None:
    with database.session() as session:
        add_key(session, "cluster", "o" * 32)
    together = threading.Barrier(2)

    def start() -> tuple[str, bool]:
        with database.session() as session:
            is_valid(session, "x" * 32)  # its transaction has begun
            together.wait(30)
            return add_deployment_key(session, "cluster", "n" * 32)

    with ThreadPoolExecutor(2) as pods:
        found = [future.result(60) for future in [pods.submit(start), pods.submit(start)]]
    assert sorted(found) == [("cluster-2", False), ("cluster-2", True)]
