"""What the detector reads: requests (or counter windows) of one stream, as columns."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from driftguard.records import AcceptanceRecord, AcceptanceRule, Verification
from driftguard.records.positions import first_counts

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

LARGEST_SECONDS = 253_402_300_800.0  # the year 10,000
LARGEST_K = 1024
_NOT_GIVEN = -1
_EMPTY_INTS: Ints = np.zeros(0, dtype=np.int64)
_EMPTY_FLOATS: Floats = np.zeros(0)


@dataclass(frozen=True, slots=True, eq=False)
class ObservationBatch:
    """N observations of one stream, oldest first. A window of a counter is one observation.

    `ordinal` [N] is any strictly increasing number by which the caller finds the record again (the
    store's seq, a line number); `drafted` and `accepted` [N] are tokens, 0 <= accepted <= drafted;
    times are in seconds since 1970 UTC. An observation that gives `first_drafted` and `first_accepted`, and
    no K, is judged by them instead (`driftguard.records.positions`). The columns after `ended_at` may be left
    out: then no observation gives that field. Raises ValueError when a column breaks this.
    """

    ordinal: Ints  # [N]
    segment: Sequence[str]  # [N]
    drafted: Ints  # [N] tokens
    accepted: Ints  # [N] tokens
    ended_at: Floats  # [N] seconds since 1970 UTC
    session: Sequence[str | None] = ()  # [N]
    kind: Sequence[str] = ()  # [N] request or window
    num_speculative_tokens: Ints = field(default_factory=lambda: _EMPTY_INTS)  # [N], -1: not given
    acceptance_rule: Sequence[str] = ()  # [N]
    verification: Sequence[str] = ()  # [N]
    temperature: Floats = field(default_factory=lambda: _EMPTY_FLOATS)  # [N], NaN: not given
    output_tokens: Ints = field(default_factory=lambda: _EMPTY_INTS)  # [N], -1: not given
    started_at: Floats = field(default_factory=lambda: _EMPTY_FLOATS)  # [N], NaN: not given
    first_drafted: Ints = field(default_factory=lambda: _EMPTY_INTS)  # [N] of position 1, -1: not given
    first_accepted: Ints = field(default_factory=lambda: _EMPTY_INTS)  # [N]
    prompt_tokens: Ints = field(default_factory=lambda: _EMPTY_INTS)  # [N], -1: not given
    cached_tokens: Ints = field(default_factory=lambda: _EMPTY_INTS)  # [N] of the prompt, -1: not given
    concurrency: Ints = field(default_factory=lambda: _EMPTY_INTS)  # [N] requests, -1: not given
    started_requests: Ints = field(default_factory=lambda: _EMPTY_INTS)  # [N] in a window, -1: not given

    def __post_init__(self) -> None:
        n = len(self.ordinal)
        left_out = {
            "session": [None] * n,
            "kind": ["request"] * n,
            "num_speculative_tokens": np.full(n, _NOT_GIVEN),
            "acceptance_rule": ["unknown"] * n,
            "verification": ["unknown"] * n,
            "temperature": np.full(n, math.nan),
            "output_tokens": np.full(n, _NOT_GIVEN),
            "started_at": np.full(n, math.nan),
            "first_drafted": np.full(n, _NOT_GIVEN),
            "first_accepted": np.full(n, _NOT_GIVEN),
            "prompt_tokens": np.full(n, _NOT_GIVEN),
            "cached_tokens": np.full(n, _NOT_GIVEN),
            "concurrency": np.full(n, _NOT_GIVEN),
            "started_requests": np.full(n, _NOT_GIVEN),
        }
        for name, column in left_out.items():
            if len(getattr(self, name)) == 0:
                object.__setattr__(self, name, column)
        self._check()

    def _check(self) -> None:
        lengths = {len(getattr(self, item.name)) for item in fields(self)}
        if len(lengths) > 1:
            raise ValueError(f"columns of a batch must have one length, not {sorted(lengths)}")
        if (np.diff(self.ordinal) <= 0).any() or (self.ordinal[:1] < 0).any():
            raise ValueError("ordinal must be at least 0 and increase from observation to observation")
        if (self.accepted < 0).any() or (self.accepted > self.drafted).any():
            raise ValueError("accepted must lie between 0 and drafted in every observation")
        if not (np.abs(self.ended_at) < LARGEST_SECONDS).all():
            raise ValueError("ended_at must be seconds since 1970, before the year 10,000")
        if (np.abs(self.started_at) >= LARGEST_SECONDS).any():
            raise ValueError("started_at must be seconds since 1970, before the year 10,000")
        if not set(self.kind) <= {"request", "window"}:
            raise ValueError("kind must be request or window in every observation")
        if not set(self.acceptance_rule) <= set(get_args(AcceptanceRule)):
            raise ValueError("acceptance_rule must be one of the record's in every observation")
        if not set(self.verification) <= set(get_args(Verification)):
            raise ValueError("verification must be one of the record's in every observation")
        if ((self.num_speculative_tokens < _NOT_GIVEN) | (self.num_speculative_tokens > LARGEST_K)).any():
            raise ValueError(f"num_speculative_tokens must lie between 0 and {LARGEST_K}")
        if (self.temperature < 0.0).any() or np.isinf(self.temperature).any():
            raise ValueError("temperature must be at least 0 and finite")
        if (self.output_tokens < _NOT_GIVEN).any():
            raise ValueError("output_tokens must be at least 0")
        if (np.minimum(self.prompt_tokens, self.cached_tokens) < _NOT_GIVEN).any():
            raise ValueError("prompt_tokens and cached_tokens must be at least 0")
        if (np.minimum(self.concurrency, self.started_requests) < _NOT_GIVEN).any():
            raise ValueError("concurrency and started_requests must be at least 0")
        if ((self.prompt_tokens >= 0) & (self.cached_tokens > self.prompt_tokens)).any():
            raise ValueError("cached_tokens must be at most prompt_tokens, of which they are a part")
        self._check_first()

    def _check_first(self) -> None:
        drafted, accepted = self.first_drafted, self.first_accepted
        given = drafted >= 0
        if not np.array_equal(given, accepted >= 0) or (np.minimum(drafted, accepted) < _NOT_GIVEN).any():
            raise ValueError("first_drafted and first_accepted must be given together, and be at least 0")
        if (accepted > drafted).any() or (drafted > np.where(given, self.drafted, 0)).any():
            raise ValueError("first_accepted must be at most first_drafted, and that at most drafted")

    @property
    def by_first(self) -> NDArray[np.bool_]:
        """Which observations are judged by their first position [N]."""
        by_first: NDArray[np.bool_] = (self.first_drafted >= 0) & (self.num_speculative_tokens == _NOT_GIVEN)
        return by_first

    @property
    def judged_drafted(self) -> Ints:
        """[N] of the positions that the observation is judged by."""
        return np.where(self.by_first, self.first_drafted, self.drafted)

    @property
    def judged_accepted(self) -> Ints:
        return np.where(self.by_first, self.first_accepted, self.accepted)

    def __len__(self) -> int:
        return len(self.ordinal)

    def __getitem__(self, part: slice) -> ObservationBatch:
        return replace(self, **{item.name: getattr(self, item.name)[part] for item in fields(self)})

    def parted(self, part: Sequence[int]) -> dict[int, ObservationBatch]:
        """The observations of each part, in their order; `part` [N] is what each belongs to."""
        of_each = np.asarray(part, dtype=np.int64)
        order = np.argsort(of_each, kind="stable")
        places = order.tolist()
        columns = {
            name: column[order] if isinstance(column, np.ndarray) else [column[place] for place in places]
            for name, column in ((item.name, getattr(self, item.name)) for item in fields(self))
        }
        parts, starts = np.unique(of_each[order], return_index=True)
        return {
            each: self.unchecked({name: column[start:end] for name, column in columns.items()})
            for each, (start, end) in zip(
                parts.tolist(), pairwise([*starts.tolist(), len(places)]), strict=True
            )
        }

    @classmethod
    def unchecked(cls, columns: Mapping[str, Any]) -> ObservationBatch:
        """Of all columns, which are parts of batches that were checked."""
        batch = object.__new__(cls)
        for name, column in columns.items():
            object.__setattr__(batch, name, column)
        return batch

    @classmethod
    def of(
        cls,
        ordinal: Sequence[int] | Ints,
        segment: Sequence[str],
        drafted: Sequence[int] | Ints,
        accepted: Sequence[int] | Ints,
        ended_at: Sequence[float] | Floats,
        *,
        session: Sequence[str | None] = (),
        kind: Sequence[str] = (),
        num_speculative_tokens: Sequence[int | None] | Ints = (),
        acceptance_rule: Sequence[str] = (),
        verification: Sequence[str] = (),
        temperature: Sequence[float | None] | Floats = (),
        output_tokens: Sequence[int | None] | Ints = (),
        started_at: Sequence[float | None] | Floats = (),
        first_position: Sequence[tuple[int, int] | None] = (),
        prompt_tokens: Sequence[int | None] | Ints = (),
        cached_tokens: Sequence[int | None] | Ints = (),
        concurrency: Sequence[int | None] | Ints = (),
        started_requests: Sequence[int | None] | Ints = (),
    ) -> ObservationBatch:
        """From plain sequences; None is a field that is not given. `first_position`: (drafted, accepted)."""
        given = first_position if any(first_position) else ()  # hardly any batch has one
        pairs = [pair or (_NOT_GIVEN, _NOT_GIVEN) for pair in given]
        first = np.array(pairs, dtype=np.int64).reshape(-1, 2)
        return cls(
            np.asarray(ordinal, dtype=np.int64),
            segment,
            np.asarray(drafted, dtype=np.int64),
            np.asarray(accepted, dtype=np.int64),
            np.asarray(ended_at, dtype=np.float64),
            session,
            kind,
            _ints(num_speculative_tokens),
            acceptance_rule,
            verification,
            np.asarray(temperature, dtype=np.float64),  # None becomes NaN
            _ints(output_tokens),
            np.asarray(started_at, dtype=np.float64),
            first[:, 0],
            first[:, 1],
            _ints(prompt_tokens),
            _ints(cached_tokens),
            _ints(concurrency),
            _ints(started_requests),
        )

    @classmethod
    def from_records(cls, ordinals: Sequence[int], records: Sequence[AcceptanceRecord]) -> ObservationBatch:
        """From records of one stream; probes are the caller's to leave out."""
        return cls.of(
            ordinals,
            [record.segment for record in records],
            [record.drafted for record in records],
            [record.accepted for record in records],
            [record.ended_at.timestamp() for record in records],
            session=[record.session for record in records],
            kind=[record.kind for record in records],
            num_speculative_tokens=[record.num_speculative_tokens for record in records],
            acceptance_rule=[record.acceptance_rule for record in records],
            verification=[record.verification for record in records],
            temperature=[record.temperature for record in records],
            output_tokens=[record.output_tokens for record in records],
            started_at=[record.started_at.timestamp() for record in records],
            prompt_tokens=[record.prompt_tokens for record in records],
            cached_tokens=[record.cached_tokens for record in records],
            concurrency=[record.concurrency for record in records],
            started_requests=[record.started_requests for record in records],
            first_position=[
                first_counts(
                    record.kind,
                    _first(record.drafted_per_position),
                    _first(record.accepted_per_position),
                )
                for record in records
            ],
        )


def _first(counts: Sequence[int] | None) -> int | None:
    return counts[0] if counts else None


def _ints(values: Sequence[int | None] | Ints) -> Ints:
    if isinstance(values, np.ndarray):
        return values.astype(np.int64)
    return np.array([_NOT_GIVEN if value is None else value for value in values], dtype=np.int64)
