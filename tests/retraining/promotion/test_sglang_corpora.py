"""An SGLang that drafts by n-grams and takes a new corpus: whatever fails, the run says what serves."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from driftguard_engine.options import BUNDLED
from driftguard_training.lookup import make_corpus
from driftguard_training.settings import CorpusSettings
from sqlalchemy import update

from driftguard.retraining.engines import live_update, sglang_corpora
from driftguard.retraining.promotion.rollback import roll_back
from driftguard.settings import Settings
from driftguard.store import drafts
from driftguard.store.database import Database
from driftguard.store.tables import Draft
from tests.alerting.http_receiver import wait_until
from tests.retraining.promotion.test_restart import Restarts
from tests.retraining.promotion.test_sglang_update import kill
from tests.retraining.restarted import NEW, OLD, SERVER, passed_the_gate, promote, serves
from tests.retraining.sglang_ngram_stub import TOKENIZER, NgramStub
from tests.retraining.sglang_stub import Fault, running
from tests.retraining.world import incident_states

pytestmark = pytest.mark.slow

LOADED = "driftguard:"
TEXTS = {OLD: ["def f():\n    return 1\n", "x = 2"], NEW: ["class A:\n    pass\n"]}
STEPS = [
    "/server_info",
    "/list_external_corpora",
    "/model_info",
    "/add_external_corpus",
    "/remove_external_corpus",
    "/update_weight_version",
]


def corpus(directory: Path, texts: list[str]) -> None:
    train = directory.with_suffix(".jsonl")
    train.parent.mkdir(parents=True, exist_ok=True)
    rows = [
        {"segment": "a", "prompt_token_ids": [1], "output_token_ids": TOKENIZER.encode(text)}
        for text in texts
    ]
    train.write_text("".join(json.dumps(row) + "\n" for row in rows))
    make_corpus(CorpusSettings(BUNDLED / "target", train, directory, as_texts=True))


class Live(Restarts):
    """As Restarts, beside an SGLang that has the corpus OLD of ours, and one of somebody else."""

    def __init__(self, database: Database, directory: Path) -> None:
        super().__init__(database, directory)
        self.directories = {version: directory / "data" / "drafts" / version for version in (OLD, NEW)}
        for version, path in self.directories.items():
            corpus(path, TEXTS[version])
        self.sglang = NgramStub(directory)
        self.has(OLD)

    def has(self, version: str | None) -> None:
        self.sglang.corpora = {"theirs": [[5, 6]]}
        if version is not None:
            texts = [TOKENIZER.encode(text) for text in TEXTS[version]]
            self.sglang.corpora[f"driftguard-{version}"] = texts
            self.sglang.version = LOADED + version

    def served(self) -> list[str]:
        """The corpora of ours, whole."""
        found = self.sglang.corpora
        assert found["theirs"] == [[5, 6]]
        ours = [name.removeprefix("driftguard-") for name in found if name != "theirs"]
        for version in ours:
            texts = [TOKENIZER.decode(ids) for ids in found[f"driftguard-{version}"]]
            assert texts == TEXTS[version]
        return ours

    def settings(self, **retraining: object) -> Settings:
        return super().settings(update_url=self.sglang.url, update_engine="sglang_ngram", **retraining)

    def made(self, settings: Settings) -> Any:
        """As passed_the_gate, where OLD is a corpus that was made here."""
        found = passed_the_gate(self.database, settings)
        with self.database.session() as session:
            old = update(Draft).where(Draft.version == OLD)
            session.execute(
                old.values(directory=str(self.directories[OLD]), method="ngram", retrain_run_id=found.id)
            )
            session.execute(update(Draft).where(Draft.version == NEW).values(method="ngram"))
        return found


@pytest.fixture
def live(database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Live]:
    monkeypatch.setattr(sglang_corpora, "_LOOK_SECONDS", 0.01)
    found = Live(database, tmp_path)
    with running(found.sglang):
        yield found


def test_the_new_corpus_takes_the_place_of_the_one_before_and_its_records_prove_it(live: Live) -> None:
    settings = live.settings()
    made = live.made(settings)
    outcome = promote(live.database, settings, made.id, made.incident_id)
    assert (outcome.state, live.served(), live.sglang.version) == ("rolling_out", [NEW], LOADED + NEW)
    assert live.calls() == []  # no command
    serves(live.database, NEW)
    assert live.settled(settings, made.id) == "watching"
    assert live.run(made.id).reason == "better; loaded without a restart"


@pytest.mark.parametrize("fault", ["refuse", "drop", "lose", "hang"])
@pytest.mark.parametrize("step", STEPS)
def test_one_fault_at_any_step(live: Live, monkeypatch: pytest.MonkeyPatch, step: str, fault: Fault) -> None:
    """The server goes on with one whole corpus of ours, and the run says with which."""
    if fault in ("drop", "hang"):  # for which it is waited
        monkeypatch.setattr(live_update, "ANSWER_SECONDS", 3.0)
        monkeypatch.setattr(live_update, "LOAD_SECONDS", 3.0)
    settings = live.settings()
    made = live.made(settings)
    live.sglang.faults[step] = fault, 0, 1
    outcome = promote(live.database, settings, made.id, made.incident_id)
    took_effect = fault in ("lose", "hang") and step.endswith("_external_corpus")
    if took_effect:
        assert (outcome.state, live.served(), live.sglang.version) == ("rolling_out", [NEW], LOADED + NEW)
        return
    assert (live.served(), live.sglang.version) == ([OLD], LOADED + OLD)
    if (step, fault) == ("/list_external_corpora", "refuse"):  # a version that has no such route
        assert (outcome.state, len(live.calls())) == ("rolling_out", 1)
        return
    assert (outcome.state, live.calls()) == ("failed", [])
    assert step in outcome.reason
    assert "draft v1 was not replaced" in outcome.reason or "draft v1 was put back" in outcome.reason
    assert made.incident_id is not None
    assert incident_states(live.database, made.incident_id)[-1] == "open"
    assert live.unsettled(settings) == []


def test_a_corpus_that_is_loaded_after_its_answer_was_lost_is_waited_for(live: Live) -> None:
    settings = live.settings()
    made = live.made(settings)
    live.sglang.faults["/add_external_corpus"] = "lose", 0, 1
    live.sglang.late = 40
    outcome = promote(live.database, settings, made.id, made.incident_id)
    assert (outcome.state, live.served(), live.sglang.version) == ("rolling_out", [NEW], LOADED + NEW)


def test_the_first_corpus_is_taken_back_to_none(live: Live) -> None:
    live.has(None)
    live.sglang.version = "default"
    settings = live.settings()
    made = live.made(settings)
    with live.database.session() as session:
        nothing = update(Draft).where(Draft.version == OLD)
        session.execute(nothing.values(directory=None, retrain_run_id=None))
    assert promote(live.database, settings, made.id, made.incident_id).state == "rolling_out"
    serves(live.database, NEW)
    assert (live.settled(settings, made.id), live.served()) == ("watching", [NEW])
    roll_back(live.database, settings, server=SERVER, draft_version=NEW, reason="slower")
    assert (live.served(), live.sglang.version) == ([], LOADED + OLD)
    serves(live.database, OLD)
    assert live.settled(settings, made.id) == "rolled_back"


def test_corpora_past_their_retention_go_but_for_those_in_service_and_before(live: Live) -> None:
    settings = live.settings()
    made = live.made(settings)
    assert promote(live.database, settings, made.id, made.incident_id).state == "rolling_out"
    serves(live.database, NEW)
    assert live.settled(settings, made.id) == "watching"
    older = live.directories[OLD].with_name("v0")
    shutil.copytree(live.directories[OLD], older)
    long_ago = datetime.now(UTC) - timedelta(days=settings.retention.captures_days, minutes=1)
    with live.database.session() as session:
        drafts.add_candidate(
            session,
            server=SERVER,
            target="target",
            version="v0",
            method="ngram",
            directory=str(older),
            parent_version="default",
            run_id=made.id,
            at=long_ago,
        )
        session.execute(update(Draft).values(created_at=long_ago))
    live.settled(settings, made.id)
    assert [path.exists() for path in (older, *live.directories.values())] == [False, True, True]
    roll_back(live.database, settings, server=SERVER, draft_version=NEW, reason="slower")
    assert (live.served(), live.sglang.version) == ([OLD], LOADED + OLD)


def test_a_corpus_that_a_gateway_gave_up_waiting_for_is_waited_for(live: Live) -> None:
    settings = live.settings()
    made = live.made(settings)
    live.sglang.faults["/add_external_corpus"] = "gateway", 0, 1
    live.sglang.late = 40
    outcome = promote(live.database, settings, made.id, made.incident_id)
    assert (outcome.state, live.served(), live.sglang.version) == ("rolling_out", [NEW], LOADED + NEW)


def test_a_corpus_that_may_come_late_is_told(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_update, "ANSWER_SECONDS", 1.0)
    settings = live.settings()
    made = live.made(settings)
    live.sglang.faults["/add_external_corpus"] = "lose", 0, 1
    live.sglang.late = 100_000
    outcome = promote(live.database, settings, made.id, made.incident_id)
    assert (outcome.state, live.served(), live.sglang.version) == ("failed", [OLD], LOADED + OLD)
    assert "it may be loaded still, beside the one before" in outcome.reason


@pytest.mark.parametrize(
    ("info", "reason"),
    [
        ({"speculative_algorithm": "EAGLE3"}, "speculative_algorithm is EAGLE3, not NGRAM"),
        ({"speculative_ngram_external_sam_budget": 0}, "without --speculative-ngram-external-sam-budget"),
        ({"tp_size": 2}, "tp_size is 2, and each rank would begin to draft from it at a step of its own"),
    ],
)
def test_a_server_that_would_not_draft_from_a_corpus_is_restarted_instead(
    live: Live, info: dict[str, Any], reason: str
) -> None:
    settings = live.settings()
    made = live.made(settings)
    live.sglang.info = info
    assert promote(live.database, settings, made.id, made.incident_id).state == "rolling_out"
    (call,) = live.calls()
    assert call["DRIFTGUARD_DRAFT_PATH"] == str(live.directories[NEW])
    serves(live.database, NEW)
    assert live.settled(settings, made.id) == "watching"
    assert reason in (live.run(made.id).reason or "")


@pytest.mark.parametrize(
    ("info", "most_tokens", "reason"),
    [
        ({"speculative_ngram_external_sam_budget": 1}, 10_000, "has 1 of others: none is left"),
        ({}, 19, r"more than its 19 \(--speculative-ngram-external-corpus-max-tokens\)"),
    ],
)
def test_a_corpus_for_which_there_is_no_room_is_not_sent(
    live: Live, info: dict[str, Any], most_tokens: int, reason: str
) -> None:
    settings = live.settings()
    made = live.made(settings)
    live.sglang.info, live.sglang.most_tokens = info, most_tokens
    outcome = promote(live.database, settings, made.id, made.incident_id)
    assert (outcome.state, live.served()) == ("failed", [OLD])
    assert re.search(reason, outcome.reason)
    assert "/add_external_corpus" not in live.sglang.calls


def test_files_that_were_changed_are_not_sent(live: Live) -> None:
    settings = live.settings()
    made = live.made(settings)
    texts = live.directories[NEW] / "corpus.jsonl"
    texts.write_text('"something else"\n')
    outcome = promote(live.database, settings, made.id, made.incident_id)
    assert (outcome.state, live.served()) == ("failed", [OLD])
    assert "corpus.jsonl is not as the training wrote it" in outcome.reason


@pytest.mark.parametrize(
    "step", ["/add_external_corpus", "/remove_external_corpus", "/update_weight_version"]
)
def test_killed_while_it_is_replaced(live: Live, tmp_path: Path, step: str) -> None:
    settings = live.settings()
    made = live.made(settings)
    process = kill(live, tmp_path, made.id, step, "sglang_ngram")
    assert process.returncode != 0
    wait_until(lambda: live.unsettled(settings) == [SERVER], "the end of the killed run's lock")
    assert live.settled(settings, made.id) == "rolling_out"
    assert (live.served(), live.sglang.version, live.calls()) == ([NEW], LOADED + NEW, [])
    serves(live.database, NEW)
    assert live.settled(settings, made.id) == "watching"
