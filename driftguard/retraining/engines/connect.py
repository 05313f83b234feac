"""The engine of a server: with an admin API, or promoted by a restart."""

from __future__ import annotations

from collections.abc import Callable

from driftguard.retraining.engines.engine_admin import EngineAdmin, engine_of
from driftguard.retraining.engines.restarted_engine import RestartedEngine
from driftguard.settings import Settings
from driftguard.store.database import Database

Engine = EngineAdmin | RestartedEngine


def connect(
    database: Database,
    settings: Settings,
    server: str | None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Engine:
    """The engine of this server. `should_stop` ends the wait for a command or a webhook.

    Raises BadSettings: no such engine.
    """
    engine = engine_of(settings, server)
    if engine.admin_url is None:
        return RestartedEngine(database, engine, settings.retraining, should_stop)
    key = engine.api_key.get_secret_value() if engine.api_key else None
    return EngineAdmin(engine.admin_url, key, engine.server)
