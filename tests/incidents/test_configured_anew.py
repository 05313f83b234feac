"""Servers whose verification rule or adaptivity is set anew, with the draft and the traffic they had."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from driftguard.records.documents.incident import IncidentDiagnosis
from driftguard.retraining.due import why_not
from driftguard.store.database import Database
from tests.incidents.server import Server, Setup
from tests.incidents.test_diagnosing import capture, known

SHARES = {"german": 1.0}
TOKEN = Setup({"german": 0.8}, SHARES, temperature=1.0, verification="token")
BLOCK = replace(TOKEN, later=0.9, verification="block")
ADAPTIVE = replace(TOKEN, k=5, adapts_k=True)


@pytest.mark.parametrize(
    ("old", "new"),
    [(BLOCK, TOKEN), (TOKEN, BLOCK), (TOKEN, ADAPTIVE), (ADAPTIVE, TOKEN)],
    ids=["block to token", "token to block", "adaptive K on", "adaptive K off"],
)
def test_another_rule_or_adaptivity_alone_is_no_fall(database: Database, old: Setup, new: Setup) -> None:
    server = Server(database, 81)
    server.send(800, old)
    server.pause(1)
    server.send(800, new)
    assert server.falls() == []
    server.send(200, replace(new, first={"german": 0.5}))  # and it is watched as before
    assert server.fall().state == "open"


def test_what_is_not_told_is_token_by_token(database: Database) -> None:
    """So that a program that begins to tell it keeps its baseline."""
    server = Server(database, 82)
    server.send(800, replace(TOKEN, verification="unknown"))
    server.send(200, replace(TOKEN, first={"german": 0.5}))
    assert server.fall().state == "open"


def fallen(database: Database, since: Setup) -> IncidentDiagnosis:
    """Verified token by token again after a long time by blocks, with less accepted than by the same rule
    before; other prompts come as well."""
    server = Server(database, 83)
    server.send(800, TOKEN)
    server.send(3_000, BLOCK)
    changed_at = server.traffic.clock
    capture(database, changed_at - timedelta(minutes=5), (0, 300), 60, seed=1)
    capture(database, changed_at + timedelta(seconds=5), (500, 800), 60, seed=2)
    server.send(300, since)
    return known(database, server.fall().id)


def test_a_fall_behind_the_first_position_since_another_rule_is_configuration_and_retrains_nothing(
    database: Database,
) -> None:
    diagnosis = fallen(database, replace(TOKEN, later=0.6))
    assert (diagnosis.cause, diagnosis.confidence, diagnosis.retrain) == ("configuration", "high", False)
    assert diagnosis.summary == "the configuration: the verification rule went from block to token"
    assert "acceptance at position 1, which it leaves alone, changed by" in diagnosis.reason
    assert why_not(diagnosis, "low") is not None


def test_a_fall_at_the_first_position_is_not_of_the_rule_alone(database: Database) -> None:
    diagnosis = fallen(database, replace(TOKEN, first={"german": 0.6}))
    assert (diagnosis.cause, diagnosis.retrain) == ("query_drift", True)
    assert "the verification rule changed as well" in diagnosis.reason
