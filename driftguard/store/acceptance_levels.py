"""What the requests of one draft accepted, per segment, and how they were sampled."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import datetime
from typing import Any, Final, Literal, NamedTuple

from sqlalchemy import Row, select, text
from sqlalchemy.orm import Session

from driftguard.records import Kind
from driftguard.store.by_arrival import (
    MOST_READ,
    NEWEST_FIRST,
    NOT_LEFT_OUT,
    OF_STREAM,
    OLDEST_FIRST,
    LeftOut,
    left_out,
    newest_records,
)
from driftguard.store.tables import Stream

_NEWEST_REQUESTS = 1_000  # per segment: what the draft does now, not what it did months ago

LOOKED_UP: Final = ("ngram", "suffix", "hybrid")  # methods that draft as many tokens as a lookup finds


class AcceptanceLevel(NamedTuple):
    """Of x = accepted / drafted per request, over `requests` requests with drafted tokens."""

    segment: str
    requests: int
    mean: float
    variance: float  # between requests; 0 for a single one


class DraftLevel(NamedTuple):
    """As AcceptanceLevel, of requests that can be compared with each other and with later ones.

    `k`: all of them told this K. `by_first`: of the first draft token alone, because K varied or was not
    told, and then accepted / drafted changes with K (driftguard.records.positions). Neither: K is unknown.
    """

    segment: str
    requests: int
    mean: float
    variance: float
    k: int | None = None
    by_first: bool = False


_LEVELS = text(
    """
    SELECT segment,
           count(*) AS requests, avg(x) AS mean, coalesce(var_samp(x), 0) AS variance,
           count(k) AS of_k, min(k) AS lowest_k, max(k) AS highest_k,
           avg(x) FILTER (WHERE k IS NOT NULL) AS mean_of_k,
           coalesce(var_samp(x) FILTER (WHERE k IS NOT NULL), 0) AS variance_of_k,
           count(first) AS of_first, avg(first) AS mean_of_first,
           coalesce(var_samp(first), 0) AS variance_of_first
    FROM (
        SELECT r.segment, r.num_speculative_tokens AS k, r.accepted::float8 / asked.tokens AS x,
               CASE WHEN s.method <> ALL(:looked_up) AND r.drafted_per_position[1] > 0
                    THEN r.accepted_per_position[1]::float8 / r.drafted_per_position[1] END AS first,
               row_number() OVER (PARTITION BY r.segment ORDER BY r.seq DESC) AS age
        FROM records r JOIN streams s ON s.id = r.stream_id
        LEFT JOIN unnest(CAST(:changed AS text[]), CAST(:since AS timestamptz[])) AS changed (segment, since)
            ON changed.segment = r.segment
        CROSS JOIN LATERAL (
            SELECT CASE WHEN s.method = ANY(:looked_up)
                   THEN coalesce(r.steps * r.num_speculative_tokens, r.drafted) ELSE r.drafted END AS tokens
        ) AS asked
        WHERE s.server = :server AND s.target = :target AND s.draft_version = :version
          AND r.kind = 'request' AND asked.tokens > 0 AND r.ended_at >= :oldest
          AND (CAST(:until AS timestamptz) IS NULL OR r.ended_at < :until)
          AND (changed.since IS NULL OR r.ended_at >= changed.since)
    ) AS newest
    WHERE age <= :newest
    GROUP BY segment ORDER BY segment
    """
)


_SINCE = text(
    """
    SELECT max(minute) FROM (
        SELECT minute, sum(sum(records)) OVER (ORDER BY minute DESC) AS requests
        FROM rollups_1h
        WHERE stream_id = ANY(:stream_ids) AND kind = 'request' AND minute >= :oldest
          AND (CAST(:until AS timestamptz) IS NULL OR minute + interval '1 hour' <= :until)
        GROUP BY minute
    ) AS hours
    WHERE requests >= :most
    """
)


def _since(session: Session, streams: list[int], oldest: datetime, until: datetime | None) -> datetime:
    """The hour since which these streams had MOST_READ requests before `until`, or `oldest`."""
    given = {"stream_ids": streams, "oldest": oldest, "until": until, "most": MOST_READ}
    return session.scalar(_SINCE, given) or oldest


def levels(
    session: Session,
    *,
    server: str,
    target: str,
    version: str,
    oldest: datetime,
    until: datetime | None = None,
    since: Mapping[str, datetime] = {},
) -> list[DraftLevel]:
    """Of the newest requests of each segment, from `oldest` on and before `until`; of some segments
    those `since` then. Of most of these: at one K if they tell one, else by the first draft token. A segment
    that has few of the newest MOST_READ requests is judged by these.

    How many tokens a lookup drafts depends on what it finds: x is then of all that K allows, so that
    two corpora can be compared.
    """
    rows = session.execute(
        _LEVELS,
        {
            "server": server,
            "target": target,
            "version": version,
            "changed": list(since),
            "since": list(since.values()),
            "oldest": _since(session, stream_ids(session, server, target, version), oldest, until),
            "until": until,
            "newest": _NEWEST_REQUESTS,
            "looked_up": list(LOOKED_UP),
        },
    )
    return [_level_of(row) for row in rows]


def _level_of(row: Row[Any]) -> DraftLevel:
    if 2 * row.of_k > row.requests and row.lowest_k == row.highest_k:
        return DraftLevel(row.segment, row.of_k, row.mean_of_k, row.variance_of_k, k=row.lowest_k)
    if 2 * row.of_first > row.requests:
        return DraftLevel(row.segment, row.of_first, row.mean_of_first, row.variance_of_first, by_first=True)
    return DraftLevel(row.segment, row.requests, row.mean, row.variance)


# Counters per position without drafted tokens are of servers whose steps all draft the first.
_FIRST_DRAFTED = "coalesce(drafted_per_position[1], CASE WHEN kind = 'window' THEN steps END)"
_FIRST_ACCEPTED = f"accepted_per_position[1]::float8 / {_FIRST_DRAFTED}"
_TELLS_FIRST = f"{_FIRST_DRAFTED} > 0 AND accepted_per_position IS NOT NULL"
_IN_SPAN = "seq >= :first AND seq < :end AND ended_at >= :oldest"
_OF_SPAN = text(
    f"""
    SELECT segment, count(*) AS requests, avg(x) AS mean, coalesce(var_samp(x), 0) AS variance
    FROM (
        SELECT segment,
               CASE WHEN :by_first THEN {_FIRST_ACCEPTED} ELSE accepted::float8 / drafted END AS x,
               row_number() OVER (PARTITION BY segment ORDER BY seq DESC) AS age
        FROM {newest_records(_IN_SPAN)}
        WHERE CASE WHEN :by_first THEN {_TELLS_FIRST} ELSE drafted > 0 END
          AND (CAST(:ks AS int[]) IS NULL OR num_speculative_tokens = ANY(CAST(:ks AS int[])))
          AND {NOT_LEFT_OUT}
    ) AS newest
    WHERE age <= :newest
    GROUP BY segment ORDER BY segment
    """  # noqa: S608 (constants only)
)
_KIND = text(
    f"SELECT kind FROM records WHERE {OF_STREAM} AND kind <> 'probe' ORDER BY {NEWEST_FIRST} LIMIT 1"  # noqa: S608 (constants only)
)


def kind_of(session: Session, stream_id: int) -> Kind:
    """Of the stream's newest record of traffic, and so of those that are compared; request where none is
    kept."""
    return session.scalar(_KIND, {"stream_id": stream_id}) or "request"


class Span(NamedTuple):
    """Requests from the seq `first` on and before `end`, in the order in which they arrived; of a server's
    clock only that they are no older than `oldest`."""

    first: int
    end: int
    oldest: datetime


def of_span(
    session: Session,
    stream_id: int,
    span: Span,
    *,
    by_first: bool,
    ks: Collection[int] | None = None,
    newest: int = _NEWEST_REQUESTS,
    without: Collection[LeftOut] = (),
) -> list[AcceptanceLevel]:
    """Over the `newest` requests of each segment in the span: of all draft tokens, or of the first one, which
    does not depend on how many follow, where the source gives counts per position. `ks`: only those that tell
    one of these K. A segment that has few of the span's newest MOST_READ requests is judged by these."""
    given = {"stream_id": stream_id, **span._asdict(), "newest": newest, "by_first": by_first}
    given["most_read"] = MOST_READ
    given["kind"] = kind_of(session, stream_id)
    given["ks"] = None if ks is None else sorted(ks)
    given |= left_out(without)
    return [AcceptanceLevel._make(row) for row in session.execute(_OF_SPAN, given)]


