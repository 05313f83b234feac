"""What of the documents differs between a forge and mkdocs: anchors, lists, and where the order stands."""

from __future__ import annotations

import re
from itertools import pairwise
from posixpath import join, normpath
from typing import Any, Final

from markdown_it import MarkdownIt

_MARKER: Final = re.compile(r"\s*([-*+]|\d+[.)])\s+")


def slug(heading: str, separator: str = "-") -> str:
    """The anchor that GitHub makes of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", separator)


def navigation(index: str, directory: str = "docs") -> list[Any]:
    """Of docs/README.md: its headings are sections, and the first link of each row of a table is a page. For
    the OpenAPI document, which is none, stands the page that is made of it."""
    lists: list[list[Any]] = [[]]
    for line in index.splitlines():
        if heading := re.match(r"##(#*) (.*)", line):
            section: list[Any] = []
            lists = [*lists[: len(heading[1]) + 1], section]
            lists[-2].append({heading[2]: section})
        elif row := re.match(r"\| \[([^\]]+)\]\(([^)]+)\)", line):
            lists[-1].append(
                {row[1]: normpath(join(directory, row[2])).replace("openapi.json", "openapi.md")}
            )
    return lists[0]


def four_spaces(markdown: str) -> str:
    """The same lists for Python's Markdown: indented by four spaces for each level, and behind an empty line
    wherever CommonMark begins one, or an item that is a paragraph."""
    lines = markdown.splitlines()
    depths = [0] * len(lines)
    columns = [0] * len(lines)  # where the text of the innermost item begins
    markers: dict[int, str] = {}
    apart: set[int] = set()
    tokens = MarkdownIt("commonmark").enable("table").parse(markdown)
    for token, inside in pairwise(tokens):
        if token.map is None or token.type not in ("bullet_list_open", "ordered_list_open", "list_item_open"):
            continue
        first, end = token.map
        if token.type != "list_item_open" or not inside.hidden:
            apart.add(first)
        if token.type == "list_item_open" and (marker := _MARKER.match(lines[first])):
            markers[first] = marker[1]
            for number in range(first, end):
                depths[number] += 1
                columns[number] = marker.end()
    shown: list[str] = []
    for number, line in enumerate(lines):
        if number in apart and shown and shown[-1]:
            shown.append("")
        begins = (
            columns[number] if number in markers else min(columns[number], len(line) - len(line.lstrip()))
        )
        indent = "    " * depths[number]
        if number in markers:
            indent = indent[4:] + f"{markers[number]:<4}"
        shown.append((indent + line[begins:]).rstrip())
    return "\n".join(shown)
