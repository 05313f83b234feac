"""A real vLLM is given other drafts while it answers requests. `-s` prints how long it stood still."""

from __future__ import annotations

import hashlib
import random
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
import torch
from driftguard_training.corpus import prompts
from safetensors.torch import load_file, save_file

from driftguard.records import AcceptanceRecord
from driftguard.retraining.engines.engine_admin import EngineRefused
from driftguard.retraining.engines.order import Order
from driftguard.retraining.engines.vllm_update import VllmUpdate
from driftguard.retraining.training.checksums import digest_of_list
from tests.alerting.http_receiver import wait_until
from tests.live import clients
from tests.live.processes import Sidecar, of_all, sidecar
from tests.live.servers import (
    DRAFT,
    Engine,
    live_updates,
    needs_vllm,
    running,
    speculative_config,
    vllm_server,
    with_plugin,
)

pytestmark = [needs_vllm, pytest.mark.live, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def beside(module_database_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sidecar]:
    with sidecar(tmp_path_factory.mktemp("sidecar"), module_database_url) as found:
        yield found


@pytest.fixture(scope="module")
def vllm(beside: Sidecar, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    engine = vllm_server(tmp_path_factory.mktemp("vllm"), speculative_config(DRAFT))
    with running(live_updates(with_plugin(engine, beside.url))):
        yield engine


def copy_of(draft: Path, directory: Path, change: str) -> Path:
    """`change`: what is done to the weights."""
    shutil.copytree(draft, directory)
    tensors, rng = load_file(draft / "model.safetensors"), torch.Generator().manual_seed(0)
    if change == "noise":
        for name, weight in tensors.items():
            noise = torch.randn(weight.shape, generator=rng) * weight.float().std() / 2
            tensors[name] = (weight + noise).to(weight.dtype)
    elif change == "another shape":
        tensors["model.norm.weight"] = tensors["model.norm.weight"][:64].clone()
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    files = sorted(path for path in directory.iterdir() if path.name != "SHA256SUMS")
    sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (directory / "SHA256SUMS").write_text("".join(sums))
    return directory


def order(path: Path, version: str, previous: Path, previous_version: str) -> Order:
    return Order(
        action="promote",
        run_id=uuid4(),
        server="real",
        target="target",
        method="draft_model",
        draft_path=str(path),
        draft_version=version,
        previous_path=str(previous),
        previous_version=previous_version,
        asked_at=datetime.now(UTC),
    )


def greedy(vllm: Engine, beside: Sidecar) -> tuple[list[str], list[AcceptanceRecord]]:
    """What is answered to always the same twelve prompts, and the records of these requests."""
    known = {record.record_id for record in beside.records()}
    texts = prompts("python", 12, seed=5, characters=clients.CHARACTERS)
    asking = clients.client(vllm.url, "greedy")
    answers = [
        asking.completions.create(model=clients.MODEL, prompt=text, max_tokens=60, temperature=0.0)
        for text in texts
    ]

    def new() -> list[AcceptanceRecord]:
        return [one for one in beside.records() if one.record_id not in known and one.segment == "greedy"]

    wait_until(lambda: len(new()) == len(texts), f"{len(texts)} records")
    return [answer.choices[0].text for answer in answers], new()


def paused(vllm: Engine) -> Any:
    return httpx.get(f"{vllm.url}/is_paused").json()["is_paused"]


def test_a_draft_is_loaded_and_taken_back_and_the_text_stays_the_same(
    vllm: Engine, beside: Sidecar, tmp_path: Path
) -> None:
    live, noisy = VllmUpdate(vllm.url, None, 60.0), copy_of(DRAFT, tmp_path / "noisy", "noise")
    texts, first = greedy(vllm, beside)
    began = time.monotonic()
    live.replace(order(noisy, "v2", DRAFT, "v1"), digest_of_list(noisy))
    print(f"loaded in {time.monotonic() - began:.2f} s")
    assert (live.version(), paused(vllm)) == ("v2", False)
    texts_then, second = greedy(vllm, beside)
    live.replace(order(DRAFT, "v1", noisy, "v2"), None)
    texts_at_last, third = greedy(vllm, beside)
    counts = [of_all(records) for records in (first, second, third)]
    print([f"{one['accepted']} of {one['drafted']}" for one in counts])
    assert texts == texts_then == texts_at_last
    versions = [{record.draft_version for record in records} for records in (first, second, third)]
    assert versions == [{"v1"}, {"v2"}, {"v1"}]
    rates = [one["accepted"] / one["drafted"] for one in counts]
    assert rates[1] < rates[0] / 2
    assert counts[2] == counts[0]


def test_it_accepts_what_a_server_accepts_that_was_started_with_the_draft(
    vllm: Engine, beside: Sidecar, tmp_path: Path
) -> None:
    """All of it was loaded: tied weights, and what vLLM packs for a CPU."""
    live, noisy = VllmUpdate(vllm.url, None, 60.0), copy_of(DRAFT, tmp_path / "noisy", "noise")
    live.replace(order(noisy, "v2", DRAFT, "v1"), digest_of_list(noisy))
    loaded = greedy(vllm, beside)
    live.replace(order(DRAFT, "v1", noisy, "v2"), None)
    with running(with_plugin(vllm_server(tmp_path, speculative_config(noisy)), beside.url)) as other:
        started = greedy(other, beside)
    assert (loaded[0], of_all(loaded[1])) == (started[0], of_all(started[1]))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        ("another shape", r"model\.norm\.weight is \(64,\), not \(128,\); draft v1 was not replaced"),
        ("half a file", r"is not as the training wrote it .*; draft v1 was not replaced"),
    ],
)
def test_what_does_not_fit_is_refused_and_the_draft_serves_on(
    vllm: Engine, beside: Sidecar, tmp_path: Path, damage: str, reason: str
) -> None:
    live, wrong = VllmUpdate(vllm.url, None, 60.0), copy_of(DRAFT, tmp_path / "wrong", damage)
    if damage == "half a file":
        content = (wrong / "model.safetensors").read_bytes()
        (wrong / "model.safetensors").write_bytes(content[: len(content) // 2])
    before = greedy(vllm, beside)
    with pytest.raises(EngineRefused, match=reason):
        live.replace(order(wrong, "v3", DRAFT, "v1"), digest_of_list(wrong))
    after = greedy(vllm, beside)
    assert not paused(vllm)
    assert (after[0], of_all(after[1])) == (before[0], of_all(before[1]))
    assert {record.draft_version for record in after[1]} == {"v1"}
    live.replace(order(DRAFT, "v1", DRAFT, "v1"), None)  # it takes others


def test_requests_go_on_while_drafts_are_loaded(vllm: Engine, beside: Sidecar, tmp_path: Path) -> None:
    """Under way they are of the draft that they began with, and end with the text that they have alone."""
    live, noisy = VllmUpdate(vllm.url, None, 60.0), copy_of(DRAFT, tmp_path / "noisy", "noise")

    def long(text: str) -> Any:
        asked = clients.client(vllm.url, "long")
        return asked.completions.create(
            model=clients.MODEL,
            prompt=text,
            max_tokens=600,
            temperature=0.0,
            extra_body={"ignore_eos": True},
        )

    texts = prompts("python", 4, seed=6, characters=clients.CHARACTERS)
    alone = [long(text).choices[0].text for text in texts]
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(long, text) for text in texts]
        time.sleep(1.0)
        live.replace(order(noisy, "v2", DRAFT, "v1"), digest_of_list(noisy))
        live.replace(order(DRAFT, "v1", noisy, "v2"), None)
        live.replace(order(noisy, "v2", DRAFT, "v1"), digest_of_list(noisy))
        assert not any(job.done() for job in jobs), "they were to be under way"
        together = [job.result().choices[0].text for job in jobs]
    live.replace(order(DRAFT, "v1", noisy, "v2"), None)
    assert together == alone
    wait_until(lambda: len([one for one in beside.records() if one.segment == "long"]) == 8, "the records")
    assert {one.draft_version for one in beside.records() if one.segment == "long"} == {"v1"}


def test_a_session_that_was_left_and_a_pause_are_recovered_from(vllm: Engine, tmp_path: Path) -> None:
    live, noisy = VllmUpdate(vllm.url, None, 60.0), copy_of(DRAFT, tmp_path / "noisy", "noise")
    httpx.post(f"{vllm.url}/start_draft_weight_update").raise_for_status()
    told = {"update_info": {"directory": str(noisy)}}
    httpx.post(f"{vllm.url}/update_weights", json=told).raise_for_status()
    httpx.post(f"{vllm.url}/pause?mode=keep").raise_for_status()
    assert paused(vllm)
    live.recover("v2")
    assert (paused(vllm), live.version()) == (False, "v1")
    live.replace(order(DRAFT, "v1", DRAFT, "v1"), None)
    clients.completion(vllm.url, "import os\n", random.Random(1))
