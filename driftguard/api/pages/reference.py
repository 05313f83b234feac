"""/docs: the API as a web page, made from its OpenAPI document; nothing is loaded from elsewhere."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from driftguard.api.pages.rendering import render

router = APIRouter(include_in_schema=False)

_SCHEMAS: Final = "#/components/schemas/"


@router.get("/docs")
def api_reference(request: Request) -> HTMLResponse:
    """Every operation with its parameters, body, answers and examples, and every schema."""
    document = request.app.openapi()
    operations = [
        (path, method.upper(), operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    return render(
        request,
        "reference.html",
        document=document,
        groups=[
            (tag, [found for found in operations if found[2]["tags"] == [tag["name"]]])
            for tag in document["tags"]
        ],
        named=type_in_words,
        example=lambda content: first_example(document, content),
    )


def type_in_words(schema: dict[str, Any]) -> str:
    """A schema in a few words, for example `array of StreamInfo, null`."""
    return ", ".join(dict.fromkeys(_types(schema)))


def _types(schema: dict[str, Any]) -> Iterator[str]:
    if reference := schema.get("$ref"):
        yield str(reference).removeprefix(_SCHEMAS)
    elif choices := schema.get("anyOf") or schema.get("oneOf"):
        for choice in choices:
            yield from _types(choice)
    elif values := schema.get("enum"):
        yield " | ".join(map(str, values))
    elif "const" in schema:
        yield str(schema["const"])
    elif schema.get("type") == "array":
        yield f"array of {type_in_words(schema.get('items', {}))}"
    elif isinstance(schema.get("additionalProperties"), dict):
        yield f"object of {type_in_words(schema['additionalProperties'])}"
    else:
        yield str(schema.get("format") or schema.get("type") or "any")


def first_example(document: dict[str, Any], content: dict[str, Any]) -> str | None:
    """The first example of a body, as it is sent."""
    found = content.get("example")
    for each in content.get("examples", {}).values():
        if "$ref" in each:
            each = document["components"]["examples"][each["$ref"].rpartition("/")[2]]
        found = each["value"]
        break
    if found is None or isinstance(found, str):
        return found
    return json.dumps(found, indent=2, ensure_ascii=False)
