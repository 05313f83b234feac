"""Search, filters, sorting and pagination of the list of streams."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from driftguard.incidents.message import cost_percent
from driftguard.status.verdict import Standing

Order = Literal["verdict", "last_seen", "cost", "server"]


class Key(NamedTuple):
    """The sort key of a stream in an order."""

    order: Order
    value: float  # smallest first
    server: str
    target: str
    stream_id: int


@dataclass(frozen=True, slots=True)
class Choice:
    """The filter of a list of streams; None: any. `text`: part of one of a stream's names, or of a segment's,
    not case-sensitive."""

    text: str | None = None
    verdict: str | None = None
    server: str | None = None
    target: str | None = None
    method: str | None = None
    in_service: bool | None = None


def matching(found: Sequence[Standing], choice: Choice, with_segment: Collection[int] = ()) -> list[Standing]:
    """`with_segment`: ids of the streams that have a segment with that text in its name."""
    return [item for item in found if _matches(item, choice, with_segment)]


def _matches(item: Standing, choice: Choice, with_segment: Collection[int]) -> bool:
    stream = item.stream
    pairs = (
        (choice.verdict, item.verdict),
        (choice.server, stream.server),
        (choice.target, stream.target),
        (choice.method, stream.method),
        (choice.in_service, item.in_service),
    )
    if any(wanted is not None and wanted != own for wanted, own in pairs):
        return False
    if choice.text is None or stream.id in with_segment:
        return True
    names = (stream.server, stream.target, stream.draft, stream.draft_version, stream.method)
    return any(choice.text.casefold() in name.casefold() for name in names)


def page(
    found: Sequence[Standing], order: Order, limit: int, after: Key | None = None
) -> tuple[list[Standing], Key | None]:
    """The next `limit` streams after the key `after`, and the key of the last one if there are more."""
    keyed = sorted(((_key(item, order), item) for item in found), key=lambda pair: pair[0])
    rest = [pair for pair in keyed if after is None or pair[0] > after]
    shown = rest[:limit]
    return [item for _, item in shown], shown[-1][0] if len(rest) > limit else None


def _key(item: Standing, order: Order) -> Key:
    """The worst, the newest, the most expensive first; among equals by name, so that consecutive
    pages of the list fit together."""
    stream = item.stream
    place = {
        "verdict": float(item.rank),
        "last_seen": -stream.last_seen_at.timestamp(),
        "cost": -(_cost(item) or 0.0),
        "server": 0.0,
    }
    return Key(order, place[order], stream.server, stream.target, stream.id)


def _cost(item: Standing) -> float | None:
    """Percent of the tokens per second, while degraded."""
    return cost_percent(item.incident) if item.known_verdict == "degraded" and item.incident else None