class NewestLevel(NamedTuple):
    """Of the newest requests of a segment, with `size` of them asked for: x = accepted / drafted of each.
    `ended_at`: of the newest."""

    segment: str
    size: int
    requests: int
    drafted: int
    steps: int
    mean: float
    variance: float
    ended_at: datetime


# Each segment after a seq of its own.
_ASKED = "unnest(CAST(:segments AS text[]), CAST(:after AS bigint[])) AS asked(segment, after)"
_NEWEST = text(
    f"""
    WITH newest AS (
        SELECT asked.segment, of_segment.*
        FROM {_ASKED} CROSS JOIN LATERAL (
            SELECT drafted, steps, ended_at,
                   CASE WHEN :by_first THEN {_FIRST_ACCEPTED} ELSE accepted::float8 / drafted END AS x,
                   row_number() OVER (ORDER BY {NEWEST_FIRST}) AS age
            FROM {newest_records("seq > asked.after")}
            WHERE read.segment = asked.segment
              AND CASE WHEN :by_first THEN {_TELLS_FIRST} ELSE drafted > 0 END
            ORDER BY {NEWEST_FIRST} LIMIT :most
        ) AS of_segment
    )
    SELECT segment, size, count(*), sum(drafted)::bigint, sum(steps)::bigint, avg(x),
           coalesce(var_samp(x), 0), max(ended_at)
    FROM newest JOIN unnest(CAST(:sizes AS bigint[])) AS size ON age <= size
    GROUP BY segment, size ORDER BY size, segment
    """  # noqa: S608 (constants only)
)


