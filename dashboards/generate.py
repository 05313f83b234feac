"""Writes the dashboards as JSON beside this file: `make dashboards`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from dashboards import engine, fleet, frame, retraining, stream
from dashboards.frame import Page

HERE: Final = Path(__file__).parent


def pages() -> list[Page]:
    return [fleet.page(), stream.page(), engine.page(), retraining.page()]


def files() -> dict[str, str]:
    """File name -> content."""
    return {
        f"{page.uid}.json": json.dumps(_document(page), indent=2, sort_keys=True) + "\n" for page in pages()
    }


def _document(page: Page) -> dict[str, Any]:
    """The SDK would put links and annotations into a menu of the newest Grafana; here they are shown on the
    page."""
    document: dict[str, Any] = json.loads(json.dumps(frame.build(page), cls=JSONEncoder))
    for item in (*document["links"], *document["annotations"]["list"]):
        item.pop("placement", None)
    return document


def main() -> None:
    for name, content in files().items():
        (HERE / name).write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
