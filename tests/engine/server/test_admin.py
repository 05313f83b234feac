"""Admin calls and who may make them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from http import HTTPStatus

import httpx
import pytest
import torch
from driftguard_engine.core import DraftInfo, InvalidModel, UnknownDraft
from driftguard_engine.server.app import ServeOptions
from driftguard_engine.server.auth import (
    InvalidKey,
    InvalidKeyHash,
    KeyMissing,
    choose_key_hash,
    hash_of,
    key_of,
)

from driftguard.retraining.engines.engine_admin import EngineAdmin
from tests.engine.server.fake_engine import FakeEngine
from tests.engine.server.serving import served


def test_info_says_what_serves(client: httpx.Client) -> None:
    draft = {
        "name": "fake-draft",
        "version": "v1",
        "method": "draft_model",
        "directory": "/models/fake-draft",
        "corpus": None,
    }
    found = client.get("/admin/info").json()
    assert found.pop("uptime_seconds") > 0
    assert found == {
        "server": "test",
        "target": "fake-target",
        "target_directory": "/models/fake-target",
        "draft": draft,
        "activated": False,
        "given_up": None,
        "drafts": [draft],
        "speculation": True,
        "num_speculative_tokens": 4,
        "suffix_min_match": 3,
        "threads": torch.get_num_threads(),
        "ngram_tokens": [2, 4],
        "drafting": {
            "adaptive": False,
            "rows": 0,
            "num_speculative_tokens": None,
            "reason": "fixed",
            "seconds_per_step": [],
            "speedup": None,
            "acceptance": None,
        },
        "running": 0,
        "waiting": 0,
        "verification": "token",
        "verify_backend": "reference",
        "verify_fallback": None,
        "loop_fallback": None,
        "ahead": None,
    }


def test_refusals_are_problem_documents(
    client: httpx.Client, fake: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse_load(directory: str, version: str | None = None) -> DraftInfo:
        raise InvalidModel(f"directory: {directory} holds pickled weights", field="directory")

    def refuse_swap(version: str) -> DraftInfo:
        raise UnknownDraft(f"version: no draft {version!r} is loaded", field="version")

    monkeypatch.setattr(fake, "load_draft", refuse_load)
    monkeypatch.setattr(fake, "swap_draft", refuse_swap)
    load = client.post("/admin/drafts", json={"directory": "/evil"})
    assert load.headers["content-type"] == "application/problem+json"
    assert load.status_code == 422
    assert load.json() == {
        "type": "about:blank",
        "title": HTTPStatus(422).phrase,
        "status": 422,
        "detail": "directory: /evil holds pickled weights",
        "code": "invalid_model",
        "field": "directory",
    }
    assert client.post("/admin/drafts/v9/activate").status_code == 404
    body = client.post("/admin/speculation", json={"enabled": "no"})
    assert body.status_code == 422
    assert body.json()["field"] == "enabled"
    assert client.get("/admin/nothing").headers["content-type"] == "application/problem+json"


@pytest.mark.parametrize("version", ["release/2", "a?b", "a#b", "a%2Fb", "v 3"])
def test_a_draft_is_put_into_service_whatever_its_version_is_called(
    client: httpx.Client, fake: FakeEngine, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    monkeypatch.setattr(fake, "swap_draft", lambda name: replace(fake.draft, version=name))
    assert EngineAdmin(str(client.base_url), None).activate(version).version == version


def test_a_draft_gets_no_version_that_no_record_can_hold(
    client: httpx.Client, fake: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sidecar would refuse the records of all requests that it serves."""
    monkeypatch.setattr(fake, "load_draft", lambda directory, version: replace(fake.draft, version=version))
    answer = client.post("/admin/drafts", json={"directory": "/models/draft", "version": "a\0b"})
    assert (answer.status_code, answer.json()["field"]) == (422, "version")
    assert "NUL" in answer.json()["detail"]


@pytest.fixture
def guarded(fake: FakeEngine) -> Iterator[httpx.Client]:
    with served(fake, options=ServeOptions(admin_key_hash=hash_of("secret"))) as client:
        yield client


def test_a_configured_key_guards_admin_only(guarded: httpx.Client) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic secret"}):
        refused = guarded.get("/admin/info", headers=headers)
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"] == "Bearer"
    assert guarded.get("/admin/info", headers={"Authorization": "Bearer secret"}).status_code == 200
    assert guarded.post("/v1/completions", json={"prompt": "a"}).status_code == 200
    assert guarded.get("/metrics").status_code == 200


def test_every_admin_route_is_guarded(guarded: httpx.Client) -> None:
    for path in ("drafts", "drafts/v1/activate", "speculation"):
        assert guarded.post(f"/admin/{path}", json={}).status_code == 401


def test_any_other_address_than_loopback_needs_a_key() -> None:
    for host in ("0.0.0.0", "::", "192.168.1.5", "example.org"):
        with pytest.raises(KeyMissing, match=f"host {host}: .*DRIFTGUARD_API_KEY"):
            choose_key_hash(host, None, None)
        assert choose_key_hash(host, "secret", None) == hash_of("secret")
    for host in ("127.0.0.1", "127.8.8.8", "::1", "localhost"):
        assert choose_key_hash(host, None, None) is None
    with pytest.raises(InvalidKeyHash, match="64 hex digits"):
        choose_key_hash("127.0.0.1", None, "secret")


def test_a_key_is_taken_without_the_end_of_its_line_and_refused_where_no_header_can_hold_it() -> None:
    assert [key_of(given) for given in (None, "\n", " secret\n")] == [None, None, "secret"]
    for wrong in ("sec\nret", "sec ret", "secr\u00e9t"):
        with pytest.raises(InvalidKey, match="DRIFTGUARD_API_KEY: not a key") as refusal:
            key_of(wrong)
        assert wrong not in str(refusal.value)
