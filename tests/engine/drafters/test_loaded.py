"""Drafts that are loaded, put into service, asked for again and used by requests, in any order."""

from __future__ import annotations

import random

import pytest
from driftguard_engine.core import DraftInfo, InvalidModel
from driftguard_engine.drafters.base import Drafter
from driftguard_engine.drafters.loaded import MOST_NEVER_SERVED, Drafts, LoadedDraft

ACTS = 300


def _draft(number: int, *, has_files: bool = True) -> LoadedDraft:
    directory = f"/drafts/{number}" if has_files else None
    return LoadedDraft(DraftInfo("d", f"v{number}", "draft_model", directory), Drafter(), versions=("own",))


def _load(drafts: Drafts, draft: LoadedDraft) -> None:
    """As the engine does."""
    try:
        if drafts.present(draft.info) is None:
            drafts.make_room()
            drafts.add(draft)
    except InvalidModel:  # one without files has this version
        assert draft.info.version == "v0"


@pytest.mark.parametrize("seed", range(20))
def test_what_requests_use_stays_loaded_and_what_nobody_uses_does_not_pile_up(seed: int) -> None:
    rng = random.Random(seed)
    drafts = Drafts(_draft(0, has_files=seed % 2 == 0))
    requests: list[LoadedDraft] = []
    for _ in range(ACTS):
        act = rng.choice(("begin", "end", "load", "swap"))
        if act == "begin":
            requests.append(drafts.acquire())
        elif act == "end" and requests:
            drafts.release(requests.pop(rng.randrange(len(requests))))
        elif act == "load":
            _load(drafts, _draft(rng.randrange(5)))
        elif act == "swap":
            version = rng.choice(drafts.loaded).version
            drafts.find(version)
            while requests and rng.random() < 0.3:  # requests end while it is saved
                drafts.release(requests.pop())
            assert drafts.swap(version).version == version
        assert drafts.serving in drafts.loaded
        assert all(drafts._loaded[each.info.version] is each for each in requests)
        idle = [
            each
            for each in drafts._loaded.values()
            if not each.users and each is not drafts.in_service and each.info.directory is not None
        ]
        assert len(idle) <= MOST_NEVER_SERVED + 1  # what was in service is kept for the one that asks again
