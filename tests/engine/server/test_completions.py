"""Completions over real HTTP: what is answered, and in which form."""

from __future__ import annotations

import json

import httpx
import pytest

from tests.engine.server import fake_engine
from tests.engine.server.conftest import openai_client
from tests.engine.server.fake_engine import TOKEN_TEXT, FakeEngine, K
from tests.engine.server.serving import served
from tests.engine.server.tiny_models import CHAT_TEMPLATE, byte_tokenizer


def test_defaults_are_openais(client: httpx.Client, fake: FakeEngine) -> None:
    body = client.post("/v1/completions", json={"prompt": "hi"}).raise_for_status().json()
    assert body["object"] == "text_completion"
    assert body["id"].startswith("cmpl-")
    assert body["model"] == "fake-target"
    assert body["choices"] == [
        {"index": 0, "text": TOKEN_TEXT * 16, "logprobs": None, "finish_reason": "length"}
    ]
    assert body["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 16,
        "total_tokens": 18,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    params = fake.seen[0].params
    assert (params.temperature, params.top_p, params.top_k, params.stop) == (1.0, 1.0, 0, ())
    assert params.num_speculative_tokens is None


def test_metrics_have_vllms_form(client: httpx.Client) -> None:
    body = client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 5}).json()
    metrics = body["metrics"]
    assert metrics["speculative_decoding"] == {
        "mean_acceptance_length": 1 + 3 / 5,
        "draft_acceptance_rate": 3 / 10,
        "acceptance_histogram": [2, 3, 0],
        "num_spec_steps": 5,
        "num_accepted_draft_tokens": 3,
        "num_draft_tokens": 10,
        "num_spec_tokens": K,
    }
    assert metrics["time_to_first_token_ms"] == 250
    assert metrics["mean_itl_ms"] == 125


def test_every_form_of_prompt_reaches_the_engine(client: httpx.Client, fake: FakeEngine) -> None:
    hi = tuple(fake.tokenizer.encode("hi"))
    forms: list[tuple[object, list[tuple[int, ...]]]] = [
        ("hi", [hi]),
        (["hi", "hihi"], [hi, hi + hi]),
        ([5, 6], [(5, 6)]),
        ([[5, 6], [7]], [(5, 6), (7,)]),
    ]
    for prompt, expected in forms:
        fake.seen.clear()
        body = client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1}).json()
        assert [request.prompt_token_ids for request in fake.seen] == expected
        assert [choice["index"] for choice in body["choices"]] == list(range(len(expected)))
        assert body["usage"]["prompt_tokens"] == sum(map(len, expected))


def test_choices_have_their_own_seeds_and_count_the_prompt_once(
    client: httpx.Client, fake: FakeEngine
) -> None:
    body = client.post(
        "/v1/completions", json={"prompt": ["hi", "yo"], "n": 2, "seed": 2**63 - 1, "max_tokens": 3}
    ).json()
    assert [request.params.seed for request in fake.seen] == [2**63 - 1, 0, 2**63 - 1, 0]
    assert len({request.request_id for request in fake.seen}) == 4
    assert len({id(request.prompt_token_ids) for request in fake.seen}) == 2  # it may be long
    usage = body["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (4, 12, 16)
    assert body["metrics"]["speculative_decoding"] is None


@pytest.mark.parametrize("given", [{}, {"seed": -1}])
def test_without_a_seed_each_request_draws_another(
    client: httpx.Client, fake: FakeEngine, given: dict[str, int]
) -> None:
    for _ in range(3):
        client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 1} | given)
    assert len({request.params.seed for request in fake.seen}) == 3


def test_a_seed_below_zero_repeats_too(client: httpx.Client, fake: FakeEngine) -> None:
    for seed in (-2, -2, -3):
        client.post("/v1/completions", json={"prompt": "hi", "max_tokens": 1, "seed": seed})
    first, again, other = (request.params.seed for request in fake.seen)
    assert first == again != other
    assert 0 <= first < 2**63


