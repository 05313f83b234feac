"""A server's answer to one probe: its counts, and a digest of its text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from driftguard.adapters.answers.counts import AnswerCounts, AnswerUnreadable, SettingNeeded
from driftguard.adapters.answers.engines import ASKED_FIELDS, Engine
from driftguard.adapters.answers.reading import counts_of, parts_of
from driftguard.errors import DriftGuardError
from driftguard.records import UNREADABLE_JSON
from driftguard.records.probe_session import digest


class ProbeFailed(DriftGuardError):
    """The probes could not be replayed; the message says which address and why."""

    status = 502
    title = "Probe failed"


class ProbeRefused(ProbeFailed):
    """The server takes no such request; the message says why."""


class _Message(msgspec.Struct, frozen=True):
    content: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    text: str | None = None
    message: _Message | None = None


class _Answer(msgspec.Struct, frozen=True):
    choices: list[_Choice]


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer. `text`: a digest, so that the text itself is not kept."""

    text: str
    told: AnswerCounts


def parse_answer(content: bytes, url: str, engine: Engine) -> Answer:
    """Raises ProbeFailed: not an answer of an OpenAI-compatible server, or one without the numbers."""
    try:
        choice = msgspec.json.decode(content, type=_Answer).choices[0]
        told = counts_of(parts_of(content), num_speculative_tokens=None)
    except (*UNREADABLE_JSON, IndexError, AnswerUnreadable, SettingNeeded) as error:
        raise ProbeFailed(f"{url}: not the answer of an OpenAI-compatible server ({error})") from None
    if told is None:
        raise ProbeFailed(f"{url} {_why_untold(engine)}")
    text = choice.text if choice.message is None else choice.message.content
    return Answer(digest((text or "").encode()), told)


def _why_untold(engine: Engine) -> str:
    if (field := ASKED_FIELDS.get(engine)) is not None:
        return (
            f"answers without the counts that {field} asks for, so its probes measure nothing: "
            "speculation is off, or this version does not support that field"
        )
    missing = (
        "answers without metrics.speculative_decoding, so its probes measure nothing: speculation is off, or "
        "vLLM was not started with --per-request-spec-decode-metrics summary"
    )
    hint = "; if it is another engine, set probes.targets.engine"
    return missing + hint if engine == "other" else missing


def detail_of(content: bytes) -> str:
    """The reason in an error's body, in OpenAI's form or any other, in one line."""
    try:
        body: Any = msgspec.json.decode(content)
        error = body["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (*UNREADABLE_JSON, KeyError, TypeError):
        return " ".join(content[:200].decode(errors="replace").split())
