"""Every bad body is refused with 400 in OpenAI's form, naming the field."""

from __future__ import annotations

import gzip
import json
import logging
from typing import Any

import httpx
import openai
import pytest
from driftguard_engine.server import app as server_app
from driftguard_engine.server.body import Body
from driftguard_engine.server.openai.schemas import ChatBody, CompletionBody
from pydantic import ValidationError

from tests.engine.server.conftest import openai_client
from tests.engine.server.fake_engine import FakeEngine
from tests.engine.server.serving import served
from tests.engine.server.tiny_models import CHAT_TEMPLATE, EOS, byte_tokenizer

BAD_FIELDS: list[tuple[str, Any, str]] = [
    ("prompt", None, "missing"),
    ("prompt", 5, "must be a string"),
    ("prompt", [], "must not be an empty list"),
    ("prompt", ["a", 5], "must be a string"),
    ("prompt", [1.5], "must be a string"),
    ("prompt", [True], "must be a string"),
    ("prompt", "\ud800", "surrogate"),
    ("prompt", ["a"] * 129, "at most 128"),
    ("max_tokens", 0, "greater than or equal to 1"),
    ("max_tokens", "5", "integer"),
    ("max_tokens", True, "integer"),
    ("temperature", -0.1, "greater than or equal to 0"),
    ("temperature", float("nan"), "finite"),
    ("temperature", "hot", "number"),
    ("top_p", 0, "greater than 0"),
    ("top_p", 1.01, "less than or equal to 1"),
    ("top_k", -2, "greater than or equal to -1"),
    ("n", 0, "greater than or equal to 1"),
    ("n", 17, "less than or equal to 16"),
    ("seed", -(2**63) - 1, "greater than or equal to"),
    ("seed", 2**63, "less than"),
    ("stop", ["a"] * 17, "at most 16"),
    ("stop.0", "", "at least 1"),
    ("stop.0", "x" * 1_001, "at most 1000"),
    ("stream", "yes", "boolean"),
    ("num_speculative_tokens", -1, "greater than or equal to 0"),
    ("echo", True, "not supported; leave it out or give false"),
    ("logprobs", 0, "not supported"),
    ("logprobs", 5, "not supported"),
    ("suffix", "tail", "not supported"),
    ("best_of", 3, "not supported"),
    ("presence_penalty", 0.5, "not supported; leave it out or give 0"),
    ("frequency_penalty", True, "not supported"),
    ("logit_bias", {"50256": -100}, "not supported; leave it out or give {}"),
    ("repetition_penalty", 1.1, "not supported; leave it out or give 1"),
    ("repetition_penalty", True, "not supported"),
    ("min_p", 0.1, "not supported; leave it out or give 0"),
    ("min_tokens", 4, "not supported; leave it out or give 0"),
    ("stop_token_ids", [3], "not supported; leave it out or give []"),
    ("skip_special_tokens", False, "not supported; leave it out or give true"),
    ("include_stop_str_in_output", True, "not supported; leave it out or give false"),
    ("guided_json", {}, "unknown field"),
    ("stream_options", {"include_usage": True}, "only with stream true"),
]


@pytest.mark.parametrize(("field", "value", "reason"), BAD_FIELDS)
def test_completions_name_the_field(
    client: httpx.Client, fake: FakeEngine, field: str, value: Any, reason: str
) -> None:
    body = {"prompt": "hi"} | {field.partition(".")[0]: value}
    response = client.post(
        "/v1/completions", content=json.dumps(body), headers={"Content-Type": "application/json"}
    )
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == field
    assert reason in error["message"]
    assert error["message"].startswith(error["param"])
    assert error["type"] == "invalid_request_error"
    assert fake.seen == []


@pytest.mark.parametrize(
    ("body", "param", "reason"),
    [
        ({}, "messages", "missing"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role", "'system'"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages.0.content",
            "must be a string or a list of parts",
        ),
        ({"messages": [{"role": "user", "content": "x"}], "tools": [{}]}, "tools", "not supported"),
        (
            {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "max_completion_tokens": 2},
            "max_tokens",
            "only one of the two",
        ),
        (
            {"messages": [{"role": "user", "content": "x"}], "response_format": {"type": "json_object"}},
            "response_format",
            'give {"type": "text"}',
        ),
    ],
)
def test_chat_names_the_field(client: httpx.Client, body: dict[str, Any], param: str, reason: str) -> None:
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert reason in response.json()["error"]["message"]


MANY = 5_000


@pytest.mark.parametrize(
    ("schema", "body"),
    [
        (CompletionBody, {"prompt": [None] * MANY}),
        (CompletionBody, {"prompt": [1, *[None] * MANY]}),
        (CompletionBody, {"prompt": [[None] * MANY]}),
        (CompletionBody, {"prompt": "a", "stop": [""] * MANY}),
        (CompletionBody, {"prompt": "a", **{str(number): 1 for number in range(MANY)}}),
        (ChatBody, {"messages": [{}] * MANY}),
        (ChatBody, {"messages": [{"role": "user", "content": [{}] * MANY}]}),
    ],
)
def test_of_many_errors_few_are_made(schema: type[Body], body: dict[str, Any]) -> None:
    """A million take seconds, in which no stream goes on."""
    with pytest.raises(ValidationError) as caught:
        schema.model_validate(body)
    causes = [error.get("ctx", {}).get("error") for error in caught.value.errors()]
    inner = [cause.__context__ for cause in causes if cause is not None]
    made = [caught.value, *(error for error in inner if isinstance(error, ValidationError))]
    assert sum(error.error_count() for error in made) < 10


