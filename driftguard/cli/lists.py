"""One page of a list that a sidecar keeps."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from driftguard.cli.output import print_table


def print_list(
    sidecar: str,
    path: str,
    query: Mapping[str, Any],
    as_json: bool,
    heads: Sequence[str],
    row: Callable[[dict[str, Any]], Sequence[object]],
    things: str,
) -> None:
    """One page of a list of the API, whose last part of the name in words is its member: of "retraining runs"
    `runs`. Says on standard error how to get the next page."""
    from driftguard.cli.sidecar_client import call

    answer = call("GET", sidecar, path, query=query)
    if as_json:
        print(answer.text)
        return
    print_table(heads, [row(one) for one in answer.listed(things.rsplit(maxsplit=1)[-1])], f"no {things}")
    if cursor := answer.found.get("next_cursor"):
        print(f"there is more: --cursor {cursor}", file=sys.stderr)
