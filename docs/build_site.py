"""Hooks of `mkdocs build`: which files are pages, in which order, and what differs from a forge.

Pages keep the paths that they have in the repository, so that a relative link leads to the same place on the
site, on a forge and in an editor.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

import jinja2
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from docs.site_markdown import four_spaces, navigation, slug
from driftguard.api.pages.reference import first_example, type_in_words

ROOT: Final = Path(__file__).parents[1]
INDEX: Final = "docs/README.md"
PUBLISHED: Final = (
    "*.md",
    "docs/*.md",
    "docs/openapi.json",
    "docs/site.css",
    "docs/screenshots/*.png",
    "alerts/runbooks/*.md",
    "tests/benchmarks/results/*.md",
)
MERMAID: Final = "build/tools/mermaid.min.js"  # draws diagrams; `make site` brings it
_DOCSTRINGS: Final = re.compile(r"<!-- docstrings: (.*?) -->", re.DOTALL)
_NAME_IN_CELL: Final = re.compile(r"(?<=<td><code>)\w+(?=</code>)")
_ELSEWHERE: Final = re.compile(
    r"<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)=[\"']?(?:https?:)?//[^>]*>"
)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.nav = [
        {"DriftGuard": "README.md"},
        {"Guides": INDEX},
        *navigation((ROOT / INDEX).read_text("utf-8")),
    ]
    config.mdx_configs["toc"]["slugify"] = slug
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Those of the theme, and what is published of the repository."""
    if not (ROOT / MERMAID).exists():
        raise PluginError(f"{MERMAID} is missing: `make {MERMAID}` brings it")
    paths = {path for pattern in (*PUBLISHED, MERMAID) for path in ROOT.glob(pattern)}
    return Files(
        [
            *(file for file in files if file.src_dir != config.docs_dir),
            *(File.generated(config, str(path.relative_to(ROOT)), abs_src_path=str(path)) for path in paths),
            File.generated(config, "docs/openapi.md", content=openapi_page()),
        ]
    )


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    if page.file.src_uri == "docs/openapi.md":
        return markdown
    # Links to a sidecar's own pages: here nobody knows its address.
    markdown = re.sub(r"\[([^\]]+)\]\((\$SIDECAR[^)]*)\)", r"\1 (`\2`)", markdown)
    return _DOCSTRINGS.sub(
        lambda names: "\n\n".join(f"::: {name}" for name in names[1].split()), four_spaces(markdown)
    )


def on_post_page(output: str, page: Page, **_: object) -> str:
    """Brings what draws diagrams to pages that have some (the theme would load it from elsewhere), and lets
    names in tables break at underscores. Raises PluginError where a page loads anything from elsewhere."""
    if '<pre class="mermaid">' in output:
        script = "../" * page.url.count("/") + MERMAID
        output = output.replace("</head>", f'<script src="{script}"></script></head>')
    output = _NAME_IN_CELL.sub(lambda name: name[0].replace("_", "_<wbr>"), output)
    if found := _ELSEWHERE.search(output):
        raise PluginError(f"{page.file.src_uri} loads something from elsewhere: {found[0]}")
    return output


def openapi_page() -> str:
    """docs/openapi.json in Markdown."""
    document = json.loads((ROOT / "docs" / "openapi.json").read_text("utf-8"))
    environment = jinja2.Environment(  # noqa: S701 (makes Markdown)
        loader=jinja2.FileSystemLoader(ROOT / "docs"), trim_blocks=True, undefined=jinja2.StrictUndefined
    )
    operations = [
        (path, method.upper(), operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    return environment.get_template("openapi.md.jinja").render(
        document=document,
        operations=operations,
        cell=_cell,
        type=lambda schema: _cell(_linked(document, type_in_words(schema))),
        example=lambda content: first_example(document, content),
    )


def _cell(text: str) -> str:
    """In a cell of a table."""
    return " ".join(text.split()).replace("|", r"\|")


def _linked(document: dict[str, Any], words: str) -> str:
    """With the names of schemas as links to them."""
    return re.sub(
        r"\w+",
        lambda word: (
            f"[{word[0]}](#{slug(word[0])})" if word[0] in document["components"]["schemas"] else word[0]
        ),
        words,
    )
