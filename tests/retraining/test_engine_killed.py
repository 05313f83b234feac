"""kill -9 of the engine in the middle of a promotion: after its restart engine and database agree."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from driftguard_engine.drafters.state_file import FILE_NAME

from driftguard.retraining.ledger.outcome import RetrainOutcome
from driftguard.retraining.promotion.reconcile import settle
from driftguard.retraining.run import retrain
from driftguard.settings import Settings
from driftguard.store import drafts, retrain_runs
from driftguard.store.tables import RetrainRun
from tests.retraining.conftest import Drifted
from tests.retraining.engine_relay import Moment, RelayedEngine, relaying
from tests.retraining.world import Models, incident_states, make_settings

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("training_here")]


@pytest.fixture
def mortal(models: Models, tmp_path: Path) -> Iterator[RelayedEngine]:
    with relaying(RelayedEngine(models, tmp_path / "state")) as engine:
        yield engine


@pytest.fixture
def settings(mortal: RelayedEngine, tmp_path: Path) -> Settings:
    return make_settings(tmp_path / "data", mortal.url)


def run_of(drifted: Drifted, outcome: RetrainOutcome) -> RetrainRun:
    assert outcome.run_id is not None
    with drifted.database.session() as session:
        run = retrain_runs.find(session, outcome.run_id)
    assert run is not None
    return run


def in_service(drifted: Drifted) -> str:
    """The version that the database believes to be in service."""
    with drifted.database.session() as session:
        draft = drafts.in_service(session, "engine-1", "target")
    assert draft is not None
    return draft.version


def on_disk(engine: RelayedEngine) -> str | None:
    """The version that the engine will serve after its restart; None: the configured one."""
    path = engine.state_dir / FILE_NAME
    return str(json.loads(path.read_text())["version"]) if path.exists() else None


def promotes_again(drifted: Drifted, settings: Settings, engine: RelayedEngine) -> bool:
    before = engine.serving()
    outcome = retrain(drifted.database, settings, force=True)
    assert outcome.state == "promoted", outcome.reason
    run = run_of(drifted, outcome)
    assert (run.state, run.parent_version) == ("watching", before)
    return engine.serving() == in_service(drifted) == on_disk(engine) == run.candidate_version != before


def test_killed_between_load_and_activation_the_old_draft_stays(
    drifted: Drifted, mortal: RelayedEngine, settings: Settings
) -> None:
    mortal.kill_at = "activation asked"
    outcome = retrain(drifted.database, settings)
    assert outcome.state == "failed"
    assert outcome.reason.endswith("the next run asks which draft is in service")
    assert run_of(drifted, outcome).state == "promoting"
    assert on_disk(mortal) is None

    mortal.start()
    settle(drifted.database, settings, "engine-1")
    run = run_of(drifted, outcome)
    assert run.state == "failed"
    assert run.reason == f"interrupted while promoting; draft {drifted.parent} is in service"
    assert mortal.serving() == in_service(drifted) == drifted.parent
    assert incident_states(drifted.database, drifted.incident_id) == ["open", "mitigating", "open"]
    assert promotes_again(drifted, settings, mortal)


def test_killed_after_it_remembered_the_new_draft_the_promotion_counts(
    drifted: Drifted, mortal: RelayedEngine, settings: Settings
) -> None:
    mortal.kill_at = "activation unanswered"
    outcome = retrain(drifted.database, settings)
    assert outcome.state == "failed"
    assert outcome.reason.endswith("the next run asks which draft is in service")
    run = run_of(drifted, outcome)
    assert run.state == "promoting"
    assert on_disk(mortal) == run.candidate_version
    assert in_service(drifted) == drifted.parent  # nobody could tell the sidecar

    mortal.start()
    settle(drifted.database, settings, "engine-1")
    assert run_of(drifted, outcome).state == "watching"
    assert mortal.serving() == in_service(drifted) == run.candidate_version
    assert incident_states(drifted.database, drifted.incident_id) == ["open", "mitigating"]


def test_killed_after_its_answer_it_still_serves_what_it_answered(
    drifted: Drifted, mortal: RelayedEngine, settings: Settings
) -> None:
    mortal.kill_at = "activation answered"
    outcome = retrain(drifted.database, settings)
    assert outcome.state == "promoted"
    run = run_of(drifted, outcome)
    assert run.state == "watching"

    mortal.start()
    assert mortal.serving() == in_service(drifted) == run.candidate_version
    settle(drifted.database, settings, "engine-1")
    assert run_of(drifted, outcome).state == "watching"


@pytest.mark.parametrize(
    ("kill_at", "ending", "state"),
    [("draft loaded", "failed", "failed"), ("activation unanswered", "promoted", "watching")],
)
def test_an_engine_that_is_back_at_once_says_itself_what_it_serves(
    drifted: Drifted, mortal: RelayedEngine, settings: Settings, kill_at: Moment, ending: str, state: str
) -> None:
    mortal.kill_at, mortal.returns_at_once = kill_at, True
    outcome = retrain(drifted.database, settings)
    run = run_of(drifted, outcome)
    assert (outcome.state, run.state) == (ending, state)
    expected = run.candidate_version if state == "watching" else drifted.parent
    assert mortal.serving() == in_service(drifted) == expected
