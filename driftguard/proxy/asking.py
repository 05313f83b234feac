"""What the proxy adds to a request so that the answer holds counts, and what it must remove from the
answer."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final, Literal

import msgspec

from driftguard.adapters.answers import triton
from driftguard.adapters.answers.engines import ASKED_FIELDS, Engine
from driftguard.proxy.json_members import NotAnObject, values_in, with_member
from driftguard.records import UNREADABLE_JSON

Kind = Literal["openai", "native", "triton"]
Fields = Mapping[str, msgspec.Raw]

_OPENAI: Final = ("/v1/completions", "/chat/completions")
# Nothing is added to these. Of OpenAI's newer interface and of Anthropic's, only llama.cpp's streamed
# responses hold counts.
_NATIVE: Final = (
    *("/generate", "/generate_stream", "/completion", "/completions", "/infill"),
    *("/responses", "/v1/messages"),
)
_TRITON: Final = re.compile(r"/v2/models/.+/generate(_stream)?$")
_MII: Final = re.compile(r"/mii/[^/]+$")
_GIVES_USAGE_LAST: Final = ("vllm", "sglang")  # with their speculative counts in it, or beside it
_ABSENT: Final = msgspec.Raw()
# In one value that is decoded whole: so many take a few milliseconds, during which all traffic waits.
MOST_VALUES: Final = 20_000


class _Sampling(msgspec.Struct, frozen=True):
    """What is read of SGLang's sampling_params; all else in them is skipped."""

    n: msgspec.Raw = _ABSENT
    temperature: msgspec.Raw = _ABSENT


class _FirstItems(msgspec.Struct, array_like=True, frozen=True):
    """Of a list; those that follow are skipped."""

    first: msgspec.Raw = _ABSENT
    second: msgspec.Raw = _ABSENT


_decode_sampling = msgspec.json.Decoder(_Sampling).decode
_decode_first = msgspec.json.Decoder(_FirstItems).decode


class Unreadable(ValueError):
    """The body is not one JSON object, or has too many members."""


class Excess(msgspec.Struct, frozen=True):
    """What the proxy asked for and the client did not."""

    usage: bool = False
    details: bool = False  # SGLang's sglext.spec_tokens_details
    outputs: bool = False  # Triton's performance metrics


NOTHING: Final = Excess()


class Asked(msgspec.Struct, frozen=True):
    """A request that was parsed. `body` is sent to the engine."""

    body: bytes
    fields: Fields
    excess: Excess

    def field(self, name: str) -> object:
        """None where the request does not have it. Raises Unreadable."""
        return decoded(self.fields[name]) if name in self.fields else None

    def sampling(self, name: Literal["n", "temperature"]) -> object:
        """As `field`, of the member of SGLang's sampling_params."""
        text = bytes(self.fields.get("sampling_params", b""))
        if text[:1] != b"{":
            self.field("sampling_params")  # raises where it cannot be read
            return None
        with _unreadable():
            value: msgspec.Raw = getattr(_decode_sampling(text), name)
        return decoded(value) if bytes(value) else None

    @property
    def has_several_answers(self) -> bool:
        """More than one sequence: engines give counts for all together, for the first only, or not at all.
        Raises Unreadable."""
        counts = (self.field("n"), self.field("n_cmpl"), self.sampling("n"))  # n_cmpl: of llama.cpp
        if any(isinstance(count, int) and count > 1 for count in counts):
            return True
        return any(
            _is_batch(self.fields[name]) for name in ("prompt", "text", "input_ids") if name in self.fields
        )


def decoded(value: msgspec.Raw) -> object:
    """Raises Unreadable: the decoder of the whole body skipped this value without checking it."""
    if sum(map(bytes(value).count, (b",", b"[", b"{"))) > MOST_VALUES:
        raise Unreadable(f"more than {MOST_VALUES} values in one member")
    with _unreadable():
        return msgspec.json.decode(value)


@contextmanager
def _unreadable() -> Iterator[None]:
    try:
        yield
    except (*UNREADABLE_JSON, NotAnObject) as error:
        raise Unreadable(str(error)) from None


def kind_of(method: str, path: str) -> Kind | None:
    """None for a request that generates nothing."""
    if method != "POST":
        return None
    if path.endswith(_OPENAI):
        return "openai"
    if _TRITON.search(path):
        return "triton"
    return "native" if path.endswith(_NATIVE) or _MII.search(path) else None


def ask(kind: Kind, engine: Engine, body: bytes, *, usage_always: bool) -> Asked:
    """Adds the fields that make this engine return its counts. Raises Unreadable."""
    with _unreadable():
        fields = values_in(body)
        if kind == "openai":
            changed, excess = _ask_openai(engine, fields, body, usage_always=usage_always)
        elif kind == "triton":
            changed, excess = _ask_triton(fields, body)
        else:
            changed, excess = body, NOTHING
    return Asked(changed, fields, excess)


def _ask_openai(engine: Engine, fields: Fields, body: bytes, *, usage_always: bool) -> tuple[bytes, Excess]:
    wants_usage = wants_details = False
    if engine in _GIVES_USAGE_LAST and not usage_always and _is_true(fields, "stream"):
        raw = fields.get("stream_options")
        options = b"{}" if raw is None or bytes(raw) == b"null" else bytes(raw)
        stated = values_in(options)
        in_every_event = _is_true(stated, "continuous_usage_stats")
        # SGLang does so by this alone, which leaves nothing to add; vLLM only with include_usage, which must
        # not bring the client what it did not get without.
        wants_usage = not (_is_true(stated, "include_usage") or (in_every_event and engine == "sglang"))
        if wants_usage and in_every_event:
            options = with_member(options, "continuous_usage_stats", b"false")
        if wants_usage:
            body = with_member(body, "stream_options", with_member(options, "include_usage", b"true"))
    field = ASKED_FIELDS.get(engine)
    if field is not None and not _is_true(fields, field):
        wants_details = True
        body = with_member(body, field, b"true")
    return body, Excess(usage=wants_usage, details=wants_details)


def _ask_triton(fields: Fields, body: bytes) -> tuple[bytes, Excess]:
    if any(_is_true(fields, name) for name in (triton.REQUEST_FIELD, "return_perf_metrics")):
        return body, NOTHING
    return with_member(body, triton.REQUEST_FIELD, b"true"), Excess(outputs=True)


def _is_true(fields: Fields, name: str) -> bool:
    """As engines read it that check requests with pydantic, as vLLM and SGLang do."""
    return name in fields and bytes(fields[name]) in (b"true", b"1")


def _is_batch(prompt: msgspec.Raw) -> bool:
    """Raises Unreadable."""
    text = bytes(prompt)
    if text[:1] != b"[" or text[1:2].isdigit():  # one text, or the token ids of one prompt
        return False
    with _unreadable():
        items = _decode_first(text)
    return bool(bytes(items.second)) and not bytes(items.first)[:1].isdigit()
