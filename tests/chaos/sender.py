"""Senders that follow the protocol: a batch is sent again until it is acknowledged."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from uuid import UUID

import httpx

from driftguard.records import AcceptanceRecord, encode_record

_EVERY_NTH_AGAIN = 7  # acknowledged batches are sent once more, as by a sender that did not get the answer
_ANSWER_SECONDS = 20.0


class Senders:
    """Threads that post batches; `acknowledged` holds every id that was answered for with 200."""

    def __init__(self, url: str, headers: dict[str, str] | None = None) -> None:
        self.url = url
        self.acknowledged: set[UUID] = set()
        self.refusals = 0  # answers other than 200, and connections that failed
        self.headers = headers or {}
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self, batches: Iterable[Sequence[AcceptanceRecord]], pause_seconds: float = 0.0) -> None:
        """One more sender, of these batches in their order."""
        thread = threading.Thread(target=self._send_all, args=(batches, pause_seconds), daemon=True)
        self._threads.append(thread)
        thread.start()

    def join(self, seconds: float) -> bool:
        """Waits until all is acknowledged. False where it is not after so long; then the senders give up."""
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        done = not any(thread.is_alive() for thread in self._threads)
        self.stop()
        return done

    def stop(self) -> None:
        self._stopping.set()
        for thread in self._threads:
            thread.join(_ANSWER_SECONDS + 5)

    def _send_all(self, batches: Iterable[Sequence[AcceptanceRecord]], pause_seconds: float) -> None:
        with httpx.Client(timeout=_ANSWER_SECONDS, headers=self.headers) as client:
            for number, batch in enumerate(batches):
                if not self._send(client, batch):
                    return
                if number % _EVERY_NTH_AGAIN == 0 and not self._send(client, batch):
                    return
                time.sleep(pause_seconds)

    def _send(self, client: httpx.Client, batch: Sequence[AcceptanceRecord]) -> bool:
        """False where the senders were stopped before it was acknowledged."""
        body = b"\n".join(map(encode_record, batch))
        while not self._stopping.is_set():
            try:
                answer = client.post(f"{self.url}/api/v1/records", content=body)
            except httpx.HTTPError:
                self._refused()
                continue
            if answer.status_code == 200:
                with self._lock:
                    self.acknowledged.update(record.record_id for record in batch)
                return True
            self._refused()
        return False

    def _refused(self) -> None:
        with self._lock:
            self.refusals += 1
        self._stopping.wait(0.2)
