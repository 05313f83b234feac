"""Captured traffic: JSON Lines of token ids, one request per line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, TypeVar

import msgspec

from driftguard_training.errors import BadTraffic


class TrafficRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One finished request. Output token t was produced after prompt_token_ids + output_token_ids[:t]."""

    segment: str
    prompt_token_ids: list[int]
    output_token_ids: list[int]

    @property
    def token_ids(self) -> list[int]:
        return self.prompt_token_ids + self.output_token_ids


class ServedRequest(TrafficRequest, frozen=True, forbid_unknown_fields=True):
    """The same with how it was served: K, and the temperature that it was sampled at."""

    temperature: Annotated[float, msgspec.Meta(ge=0)]
    num_speculative_tokens: Annotated[int, msgspec.Meta(ge=1)]


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
