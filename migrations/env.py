"""Alembic's environment: migrates over the connection it is given, else over DRIFTGUARD_DATABASE_URL."""

from __future__ import annotations

import os
import re
from typing import Any

from alembic import context
from sqlalchemy import Connection

from driftguard.store.database import Database
from driftguard.store.tables import Base

# Alembic ignores partitions, which the program makes, and procrastinate's tables.
_NOT_OURS = re.compile(r"(records|rollups_1[mhd])_(until_)?\d+|procrastinate_.*|idx_procrastinate_.*")


def include_name(name: str | None, kind: str, _parents: Any) -> bool:
    return kind != "table" or name is None or _NOT_OURS.fullmatch(name) is None


def run(connection: Connection) -> None:
    context.configure(connection=connection, target_metadata=Base.metadata, include_name=include_name)
    with context.begin_transaction():
        context.run_migrations()


given = context.config.attributes.get("connection")
if context.is_offline_mode():
    raise SystemExit("migrations need a database: --sql is not supported")
if given is not None:
    run(given)
else:
    database = Database.open(os.environ["DRIFTGUARD_DATABASE_URL"])
    with database.engine.connect() as opened:
        run(opened)
    database.close()
