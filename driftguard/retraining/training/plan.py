"""The plan of a retraining: whether the captured traffic is enough, what to train on, what to hold out.

Groups, and how they are named in the files of the training:

    changed:<segment>   captured since the change point in a segment whose acceptance changed
    older:<segment>     everything else: before the change point, or in a segment that did not change

The held-out part is chosen by a hash of the record's id, so that a request stays on its side of the
split in every later run: no candidate is ever judged on what it, or its parent, has learned.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

MINIMUM_HELD_OUT = 10  # requests of the changed traffic; fewer cannot show a gain
MAXIMUM_HELD_OUT = 400  # per group; more only costs the gate time
MAXIMUM_TRAINING = 4_096  # requests of the changed traffic; 150 steps of 12 read fewer
MAXIMUM_REPLAY = 4_096  # older requests; the training keeps all in memory, and reads a few hundred of them
_HASH_RANGE = 2**64


@dataclass(frozen=True, slots=True)
class CapturedRequest:
    """One captured request without its token ids. `key` is what the split hashes: the record's id; `tokens`:
    of prompt and output; `output_tokens`: of the output alone."""

    key: str
    segment: str
    captured_at: datetime
    tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Change:
    """The change that an incident states: which segments, each since when, and when it was opened."""

    since: Mapping[str, datetime]
    opened_at: datetime


@dataclass(frozen=True, slots=True)
class PlanRules:
    """See RetrainingSettings; the same names and units. `context_tokens`: of the models that learn and judge;
    what is longer is left out. None where that is not known. `corpus_tokens`: of a corpus, which has room for
    answers of so many; None where a model is trained."""

    minimum_requests: int
    aim_requests: int
    wait: timedelta
    heldout_fraction: float
    context_tokens: int | None = None
    corpus_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class LeftOut:
    """How many captured requests have token ids that a target of so many tokens lacks."""

    requests: int
    vocabulary: int

    @property
    def told(self) -> str:
        requests = "1 captured request is" if self.requests == 1 else f"{self.requests} captured requests are"
        return (
            f"{requests} left out: {'it has' if self.requests == 1 else 'they have'} token ids that the "
            f"target's vocabulary of {self.vocabulary} lacks"
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """Which captured requests go where, by key, and the group that each belongs to."""

    train: Sequence[str]
    replay: Sequence[str]
    held_out: Sequence[str]
    groups: Mapping[str, str]  # key -> "changed:<segment>" or "older:<segment>"
    left_out: LeftOut | None = None


@dataclass(frozen=True, slots=True)
class NothingToDo:
    """No retraining now, and why. `waits_for_traffic`: it may be possible when more traffic is captured."""

    reason: str
    waits_for_traffic: bool = False


def plan(
    captured: Iterable[CapturedRequest], change: Change | None, rules: PlanRules, now: datetime
) -> Plan | NothingToDo:
    """Without a change (a forced run, or a traffic file) all captured traffic counts as changed."""
    context = math.inf if rules.context_tokens is None else rules.context_tokens
    newest_first = sorted(captured, key=lambda request: (request.captured_at, request.key), reverse=True)
    longer = sum(request.tokens > context for request in newest_first)
    that_fit = f" that fit the models' context of {context} tokens" if longer else ""
    newest_first = [request for request in newest_first if request.tokens <= context]
    groups = {request.key: _group(request, change) for request in newest_first}
    changed = [request.key for request in newest_first if is_changed(groups[request.key])]
    if refusal := _too_little(len(changed), that_fit, change, rules, now):
        return refusal
    held_out = [key for key in groups if is_held_out(key, rules.heldout_fraction)]
    held_out_changed = sum(is_changed(groups[key]) for key in held_out)
    if held_out_changed < MINIMUM_HELD_OUT:
        return NothingToDo(
            f"only {held_out_changed} of {len(changed)} captured requests{that_fit} are held out for the "
            f"gate, {MINIMUM_HELD_OUT} needed; capture more, or raise retraining.heldout_fraction",
            waits_for_traffic=change is not None,
        )
    aside = set(held_out)
    learned = [one for one in newest_first if one.key not in aside]
    newer, older = ([one for one in learned if is_changed(groups[one.key]) is new] for new in (True, False))
    if rules.corpus_tokens is None:
        train, replay = _of_each(newer, groups, MAXIMUM_TRAINING), _of_each(older, groups, MAXIMUM_REPLAY)
    else:
        train, room = _filling(newer, rules.corpus_tokens)
        if not train:
            return NothingToDo(
                f"no captured answer{' since the change' if change else ''} fits into a corpus of "
                f"{rules.corpus_tokens} tokens (retraining.corpus_tokens)"
            )
        replay, _ = _filling(older, room)
    held_out = _newest_of_each_group(held_out, groups, MAXIMUM_HELD_OUT)
    return Plan(train=train, replay=replay, held_out=held_out, groups=groups)


def too_few(found: int, change: Change | None, rules: PlanRules, that_fit: str = "") -> NothingToDo | None:
    """Where there are no more captured requests of the changed traffic than `found`."""
    if found >= rules.minimum_requests:
        return None
    since = (" since the change" if change else "") + that_fit
    return NothingToDo(
        f"only {found} captured requests{since}, {rules.minimum_requests} needed",
        waits_for_traffic=change is not None,
    )


def is_held_out(key: str, fraction: float) -> bool:
    """Always the same for the same key; true for about `fraction` of all keys."""
    digest = hashlib.sha256(key.encode()).digest()
    return int.from_bytes(digest[:8]) < fraction * _HASH_RANGE


def _group(request: CapturedRequest, change: Change | None) -> str:
    since = None if change is None else change.since.get(request.segment)
    changed = change is None or (since is not None and request.captured_at >= since)
    return f"{'changed' if changed else 'older'}:{request.segment}"


def is_changed(group: str) -> bool:
    """Whether requests of this group are of the changed traffic."""
    return group.startswith("changed:")


def _too_little(
    found: int, that_fit: str, change: Change | None, rules: PlanRules, now: datetime
) -> NothingToDo | None:
    if (refusal := too_few(found, change, rules, that_fit)) or change is None or found >= rules.aim_requests:
        return refusal
    deadline = change.opened_at + rules.wait
    if now >= deadline:
        return None
    return NothingToDo(
        f"{found} captured requests since the change{that_fit}; waiting for {rules.aim_requests}, "
        f"at the latest until {deadline:%Y-%m-%d %H:%M:%S} UTC",
        waits_for_traffic=True,
    )


def _of_each(newest_first: Sequence[CapturedRequest], groups: Mapping[str, str], most: int) -> list[str]:
    """Of all at most so many, of which each group has as many, or all of its own: a rare one would be
    unlearned first, or not be learned at all."""
    keys = [one.key for one in newest_first]
    sizes = sorted(Counter(groups[key] for key in keys).values())
    room, each = most, 0
    for place, size in enumerate(sizes):
        each = room // (len(sizes) - place)
        if size > each:
            break
        room -= size
    return _newest_of_each_group(keys, groups, each)


def _filling(newest_first: Iterable[CapturedRequest], room: int) -> tuple[list[str], int]:
    """The newest whose answers fill a corpus of so many tokens, and the room that they leave: its maker keeps
    all that it reads in memory, and takes each answer that still fits, with an end."""
    chosen = []
    for one in newest_first:
        if one.output_tokens < room:
            room -= one.output_tokens + 1
            chosen.append(one.key)
    return chosen, room


def _newest_of_each_group(keys: Iterable[str], groups: Mapping[str, str], most: int) -> list[str]:
    taken: Counter[str] = Counter()
    chosen = []
    for key in keys:
        group = groups[key]
        taken[group] += 1
        if taken[group] <= most:
            chosen.append(key)
    return chosen
