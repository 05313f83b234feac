"""What one stream of a batch raises undoes what was stored of that stream, and nothing else.

A statement that takes too long may be the stream's own, or the database's, which is slow for everybody. It is
held against the stream only where other streams are stored in time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import structlog
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from driftguard.store.database import FOLD, is_database_failure, is_too_slow

PROMPT_SHARE: Final = 0.1  # of the time that a statement has: what another stream may take in comparison
_log = structlog.get_logger(__name__)


class TookTooLong(Exception):
    """A statement of this stream alone took longer than the fold waits."""

    def __init__(self) -> None:
        super().__init__(f"a statement took longer than {FOLD.statement_seconds:g} s")


class Failures(dict[int, Exception]):
    """Stream id -> what it raised. A failure of the database is nobody's own: it is raised.

    `was_late`: whether a statement took too long, of one stream or of several together."""

    def __init__(self) -> None:
        super().__init__()
        self.was_late = False
        self._late = 0  # streams whose own statement took too long,
        self._stored = 0  # and those that were stored one by one

    @contextmanager
    def of(self, stream_id: int) -> Iterator[None]:
        """For what stores nothing."""
        try:
            yield
        except Exception as error:
            if is_database_failure(error):
                raise
            self[stream_id] = error

    @contextmanager
    def alone(self, session: Session, stream_id: int) -> Iterator[None]:
        """In a savepoint."""
        with self.of(stream_id):
            try:
                with session.begin_nested():
                    yield
            except DBAPIError as error:
                if not is_too_slow(error):
                    raise
                self.was_late = True
                self._late += 1
                if self._late > max(1, self._stored) or not is_another_in_time(session, stream_id):
                    raise
                raise TookTooLong from error

    def together(
        self, session: Session, stream_ids: Sequence[int], store: Callable[[Sequence[int]], None]
    ) -> None:
        """Stores what these streams have in one savepoint, as it costs two statements; in one for each where
        that raises, or takes too long."""
        if len(stream_ids) > 1:
            try:
                with session.begin_nested():
                    store(stream_ids)
            except Exception as error:
                if is_too_slow(error):
                    self.was_late = True
                    _log.warning(
                        "streams took too long together, and are stored one by one", error=str(error)
                    )
                elif is_database_failure(error):
                    raise
            else:
                return
        # In any order: where two are at fault, they are not always the first ones.
        for stream_id in random.sample(stream_ids, len(stream_ids)):
            with self.alone(session, stream_id):
                store([stream_id])
            self._stored += stream_id not in self


def is_another_in_time(session: Session, stream_id: int) -> bool:
    """Whether the state of another stream, any one, can be written promptly; it is left as it is."""
    limit_ms = round(PROMPT_SHARE * FOLD.statement_seconds * 1_000)
    try:
        with session.begin_nested() as comparison:
            session.execute(
                text("SELECT set_config('statement_timeout', :limit, true)"), {"limit": str(limit_ms)}
            )
            written = session.execute(
                text(
                    "UPDATE detector_states SET updated_at = updated_at WHERE stream_id = (SELECT stream_id "
                    "FROM detector_states WHERE stream_id <> :stream_id ORDER BY random() LIMIT 1) "
                    "RETURNING stream_id"
                ),
                {"stream_id": stream_id},
            ).all()
            comparison.rollback()
    except DBAPIError as error:
        if is_too_slow(error):
            return False
        raise
    return bool(written)
