"""The OpenAPI document: FastAPI's, with every error as problem+json and the record's own schema. Of the
docstring of a route the first sentence is the summary, and what follows it the description."""

from __future__ import annotations

import re
from inspect import cleandoc
from typing import Any, Final

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, ConfigDict, Field

from driftguard.api import openapi_examples
from driftguard.api.problems import MalformedBody, TooSlow, UnsupportedEncoding
from driftguard.errors import (
    BadInput,
    DatabaseUnavailable,
    DriftGuardError,
    Forbidden,
    TooLarge,
    Unauthorized,
)
from driftguard.records import AcceptanceRecord, UnrecordedRequests
from driftguard.store.captures import CapturedRequest
from driftguard.store.export_rows import RollupRow

PROBLEM_JSON: Final = "application/problem+json"
_SCHEMAS: Final = "#/components/schemas/"
_STRUCTS: Final = (AcceptanceRecord, RollupRow, CapturedRequest, UnrecordedRequests)
_SENTENCE_END: Final = re.compile(r"(?<=\.)\s+")
_TAGS: Final = {
    "records": "Acceptance records: sent one by one or in batches, read as a paginated list or an export.",
    "otlp": "Records made from the spans and the metrics of OpenTelemetry exporters and collectors.",
    "status": "One verdict per stream, and its acceptance over time.",
    "incidents": "What changed, since when, how bad, where and why.",
    "drafts": "The drafts in service, candidates, and former ones.",
    "retraining": "Retraining runs: list, start, roll back.",
    "captures": "Token ids of sampled requests; off unless `capture.enabled` is set.",
    "health": "Liveness, readiness, metrics, and the alert rules that query them.",
}


class Problem(BaseModel):
    """RFC 9457 problem document: every error of this API."""

    model_config = ConfigDict(extra="allow")
    type: str = Field(description="about:blank: the title and status say what kind of problem it is.")
    title: str
    status: int
    detail: str = Field(description="What was wrong, naming it.")


class RpcStatus(BaseModel):
    """google.rpc.Status: every error of OTLP."""

    code: int = Field(description="google.rpc.Code.")
    message: str = Field(description="What was wrong, naming it.")
    details: list[dict[str, object]] = Field([], description="A google.rpc.BadRequest where the data is bad.")


class BadParameter(BaseModel):
    """One parameter, header or field of the body that is refused."""

    where: str = Field(alias="in", description="query, path, header or body.")
    field: str | None
    detail: str


class BadInputProblem(Problem):
    """What is refused, and why, by name."""

    errors: list[BadParameter] | None = None
    field: str | None = None


class RefusedLine(BaseModel):
    """One line of a batch that is refused."""

    line: int | None = Field(description="From 1; of a JSON array the place in it.")
    field: str | None
    detail: str


class RefusedLinesProblem(Problem):
    """Lines of a batch are refused; the others are stored."""

    accepted: int | None = None
    duplicates: int | None = None
    errors: list[RefusedLine | BadParameter] | None = Field(None, description="The first 100.")
    errors_total: int | None = None


BATCH_COUNTS: Final = {
    "type": "object",
    "required": ["accepted", "duplicates"],
    "properties": {
        "accepted": {"type": "integer", "description": "New, and stored."},
        "duplicates": {"type": "integer", "description": "Stored before."},
    },
}
_PROBLEMS: Final = (Problem, BadInputProblem, RefusedLinesProblem, RpcStatus)

Responses = dict[int | str, dict[str, Any]]


def problem(
    error: type[DriftGuardError], detail: str, *, schema: type[Problem] = Problem, **members: object
) -> Responses:
    """`responses` of an operation that may raise `error`, with an example that says `detail`."""
    example = {
        "type": "about:blank",
        "title": error.title,
        "status": error.status,
        "detail": detail,
        **members,
    }
    content = {"schema": {"$ref": _SCHEMAS + schema.__name__}, "example": example}
    description = (error.__doc__ or error.title).partition("\n")[0]
    return {error.status: {"description": description, "content": {PROBLEM_JSON: content}}}


def reference(schema: type[msgspec.Struct]) -> dict[str, str]:
    """A reference to the schema of a struct that msgspec writes to JSON."""
    return {"$ref": _SCHEMAS + schema.__name__}


def example(name: str, schema: dict[str, Any] | None = None, status: int = 200) -> Responses:
    """`responses` with the good answer's example of that name, and its schema where no model gives it."""
    return {status: {"content": {"application/json": shown(name) | ({"schema": schema} if schema else {})}}}