@pytest.mark.parametrize(
    ("item", "status"), [('{"a": "[[{{"}', 400), ("[]", 400), (r'"\"[[{{\\"', 200), (r'"[[{{"', 200)]
)
def test_a_body_of_very_many_arrays_and_objects_is_not_parsed(
    client: httpx.Client, item: str, status: int
) -> None:
    many = ",".join([item] * 20_000)
    response = client.post(
        "/v1/completions",
        content=f'{{"prompt": "a", "max_tokens": 1, "metadata": {{"a": [{many}]}}}}',
        headers={"Content-Type": "application/json"},
    )
    assert response.status_code == status
    assert status == 200 or "more than 20000 arrays and objects" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("field", "item", "count", "refusal"),
    [
        ("prompt", "1", 2**20 + 1, "more than 1048576 values"),
        ("stop", '"1"', 2**20 + 1, "more than 1048576 values"),
        ("prompt", "1", 2**20, "an array of 1048576 values, but the context is 64 tokens"),
        ("prompt", "1", 20_001, "an array of 20001 values, but the context is 64 tokens"),
        ("prompt", "1", 20_000, "20000 tokens, but the context is 64"),
        ("metadata", '{"":1},1', 2**18, "more than 20000 arrays and objects"),
        ("n", "9" * 400, 1, "n: input should be a valid integer"),
        ("prompt", "9" * 401, 1, "a number of more than 400 digits"),
        ("user", "9" * 401, 1, "user: input should be a valid string"),
        ("user", "1", 2**20 + 1, "user: input should be a valid string"),  # one text with so many commas
    ],
)
def test_a_body_of_very_many_token_ids_is_not_parsed(
    client: httpx.Client, field: str, item: str, count: int, refusal: str
) -> None:
    """That holds the event loop, on which every stream is sent."""
    many = ",".join([item] * count)
    value = f"[{many}]" if field != "user" else f'["{many}"]'
    response = client.post(
        "/v1/completions",
        content=f'{{"prompt": "a", "{field}": {value}}}',
        headers={"Content-Type": "application/json"},
    )
    assert (response.status_code, refusal in response.json()["error"]["message"]) == (400, True)


def test_a_body_of_very_many_members_is_not_parsed(client: httpx.Client) -> None:
    for count, status in ((100_000, 200), (100_001, 400)):
        members = ",".join(f'"{index}:":1' for index in range(count - 3))
        response = client.post(
            "/v1/completions",
            content=f'{{"prompt":"a","max_tokens":1,"metadata":{{{members}}}}}',
            headers={"Content-Type": "application/json"},
        )
        assert response.status_code == status
    assert "more than 100000 members of objects" in response.json()["error"]["message"]


def test_chat_without_a_template_is_a_bad_request(client: httpx.Client) -> None:
    with pytest.raises(openai.BadRequestError, match="no chat template; use /v1/completions"):
        openai_client(client).chat.completions.create(
            model="fake-target", messages=[{"role": "user", "content": "hi"}]
        )


def test_another_model_is_not_found(client: httpx.Client) -> None:
    with pytest.raises(openai.NotFoundError, match="this server serves 'fake-target'") as caught:
        openai_client(client).completions.create(model="gpt-5", prompt="hi")
    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"


@pytest.mark.parametrize("body", [{"model": "m" * 10_000}, {"f" * 10_000: 1}, {"echo": "e" * 10_000}])
def test_what_is_refused_is_told_in_a_few_words(client: httpx.Client, body: dict[str, Any]) -> None:
    refused = client.post("/v1/completions", json={"prompt": "a", **body})
    assert refused.status_code in (400, 404)
    assert "mmm" in refused.text or "fff" in refused.text or "eee" in refused.text
    assert len(refused.text) < 500


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{", "not valid JSON"),
        (b'{"prompt": "a", "\\ud800": 1}', "field's name holds a lone surrogate"),
        (b"[]", "must be a JSON object"),
        (b"", "must be a JSON object"),
        (b"\xff", "not valid JSON: 'utf-8' codec can't decode"),
        (b'{"prompt": ' + b"[" * 100_000, "more than 20000 arrays"),
        (b'{"prompt": ' + b"[" * 19_000, "not valid JSON: maximum recursion depth"),
        (b'{"prompt": "a", "seed": ' + b"9" * 5_000 + b"}", "a number of more than 400 digits"),
    ],
)
def test_a_body_that_is_no_json_object(client: httpx.Client, content: bytes, reason: str) -> None:
    response = client.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == 400
    assert reason in response.json()["error"]["message"]


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br"])
def test_a_compressed_body_is_told_from_one_that_is_no_json(
    client: httpx.Client, fake: FakeEngine, encoding: str
) -> None:
    headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
    response = client.post("/v1/completions", content=gzip.compress(b'{"prompt": "a"}'), headers=headers)
    assert response.status_code == 415
    message = response.json()["error"]["message"]
    assert message == f"Content-Encoding {encoding!r} is not supported; send the body as it is"
    plain = {"Content-Type": "application/json", "Content-Encoding": "identity"}
    client.post("/v1/completions", content=b'{"prompt": "a"}', headers=plain).raise_for_status()
    assert len(fake.seen) == 1