def newest(
    session: Session,
    stream_id: int,
    after: Mapping[str, int],
    sizes: Collection[int],
    *,
    by_first: bool,
) -> list[NewestLevel]:
    """Of as many requests of each segment as each of `sizes` says, or as there are after the seq that `after`
    says for it among the newest MOST_READ; by the first draft token of requests that tell it, or by all."""
    given = {
        "stream_id": stream_id,
        "segments": list(after),
        "after": list(after.values()),
        "sizes": list(sizes),
        "most": max(sizes),
        "most_read": MOST_READ,
        "by_first": by_first,
        "kind": kind_of(session, stream_id),
    }
    return [NewestLevel._make(row) for row in session.execute(_NEWEST, given)]


class LevelAtK(NamedTuple):
    """Of requests of a segment, x = accepted / drafted of each; `lowest_k` and `highest_k` of those that tell
    their K, None where none does."""

    segment: str
    requests: int
    drafted: int
    steps: int
    mean: float
    lowest_k: int | None
    highest_k: int | None


_AT_K = """
    SELECT asked.segment, count(*), sum(drafted)::bigint, sum(steps)::bigint,
           avg(accepted::float8 / drafted), min(k), max(k)
    FROM {asked} CROSS JOIN LATERAL (
        SELECT drafted, accepted, steps, num_speculative_tokens AS k
        FROM {read}
        WHERE drafted > 0 AND read.segment = asked.segment {condition}
        ORDER BY {order} LIMIT :most
    ) AS of_segment
    GROUP BY asked.segment ORDER BY asked.segment
    """
_NEWEST_AT_K = text(
    _AT_K.format(asked=_ASKED, read=newest_records("seq > asked.after"), order=NEWEST_FIRST, condition="")
)
_FIRST_AT_K = text(
    _AT_K.format(
        asked=_ASKED,
        read="records AS read",
        order=OLDEST_FIRST,
        condition=f"AND num_speculative_tokens = :k AND {OF_STREAM} AND kind = :kind AND seq > asked.after",
    )
)


def newest_k(session: Session, stream_id: int, after: Mapping[str, int], most: int) -> list[LevelAtK]:
    """Of the newest requests of each segment, at most so many, after the seq that `after` says for it and
    among the newest MOST_READ."""
    given = {"stream_id": stream_id, "segments": list(after), "after": list(after.values()), "most": most}
    given |= {"kind": kind_of(session, stream_id), "most_read": MOST_READ}
    return [LevelAtK._make(row) for row in session.execute(_NEWEST_AT_K, given)]


def first_at_k(
    session: Session, stream_id: int, segment: str, after: int, k: int, most: int
) -> LevelAtK | None:
    """Of the first requests of the segment at this K, at most so many, after the seq `after`; None where
    there are none."""
    given = {"stream_id": stream_id, "segments": [segment], "after": [after], "k": k, "most": most}
    given["kind"] = kind_of(session, stream_id)
    row = session.execute(_FIRST_AT_K, given).one_or_none()
    return None if row is None else LevelAtK._make(row)


_K_OF_SPAN = text(
    f"""
    SELECT sum(drafted)::float8 / sum(steps) FROM (
        SELECT drafted, steps FROM {newest_records(_IN_SPAN)}
        WHERE drafted > 0 AND steps > 0 AND segment = :segment
        ORDER BY {NEWEST_FIRST} LIMIT :newest
    ) AS newest
    """  # noqa: S608 (constants only)
)