def test_fields_without_effect_are_accepted_at_their_default(client: httpx.Client, fake: FakeEngine) -> None:
    body = {
        "model": "fake-target",
        "prompt": "hi",
        "max_tokens": 1,
        "best_of": 1,
        "echo": False,
        "frequency_penalty": 0.0,
        "presence_penalty": 0,
        "logit_bias": {},
        "logprobs": None,
        "suffix": None,
        "stream_options": None,
        "user": "someone",
        "repetition_penalty": 1.0,
        "length_penalty": 1,
        "min_p": 0.0,
        "min_tokens": 0,
        "stop_token_ids": [],
        "use_beam_search": False,
        "include_stop_str_in_output": False,
        "skip_special_tokens": True,
        "top_k": -1,
        "stop": "x",
        "num_speculative_tokens": 3,
        "ignore_eos": True,
    }
    client.post("/v1/completions", json=body).raise_for_status()
    params = fake.seen[0].params
    assert (params.top_k, params.stop, params.num_speculative_tokens) == (0, ("x",), 3)
    assert params.ignore_eos


def test_segment_and_session_come_from_headers(client: httpx.Client, fake: FakeEngine) -> None:
    headers = {b"X-DriftGuard-Segment": "über".encode(), b"X-DriftGuard-Session": b"s-1"}
    client.post("/v1/completions", json={"prompt": "hi"}, headers=headers).raise_for_status()
    client.post("/v1/completions", json={"prompt": "hi"}).raise_for_status()
    assert [(one.segment, one.session) for one in fake.seen] == [("über", "s-1"), ("default", None)]


def test_an_empty_label_counts_as_none(client: httpx.Client, fake: FakeEngine) -> None:
    """As at the proxy: gateways fill the headers from a value that may be missing."""
    headers = {"X-DriftGuard-Segment": "", "X-DriftGuard-Session": ""}
    client.post("/v1/completions", json={"prompt": "hi"}, headers=headers).raise_for_status()
    assert [(one.segment, one.session) for one in fake.seen] == [("default", None)]


def test_stream_is_server_sent_events_that_end_with_done(client: httpx.Client) -> None:
    body = {"prompt": "hi", "max_tokens": 2, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        frames = response.read().decode().split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]
    assert [chunk["choices"][0]["text"] for chunk in chunks] == [TOKEN_TEXT, TOKEN_TEXT]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, "length"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all("usage" not in chunk and "metrics" not in chunk for chunk in chunks)


