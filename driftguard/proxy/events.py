"""A streamed answer: its counts are noted, and what the client did not ask for is removed."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Final

from driftguard.adapters.answers import sglang, triton
from driftguard.adapters.answers.counts import AnswerUnreadable
from driftguard.adapters.answers.openai import common, has_output
from driftguard.adapters.answers.reading import members_with_counts
from driftguard.proxy.asking import NOTHING, Excess
from driftguard.proxy.json_members import (
    NotAnObject,
    members,
    values_in,
    with_last_member,
    within,
    without,
)

_END: Final = re.compile(rb"\r?\n\r?\n")
_DATA: Final = re.compile(rb"^data: ?(.*?)\r?$", re.MULTILINE)
_NO_CHOICES: Final = re.compile(rb'"choices"\s*:\s*\[\s*\]')
_DONE: Final = b"[DONE]"
_ENDS_ANSWER: Final = re.compile(rb'^data:.*"finish_reason"\s*:\s*"', re.MULTILINE)
_TOLD_LAST: Final = "system_fingerprint"  # by vLLM, in the event with the usage where that is asked for


@dataclass(slots=True)
class StreamedAnswer:
    """The counts in an answer. Times are those of perf_counter(), and only of a streamed answer."""

    parts: dict[bytes, bytes] = field(default_factory=dict)  # see adapters.answers.reading.counts_of
    model_part: bytes = b""
    first_output_at: float | None = None
    last_output_at: float | None = None
    has_failed: bool = False  # an event told of an error: the status was sent before


class EventStream:
    """Splits server-sent events as they arrive. If nothing has to be removed, bytes are passed on before they
    are parsed. Before usage that is to be removed, the event that ends the answer is held until the next one
    is there: it may have to tell what that would have told last."""

    def __init__(self, excess: Excess, max_event_bytes: int) -> None:
        self.heard = StreamedAnswer()
        self.is_too_large = False
        self.is_done = False  # the engine has sent its end marker
        self._excess = excess
        self._takes_out = excess != NOTHING
        self._max = max_event_bytes
        self._rest = b""
        self._held = b""

    def feed(self, chunk: bytes, now: float) -> bytes:
        """Returns the bytes for the client."""
        if self.is_too_large:
            return chunk
        text = self._rest + chunk
        passed: list[bytes] = []
        place = 0
        for end in _END.finditer(text, max(0, len(self._rest) - 3)):
            event = text[place : end.end()]
            passed.append(self._in_turn(event, self._event(event, now)))
            place = end.end()
        self._rest = text[place:]
        if len(self._rest) > self._max:
            self.is_too_large = True
            passed.append(self.end())
        return b"".join(passed) if self._takes_out else chunk

    def end(self) -> bytes:
        """Returns the event that is held, and an incomplete last one unchanged."""
        rest, self._held, self._rest = self._held + self._rest, b"", b""
        return rest if self._takes_out else b""

    def _in_turn(self, event: bytes, kept: bytes) -> bytes:
        """Returns the event that was held, and this one as `kept`, unless it is held now."""
        held, self._held = self._held, b""
        if held and not kept:
            held = _with_what_is_told_last(held, event)
        if self._excess.usage and _ENDS_ANSWER.search(kept):
            self._held = kept
            return held
        return held + kept

    def _event(self, event: bytes, now: float) -> bytes:
        found = _DATA.findall(event)
        if len(found) != 1 or found[0] == _DONE:
            self.is_done = self.is_done or _DONE in found
            return event
        payload = found[0]
        self.heard.has_failed = self.heard.has_failed or _tells_error(payload)
        telling = members_with_counts(payload)
        for name in telling:
            self.heard.parts[name] = payload
        self.heard.model_part = self.heard.model_part or payload
        if self.heard.first_output_at is None:
            if has_output(payload):
                self.heard.first_output_at = self.heard.last_output_at = now
        elif not _NO_CHOICES.search(payload):
            self.heard.last_output_at = now
        if not self._takes_out or not (telling or self._excess.outputs):
            return event
        kept = reduced(payload, self._excess, is_event=True)
        return event if kept is payload else event.replace(payload, kept, 1) if kept else b""


def _with_what_is_told_last(event: bytes, removed: bytes) -> bytes:
    """As a client gets it that asks for no usage."""
    payload, theirs = _DATA.findall(event)[0], _DATA.findall(removed)[0]
    try:
        return event.replace(payload, with_last_member(payload, _TOLD_LAST, theirs), 1)
    except NotAnObject:
        return event


def _tells_error(payload: bytes) -> bool:
    if b'"error"' not in payload:
        return False
    try:
        return bytes(values_in(payload).get("error", b"null")) != b"null"
    except NotAnObject:
        return False


def reduced(answer: bytes, excess: Excess, *, is_event: bool) -> bytes:
    """The answer without what the client did not ask for; an event with nothing else becomes empty.

    An answer that cannot be parsed is not changed.
    """
    try:
        if excess.outputs:
            return without(answer, triton.OUTPUTS)
        if not is_event:
            return within(answer, sglang.EXTENSION, {sglang.DETAILS}) if excess.details else answer
        return _reduced_event(answer, excess)
    except (NotAnObject, AnswerUnreadable):
        return answer


def _reduced_event(event: bytes, excess: Excess) -> bytes:
    found = common(event)
    if found.choices != []:
        return event
    if excess.usage and found.usage is not None:
        return b""
    if excess.details:
        kept = within(event, sglang.EXTENSION, {sglang.DETAILS})
        was = {member.name for member in members(event)}
        now = {member.name for member in members(kept)}
        return b"" if was != now else kept
    return event
