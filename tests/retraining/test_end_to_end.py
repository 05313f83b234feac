"""The loop with nothing stood in for: engine, training, database and the HTTP between them are real."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import pytest
import torch
from driftguard_engine.options import BUNDLED
from driftguard_training.lookup import make_corpus
from driftguard_training.model_directories import model_version
from driftguard_training.settings import CorpusSettings
from sqlalchemy import update

from driftguard.app import Sidecar, create_app
from driftguard.retraining.promotion.rollback import roll_back
from driftguard.retraining.run import retrain
from driftguard.settings import EngineSettings, Settings
from driftguard.store import drafts, retrain_runs
from driftguard.store.database import Database
from driftguard.store.tables import Stream
from tests.api.ingest_server import serving
from tests.engine.core.eagle3_heads import save_distilled_head
from tests.engine.server.processes import engine_main, serving_process
from tests.retraining.sglang_ngram_stub import NgramStub
from tests.retraining.sglang_stub import running
from tests.retraining.world import NEW, OLD, Models, capture, drift, make_settings, requests_of
from tests.training.small_models import save_directory, small_model, write_traffic

pytestmark = pytest.mark.slow


@contextmanager
def real_engine(models: Models, *drafting: str) -> Iterator[str]:
    """The address of `driftguard engine` as a process."""
    arguments = ["--target", str(models.target), *drafting]
    arguments += ["--server-name", "engine-1", "--port", "0", "--threads", "1"]
    with serving_process(engine_main, arguments) as (_, url, _ready):
        yield url


def complete(address: str) -> dict[str, Any]:
    """One greedy request; its answer with the engine's own counts."""
    body = {"model": "target", "prompt": "t3 t4 t5", "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{address}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    decoded: dict[str, Any] = answer.json()
    return decoded


def drifted(database: Database, models: Models, method: str = "draft_model") -> UUID:
    """The incident of a change of the traffic, captured before and after."""
    parent = model_version(models.draft)
    changed_at = datetime.now(UTC) - timedelta(minutes=5)
    incident_id = drift(database, parent, changed_at)
    capture(database, parent, OLD, requests_of(models.old_traffic), changed_at - timedelta(minutes=2))
    capture(database, parent, NEW, requests_of(models.new_traffic), changed_at + timedelta(seconds=1))
    with database.session() as session:
        session.execute(update(Stream).values(method=method))
    return incident_id


def test_a_drift_ends_with_a_better_draft_in_service(
    database: Database, models: Models, tmp_path: Path
) -> None:
    parent = model_version(models.draft)
    incident_id = drifted(database, models)
    with real_engine(models, "--draft", str(models.draft)) as address:
        before = complete(address)
        settings = make_settings(tmp_path / "data", address)
        outcome = retrain(database, settings, trigger="incident", incident_id=incident_id)
        assert outcome.state == "promoted", outcome.reason
        after = complete(address)
        info = httpx.get(f"{address}/admin/info").json()

    with database.session() as session:
        assert outcome.run_id is not None
        run = retrain_runs.find(session, outcome.run_id)
        serving = drafts.in_service(session, "engine-1", "target")
    assert run is not None
    assert serving is not None
    assert info["draft"]["version"] == serving.version == run.candidate_version != parent
    assert Path(info["draft"]["directory"]) == tmp_path / "data" / "drafts" / serving.version
    # The target decides: another draft changes the speed, never the text.
    assert after["choices"][0]["text"] == before["choices"][0]["text"]


@pytest.fixture(scope="module")
def headed(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """As `models`; the draft is a head that knows the old traffic."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("headed")
    target = small_model(1, layers=2)
    directory = save_directory(root / "target", target)
    old = write_traffic(root / "old.jsonl", target, requests=120, seed=4, tokens=(1, 16))
    texts = [[*prompt, *output] for prompt, output in requests_of(old)]
    return Models(
        target=directory,
        draft=Path(save_distilled_head(root / "head", directory, texts)),
        new_traffic=write_traffic(root / "new.jsonl", target, requests=200, seed=3, tokens=(16, 32)),
        old_traffic=old,
    )


def test_a_drift_of_a_head_ends_with_a_better_head_in_service_to_be_watched_and_rolled_back(
    database: Database, headed: Models, tmp_path: Path
) -> None:
    parent = model_version(headed.draft)
    incident_id = drifted(database, headed, "eagle3")
    drafting = ("--drafter", "eagle3", "--draft", str(headed.draft))
    with real_engine(headed, *drafting) as address:
        before = complete(address)
        settings = make_settings(tmp_path / "data", address, steps=150)
        outcome = retrain(database, settings, trigger="incident", incident_id=incident_id)
        assert outcome.state == "promoted", outcome.reason
        assert "accepted per draft token at K = 4 expected to go from" in outcome.reason
        serving = httpx.get(f"{address}/admin/info").json()["draft"]
        after = complete(address)
        with database.session() as session:
            assert outcome.run_id is not None
            run = retrain_runs.find(session, outcome.run_id)
            assert run is not None
            assert (run.state, run.candidate_version) == ("watching", serving["version"])
        returned = roll_back(
            database, settings, server="engine-1", draft_version=serving["version"], reason="slower"
        )
        assert httpx.get(f"{address}/admin/info").json()["draft"]["version"] == returned.version == parent
    assert serving["method"] == returned.method == "eagle3"
    assert Path(serving["directory"]) == tmp_path / "data" / "drafts" / serving["version"]
    assert after["choices"][0]["text"] == before["choices"][0]["text"]


def repeated_traffic(database: Database, models: Models, version: str) -> UUID:
    """The incident of a change after which the same answers come again and again."""
    changed_at = datetime.now(UTC) - timedelta(minutes=5)
    incident_id = drift(database, version, changed_at)
    capture(
        database, version, NEW, requests_of(models.new_traffic)[:50] * 4, changed_at + timedelta(seconds=1)
    )
    return incident_id


@pytest.mark.parametrize(("drafter", "plain"), [("suffix", "no-corpus"), ("ngram", "ngram-2-4")])
def test_a_drift_of_lookups_ends_with_a_corpus_in_service_and_is_rolled_back(
    database: Database, models: Models, tmp_path: Path, drafter: str, plain: str
) -> None:
    with real_engine(models, "--drafter", drafter) as address:
        parent = httpx.get(f"{address}/admin/info").json()["draft"]
        assert (parent["version"], parent["method"]) == (plain, drafter)
        incident_id = repeated_traffic(database, models, parent["version"])
        before = complete(address)
        settings = make_settings(tmp_path / "data", address)
        outcome = retrain(database, settings, trigger="incident", incident_id=incident_id)
        assert outcome.state == "promoted", outcome.reason
        assert "no group regressed" in outcome.reason
        assert "accepted of 4 draft tokens a step expected to go from" in outcome.reason
        serving = httpx.get(f"{address}/admin/info").json()["draft"]
        again = retrain(database, settings, force=True)
        after = complete(address)
        roll_back(database, settings, server="engine-1", draft_version=serving["version"], reason="slower")
        assert httpx.get(f"{address}/admin/info").json()["draft"] == parent
    assert serving["method"] == drafter
    assert Path(serving["directory"]) == tmp_path / "data" / "drafts" / serving["version"]
    assert (again.state, again.reason) == (
        "failed",
        f"the training changed nothing: the candidate equals draft {serving['version']}",
    )
    assert after["choices"][0]["text"] == before["choices"][0]["text"]


def test_a_drift_of_a_hybrid_ends_with_another_corpus_beside_its_model_and_is_rolled_back(
    database: Database, models: Models, tmp_path: Path
) -> None:
    corpus = make_corpus(CorpusSettings(models.target, models.old_traffic, tmp_path / "corpus"))
    drafting = ("--drafter", "hybrid", "--draft", str(models.draft), "--corpus", str(tmp_path / "corpus"))
    with real_engine(models, *drafting) as address:
        parent = httpx.get(f"{address}/admin/info").json()["draft"]
        assert parent["version"] == f"{model_version(models.draft)}+{corpus['version']}"
        incident_id = repeated_traffic(database, models, parent["version"])
        before = complete(address)
        settings = make_settings(tmp_path / "data", address)
        outcome = retrain(database, settings, trigger="incident", incident_id=incident_id)
        assert outcome.state == "promoted", outcome.reason
        assert "accepted of 4 draft tokens a step expected to go from" in outcome.reason
        serving = httpx.get(f"{address}/admin/info").json()["draft"]
        with database.session() as session:
            stored = drafts.in_service(session, "engine-1", "target")
        returned = roll_back(
            database, settings, server="engine-1", draft_version=serving["version"], reason="slower"
        )
        after = httpx.get(f"{address}/admin/info").json()["draft"]
        text = complete(address)
    made = tmp_path / "data" / "drafts" / serving["version"]
    assert (serving["method"], serving["directory"], serving["corpus"]) == (
        "hybrid",
        parent["directory"],
        str(made),
    )
    assert stored is not None
    assert stored.directory == str(made)  # the model is not ours to remove
    assert {**after, "version": returned.version} == parent
    assert text["choices"][0]["text"] == before["choices"][0]["text"]


def test_a_drift_of_an_sglang_that_drafts_by_ngrams_ends_with_a_corpus_in_it(
    database: Database, models: Models, tmp_path: Path
) -> None:
    sglang = NgramStub(tmp_path)
    with running(sglang):
        incident_id = repeated_traffic(database, models, "default")
        settings = make_settings(tmp_path / "data", "http://127.0.0.1:9")
        engine = EngineSettings(
            server="engine-1",
            target_directory=BUNDLED / "target",  # its tokenizer reads the ids of the small models too
            num_speculative_tokens=4,
            update_url=sglang.url,
            update_engine="sglang_ngram",
        )
        settings = settings.model_copy(update={"engines": [engine]})
        with database.session() as session:
            session.execute(update(Stream).values(method="ngram"))
        outcome = retrain(database, settings, trigger="incident", incident_id=incident_id)
        assert outcome.state == "rolling_out", outcome.reason
    with database.session() as session:
        run = retrain_runs.find(session, outcome.run_id) if outcome.run_id else None
    assert run is not None
    assert run.numbers is not None
    assert run.numbers.gate is not None
    assert run.numbers.gate.gain.expected_range() is None
    assert "of the tokens of held-out answers on the changed traffic, the corpus" in run.numbers.gate.reason
    assert list(sglang.corpora) == [f"driftguard-{run.candidate_version}"]
    requests = run.numbers.requests
    assert requests is not None
    assert len(next(iter(sglang.corpora.values()))) == requests.train
    assert sglang.version == f"driftguard:{run.candidate_version}"
    beside = Sidecar(Settings(data_dir=tmp_path / "sidecar"), database, "http://sidecar")
    with serving(create_app(beside)) as client:
        page = client.get(f"/retraining/{run.id}")
    assert page.status_code == 200, page.text
    assert "the corpus and the answer itself tell" in page.text
    assert "Predicted time per token" not in page.text
