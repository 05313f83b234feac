"""After a promotion: live records resolve the incident, or bring the old draft back."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import msgspec
import pytest
from sqlalchemy import text
from structlog.testing import capture_logs

from driftguard.api.incident_models import IncidentModel
from driftguard.detection import DetectorConfig
from driftguard.incidents.aftermath import half_recovery
from driftguard.incidents.message import summary
from driftguard.metrics import Metrics
from driftguard.pipeline.fold_loop import Pipeline
from driftguard.records import AcceptanceRecord
from driftguard.records.documents.retraining_run import Watch
from driftguard.retraining.engines.engine_admin import EngineDraft
from driftguard.retraining.ledger.incident_notes import begin_mitigation, end_mitigation
from driftguard.retraining.promotion import watch
from driftguard.retraining.promotion.draft_rows import finish_promotion
from driftguard.retraining.promotion.reconcile import settle
from driftguard.retraining.promotion.watch_hook import watch_promoted
from driftguard.status.gather import gather
from driftguard.store import drafts, incidents, retrain_runs
from driftguard.store.incidents import move
from driftguard.store.tables import RetrainRun
from tests.retraining.conftest import Drifted
from tests.retraining.engine_stub import EngineStub
from tests.retraining.promotion.test_clocks import TWO_HOURS, clock_off_by
from tests.retraining.world import NEW, OLD, incident_of, incident_states, rates, record, store, trained

CANDIDATE = "c4nd1d4te000"


@pytest.fixture
def promoted(drifted: Drifted, engine: EngineStub, tmp_path: Path) -> UUID:
    """The run of a candidate that the engine serves and the database knows to be in service."""
    now = datetime.now(UTC)
    directory = str(tmp_path / "data" / "drafts" / CANDIDATE)
    draft = EngineDraft("draft", CANDIDATE, "draft_model", directory)
    with drifted.database.session() as session:
        drafts.put_in_service(
            session,
            server="engine-1",
            target="target",
            version=drifted.parent,
            name="draft",
            method="draft_model",
            directory=engine.serving["directory"],
            at=now - timedelta(hours=1),
        )
    run = trained(drifted.database, drifted.incident_id, drifted.parent, CANDIDATE, directory, "promoting")
    with drifted.database.session() as session:
        finish_promotion(session, run, draft, now, tolerance=0.02, minimum_drop=0.05)
    engine.serving = {
        "name": "draft",
        "version": CANDIDATE,
        "method": "draft_model",
        "directory": directory,
    }
    engine.loaded = {CANDIDATE: engine.serving}  # the engine has freed the old one
    return run.id


def fold(drifted: Drifted, levels: Sequence[tuple[str, float]], count: int) -> Pipeline:
    """Stores requests of the promoted draft and folds all there is, as the sidecar does."""
    now = datetime.now(UTC)
    mixed = zip(*(rates(level, count) for _, level in levels), strict=True)
    names = [name for name, _ in levels]
    store(
        drifted.database,
        [record(CANDIDATE, name, rate, now) for row in mixed for name, rate in zip(names, row, strict=True)],
    )
    pipeline = Pipeline(
        drifted.database, DetectorConfig(), Metrics(), after_fold=[watch_promoted], batch_records=50
    )
    while pipeline.fold_batch():
        pass
    return pipeline


def the_run(drifted: Drifted, run_id: UUID) -> RetrainRun:
    with drifted.database.session() as session:
        run = retrain_runs.find(session, run_id)
    assert run is not None
    return run


def states(drifted: Drifted) -> dict[str, str]:
    with drifted.database.session() as session:
        return {draft.version: draft.state for draft in drafts.list_page(session, limit=10)}


def test_a_better_draft_resolves_the_incident_with_its_numbers(drifted: Drifted, promoted: UUID) -> None:
    with capture_logs() as logs:
        fold(drifted, [(NEW, 0.76), (OLD, 0.77)], 120)
    incident = incident_of(drifted.database, drifted.incident_id)
    assert incident.state == "resolved"
    assert incident_states(drifted.database, drifted.incident_id)[1:] == [
        "mitigating", "recovered_in_part", "resolved",
    ]  # fmt: skip
    (logged,) = [line for line in logs if line["event"] == "incident resolved"]
    assert (logged["incident"], logged["reason"]) == (str(incident.id), incident.resolution)
    assert incident.resolution is not None
    assert incident.resolution.startswith(
        f"draft {CANDIDATE} promoted: acceptance of german recovered to 0.7"
    )
    assert re.search(r"from 0\.41, was 0\.77: \d% (below|above), over \d+ requests", incident.resolution)
    assert incident.resolution.endswith("watched until 2,000 requests")
    assert the_run(drifted, promoted).state == "watching"


@pytest.mark.parametrize("method", ["suffix", "ngram"])
def test_a_lookup_is_compared_by_all_tokens_that_its_k_allows(
    drifted: Drifted, engine: EngineStub, tmp_path: Path, method: str
) -> None:
    """Without a corpus few tokens were drafted and most of them kept; with one four times as many are kept,
    and far more drafted."""

    def requests(version: str, drafted: int, accepted: int) -> list[AcceptanceRecord]:
        made = []
        for number in range(80):
            row = msgspec.structs.replace(
                record(version, NEW, 0.5, datetime.now(UTC)), method=method, num_speculative_tokens=4
            )
            kept = max(accepted + number % 3 - 1, 0)
            made.append(
                msgspec.structs.replace(row, drafted=drafted + 2, accepted=kept, emitted=kept + row.steps)
            )
        return made

    now = datetime.now(UTC)
    before = incident_of(drifted.database, drifted.incident_id).change_point_at - timedelta(minutes=5)
    store(
        drifted.database,
        [msgspec.structs.replace(one, ended_at=before) for one in requests("no-corpus", 30, 20)],
    )
    store(drifted.database, requests("no-corpus", 4, 4))
    run = trained(drifted.database, drifted.incident_id, "no-corpus", CANDIDATE, str(tmp_path), "promoting")
    with drifted.database.session() as session:
        draft = EngineDraft("corpus", CANDIDATE, method, str(tmp_path))
        finish_promotion(session, run, draft, now, tolerance=0.02, minimum_drop=0.05)
    store(drifted.database, requests(CANDIDATE, 40, 18))
    pipeline = Pipeline(drifted.database, DetectorConfig(), Metrics(), after_fold=[watch_promoted])
    while pipeline.fold_batch():
        pass
    numbers = retrain_runs.numbers_of(the_run(drifted, run.id))
    assert numbers.watch is not None
    (seen,) = numbers.watch.segments
    assert (round(seen.old.mean, 2), round(seen.acceptance or 0, 2)) == (0.05, 0.22)  # of 20 steps, K = 4
    assert (numbers.watch.verdict, seen.shown_better) == ("watching", True)
    assert seen.old.half_from == pytest.approx((0.05 + 0.25) / 2, abs=0.01)
    assert (seen.shown_half, numbers.watch.half) == (True, True)
    assert "was 0." not in (incident_of(drifted.database, drifted.incident_id).resolution or "")


def requests_at(version: str, level: float, k: int, count: int, **changes: Any) -> list[AcceptanceRecord]:
    """Of twenty steps with K drafted tokens each, of which the first is accepted at `level`, about, and each
    further one as often where the one before was."""
    made = []
    for rate in rates(level, count):
        kept = [round(20 * rate**place) for place in range(1, k + 1)]
        counts = {
            "drafted": 20 * k,
            "accepted": sum(kept),
            "emitted": sum(kept) + 20,
            "drafted_per_position": [20] * k,
            "accepted_per_position": kept,
        }
        now = datetime.now(UTC)
        made.append(msgspec.structs.replace(record(version, NEW, 0.5, now), **(counts | changes)))
    return made


def watched_after(drifted: Drifted, requests: Sequence[AcceptanceRecord], tmp_path: Path) -> Watch:
    """What the watch makes of these requests of a promoted draft."""
    run = trained(
        drifted.database, drifted.incident_id, drifted.parent, CANDIDATE, str(tmp_path), "promoting"
    )
    with drifted.database.session() as session:
        draft = EngineDraft("draft", CANDIDATE, "draft_model", str(tmp_path))
        finish_promotion(session, run, draft, datetime.now(UTC), tolerance=0.02, minimum_drop=0.05)
    store(drifted.database, requests)
    pipeline = Pipeline(drifted.database, DetectorConfig(), Metrics(), after_fold=[watch_promoted])
    while pipeline.fold_batch():
        pass
    return retrain_runs.watch_of(the_run(drifted, run.id))


def test_where_k_follows_acceptance_a_draft_is_judged_by_its_first_token(
    drifted: Drifted, tmp_path: Path
) -> None:
    """A better draft drafts more, and less of all that is accepted: .32 instead of .48."""
    store(drifted.database, requests_at(drifted.parent, 0.6, 2, 200))
    seen = watched_after(drifted, requests_at(CANDIDATE, 0.75, 8, 200), tmp_path)
    (german,) = [part for part in seen.segments if part.old.segment == NEW]
    assert (round(german.old.mean, 2), round(german.acceptance or 0, 2)) == (0.6, 0.75)
    assert (seen.verdict, german.shown_better) == ("watching", True)
    told = f"acceptance of the first draft token of {NEW} recovered to 0.75 from 0.60, over 200 requests"
    resolution = incident_of(drifted.database, drifted.incident_id).resolution or ""
    assert told in resolution or told.split(", over", maxsplit=1)[0] in resolution


def test_where_k_follows_acceptance_a_worse_draft_is_found_by_its_first_token(
    drifted: Drifted, tmp_path: Path
) -> None:
    """It drafts less, and more of all that is accepted: .55 instead of .39."""
    store(drifted.database, requests_at(drifted.parent, 0.7, 5, 200))
    seen = watched_after(drifted, requests_at(CANDIDATE, 0.55, 1, 200), tmp_path)
    assert seen.verdict == "worse"
    told = "of the first draft token over"
    assert told in watch.describe(seen, None)


@pytest.mark.parametrize(("before", "after"), [(4, 8), (4, 2)])
def test_requests_at_another_k_than_those_of_the_old_draft_are_not_judged(
    drifted: Drifted, tmp_path: Path, before: int, after: int
) -> None:
    """As where a server is restarted with another K."""
    store(drifted.database, requests_at(drifted.parent, 0.7, before, 200, num_speculative_tokens=before))
    now = requests_at(CANDIDATE, 0.7, after, 200, num_speculative_tokens=after)
    seen = watched_after(drifted, now, tmp_path)
    assert (seen.verdict, seen.requests, seen.unjudged_requests) == ("watching", 0, 200)
    assert not seen.recovered


def test_a_few_lookups_before_the_fall_are_no_level_to_come_back_to(drifted: Drifted, tmp_path: Path) -> None:
    def requests(accepted: int, count: int, at: datetime) -> list[AcceptanceRecord]:
        made = (record("no-corpus", NEW, accepted / 80, at) for _ in range(count))
        return [msgspec.structs.replace(one, method="suffix", num_speculative_tokens=4) for one in made]

    now = datetime.now(UTC)
    before = incident_of(drifted.database, drifted.incident_id).change_point_at - timedelta(minutes=5)
    store(drifted.database, requests(60, 3, before) + requests(4, 40, now))
    run = trained(drifted.database, drifted.incident_id, "no-corpus", CANDIDATE, str(tmp_path), "promoting")
    with drifted.database.session() as session:
        draft = EngineDraft("corpus", CANDIDATE, "suffix", str(tmp_path))
        finish_promotion(session, run, draft, now, tolerance=0.02, minimum_drop=0.05)
    started = retrain_runs.numbers_of(the_run(drifted, run.id)).watch
    assert started is not None
    (seen,) = started.segments
    assert (seen.old.requests, seen.old.over_from, seen.old.half_from) == (40, None, None)


def test_when_half_of_the_fall_was_won_back_is_told(drifted: Drifted, promoted: UUID) -> None:
    """Of 0.77 to 0.41; 0.59 is half of it, and not shown to be more."""
    fold(drifted, [(NEW, 0.59), (OLD, 0.77)], 300)
    incident = incident_of(drifted.database, drifted.incident_id)
    assert incident.state == "recovered_in_part"
    assert half_recovery(incident) is None
    fold(drifted, [(NEW, 0.72), (OLD, 0.77)], 300)
    incident = incident_of(drifted.database, drifted.incident_id)
    half, told = half_recovery(incident), incident.evidence.mitigation
    assert half is not None
    assert told is not None
    assert told.half_at is not None
    assert told.promoted_at is not None
    assert told.recovered is not None
    assert half.since_promoted_seconds == (told.half_at - told.promoted_at).total_seconds() > 0
    assert half.since_confirmed_seconds == (told.half_at - incident.opened_at).total_seconds()
    assert "half of the fall was won back" in half.text
    with drifted.database.session() as session:
        _, stream = incidents.find(session, drifted.incident_id)
        shown = IncidentModel.of(incident, stream).half_recovery
    assert shown == half


def test_half_of_a_small_fall_is_told_of_an_incident_that_was_over_before_it_was_shown(
    drifted: Drifted, promoted: UUID
) -> None:
    """Of 0.61 to 0.41, where 0.2 may be left: 0.41 is over, 0.51 is half."""
    with drifted.database.session() as session:
        run = retrain_runs.find(session, promoted)
        incident, _ = incidents.find(session, drifted.incident_id)
        assert run is not None
        (change,) = incident.segments
        incident.segments = (replace(change, before=replace(change.before, rate=0.61), adjusted=None),)
        serving = EngineDraft("draft", CANDIDATE, "draft_model", "/somewhere")
        finish_promotion(session, run, serving, datetime.now(UTC), tolerance=0.02, minimum_drop=0.2)
    fold(drifted, [(NEW, 0.55), (OLD, 0.77)], 300)
    incident = incident_of(drifted.database, drifted.incident_id)
    told = incident.evidence.mitigation
    assert told is not None
    assert told.half_at is not None
    assert incident.resolved_at is not None
    assert told.half_at > incident.resolved_at


def test_a_segment_that_was_back_or_silent_before_the_promotion_is_not_waited_for(
    drifted: Drifted, tmp_path: Path
) -> None:
    """The old draft had requests of it since the change, and the new one gets none."""
    now = datetime.now(UTC)
    store(drifted.database, [record(drifted.parent, "deutsch", rate, now) for rate in rates(0.77, 60)])
    with drifted.database.session() as session:
        incident, _ = incidents.find(session, drifted.incident_id)
        (fallen,) = incident.segments
        incident.segments = (replace(fallen, segment="deutsch", back_at=now), fallen)
    requests = [record(CANDIDATE, NEW, rate, datetime.now(UTC)) for rate in rates(0.76, 120)]
    seen = watched_after(drifted, requests, tmp_path)
    assert (seen.recovered, seen.over) == (True, True)
    assert incident_of(drifted.database, drifted.incident_id).state == "resolved"


def test_of_a_segment_that_joined_the_incident_the_old_draft_has_its_level_since_its_own_change(
    drifted: Drifted, tmp_path: Path
) -> None:
    """With what it accepted before, a better draft would be rolled back."""
    joined_at = datetime.now(UTC)
    old = [(0.77, joined_at - timedelta(minutes=1)), (0.41, joined_at)]
    for rate, at in old:
        store(drifted.database, [record(drifted.parent, "french", each, at) for each in rates(rate, 60)])
    with drifted.database.session() as session:
        incident, _ = incidents.find(session, drifted.incident_id)
        (fallen,) = incident.segments
        incident.segments = (fallen, replace(fallen, segment="french", since=joined_at))
        incident.change_point_at = joined_at - timedelta(hours=1)
    of_old = {part.old.segment: part.old for part in watched_after(drifted, [], tmp_path).segments}
    assert of_old["french"].requests == 60
    assert of_old["french"].mean == pytest.approx(0.41, abs=0.03)


def test_half_a_recovery_keeps_the_incident_and_says_how_far_it_came(
    drifted: Drifted, promoted: UUID
) -> None:
    """Of a fall from 0.77 to 0.41, 0.59 is half. It was closed after some 20 requests."""
    fold(drifted, [(NEW, 0.59), (OLD, 0.77)], 600)
    incident = incident_of(drifted.database, drifted.incident_id)
    assert (incident.state, incident.resolved_at) == ("recovered_in_part", None)
    with drifted.database.session() as session:
        told = summary(*incidents.find(session, drifted.incident_id))
        history = incidents.transitions(session, drifted.incident_id)[-1].reason
    assert re.search(
        rf"Recovered in part: draft {CANDIDATE} promoted: acceptance of german recovered to 0\.\d\d "
        r"from 0\.41, was 0\.77: \d\d% below, over \d+ requests\.",
        told,
    )
    assert "is being trained" not in told
    assert history.endswith("watched until 2,000 requests")
    with drifted.database.session() as session:
        assert incidents.unresolved_of(session, incident.stream_id, "down"), "its page goes on"


def test_half_a_recovery_is_the_level_from_the_end_of_the_watch_on(drifted: Drifted, promoted: UUID) -> None:
    with clock_off_by(TWO_HOURS):
        fold(drifted, [(NEW, 0.59), (OLD, 0.77)], 1_000)
    incident = incident_of(drifted.database, drifted.incident_id)
    run = the_run(drifted, promoted)
    assert (run.state, run.ended_at and run.ended_at < datetime.now(UTC)) == ("promoted", True)
    assert incident.state == "resolved"
    assert incident.resolution is not None
    assert "recovered to 0.59 from 0.41, was 0.77: 23% below, over 1,000 requests" in incident.resolution
    assert incident.resolution.endswith("; this is its level from now on")
    with drifted.database.session() as session:
        draft = drafts.find(session, "engine-1", "target", CANDIDATE)
    assert draft is not None
    assert incident.evidence.ending is not None
    assert incident.evidence.ending.mitigated_at == draft.promoted_at


def test_a_fall_that_is_no_larger_than_the_smallest_watched_for_is_over_with_a_better_draft(
    drifted: Drifted, promoted: UUID
) -> None:
    """What is left of it is less than `detection.minimum_drop`."""
    with drifted.database.session() as session:
        run = retrain_runs.find(session, promoted)
        incident, _ = incidents.find(session, drifted.incident_id)
        assert run is not None
        (change,) = incident.segments
        small = replace(change, before=replace(change.before, rate=0.44), adjusted=None)
        incident.segments = (small,)
        serving = EngineDraft("draft", CANDIDATE, "draft_model", "/somewhere")
        finish_promotion(session, run, serving, datetime.now(UTC), tolerance=0.02, minimum_drop=0.05)
    fold(drifted, [(NEW, 0.6), (OLD, 0.77)], 60)
    assert incident_of(drifted.database, drifted.incident_id).state == "resolved"


def test_a_draft_that_gets_worse_after_half_a_recovery_is_rolled_back(
    drifted: Drifted, promoted: UUID, engine: EngineStub
) -> None:
    fold(drifted, [(NEW, 0.59), (OLD, 0.77)], 60)
    assert incident_of(drifted.database, drifted.incident_id).state == "recovered_in_part"
    fold(drifted, [(NEW, 0.2), (OLD, 0.3)], 100)
    settle(drifted.database, drifted.settings, "engine-1")
    assert engine.serving["version"] == drifted.parent
    assert incident_states(drifted.database, drifted.incident_id) == [
        "open", "mitigating", "recovered_in_part", "open",
    ]  # fmt: skip
    incident = incident_of(drifted.database, drifted.incident_id)
    assert incident.evidence.mitigation is None


def test_an_acknowledged_incident_is_left_to_the_watch_all_the_same(drifted: Drifted, promoted: UUID) -> None:
    fold(drifted, [(NEW, 0.59), (OLD, 0.77)], 60)
    with drifted.database.session() as session:
        incident = move(session, drifted.incident_id, "acknowledged", "looking", datetime.now(UTC))
        assert incident.is_left_to_retraining
        assert "Recovered in part" in summary(*incidents.find(session, drifted.incident_id))
    fold(drifted, [(NEW, 0.2), (OLD, 0.3)], 100)
    settle(drifted.database, drifted.settings, "engine-1")
    assert incident_states(drifted.database, drifted.incident_id) == [
        "open", "mitigating", "recovered_in_part", "acknowledged",
    ]  # fmt: skip
    assert incident_of(drifted.database, drifted.incident_id).evidence.mitigation is None


def test_what_is_told_of_half_a_recovery_grows_with_the_requests(drifted: Drifted, promoted: UUID) -> None:
    def told() -> int:
        with drifted.database.session() as session:
            found = re.search(
                r"over ([\d,]+) requests", summary(*incidents.find(session, drifted.incident_id))
            )
        assert found is not None
        return int(found[1].replace(",", ""))

    fold(drifted, [(NEW, 0.59), (OLD, 0.77)], 60)
    first = told()
    fold(drifted, [(NEW, 0.59), (OLD, 0.77)], 300)
    assert told() > 4 * first


def test_a_watch_that_an_earlier_version_began_goes_on(drifted: Drifted, promoted: UUID) -> None:
    """Its document knows no baseline: better than the old draft is all that it can show."""
    with drifted.database.session() as session:
        session.execute(
            text(
                "UPDATE retrain_runs SET numbers = jsonb_set(jsonb_set(numbers #- '{watch,over}', "
                "'{watch,segments}', (SELECT jsonb_agg((each - 'over' - 'shown_over') #- '{old,over_from}') "
                "FROM jsonb_array_elements(numbers #> '{watch,segments}') each)), '{watch,requests}', '0') "
                "WHERE id = :id"
            ),
            {"id": promoted},
        )
    fold(drifted, [(NEW, 0.59), (OLD, 0.77)], 60)
    assert incident_of(drifted.database, drifted.incident_id).state == "resolved"


def test_right_after_a_promotion_the_stream_is_watched_and_says_how_far_it_recovered(
    drifted: Drifted, promoted: UUID
) -> None:
    """It said "insufficient data", in amber."""
    fold(drifted, [(NEW, 0.65), (OLD, 0.77)], 60)
    now = datetime.now(UTC)
    with drifted.database.session() as session:
        found = {item.stream.draft_version: item for item in gather(session, now)}
    new = found[CANDIDATE]
    assert new.verdict == "watching"
    assert f"Watching draft {CANDIDATE} since its promotion" in new.text
    assert (
        "acceptance of german recovered to 0.65 from 0.41, was 0.77: 16% below, over 60 requests" in new.text
    )
    assert "nsufficient data" not in new.text
    assert found[drifted.parent].verdict == "replaced"


def test_a_promoted_draft_with_a_baseline_of_its_own_still_says_how_far_it_recovered(
    drifted: Drifted, promoted: UUID
) -> None:
    fold(drifted, [(NEW, 0.65), (OLD, 0.77)], 600)
    assert the_run(drifted, promoted).state == "watching"
    with drifted.database.session() as session:
        (new,) = [item for item in gather(session, datetime.now(UTC)) if item.in_service]
    assert new.verdict == "steady"
    assert "acceptance of german recovered to 0.65 from 0.41, was 0.77: 16% below" in new.text


def test_a_promoted_draft_that_is_no_better_is_watched_and_not_called_recovered(
    drifted: Drifted, promoted: UUID
) -> None:
    fold(drifted, [(NEW, 0.41), (OLD, 0.77)], 60)
    with drifted.database.session() as session:
        (new,) = [item for item in gather(session, datetime.now(UTC)) if item.verdict == "watching"]
    assert "acceptance of german is 0.41, 0.41 with the old draft, was 0.77: 47% below" in new.text
    assert "recovered" not in new.text


def test_before_its_first_request_a_promoted_draft_is_watched_without_numbers(
    drifted: Drifted, promoted: UUID
) -> None:
    """One request, of a segment that the incident did not name."""
    fold(drifted, [(OLD, 0.77)], 1)
    with drifted.database.session() as session:
        (new,) = [item for item in gather(session, datetime.now(UTC)) if item.verdict == "watching"]
    assert "no request of german has been judged yet" in new.text


def test_a_resolved_incident_knows_when_it_was_mitigated(drifted: Drifted, promoted: UUID) -> None:
    fold(drifted, [(NEW, 0.77), (OLD, 0.77)], 60)
    incident = incident_of(drifted.database, drifted.incident_id)
    with drifted.database.session() as session:
        draft = drafts.find(session, "engine-1", "target", CANDIDATE)
    assert draft is not None
    assert incident.evidence.ending is not None
    assert incident.evidence.ending.mitigated_at == draft.promoted_at


def test_a_draft_that_is_no_better_resolves_nothing(drifted: Drifted, promoted: UUID) -> None:
    fold(drifted, [(NEW, 0.41), (OLD, 0.77)], 100)
    incident = incident_of(drifted.database, drifted.incident_id)
    assert incident.state == "mitigating"
    with drifted.database.session() as session:
        told = summary(*incidents.find(session, incident.id))
    assert "is being trained" not in told


def test_in_the_end_the_promotion_stands_and_an_unproven_recovery_asks_people(
    drifted: Drifted, promoted: UUID
) -> None:
    fold(drifted, [(NEW, 0.41), (OLD, 0.77)], 1_000)
    run = the_run(drifted, promoted)
    assert (run.state, run.ended_at is not None) == ("promoted", True)
    assert "live: " in (run.reason or "")
    assert incident_states(drifted.database, drifted.incident_id) == ["open", "mitigating", "open"]
    assert states(drifted)[CANDIDATE] == "in_service"


def test_a_worse_draft_is_rolled_back(drifted: Drifted, promoted: UUID, engine: EngineStub) -> None:
    fold(drifted, [(NEW, 0.2), (OLD, 0.5)], 60)
    assert engine.serving["version"] == CANDIDATE  # the fold itself calls nobody
    settle(drifted.database, drifted.settings, "engine-1")
    assert engine.calls == ["load", "activate"]  # the old draft had left the engine's memory
    assert engine.serving["version"] == drifted.parent
    assert states(drifted) == {CANDIDATE: "rolled_back", drifted.parent: "in_service"}
    run = the_run(drifted, promoted)
    assert run.state == "rolled_back"
    assert "accepted less than the one before it" in (run.reason or "")
    assert "code 0.50 over 10 requests (the old draft: 0.77)" in (run.reason or "")
    assert incident_states(drifted.database, drifted.incident_id) == ["open", "mitigating", "open"]


def test_killed_between_the_rollback_and_its_commit(
    drifted: Drifted, promoted: UUID, engine: EngineStub
) -> None:
    fold(drifted, [(NEW, 0.2), (OLD, 0.5)], 60)
    engine.serving = {**engine.serving, "version": drifted.parent}  # activated, and then the sidecar died
    settle(drifted.database, drifted.settings, "engine-1")
    settle(drifted.database, drifted.settings, "engine-1")  # repeating changes nothing
    assert engine.calls == []
    assert states(drifted) == {CANDIDATE: "rolled_back", drifted.parent: "in_service"}
    assert the_run(drifted, promoted).state == "rolled_back"
    assert incident_states(drifted.database, drifted.incident_id) == ["open", "mitigating", "open"]


def test_a_draft_that_somebody_else_activates_is_followed(
    drifted: Drifted, promoted: UUID, engine: EngineStub
) -> None:
    engine.serving = {**engine.serving, "version": "by-hand"}
    settle(drifted.database, drifted.settings, "engine-1")
    assert states(drifted) == {CANDIDATE: "retired", drifted.parent: "retired", "by-hand": "in_service"}
    run = the_run(drifted, promoted)
    assert run.state == "promoted"
    assert "draft by-hand is in service now" in (run.reason or "")
    assert incident_of(drifted.database, drifted.incident_id).state == "open"


def test_an_acknowledged_incident_becomes_acknowledged_again(drifted: Drifted, engine: EngineStub) -> None:
    now = datetime.now(UTC)
    with drifted.database.session() as session:
        move(session, drifted.incident_id, "acknowledged", "looking", now)
        begin_mitigation(session, drifted.incident_id, "retraining", now)
        end_mitigation(session, drifted.incident_id, "rejected", now)
        end_mitigation(session, drifted.incident_id, "again", now)
    assert incident_states(drifted.database, drifted.incident_id) == [
        "open", "acknowledged", "mitigating", "acknowledged",
    ]  # fmt: skip
