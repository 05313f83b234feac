"""The committed OpenAPI document: that of the code, complete, and true about its own examples."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from driftguard.api.application import http_application
from driftguard.api.openapi_examples import RECORD
from driftguard.records import decode_record

COMMITTED = Path(__file__).parents[2] / "docs" / "openapi.json"
DOCUMENT: dict[str, Any] = json.loads(COMMITTED.read_bytes())
OPERATIONS: dict[str, dict[str, Any]] = {
    f"{method.upper()} {path}": operation
    for path, operations in DOCUMENT["paths"].items()
    for method, operation in operations.items()
}


def contents(operation: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(where, media type, content) of what an operation takes and answers."""
    for media_type, content in operation.get("requestBody", {}).get("content", {}).items():
        yield "request", media_type, content
    for status, answer in operation["responses"].items():
        for media_type, content in answer["content"].items():
            yield status, media_type, content


def test_the_committed_document_is_that_of_the_code() -> None:
    regenerated = json.loads(json.dumps(http_application().openapi()))
    assert regenerated == DOCUMENT, "the API has changed; `make openapi` writes the document anew"


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_is_described_and_shows_what_it_takes_and_answers(name: str) -> None:
    operation = OPERATIONS[name]
    assert operation["description"]
    assert len(operation["summary"]) < 100
    assert " " in operation["summary"]
    assert operation["tags"][0] in {tag["name"] for tag in DOCUMENT["tags"]}
    for where, media_type, content in contents(operation):
        if content["schema"].get("format") == "binary":
            continue
        assert given(content) or "example" in resolved(content["schema"]), (where, media_type)


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_refusal_is_described_in_whole_sentences(name: str) -> None:
    answers = OPERATIONS[name]["responses"]
    refusals = {status: answer["description"] for status, answer in answers.items() if int(status) >= 400}
    assert not [told for told in refusals.values() if not told.endswith(".")]


def test_schemas_are_described_in_paragraphs_none_of_which_is_code_by_its_indentation() -> None:
    described = [schema for schema in DOCUMENT["components"]["schemas"].values() if "description" in schema]
    assert len(described) >= 4
    assert not [schema for schema in described if "\n " in schema["description"]]


def test_operations_have_names_of_their_own() -> None:
    names = [operation["operationId"] for operation in OPERATIONS.values()]
    assert len(set(names)) == len(names)
    assert {"post_records", "list_records", "list_incidents", "acknowledge_incident"} <= set(names)


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_example_is_what_its_schema_says(name: str) -> None:
    for where, media_type, content in contents(OPERATIONS[name]):
        schema = {**content["schema"], "components": DOCUMENT["components"]}
        for value in given(content):
            try:
                jsonschema_rs.validator_for(schema).validate(value)
            except jsonschema_rs.ValidationError as error:
                pytest.fail(f"{where}, {media_type}: {error}")


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_refusal_is_a_problem_document_or_in_the_form_of_otlp(name: str) -> None:
    refusals = [answer for status, answer in OPERATIONS[name]["responses"].items() if status >= "400"]
    of_otlp = OPERATIONS[name]["tags"] == ["otlp"]
    forms = ["application/x-protobuf", "application/json"] if of_otlp else ["application/problem+json"]
    for answer in refusals:
        assert list(answer["content"]) == forms
    assert refusals or name in ("GET /healthz", "GET /metrics")


def test_the_example_record_would_be_taken() -> None:
    assert decode_record(json.dumps(RECORD)).accepted == RECORD["accepted"]


def given(content: dict[str, Any]) -> list[Any]:
    """The examples of a content."""
    names = [
        shown["$ref"].removeprefix("#/components/examples/") for shown in content.get("examples", {}).values()
    ]
    named = [DOCUMENT["components"]["examples"][name]["value"] for name in names]
    return named + ([content["example"]] if "example" in content else [])


def resolved(schema: dict[str, Any]) -> dict[str, Any]:
    name = schema.get("$ref", "").removeprefix("#/components/schemas/")
    return dict(DOCUMENT["components"]["schemas"][name]) if name else schema
