"""Stores windows of several servers in one transaction, to be folded in one batch: most of the cost of both
is per batch, and a window may wait."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from driftguard.errors import DriftGuardError
from driftguard.records import AcceptanceRecord
from driftguard.sources.scrape import Submit


class WindowBuffer:
    """Collects submitted records until `flush`. Both are called on one thread."""

    def __init__(self, submit: Submit) -> None:
        self._submit = submit
        self._records: list[AcceptanceRecord] = []
        self._stored: Future[Any] = Future()

    def submit(self, records: Sequence[AcceptanceRecord]) -> Future[Any]:
        """The future ends with the transaction of the next flush, and raises what the submission raises."""
        self._records += records
        return self._stored

    def flush(self) -> None:
        if not self._records:
            return
        records, waiting = self._records, self._stored
        self._records, self._stored = [], Future()
        try:
            stored = self._submit(records)
        except DriftGuardError as error:
            waiting.set_exception(error)
            return
        stored.add_done_callback(lambda done: _pass_on(done, waiting))


def _pass_on(done: Future[Any], waiting: Future[Any]) -> None:
    if not waiting.set_running_or_notify_cancel():
        return
    error = done.exception()
    if error is None:
        waiting.set_result(done.result())
    else:
        waiting.set_exception(error)
