"""Names in paths and directories that nobody gave: too long, no text, of nobody. Never an internal error."""

from __future__ import annotations

import httpx
import pytest

from tests.api.test_paths import NAMES


@pytest.mark.parametrize("name", NAMES, ids=lambda name: name[:20])
def test_a_name_in_a_path_that_nobody_gave_is_no_internal_error(real_client: httpx.Client, name: str) -> None:
    answers = [
        real_client.get(f"/v1/models/{name}"),
        real_client.post(f"/admin/drafts/{name}/activate"),
        real_client.get(f"/{name}"),
    ]
    assert [answer.status_code for answer in answers] == [404, 404, 404]


@pytest.mark.parametrize(
    "directory",
    [
        "/" + "x" * 5_000,
        "x" * 5_000,
        "o/" + "x" * 5_000,
        "\0",
        "/a\0b",
        "~nobody-of-this-name/draft",
        "~\0",
        "/dev/null",
    ],
    ids=lambda name: ascii(name[:20]),
)
def test_a_draft_directory_that_cannot_be_is_refused_by_name(
    real_client: httpx.Client, directory: str
) -> None:
    answer = real_client.post("/admin/drafts", json={"directory": directory})
    assert answer.status_code == 422
    assert answer.json()["field"] == "directory"
    assert len(answer.json()["detail"]) < 1_000
