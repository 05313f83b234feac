"""Numbers of single requests, read from the answers of each engine: its own forms, its traps."""

from __future__ import annotations

import json
from typing import Any

import pytest

from driftguard.adapters.answers import llamacpp, sglang, triton, vllm
from driftguard.adapters.answers.counts import AnswerCounts, AnswerUnreadable, SettingNeeded
from driftguard.adapters.answers.openai import has_output
from driftguard.adapters.answers.reading import counts_of, parts_of
from tests.proxy.engines import (
    LLAMACPP_TIMINGS,
    SGLANG_DETAILS,
    TRITON_METRICS,
    TRTLLM_STATISTICS,
    VLLM_SPECULATION,
)


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def _whole(**members: Any) -> AnswerCounts | None:
    return counts_of(parts_of(_json({"choices": [], **members})), num_speculative_tokens=None)


def test_vllm_by_its_own_example() -> None:
    told = _whole(metrics={"speculative_decoding": VLLM_SPECULATION, "mean_itl_ms": 10.0})
    assert told is not None
    assert (told.steps, told.drafted, told.accepted, told.emitted) == (43, 129, 10, 53)
    assert told.accepted / told.drafted == pytest.approx(VLLM_SPECULATION["draft_acceptance_rate"])
    assert told.emitted / told.steps == pytest.approx(VLLM_SPECULATION["mean_acceptance_length"])
    assert told.accepted_per_position == [4, 3, 3]  # 10 in all
    assert told.time_per_output_token_seconds == pytest.approx(0.01)


@pytest.mark.parametrize(
    "metrics", [None, {}, {"speculative_decoding": None}, {"speculative_decoding": None, "mean_itl_ms": 1.0}]
)
def test_vllm_tells_nothing_of_several_sequences_or_without_its_option(metrics: object) -> None:
    assert _whole(metrics=metrics) is None


CACHED = {"prompt_tokens": 40, "completion_tokens": 53, "prompt_tokens_details": {"cached_tokens": 32}}


@pytest.mark.parametrize(
    "members",
    [
        {"usage": CACHED, "metrics": {"speculative_decoding": VLLM_SPECULATION}},
        {"usage": CACHED, "sglext": {"spec_tokens_details": SGLANG_DETAILS}},
        {"meta_info": {**SGLANG_DETAILS, "prompt_tokens": 40, "cached_tokens": 32}},
        {"usage": CACHED, "choices": [{"speculative_decoding": TRTLLM_STATISTICS}]},
        {"timings": {**LLAMACPP_TIMINGS, "cache_n": 32}},
        {"usage": CACHED, "timings": {**LLAMACPP_TIMINGS}},
    ],
)
def test_tokens_from_the_prefix_cache_are_read_where_an_engine_tells_them(members: dict[str, Any]) -> None:
    told = _whole(**members)
    assert told is not None
    assert told.cached_tokens == 32


def test_an_engine_that_tells_no_cached_tokens_is_not_said_to_have_none() -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 50, "prompt_tokens_details": None}
    told = _whole(usage=usage, metrics={"speculative_decoding": VLLM_SPECULATION})
    assert told is not None
    assert told.cached_tokens is None


def test_an_answer_cut_short_emits_no_more_than_it_has_tokens() -> None:
    usage = {"prompt_tokens": 3, "completion_tokens": 50}
    told = vllm.counts_in(_json({"usage": usage, "metrics": {"speculative_decoding": VLLM_SPECULATION}}))
    assert told is not None
    assert told.emitted == 50


def test_sglang_by_its_own_example() -> None:
    told = _whole(sglext={"spec_tokens_details": SGLANG_DETAILS})
    assert told is not None
    assert (told.steps, told.drafted, told.accepted, told.emitted) == (43, 215, 63, 106)
    assert told.accepted_per_position == [32, 18, 7, 3, 3]
    assert sum(told.accepted_per_position) == told.accepted


def test_sglang_by_its_older_names() -> None:
    older = {
        "completion_tokens": 100,
        "spec_verify_ct": 25,
        "prompt_tokens": 50,
        "spec_accept_token_num": 75,
        "spec_draft_token_num": 200,
        "spec_accept_histogram": [0, 0, 5, 15, 5],
    }
    told = sglang.counts_in(_json({"text": "", "meta_info": older}))
    assert told is not None
    assert (told.steps, told.drafted, told.accepted, told.emitted) == (25, 200, 75, 100)
    assert told.accepted_per_position == [25, 25, 20, 5]


@pytest.mark.parametrize("details", [None, {}, {"spec_verify_ct": 0, "spec_num_proposed_drafts": 0}])
def test_sglang_without_a_verification_tells_nothing(details: object) -> None:
    assert _whole(sglext={"spec_tokens_details": details}) is None


def test_tensorrt_llm_by_its_own_example() -> None:
    told = counts_of(
        parts_of(_json({"choices": [{"index": 0, "speculative_decoding": TRTLLM_STATISTICS}]})),
        num_speculative_tokens=None,
    )
    assert told is not None
    assert (told.steps, told.drafted, told.accepted, told.emitted) == (20, 60, 30, 50)
    assert told.num_speculative_tokens == 3
    assert told.accepted_per_position == [12, 12, 6]