def k_of_span(session: Session, stream_id: int, segment: str, span: Span) -> float | None:
    """Draft tokens per step of the segment's newest requests in the span; None where none is kept."""
    given = {"stream_id": stream_id, **span._asdict(), "segment": segment}
    given |= {"newest": _NEWEST_REQUESTS, "most_read": MOST_READ}
    found: float | None = session.scalar(_K_OF_SPAN, given | {"kind": kind_of(session, stream_id)})
    return found


# As `driftguard.records.verified_at_once`.
_AT_ONCE = "CASE WHEN verification IN ('block', 'tree') THEN verification ELSE 'token' END AS at_once"
_OTHER_SETTINGS = text(
    f"""
    WITH fallen AS (
        SELECT DISTINCT temperature, acceptance_rule, {_AT_ONCE} FROM {newest_records(_IN_SPAN)}
        WHERE drafted > 0 AND segment = :segment
    ), newest AS (
        SELECT temperature, acceptance_rule, {_AT_ONCE} FROM {newest_records("seq >= :end")}
        WHERE drafted > 0 AND segment = :segment
        ORDER BY {NEWEST_FIRST} LIMIT :newest
    )
    SELECT EXISTS (SELECT FROM fallen) AND NOT EXISTS (
        SELECT FROM newest JOIN fallen USING (acceptance_rule, at_once)
        WHERE newest.temperature IS NOT DISTINCT FROM fallen.temperature)
    """  # noqa: S608 (constants only)
)


def has_other_settings(session: Session, stream_id: int, segment: str, span: Span, newest: int) -> bool:
    """Whether none of so many newest requests of the segment has the temperature, acceptance rule and
    verification of one in the span. Not where no request of that is kept."""
    given = {"stream_id": stream_id, "segment": segment, **span._asdict(), "newest": newest}
    given |= {"kind": "request", "most_read": MOST_READ}
    return bool(session.scalar(_OTHER_SETTINGS, given))


_TOLD_K = text(
    f"""
    SELECT DISTINCT num_speculative_tokens FROM (
        SELECT num_speculative_tokens FROM records
        WHERE {OF_STREAM} AND kind = :kind AND num_speculative_tokens IS NOT NULL
          AND {_IN_SPAN}
        ORDER BY {NEWEST_FIRST} LIMIT :newest
    ) AS newest
    """  # noqa: S608 (constants only)
)


def told_k(session: Session, stream_id: int, span: Span) -> set[int]:
    """The numbers of draft tokens of the newest requests in the span."""
    given = {"stream_id": stream_id, **span._asdict(), "newest": _NEWEST_REQUESTS}
    return set(session.scalars(_TOLD_K, given | {"kind": kind_of(session, stream_id)}))


class Sampling(NamedTuple):
    """How requests are sampled, and what of their drafts is verified at once: token, block or tree."""

    temperature: float
    at_once: str

    @property
    def verification(self) -> Literal["token", "block"]:
        return "block" if self.at_once == "block" else "token"


_USUAL_SAMPLING = text(
    f"""
    SELECT temperature, mode() WITHIN GROUP (ORDER BY at_once) FROM (
        SELECT temperature, at_once
        FROM unnest(CAST(:stream_ids AS bigint[])) AS stream CROSS JOIN LATERAL (
            SELECT seq, temperature, {_AT_ONCE} FROM records
            WHERE stream_id = ANY(ARRAY[stream])
              AND kind = 'request' AND temperature IS NOT NULL AND ended_at >= :oldest
            ORDER BY {NEWEST_FIRST} LIMIT :newest
        ) AS of_stream
        ORDER BY seq DESC LIMIT :newest
    ) AS newest
    GROUP BY temperature ORDER BY count(*) DESC, temperature LIMIT 1
    """  # noqa: S608 (constants only)
)


def usual_sampling(
    session: Session, *, server: str, target: str, version: str, oldest: datetime
) -> Sampling | None:
    """The temperature of most of the newest requests, and how most of these are verified; None where no
    record tells a temperature."""
    streams = stream_ids(session, server, target, version)
    given = {"stream_ids": streams, "oldest": oldest, "newest": _NEWEST_REQUESTS}
    row = session.execute(_USUAL_SAMPLING, given).one_or_none()
    return None if row is None else Sampling(*row)


def stream_ids(session: Session, server: str, target: str, version: str) -> list[int]:
    """Streams of one draft; more than one only when its method changed."""
    return list(
        session.scalars(
            select(Stream.id).where(
                Stream.server == server, Stream.target == target, Stream.draft_version == version
            )
        )
    )