def shown(name: str) -> dict[str, Any]:
    """Content with a reference to the example of that name: FastAPI leaves the nulls of inline ones out."""
    return {"examples": {name: {"$ref": f"#/components/examples/{name}"}}}


def json_line(value: object) -> str:
    """As one line of JSON Lines."""
    return msgspec.json.encode(value).decode() + "\n"


def batch_problems(things: str) -> Responses:
    """Errors of a batch of lines."""
    return (
        problem(MalformedBody, f"the body is empty; send JSON Lines or a JSON array of {things}")
        | problem(TooLarge, f"more than 10000 {things} in one batch; send smaller ones", max_records=10_000)
        | problem(UnsupportedEncoding, "Content-Encoding 'br' is not supported; send gzip or none")
        | problem(
            BadInput,
            f"1 of 2 {things} are refused; first: line 2: segment: missing; this field is required",
            schema=RefusedLinesProblem,
            accepted=1,
            duplicates=0,
            errors=[{"line": 2, "field": "segment", "detail": "missing; this field is required"}],
            errors_total=1,
        )
    )


def install_openapi(app: FastAPI) -> None:
    """Makes `app` serve, and `app.openapi()` give, this document."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _document(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(
        title=app.title,
        version=app.version,
        description=app.description,
        routes=app.routes,
        tags=[{"name": name, "description": text} for name, text in _TAGS.items()],
        license_info={"name": "MIT", "identifier": "MIT"},
    )
    for path, operations in document["paths"].items():
        for operation in operations.values():
            _complete(path, operation)
    schemas = document["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    schemas |= _schemas()
    document["components"]["schemas"] = dict(sorted(schemas.items()))
    document["components"]["examples"] = {
        name: {"value": value} for name, value in openapi_examples.ANSWERS.items()
    }
    return document


def _complete(path: str, operation: dict[str, Any]) -> None:
    summary, *rest = _SENTENCE_END.split(operation["description"], maxsplit=1)
    operation["summary"] = summary.removesuffix(".")
    operation["description"] = rest[0] if rest else summary
    answers = operation["responses"]
    if operation["tags"] == ["otlp"]:  # whose errors are of another form
        operation["responses"] = dict(sorted(answers.items()))
        return
    if "application/json" in answers.get("422", {}).get("content", {}):
        answers.update(_as_keys(_BAD_PARAMETER))
    answers.update(_as_keys(_FOREIGN))
    if "requestBody" in operation:
        for status, answer in _as_keys(_BAD_BODY).items():
            answers.setdefault(status, answer)
    if "security" in operation:
        answers.update(_as_keys(_NO_KEY))
    if path.startswith("/api/v1/"):
        answers.update(_as_keys(_NO_DATABASE))
    operation["responses"] = dict(sorted(answers.items()))


def _as_keys(responses: Responses) -> dict[str, Any]:
    return {str(status): answer for status, answer in responses.items()}


def _schemas() -> dict[str, Any]:
    _, schemas = msgspec.json.schema_components(_STRUCTS, ref_template=_SCHEMAS + "{name}")
    for schema in schemas.values():
        if "description" in schema:  # a docstring, which Python indents up to 3.12: that is code in Markdown
            schema["description"] = cleandoc(schema["description"])
    for model in _PROBLEMS:
        schema = model.model_json_schema(ref_template=_SCHEMAS + "{model}")
        schemas |= schema.pop("$defs", {}) | {model.__name__: schema}
    return dict(schemas)


_BAD_PARAMETER: Final = problem(
    BadInput,
    "limit: Input should be less than or equal to 500",
    schema=BadInputProblem,
    errors=[{"in": "query", "field": "limit", "detail": "Input should be less than or equal to 500"}],
)
_FOREIGN: Final = problem(
    Forbidden, "Host 'evil.example' is not a name of this server; see http.allowed_hosts"
)
_BAD_BODY: Final = (
    problem(MalformedBody, "the body is not JSON text")
    | problem(TooSlow, "the body arrived too slowly")
    | problem(TooLarge, "the body is larger than 64000 bytes; send less at once")
)
_NO_KEY: Final = problem(Unauthorized, "this call needs an API key: Authorization: Bearer KEY")
_NO_DATABASE: Final = problem(
    DatabaseUnavailable, "database 'driftguard' at db.internal:5432: connection refused"
)
