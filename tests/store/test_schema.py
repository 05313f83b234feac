"""Migrations, and what an operator reads when the database does not fit."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from urllib.parse import quote
from uuid import uuid4

import psycopg
import pytest
from alembic import command
from sqlalchemy import select, text

from driftguard.errors import BadSettings, DatabaseUnavailable
from driftguard.store import status_queries
from driftguard.store.database import Database, parse_url, upgrade
from driftguard.store.migrations import alembic_config, head_revision
from driftguard.store.records import insert_batches
from driftguard.store.retention import maintain
from driftguard.store.streams import StreamRegistry
from driftguard.store.tables import Base, Record
from tests.conftest import fresh_database
from tests.store.black_hole import black_hole
from tests.store.samples import make_records
from tests.store.test_partitions import NOON, RETENTION


def test_migrations_and_tables_agree(database: Database) -> None:
    maintain(database, NOON, RETENTION)  # partitions must not look like tables to remove
    with database.engine.connect() as connection:
        command.check(alembic_config(connection))


def test_the_check_notices_a_difference(database: Database) -> None:
    with database.session() as session:
        session.execute(text("ALTER TABLE streams DROP COLUMN records_in_other"))
    with database.engine.connect() as connection, pytest.raises(Exception, match="records_in_other"):
        command.check(alembic_config(connection))


def test_an_empty_database_is_behind_and_upgrade_mends_it(empty_database_url: str) -> None:
    database = Database.open(empty_database_url)
    with pytest.raises(DatabaseUnavailable, match=r"no DriftGuard schema yet.*`driftguard db upgrade`"):
        database.check_schema()
    database.upgrade()
    database.check_schema()
    database.close()


def test_an_older_revision_is_behind(database: Database) -> None:
    with database.session() as session:
        session.execute(text("DELETE FROM alembic_version"))
    with pytest.raises(DatabaseUnavailable, match=f"this version needs {head_revision()}"):
        database.check_schema()


def test_an_unknown_revision_is_ahead_and_is_never_touched(database: Database) -> None:
    with database.session() as session:
        session.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    for attempt in (database.check_schema, database.upgrade):
        with pytest.raises(DatabaseUnavailable, match=r"9999, which is newer than this version knows"):
            attempt()


def test_upgrades_at_the_same_time_wait_for_each_other(empty_database_url: str) -> None:
    with ThreadPoolExecutor(4) as threads:
        for outcome in [threads.submit(upgrade, empty_database_url) for _ in range(4)]:
            outcome.result()
    database = Database.open(empty_database_url)
    database.check_schema()
    database.close()


def test_every_table_exists(database: Database) -> None:
    with database.session() as session:
        found = set(session.scalars(text("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")))
    assert set(Base.metadata.tables) | {"procrastinate_jobs"} <= found


def test_an_unreachable_database_is_named_without_its_password() -> None:
    database = Database.open("postgresql://me:hunter2@127.0.0.1:1/traffic")
    with pytest.raises(DatabaseUnavailable) as caught:
        database.check_schema()
    assert "database 'traffic' at 127.0.0.1:1" in caught.value.detail
    assert "refused" in caught.value.detail
    assert "hunter2" not in caught.value.detail


def test_a_database_that_is_not_in_utf8_is_refused(postgres_server: str) -> None:
    """It would give some text back as bytes."""
    encoded = "template0 ENCODING 'SQL_ASCII' LOCALE 'C'"
    with contextmanager(fresh_database)(postgres_server, encoded) as url:
        database = Database.open(url)
        with pytest.raises(BadSettings, match=r"encoded in SQL_ASCII.*ENCODING 'UTF8'"):
            database.upgrade()
        database.close()


@pytest.mark.parametrize("url", ["postgres://h/d", "postgresql://h/d", "postgresql+psycopg://h/d"])
def test_usual_urls_are_accepted(url: str) -> None:
    assert parse_url(url).drivername == "postgresql+psycopg"


@pytest.mark.parametrize("url", ["mysql://me:hunter2@h/d", "sqlite:///x.db", "not a url", ""])
def test_other_urls_are_refused_without_showing_them(url: str) -> None:
    with pytest.raises(BadSettings, match="database_url") as caught:
        Database.open(url)
    assert "hunter2" not in caught.value.detail


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:half@hunter2@h/d",
        "postgresql://me:half@hunt/er2@h:1/d",
        "postgresql://me:half@hunt,er2@h:1/d",
    ],
)
def test_an_unescaped_password_is_explained_without_showing_it(url: str) -> None:
    with pytest.raises(BadSettings, match=r"database_url:.*password.*@ as %40") as caught:
        Database.open(url)
    assert "hunt" not in caught.value.detail


@pytest.mark.parametrize(
    "url", ["postgresql://me@h:pw@h/d", "postgresql://me:p%40w@h/a%40b", "postgresql://h/d?user=a@b"]
)
def test_an_at_sign_may_stand_where_it_means_one_thing(url: str) -> None:
    parse_url(url)


def test_an_unknown_option_of_the_url_is_named() -> None:
    with pytest.raises(BadSettings, match=r'database_url: invalid connection option "sslmod"'):
        Database.open("postgresql://me:hunter2@h/d?sslmod=verify-full")


def test_ports_that_do_not_fit_the_hosts_are_told() -> None:
    with pytest.raises(BadSettings, match="database_url: number of hosts and ports don't match"):
        Database.open("postgresql://me@/d?host=one,two,three&port=1,2")


def test_hosts_that_cannot_be_told_from_their_ports_are_refused() -> None:
    with pytest.raises(BadSettings, match=r"database_url: .*host=one,two&port=1,2"):
        Database.open("postgresql://me@/d?host=[::1]:5432&host=[::2]:5432")


@pytest.mark.parametrize("host", ["one%zz", "one%00"])
def test_a_host_among_several_that_cannot_be_decoded_is_told(host: str) -> None:
    with pytest.raises(BadSettings, match=f"database_url: .*percent-encoded.*{host}") as caught:
        Database.open(f"postgresql://me:hunter2@{host},two/d")
    assert "hunter2" not in caught.value.detail


def test_a_url_out_of_a_file_may_end_in_a_newline() -> None:
    assert parse_url(" postgresql://me:pw@h/d\n") == parse_url("postgresql://me:pw@h/d")


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("postgresql://u@/d?host=/run/pg&port=6543", "database 'd' at /run/pg:6543"),
        ("postgresql://u@/d?host=one:1&host=two:2", "database 'd' at one:1, two:2"),
        ("postgresql://u@/d?host=one,two&port=1,2", "database 'd' at one:1, two:2"),
        ("postgresql://u@/d?host=one,two&port=6543", "database 'd' at one:6543, two:6543"),
        ("postgresql://u@/d?host=one,two", "database 'd' at one:5432, two:5432"),
        ("postgresql://u:p,w@one:1,two:2/d?sslmode=prefer", "database 'd' at one:1, two:2"),
        ("postgresql://u@one,two:2/d", "database 'd' at one:5432, two:2"),
        ("postgresql+psycopg://u@one,two/d", "database 'd' at one:5432, two:5432"),
        ("postgresql://[::1]:1,[::2]:2/d", "database 'd' at ::1:1, ::2:2"),
    ],
)
def test_a_place_named_by_options_is_told(url: str, place: str) -> None:
    assert Database.open(url).place == place


def test_libpq_and_the_pool_find_the_same_of_several_hosts(database_url: str) -> None:
    """Jobs have connections of libpq alone."""
    parsed = parse_url(database_url)
    host, port = parsed.query["host"], parsed.query.get("port", 5432)
    rest = parsed.difference_update_query(["host", "port"])
    several = rest.render_as_string(hide_password=False)
    as_libpq = several.replace("@/", f"@127.0.0.1:1,{quote(str(host), safe='')}:{port}/")
    for url in (f"{several}&host=127.0.0.1:1&host={host}:{port}", as_libpq):
        database = Database.open(url)
        database.check_schema()
        with psycopg.connect(database.libpq_url) as connection:
            assert connection.info.host == host
        database.close()


def test_of_several_hosts_each_is_told_why_it_failed(database_url: str) -> None:
    """The first is down, the second a standby: whoever reads only of the second looks at the wrong one."""
    with black_hole(database_url) as hole:
        parsed = parse_url(hole.url)
        database = Database.open(
            f"postgresql://{parsed.username}@/{parsed.database}?host=127.0.0.1:1&host=127.0.0.1:{parsed.port}"
            "&target_session_attrs=standby"
        )
        with pytest.raises(DatabaseUnavailable) as raised:
            database.check_schema()
        database.close()
    message = str(raised.value)
    assert 'port 1 failed: Connection refused; connection to server at "127.0.0.1"' in message
    assert message.endswith(f"port {parsed.port} failed: server is not in hot standby mode")


def test_a_role_without_rights_is_told_what_it_lacks(postgres_server: str, empty_database_url: str) -> None:
    with _role(postgres_server) as role:
        database = Database.open(_as(role, empty_database_url))
        with pytest.raises(DatabaseUnavailable, match=f"permission denied for schema public.*{role}.*own"):
            database.upgrade()
        database.close()


def test_a_role_that_may_not_see_the_activity_of_the_server_is_enough(
    postgres_server: str, empty_database_url: str
) -> None:
    """Some take that view from all roles."""
    owner, name = parse_url(empty_database_url), parse_url(empty_database_url).database
    with (
        _role(postgres_server) as role,
        psycopg.connect(owner.set(drivername="postgresql").render_as_string(False), autocommit=True) as admin,
    ):
        admin.execute(f'ALTER DATABASE "{name}" OWNER TO {role}'.encode())
        admin.execute("REVOKE SELECT ON pg_stat_activity FROM PUBLIC")
        database = Database.open(_as(role, empty_database_url))
        database.upgrade()
        database.check_schema()
        database.close()
        admin.execute(f'ALTER DATABASE "{name}" OWNER TO CURRENT_USER'.encode())
        admin.execute(f"REASSIGN OWNED BY {role} TO CURRENT_USER".encode())


def test_tables_of_another_role_are_told(postgres_server: str, database_url: str) -> None:
    """As after a restore by a superuser."""
    with _role(postgres_server) as role:
        database = Database.open(_as(role, database_url))
        for attempt in (database.check_schema, database.upgrade):
            with pytest.raises(DatabaseUnavailable, match=f"permission denied for table.*{role}.*own"):
                attempt()
        database.close()


def test_a_missing_schema_is_told(empty_database_url: str) -> None:
    database = Database.open(f"{empty_database_url}&options=-csearch_path%3Dnowhere")
    with pytest.raises(DatabaseUnavailable, match="no schema has been selected to create in"):
        database.upgrade()
    database.close()


@contextmanager
def _role(server_url: str) -> Iterator[str]:
    name = f"role_{uuid4().hex}"
    with psycopg.connect(server_url, autocommit=True) as connection:
        connection.execute(f"CREATE ROLE {name} LOGIN")
        yield name
        connection.execute(f"DROP ROLE {name}")


def _as(role: str, url: str) -> str:
    return parse_url(url).set(username=role).render_as_string(hide_password=False)


@pytest.mark.parametrize(
    "setting",
    [
        "DateStyle = 'German'",
        "IntervalStyle = 'iso_8601'",
        "client_encoding = 'LATIN1'",
        "extra_float_digits = 0",
        "default_transaction_isolation = 'serializable'",
    ],
)
def test_what_a_database_is_set_to_changes_nothing(database_url: str, setting: str) -> None:
    with psycopg.connect(database_url.replace("+psycopg", ""), autocommit=True) as connection:
        connection.execute(f"ALTER DATABASE {connection.info.dbname} SET {setting}")
    database = Database.open(database_url)
    record = make_records(1, segment="日本語", temperature=0.1 + 0.2)[0]
    with database.session() as session:
        insert_batches(session, [[record]], StreamRegistry(), datetime.now(UTC))
    with database.session() as session:
        row = session.scalars(select(Record)).one()
        assert (row.segment, row.ended_at, row.temperature) == ("日本語", record.ended_at, record.temperature)
        assert session.scalar(text("SELECT interval '90 s'")) == timedelta(seconds=90)
        assert session.scalar(text("SHOW transaction_isolation")) == "read committed"
    database.close()


def test_a_query_is_planned_for_what_it_asks_however_often_it_was_asked(database: Database) -> None:
    """A plan for any values reads the records of all streams for those of one, and is kept from then on."""
    with database.session() as session:
        for _ in range(12):
            status_queries.requests_per_day(session, datetime.now(UTC), [1])
        plans = text("SELECT sum(custom_plans), sum(generic_plans) FROM pg_prepared_statements")
        custom, generic = session.execute(plans).one()
        assert custom > 5
        assert generic == 0
        assert session.scalar(text("SHOW jit")) == "off"


def test_times_come_back_in_utc(database: Database) -> None:
    with database.session() as session:
        assert session.scalar(text("SHOW timezone")) == "UTC"
