"""Captured traffic: JSON Lines of token ids, one request per line."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from driftguard_training.errors import BadTraffic
from driftguard_training.settings import Verification


class TrafficRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One finished request. Output token t was produced after prompt_token_ids + output_token_ids[:t]."""

    segment: str
    prompt_token_ids: list[int]
    output_token_ids: list[int]

    @property
    def token_ids(self) -> list[int]:
        return self.prompt_token_ids + self.output_token_ids


class ServedRequest(TrafficRequest, frozen=True, forbid_unknown_fields=True):
    """The same with how it was served: the temperature that it was sampled at, and K; or, where that is null
    because it changed between the steps, the parts of these that drafted at least 1, 2, ... tokens; and what
    of sampled drafts was verified at once."""

    temperature: Annotated[float, msgspec.Meta(ge=0)]
    num_speculative_tokens: Annotated[int, msgspec.Meta(ge=1)] | None
    drafting_steps: list[Annotated[float, msgspec.Meta(gt=0, le=1)]] = []
    verification: Verification = "token"

    def __post_init__(self) -> None:
        falling = all(more <= fewer for fewer, more in pairwise(self.drafting_steps))
        if bool(self.drafting_steps) == (self.num_speculative_tokens is not None) or not falling:
            raise ValueError(
                "num_speculative_tokens is needed, or, where that is null, drafting_steps, of which none may "
                f"be larger than the one before; given are {self.num_speculative_tokens} and "
                f"{self.drafting_steps}"
            )

    @property
    def lengths(self) -> list[float]:
        """The parts of the steps that drafted at least 1, 2, ... tokens."""
        return self.drafting_steps or [1.0] * (self.num_speculative_tokens or 0)


Request = TypeVar("Request", bound=TrafficRequest)


def read_traffic(path: Path, vocabulary: int, context_tokens: int) -> list[TrafficRequest]:
    """All requests of the file, in order.

    Raises:
        BadTraffic: the file is missing or empty, or a line is not a request that these models could serve.
    """
    requests = []
    for number, request in _read(path, TrafficRequest):
        if problem := _problem(request, vocabulary, context_tokens):
            raise BadTraffic(f"{path}, line {number}: {problem}")
        requests.append(request)
    return requests


def read_served(path: Path) -> list[ServedRequest]:
    """All requests of the file, in order. Raises BadTraffic: it is missing or empty, or a line is none."""
    return [request for _, request in _read(path, ServedRequest)]


def is_served_by(request: TrafficRequest, vocabulary: int, context_tokens: int) -> bool:
    return _problem(request, vocabulary, context_tokens) is None


def _read(path: Path, kind: type[Request]) -> list[tuple[int, Request]]:
    """(number of its line, request)."""
    if not path.is_file():
        raise BadTraffic(f"{path}: no such file")
    decoder = msgspec.json.Decoder(kind)
    requests = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            requests.append((number, decoder.decode(line)))
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BadTraffic(f"{path}, line {number}: {error}") from error
    if not requests:
        raise BadTraffic(f"{path}: no requests in the file")
    return requests


def _problem(request: TrafficRequest, vocabulary: int, context_tokens: int) -> str | None:
    for field in ("prompt_token_ids", "output_token_ids"):
        ids: list[int] = getattr(request, field)
        if not ids:
            return f"{field} is empty; at least one token id is needed"
        for index, token in enumerate(ids):
            if not 0 <= token < vocabulary:
                return f"{field}[{index}] is {token}; token ids are 0 to {vocabulary - 1}"
    length = len(request.token_ids)
    if length > context_tokens:
        return f"prompt and output are {length} tokens; the models' context is {context_tokens}"
    return None