@pytest.mark.parametrize(
    ("header", "value"), [("X-DriftGuard-Segment", "s" * 257), ("X-DriftGuard-Session", "s" * 257)]
)
def test_bad_labels_name_the_header(client: httpx.Client, header: str, value: str) -> None:
    response = client.post("/v1/completions", json={"prompt": "hi"}, headers={header: value})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == header


def test_unknown_paths_and_methods_have_openais_form(client: httpx.Client) -> None:
    missing = client.get("/v1/embeddings")
    assert missing.status_code == 404
    assert missing.json()["error"]["message"] == "GET /v1/embeddings: Not Found"
    wrong = client.get("/v1/completions")
    assert wrong.status_code == 405
    assert wrong.headers["allow"] == "POST"
    assert wrong.json()["error"]["code"] == "method_not_allowed"


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_over_the_limit_is_413(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch, chunked: bool
) -> None:
    monkeypatch.setattr(server_app, "MAX_BODY_BYTES", 1000)
    content = json.dumps({"prompt": "x" * 2000}).encode()
    response = client.post(
        "/v1/completions",
        content=iter([content]) if chunked else content,
        headers={"Content-Type": "application/json"},
    )
    assert response.status_code == 413
    assert "1000 bytes" in response.json()["error"]["message"]


def test_refusals_are_counted_by_code(client: httpx.Client) -> None:
    client.post("/v1/completions", json={})
    client.get("/v1/nothing")
    text = client.get("/metrics").text
    assert 'driftguard_engine_refused_requests_total{code="invalid_request"} 1.0' in text
    assert 'driftguard_engine_refused_requests_total{code="not_found"} 1.0' in text


class Untouched:
    """A tokenizer that may be asked for its vocabulary only, and for what the template writes."""

    chat_template = CHAT_TEMPLATE

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def get_vocab(self) -> dict[str, int]:
        vocabulary: dict[str, int] = self._tokenizer.get_vocab()
        return vocabulary

    def apply_chat_template(self, *_: Any, **__: Any) -> str:
        return "text " * 1_000

    def encode(self, *_: Any, **__: Any) -> list[int]:
        raise AssertionError("it was tokenized")


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("completions", {"prompt": "word " * 2_960_000}, "prompt"),
        ("completions", {"prompt": ["short", "word " * 1_000]}, "prompt"),
        ("completions", {"prompt": [7] * 64}, "prompt"),
        ("completions", {"prompt": [[7], [7] * 64]}, "prompt"),
        ("completions", {"prompt": ["word"] * 65, "n": 2}, "prompt"),
        ("chat/completions", {"messages": [{"role": "user", "content": "word " * 1_000}]}, "messages"),
        ("chat/completions", {"messages": [{"role": "user", "content": ""}] * 10_000}, "messages"),
        ("chat/completions", {"messages": [{"role": "user", "content": "the template adds"}]}, "messages"),
    ],
)
def test_what_cannot_fit_is_refused_before_it_is_tokenized(
    path: str, body: dict[str, Any], field: str
) -> None:
    with served(FakeEngine(Untouched(byte_tokenizer()))) as client:
        answer = client.post(f"/v1/{path}", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["type"]) == (400, field, "invalid_request_error")
    assert "the context is 64" in error["message"] or "at most 128" in error["message"]


def test_a_text_of_the_longest_tokens_alone_is_tokenized(client: httpx.Client, fake: FakeEngine) -> None:
    """One that may fit is left to the count of its tokens."""
    answer = client.post("/v1/completions", json={"prompt": EOS * 64, "max_tokens": 1})
    assert answer.status_code == 200
    assert len(fake.seen[0].prompt_token_ids) == 64
    assert client.post("/v1/completions", json={"prompt": EOS * 64 + "x"}).status_code == 400


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("completions", {"prompt": "x" * 30}),
        ("chat/completions", {"messages": [{"role": "user", "content": "x" * 30}]}),
    ],
)
def test_the_tokenizer_does_not_log_indexing_errors_that_cannot_come(
    path: str, body: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = byte_tokenizer(CHAT_TEMPLATE)
    tokenizer.model_max_length = 8  # as its files say; the engine's own limit is the context
    transformers = logging.getLogger("transformers")
    transformers.addHandler(caplog.handler)
    try:
        with served(FakeEngine(tokenizer)) as client:
            assert client.post(f"/v1/{path}", json=body | {"max_tokens": 1}).status_code == 200
    finally:
        transformers.removeHandler(caplog.handler)
    assert [record.message for record in caplog.records if record.name.startswith("transformers")] == []
