"""/docs: the API as a page that needs nothing from elsewhere."""

from __future__ import annotations

import re

from fastapi.testclient import TestClient

from driftguard.api.application import http_application


def test_every_operation_and_schema_is_on_the_page_and_nothing_comes_from_elsewhere() -> None:
    app = http_application()
    page = TestClient(app, base_url="http://127.0.0.1").get("/docs")
    assert page.status_code == 200
    document = app.openapi()
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert f'<details id="{operation["operationId"]}">' in page.text
            assert f"<code>{method.upper()} {path}</code>" in page.text
    for name in document["components"]["schemas"]:
        assert f'<details id="{name}">' in page.text
    loaded = re.findall(r'<(?:script|link|img)[^>]* (?:src|href)="([^"]+)"', page.text)
    assert loaded
    assert all(address.startswith(("/static/", "data:")) for address in loaded)
    assert '"next_cursor"' in page.text.replace("&#34;", '"')  # an example of an answer
