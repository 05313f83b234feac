"""The usual silence of each source: queried once after its newest record, and cached."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta

from sqlalchemy.orm import Session

from driftguard.status.staleness import USUAL_SPANS, Newest
from driftguard.store import silences

Place = tuple[str, str]  # server, target


@dataclass(frozen=True, slots=True)
class ActiveSource:
    """A source's newest record that is not a canary probe, and all its streams."""

    newest: Newest
    stream_ids: tuple[int, ...]


@dataclass(slots=True)
class UsualSilences:
    """A cache, one per process, for all threads: a value stays valid until the source's next record. It holds
    one value for each source that was ever queried."""

    _known: dict[Place, tuple[ActiveSource, timedelta]] = field(default_factory=dict)

    def of(self, session: Session, heard: Mapping[Place, ActiveSource]) -> dict[Place, timedelta]:
        """Uses one statement, or none if all are cached."""
        known = dict(self._known)  # other threads may add to it
        unknown = [place for place, each in heard.items() if place not in known or known[place][0] != each]
        asked = [silences.Source(heard[each].stream_ids, heard[each].newest.ended_at) for each in unknown]
        for place, usual in zip(unknown, silences.longest(session, asked, USUAL_SPANS), strict=True):
            known[place] = self._known[place] = (heard[place], usual)
        return {place: known[place][1] for place in heard}
