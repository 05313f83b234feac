"""Captured traffic: JSON Lines of token ids, one request per line."""

from __future__ import annotations

from pathlib import Path

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


def read_traffic(path: Path, vocabulary: int, context_tokens: int) -> list[TrafficRequest]:
    """All requests of the file, in order.

    Raises:
        BadTraffic: the file is missing or empty, or a line is not a request that these models could serve.
    """
    if not path.is_file():
        raise BadTraffic(f"{path}: no such file")
    decoder = msgspec.json.Decoder(TrafficRequest)
    requests = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            request = decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise BadTraffic(f"{path}, line {number}: {error}") from error
        if problem := _problem(request, vocabulary, context_tokens):
            raise BadTraffic(f"{path}, line {number}: {problem}")
        requests.append(request)
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
