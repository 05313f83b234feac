"""What one stream of a batch raises undoes what was stored of that stream, and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from sqlalchemy.orm import Session

from driftguard.store.database import is_database_failure


class Failures(dict[int, Exception]):
    """Stream id -> what it raised. A failure of the database is nobody's own: it is raised."""

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
        with self.of(stream_id), session.begin_nested():
            yield

    def together(
        self, session: Session, stream_ids: Sequence[int], store: Callable[[Sequence[int]], None]
    ) -> None:
        """Stores what these streams have in one savepoint, as it costs two statements; in one for each where
        that raises."""
        if len(stream_ids) > 1:
            try:
                with session.begin_nested():
                    store(stream_ids)
            except Exception as error:
                if is_database_failure(error):
                    raise
            else:
                return
        for stream_id in stream_ids:
            with self.alone(session, stream_id):
                store([stream_id])