def test_llamacpp_by_its_own_example() -> None:
    """200 tokens, the first from the prompt; the other 199 from 134 passes that kept 65 draft tokens."""
    told = _whole(timings=LLAMACPP_TIMINGS)
    assert told is not None
    assert (told.steps, told.drafted, told.accepted, told.emitted) == (134, 347, 65, 199)
    assert told.time_per_output_token_seconds == pytest.approx(0.05541303)


def test_llamacpp_that_drafted_nothing() -> None:
    told = llamacpp.counts_in(_json({"timings": {"predicted_n": 20, "predicted_ms": 1.0}}))
    assert told is not None
    assert (told.steps, told.drafted, told.accepted, told.emitted) == (19, 0, 0, 19)


@pytest.mark.parametrize(
    ("end", "k", "steps"),
    [
        ({"choices": [{"finish_reason": "length"}]}, 4, 1),
        ({"stop_type": "limit"}, 4, 1),
        ({"choices": [{"finish_reason": "stop"}]}, 4, 2),  # it could have drafted in both passes
        ({"choices": [{"finish_reason": "length"}]}, 3, 2),  # four draft tokens need two passes
        ({"choices": [{"finish_reason": "length"}]}, None, 2),
    ],
)
def test_llamacpp_drafts_nothing_where_one_token_is_left(
    end: dict[str, Any], k: int | None, steps: int
) -> None:
    """The first pass keeps four of four, the second makes the last token that was asked for."""
    timings = {"predicted_n": 7, "draft_n": 4, "draft_n_accepted": 4}
    told = llamacpp.counts_in(_json({"timings": timings, **end}), k)
    assert told is not None
    assert (told.steps, told.drafted, told.accepted, told.emitted) == (steps, 4, 4, 4 + steps)


def test_the_last_event_of_a_response_of_llamacpp_has_its_counts() -> None:
    """OpenAI's newer interface: usage and model are inside the response, and named otherwise."""
    usage = {"input_tokens": 12, "output_tokens": 200}
    event = _json({"type": "response.completed", "response": {"usage": usage}, "timings": LLAMACPP_TIMINGS})
    told = counts_of(parts_of(event), None)
    assert told is not None
    assert (told.drafted, told.accepted, told.prompt_tokens, told.output_tokens) == (347, 65, 1, 200)


def test_llamacpp_stopped_inside_an_accepted_run() -> None:
    told = llamacpp.counts_in(_json({"timings": {"predicted_n": 3, "draft_n": 8, "draft_n_accepted": 7}}))
    assert told is not None
    assert (told.steps, told.accepted, told.emitted) == (1, 7, 2)


@pytest.mark.parametrize("write", [str, int])
def test_triton_counts_its_steps_with_k(write: type) -> None:
    answer = {
        name: write(TRITON_METRICS[name]) for name in ("total_draft_tokens", "total_accepted_draft_tokens")
    }
    told = triton.counts_in(_json(answer), 3)
    assert told is not None
    assert (told.steps, told.drafted, told.accepted, told.emitted) == (14, 40, 20, 34)
    with pytest.raises(SettingNeeded, match="num_speculative_tokens"):
        triton.counts_in(_json(answer), None)


def test_triton_tells_when_the_first_token_came() -> None:
    told = triton.counts_in(_json(TRITON_METRICS), 4)
    assert told is not None
    assert told.time_to_first_token_seconds == pytest.approx(0.126554)


@pytest.mark.parametrize(
    "member",
    [
        {"metrics": {"speculative_decoding": {"num_spec_steps": "many"}}},
        {"metrics": []},
        {"sglext": {"spec_tokens_details": {"spec_verify_ct": 1.5}}},
        {"timings": {"draft_n": 1}},
        {"total_draft_tokens": "-3"},
    ],
)
def test_numbers_of_another_form_are_refused_not_guessed(member: dict[str, Any]) -> None:
    with pytest.raises(AnswerUnreadable):
        _whole(**member)


def test_what_the_model_says_is_not_taken_for_numbers() -> None:
    said = '"metrics": {"speculative_decoding": 1}, "timings": {}, "usage":'
    assert parts_of(_json({"choices": [{"text": said}], "usage": None})) == {}


@pytest.mark.parametrize(
    ("event", "has"),
    [
        ({"choices": [{"delta": {"role": "assistant", "content": ""}}]}, False),
        ({"choices": [{"delta": {"content": "a"}}]}, True),
        ({"choices": [{"delta": {"reasoning_content": "a"}}]}, True),
        ({"choices": [{"delta": {"tool_calls": [{"index": 0}]}}]}, True),
        ({"choices": [{"text": "a"}]}, True),
        ({"choices": [], "usage": {}}, False),
        ({"text": "a", "meta_info": {}}, True),
        ({"content": "a", "stop": False}, True),
        ({"text_output": "a"}, True),
        ({"token": {"id": 1, "text": "a"}}, True),
        ({"prompt_progress": {"total": 3}, "choices": []}, False),
        ([], False),
    ],
)
def test_which_events_carry_output(event: object, has: bool) -> None:
    assert has_output(_json(event)) is has
