"""The page of the settings shows what differs, and no secret."""

from __future__ import annotations

from pathlib import Path

from driftguard.app import Sidecar, create_app
from driftguard.settings import Settings
from driftguard.store.database import Database
from driftguard.store.keys import create_key, revoke_key
from tests.api.ingest_server import serving

ENGINE = {"server": "chat", "admin_url": "http://10.0.0.7:8100", "api_key": "the-key-of-the-engine"}
RESTARTED = {
    "server": "code",
    "target_directory": "/models/target",
    "draft_directory": "/models/draft",
    "num_speculative_tokens": 4,
}
HOOK = "https://hooks.example.com/services/T0SECRET/B1SECRET"


def test_settings_are_shown_without_their_secrets_and_keys_by_name(
    database: Database, tmp_path: Path
) -> None:
    values = {
        "data_dir": tmp_path,
        "engines": [ENGINE, RESTARTED],
        "alerting": {"webhook_urls": [HOOK]},
        "retraining": {"promote_command": ["/usr/bin/restart", "--token=the-token-of-the-cluster"]},
    }
    with database.session() as session:
        key = create_key(session, "gone")
        create_key(session, "ci")
        revoke_key(session, "gone")
    settings = Settings.model_validate({**values, "database_url": "postgresql://dg:pass-word@db/dg"})
    with serving(create_app(Sidecar(settings, database, "http://sidecar"))) as client:
        page = client.get("/configuration").text
    changed, _, defaults = page.partition("settings with their defaults")
    for told in (
        "alerting.webhook_urls",
        "https://hooks.example.com",
        "engines",
        "http://10.0.0.7:8100",
        "/bin/restart",
    ):
        assert told in changed
    assert "detection.false_alarm_days" in defaults
    for secret in ("T0SECRET", "the-key-of-the-engine", "the-token-of", "pass-word", key):
        assert secret not in page
    keys = page[page.index('aria-labelledby="keys"') :]
    assert keys.index("ci") < keys.index("works")
    assert keys.index("gone") < keys.index("revoked")
