"""Captured traffic: JSON Lines of token ids, one request per line."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Annotated, NamedTuple, TypeVar

import msgspec

from driftguard_training.errors import BadTraffic, TooLittleTraffic
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


class Fitting(NamedTuple):
    """The requests of a file that fit the models' context, in order, and those that are longer."""

    requests: list[TrafficRequest]
    longer: list[TrafficRequest]

    def left_out(self) -> dict[str, int]:
        """How many are longer, by segment."""
        return dict(sorted(Counter(request.segment for request in self.longer).items()))


def read_fitting(path: Path, vocabulary: int, context_tokens: int, *, may_be_none: bool = False) -> Fitting:
    """A request that is only too long is no bad traffic: an engine serves, and captures, also what is longer
    than the context of its draft.

    Raises:
        BadTraffic: the file is missing or empty, or a line is not a request of tokens that these models have.
        TooLittleTraffic: no request fits, unless there `may_be_none`.
    """
    requests = []
    for number, request in _read(path, TrafficRequest):
        if problem := _problem(request, vocabulary):
            raise BadTraffic(f"{path}, line {number}: {problem}")
        requests.append(request)
    fitting = [request for request in requests if _fits(request, context_tokens)]
    longer = [request for request in requests if not _fits(request, context_tokens)]
    if not fitting and not may_be_none:
        raise TooLittleTraffic(
            f"{path}: no request fits the models' context of {context_tokens} tokens "
            f"(requests that are longer: {len(longer)})"
        )
    return Fitting(fitting, longer)


def read_traffic(path: Path, vocabulary: int, context_tokens: int) -> list[TrafficRequest]:
    """As `read_fitting`, those that fit alone."""
    return read_fitting(path, vocabulary, context_tokens).requests


def read_served(path: Path) -> list[ServedRequest]:
    """All requests of the file, in order. Raises BadTraffic: it is missing or empty, or a line is none."""
    return [request for _, request in _read(path, ServedRequest)]


def is_served_by(request: TrafficRequest, vocabulary: int, context_tokens: int) -> bool:
    return _problem(request, vocabulary) is None and _fits(request, context_tokens)


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


def _fits(request: TrafficRequest, context_tokens: int) -> bool:
    return len(request.token_ids) <= context_tokens


def _problem(request: TrafficRequest, vocabulary: int) -> str | None:
    for field in ("prompt_token_ids", "output_token_ids"):
        ids: list[int] = getattr(request, field)
        if not ids:
            return f"{field} is empty; at least one token id is needed"
        for index, token in enumerate(ids):
            if not 0 <= token < vocabulary:
                return f"{field}[{index}] is {token}; token ids are 0 to {vocabulary - 1}"
    return None
