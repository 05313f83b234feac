"""The file of canary prompts: what is understood, and what each mistake is told as."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import UUID

import pytest

from driftguard.errors import BadInput, Conflict
from driftguard.probes import prompt_set
from driftguard.probes.prompts import MINIMUM_PROMPTS, read_prompts
from driftguard.store import probe_prompts
from driftguard.store.captures import CapturedRequest, insert_captures
from driftguard.store.database import Database

NOW = datetime.now(UTC)
GOOD = [{"prompt": f"question {number}", "segment": "code"} for number in range(MINIMUM_PROMPTS)]


def written(path: Path, *lines: object) -> Path:
    file = path / "prompts.jsonl"
    file.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return file


def test_texts_tokens_and_conversations_are_understood_and_equal_ones_count_once(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi"}]
    file = written(tmp_path, *GOOD, GOOD[0], "", {"prompt_token_ids": [1, 2]}, {"messages": chat})
    prompts = read_prompts(file)
    assert len(prompts) == MINIMUM_PROMPTS + 2
    assert [prompt.body for prompt in prompts[-2:]] == [{"prompt": [1, 2]}, {"messages": chat}]
    assert [prompt.is_chat for prompt in prompts[-2:]] == [False, True]
    assert [prompt.segment for prompt in prompts[-3:]] == ["code", "default", "default"]
    assert read_prompts(file) == prompts  # the same prompt has the same key for ever


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "truncated"),
        ({"promt": "x"}, "unknown field `promt`"),
        ({"segment": "code"}, "needs exactly one of prompt"),
        ({"prompt": "x", "prompt_token_ids": [1]}, "needs exactly one of prompt"),
        ({"prompt": ""}, "prompt: is empty"),
        ({"prompt_token_ids": [3, -1]}, "holds -1"),
        ({"messages": [{"role": "user"}]}, "missing required field `content`"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: object, reason: str) -> None:
    with pytest.raises(BadInput) as caught:
        read_prompts(written(tmp_path, *GOOD, line))
    assert f"prompts.jsonl, line {MINIMUM_PROMPTS + 1}: " in caught.value.detail
    assert reason in caught.value.detail
    assert "\n" not in caught.value.detail


def test_too_few_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="7 different prompts; 8 to 500 are needed"):
        read_prompts(written(tmp_path, *GOOD[1:], GOOD[1]))
    with pytest.raises(BadInput, match="cannot be read"):
        read_prompts(tmp_path / "nowhere.jsonl")


def capture(database: Database, segment: str, lengths: list[int]) -> None:
    captured = [
        CapturedRequest(
            record_id=UUID(int=number + 1_000 * len(segment)),
            server="chat",
            target="target",
            draft_version="v1",
            segment=segment,
            captured_at=NOW - timedelta(seconds=number),
            prompt_token_ids=[number] * length,
            output_token_ids=[1],
        )
        for number, length in enumerate(lengths)
    ]
    with database.session() as session:
        insert_captures(session, captured, max_per_segment=1_000)


def test_a_set_is_chosen_from_captured_traffic_of_every_segment_and_kept(database: Database) -> None:
    capture(database, "code", [5] * 40)
    capture(database, "german", [5] * 4 + [9_000] * 20)
    with database.session() as session:
        made = prompt_set.make(session, "chat", file=None, per_segment=6, is_replacing=False, now=NOW)
    assert [prompt.segment for prompt in made] == ["code"] * 6 + ["german"] * 4  # none of 9,000 tokens
    with database.session() as session:
        stored = probe_prompts.of_server(session, "chat")
        assert [tuple(item) for item in stored] == [(p.key, p.segment, p.body) for p in made]
        with pytest.raises(Conflict, match="--replace"):
            prompt_set.make(session, "chat", file=None, per_segment=6, is_replacing=False, now=NOW)
        again = prompt_set.make(session, "chat", file=None, per_segment=6, is_replacing=True, now=NOW)
    assert again == made
    with database.session() as session:
        assert len(probe_prompts.of_server(session, "chat")) == 10


def test_no_captured_traffic_to_choose_from_says_so(database: Database) -> None:
    with database.session() as session, pytest.raises(BadInput, match=r"capture\.enabled"):
        prompt_set.make(session, "chat", file=None, per_segment=6, is_replacing=False, now=NOW)
