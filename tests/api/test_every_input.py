"""Whatever is sent to any operation: no unexpected error, and an answer that the OpenAPI document has.

The document's own inputs and broken ones, drawn by schemathesis: the same ones in every run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import CheckFunction, not_a_server_error
from schemathesis.specs.openapi.checks import negative_data_rejection, positive_data_acceptance

from driftguard.api.application import http_application
from driftguard.app import Sidecar, create_app
from driftguard.settings import Settings
from driftguard.store.database import Database
from driftguard.store.keys import create_key
from tests.alerting.http_receiver import wait_until
from tests.api.ingest_server import serving
from tests.pipeline.sidecar import post
from tests.pipeline.traffic import Traffic

pytestmark = pytest.mark.slow

EXAMPLES = 10  # of each operation
schema = schemathesis.openapi.from_dict(http_application().openapi())


@schemathesis.serializer("application/x-ndjson", "application/x-protobuf")
def as_it_is(_: schemathesis.SerializationContext, value: object) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode()


@dataclass(frozen=True, slots=True)
class Served:
    """A sidecar that asks for a key, with traffic and an incident."""

    url: str
    key: str
    incident_id: str
    session: requests.Session


@pytest.fixture(scope="module")
def served(module_database_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    database = Database.open(module_database_url)
    with database.session() as unit:
        key = create_key(unit, "test")
    own = Settings.model_validate(
        {
            "data_dir": tmp_path_factory.mktemp("data"),
            "host": "0.0.0.0",  # what it takes itself to be bound to; it is served on loopback
            "capture": {"enabled": True},
            "detection": {"minimum_drop": 0.1, "false_alarm_days": 0.1},
            "engines": [{"server": "chat-eu-1", "admin_url": "http://127.0.0.1:9"}],
        }
    )
    with serving(create_app(Sidecar(own, database, "http://sidecar"))) as client:
        client.headers["Authorization"] = f"Bearer {key}"
        traffic = Traffic(seed=1, start=datetime.now(UTC) - timedelta(minutes=30))
        post(client, traffic.draw(600, {"code": 0.75}) + traffic.draw(200, {"code": 0.4}))
        wait_until(lambda: bool(client.get("/api/v1/incidents").json()["incidents"]), "an incident")
        (incident,) = client.get("/api/v1/incidents").json()["incidents"]
        with requests.Session() as session:
            yield Served(str(client.base_url).rstrip("/"), key, incident["id"], session)
    database.close()


@schema.parametrize()
@settings(max_examples=EXAMPLES, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
def test_no_input_is_answered_by_surprise(case: schemathesis.Case[Any], served: Served) -> None:
    if "incident_id" in case.path_parameters and str(case.path_parameters["incident_id"]) > "8":
        case.path_parameters["incident_id"] = served.incident_id  # else none of them would be found
    excluded: list[CheckFunction] = [
        positive_data_acceptance,  # no schema says that a cursor is of another list, or a time range is empty
        not_a_server_error,  # 502 where the engine is away is told by the document; 500 is checked below
    ]
    if case.method == "GET":
        excluded.append(negative_data_rejection)  # in a query all is text: 13257 is a fine segment
    answer = case.call_and_validate(
        base_url=served.url,
        session=served.session,
        headers={"Authorization": f"Bearer {served.key}"},
        excluded_checks=excluded,
    )
    assert answer.status_code != 500