def test_an_event_is_one_line_to_clients_for_whom_other_characters_end_lines_too(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As to Python's str.splitlines, and so to the lines of httpx."""
    text = "a\x1c\x85b\u2028\u2029c\\"
    monkeypatch.setattr(fake_engine, "TOKEN_TEXT", text)
    body = {"prompt": "hi", "stream": True, "max_tokens": 1}
    with client.stream("POST", "/v1/completions", json=body) as response:
        (event, end) = (line for line in response.iter_lines() if line)
    assert json.loads(event.removeprefix("data: "))["choices"][0]["text"] == text
    assert end == "data: [DONE]"


def test_openai_client_streams_several_choices_with_usage(client: httpx.Client) -> None:
    stream = openai_client(client).completions.create(
        model="fake-target",
        prompt="hi",
        n=2,
        max_tokens=3,
        stream=True,
        stream_options={"include_usage": True},
    )
    texts = {0: "", 1: ""}
    *chunks, last = list(stream)
    for chunk in chunks:
        assert chunk.usage is None
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {0: TOKEN_TEXT * 3, 1: TOKEN_TEXT * 3}
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 6
    assert last.model_dump()["metrics"] == {"speculative_decoding": None}


def test_usage_chunk_of_one_choice_carries_metrics(client: httpx.Client) -> None:
    stream = openai_client(client).completions.create(
        model="fake-target", prompt="hi", max_tokens=3, stream=True, stream_options={"include_usage": True}
    )
    *_, last = list(stream)
    assert last.model_dump()["metrics"]["speculative_decoding"]["num_spec_steps"] == 3


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_each_chunk_has_the_usage_of_its_choice_so_far_where_that_is_asked_for(path: str) -> None:
    """As guidellm asks, by vLLM's continuous_usage_stats."""
    is_chat = path.startswith("chat")
    prompt = {"messages": [{"role": "user", "content": "hi"}]} if is_chat else {"prompt": ["hi", "hello"]}
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = prompt | {"n": 2, "max_tokens": 2, "stream": True, "stream_options": options}
    with served(FakeEngine(byte_tokenizer(CHAT_TEMPLATE))) as client:
        frames = client.post(f"/v1/{path}", json=body).text.split("\n\n")
        body["stream_options"] = {"continuous_usage_stats": True}
        assert '"usage"' not in client.post(f"/v1/{path}", json=body).text
    *chunks, last = [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]
    lengths = [len("user: hi\nassistant:")] * 2 if is_chat else [2, 2, 5, 5]
    told: dict[int, list[int]] = {}
    for chunk in chunks:
        (choice,), usage = chunk["choices"], chunk["usage"]
        assert usage["prompt_tokens"] == lengths[choice["index"]]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        told.setdefault(choice["index"], []).append(usage["completion_tokens"])
    assert told == {index: [0, 1, 2] if is_chat else [1, 2] for index in range(len(lengths))}
    assert last["usage"]["completion_tokens"] == 2 * len(lengths)


def test_chat_uses_the_template_and_the_rest_of_the_context() -> None:
    fake = FakeEngine(byte_tokenizer(CHAT_TEMPLATE))
    with served(fake) as client:
        answer = openai_client(client).chat.completions.create(
            model="fake-target",
            messages=[
                {"role": "system", "content": "be brief"},
                {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            ],
        )
    prompt = "system: be brief\nuser: hi\nassistant:"
    assert fake.tokenizer.decode(fake.seen[0].prompt_token_ids) == prompt
    assert fake.seen[0].params.max_tokens == fake.max_length - len(prompt)
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.content == TOKEN_TEXT * (fake.max_length - len(prompt))


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        (
            "{% for m in messages %}{% if m.role == 'system' %}S {{ m.content }}{% endif %}{% endfor %}",
            "S brief",
        ),
        (
            "{% for m in messages %}{% if m.role == 'developer' %}D {{ m.content }}{% endif %}{% endfor %}",
            "D brief",
        ),
    ],
)
def test_a_developers_message_is_a_system_message_to_templates_that_know_no_developer(
    template: str, prompt: str
) -> None:
    """Most templates leave out roles that they do not know."""
    fake = FakeEngine(byte_tokenizer(template))
    messages = [{"role": "developer", "content": "brief"}, {"role": "user", "content": "hi"}]
    with served(fake) as client:
        client.post("/v1/chat/completions", json={"messages": messages}).raise_for_status()
    assert fake.tokenizer.decode(fake.seen[0].prompt_token_ids) == prompt


def test_openai_client_streams_chat() -> None:
    with served(FakeEngine(byte_tokenizer(CHAT_TEMPLATE))) as client:
        stream = openai_client(client).chat.completions.create(
            model="fake-target",
            messages=[{"role": "user", "content": "hi"}],
            max_completion_tokens=2,
            stream=True,
        )
        chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == TOKEN_TEXT * 2
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, "length"]
    assert chunks[0].object == "chat.completion.chunk"


def test_models_are_listed_and_found(client: httpx.Client) -> None:
    api = openai_client(client)
    assert [model.id for model in api.models.list()] == ["fake-target"]
    assert api.models.retrieve("fake-target").owned_by == "driftguard"


@pytest.mark.parametrize("stream", [False, True])
def test_an_error_of_the_engine_reaches_the_client(
    client: httpx.Client, fake: FakeEngine, stream: bool
) -> None:
    fake.request_error = "out of memory"
    response = client.post("/v1/completions", json={"prompt": "hi", "stream": stream})
    if stream:
        assert response.status_code == 200
        frame = response.text.strip().removeprefix("data: ")
        assert "[DONE]" not in response.text
    else:
        assert response.status_code == 500
        frame = response.text
    error = json.loads(frame)["error"]
    assert error["code"] == "generation_failed"
    assert "out of memory" in error["message"]
