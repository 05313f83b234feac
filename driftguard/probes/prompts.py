"""The fixed set of canary prompts: read from a file, identified by a digest of the prompt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from driftguard.errors import BadInput
from driftguard.records import DEFAULT_SEGMENT, UNREADABLE_JSON, Text
from driftguard.records.probe_session import digest

# Fewer cannot show a change at 1% (driftguard.diagnosis.probes); more only load the server.
MINIMUM_PROMPTS: Final = 8
MAXIMUM_PROMPTS: Final = 500


@dataclass(frozen=True, slots=True)
class Prompt:
    """`body`: the fields of a request that hold the prompt, {"prompt": ...} or {"messages": [...]}."""

    key: str
    segment: str
    body: dict[str, Any]

    @property
    def is_chat(self) -> bool:
        return "messages" in self.body


def prompt_of(body: dict[str, Any], segment: str) -> Prompt:
    return Prompt(digest(msgspec.json.encode(body, order="sorted")), segment, body)


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    role: str
    content: str


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One line: a text, token ids, or a conversation; and its segment."""

    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    messages: list[_Message] | None = None
    segment: Text = DEFAULT_SEGMENT


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts of a JSON Lines file, without duplicates. Raises BadInput that names the line."""
    try:
        content = path.read_bytes()
    except OSError as error:
        raise BadInput(f"{path}: cannot be read ({error.strerror})") from None
    decoder = msgspec.json.Decoder(_Line)
    found = []
    for number, text in enumerate(content.splitlines(), start=1):
        if text.strip():
            try:
                found.append(_prompt(decoder.decode(text)))
            except (*UNREADABLE_JSON, ValueError) as error:
                raise BadInput(f"{path}, line {number}: {error}", line=number) from None
    return checked(found, str(path))


def checked(prompts: Iterable[Prompt], source: str) -> list[Prompt]:
    """The prompts without duplicates, in order. Raises BadInput: too few to show a change, or too many."""
    distinct: Sequence[Prompt] = list({prompt.key: prompt for prompt in prompts}.values())
    if not MINIMUM_PROMPTS <= len(distinct) <= MAXIMUM_PROMPTS:
        raise BadInput(
            f"{source}: {len(distinct)} different prompts; {MINIMUM_PROMPTS} to {MAXIMUM_PROMPTS} are needed "
            "(fewer cannot show a change, more only load the server)"
        )
    return list(distinct)


def _prompt(line: _Line) -> Prompt:
    given = {
        name: value
        for name in ("prompt", "prompt_token_ids", "messages")
        if (value := getattr(line, name)) is not None
    }
    if len(given) != 1:
        raise ValueError("needs exactly one of prompt, prompt_token_ids and messages")
    [(name, value)] = given.items()
    if not value:
        raise ValueError(f"{name}: is empty")
    if name == "prompt_token_ids" and min(value) < 0:
        raise ValueError(f"{name}: holds {min(value)}; token ids are 0 or more")
    field = "messages" if name == "messages" else "prompt"
    return prompt_of({field: msgspec.to_builtins(value)}, line.segment)
