"""A real llama-server beyond a million draft tokens, where it prints its counters in steps of ten, but for
those of positions: beside the counts of its answers, which are exact.

A random model of one layer that drafts 64 tokens for itself, and keeps what it is told to, gets there in two
minutes. Steps of a hundred and more are imitated, in tests/adapters/test_rounded_counters.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from tests.alerting.http_receiver import wait_until
from tests.engine.server.tiny_models import save_model
from tests.live import clients
from tests.live.processes import Sidecar, sidecar
from tests.live.scraped import is_scraped, scraping
from tests.live.servers import TARGET, Engine, gguf, llama_server, needs_llama, running

pytestmark = [needs_llama, pytest.mark.live, pytest.mark.timeout(900)]

DRAFTED = 64
KEPT = ",".join(f"{0.97**place:.3f}" for place in range(1, DRAFTED + 1))
SPARSE = 30  # scrapes with fewer draft tokens between them than a window needs


@pytest.fixture
def llama(tmp_path: Path) -> Iterator[Engine]:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(TARGET)
    small = gguf(save_model(tmp_path / "small", seed=0, tokenizer=tokenizer, context=1_024), tmp_path)
    told = ["--spec-draft-n-max", str(DRAFTED), "--spec-synth-rates", KEPT]
    with running(llama_server(small, small, tmp_path, *told)) as engine:
        yield engine


class Answers:
    """Counts of all answers until now."""

    def __init__(self, engine: Engine) -> None:
        self.drafted = self.accepted = self._asked = 0
        self.drafted_at: dict[int, int] = {}  # by what was accepted: where no request was under way
        self._url = engine.url

    def ask(self, requests: int, at_once: int = 1) -> None:
        asks = [clients.endless_completion]
        for answer in clients.all_of(asks, self._url, requests, seed=self._asked, at_once=at_once):
            self.drafted += answer["timings"]["draft_n"]
            self.accepted += answer["timings"]["draft_n_accepted"]
            if at_once == 1:
                self.drafted_at[self.accepted] = self.drafted
        self.drafted_at[self.accepted] = self.drafted
        self._asked += requests


def source(beside: Sidecar) -> dict[str, Any]:
    (found,) = beside.get("status")["sources"]
    return dict(found)


def test_each_window_has_the_acceptance_that_the_answers_tell(
    llama: Engine, database_url: str, tmp_path: Path
) -> None:
    answers, details = Answers(llama), set[str]()
    with sidecar(tmp_path / "sidecar", database_url, scraping(llama.url)) as beside:
        wait_until(lambda: is_scraped(beside), "the first scrape")
        while answers.drafted < 1_000_000:
            answers.ask(40, at_once=4)
        at_million = answers.accepted
        while answers.drafted < 1_200_000:
            answers.ask(10)
        before_sparse = answers.accepted
        for _ in range(SPARSE):
            before = source(beside)["scraped_at"]
            answers.ask(1)
            wait_until(lambda: source(beside)["scraped_at"] > before, "the next scrape")  # noqa: B023
            details.add(source(beside)["detail"])
        records = beside.records()

    errors, sparse, last = list[float](), list[int](), (0, 0, 0)
    accepted = drafted = 0  # of all windows until now
    for record in records:
        accepted, drafted = accepted + record.accepted, drafted + record.drafted
        if accepted not in answers.drafted_at:
            assert accepted < at_million, "a window ends amid an answer"
            continue
        now = accepted, drafted, answers.drafted_at[accepted]
        kept, ours, exact = (new - old for new, old in zip(now, last, strict=True))
        errors.append(abs(kept / ours - kept / exact))
        last = now
        if accepted > before_sparse:
            sparse.append(record.drafted)
    print(f"{answers.drafted:,} draft tokens; {len(errors)} windows, largest error {max(errors):.4f}")
    print(f"few requests: windows of {sparse}")
    assert max(errors) < 0.005
    assert len(sparse) >= 5
    assert min(sparse) >= 2_000
    assert answers.drafted - drafted < 3_000  # what is left is no window yet
    (detail,) = details
    assert "6 digits, now in steps of 10 draft tokens: a window has at least 2,000" in detail
