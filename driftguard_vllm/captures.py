"""Token ids of a sampled part of requests, to the sidecar, which keeps them where it was told to.

What a draft is retrained from. They are less precious than records: they wait in memory, the oldest is
dropped first, and a batch that the sidecar refuses is dropped.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from typing import Final

import httpx
import msgspec

from driftguard.client import SidecarUnavailable, protocol
from driftguard.client.sync import started
from driftguard.errors import DriftGuardError, Forbidden, TooLarge
from driftguard.records import AcceptanceRecord

log = logging.getLogger("vllm.driftguard")

PATH: Final = "/api/v1/captures"
MOST_WAITING: Final = 1_000  # requests, of some thousand tokens each
MOST_AT_ONCE: Final = 50
LINGER_SECONDS: Final = 1.0
AWAY_SECONDS: Final = 5.0
FORBIDDEN_SECONDS: Final = 60.0

Captured = tuple[AcceptanceRecord, Sequence[int], Sequence[int]]  # with its prompt's and output's token ids


class CaptureSender:
    """Sends from a thread of its own; `send` never waits."""

    def __init__(self, url: str, api_key: str | None) -> None:
        address = protocol.address_of(url)
        self._http = httpx.Client(
            base_url=address,
            headers=protocol.headers(api_key),
            timeout=protocol.TIMEOUT,
            trust_env=False,
            verify=protocol.authorities_for(address),
        )
        self._waiting: deque[Captured] = deque(maxlen=MOST_WAITING)
        self._most_at_once = MOST_AT_ONCE
        self._is_forbidden = False  # as the last answer said
        self._refusal = ""  # that was told last, and is still so
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def send(self, record: AcceptanceRecord, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Both must not change any more: they are encoded later, in the other thread."""
        self._waiting.append((record, prompt, output))
        if self._thread is None:
            self._thread = started(self._run, "driftguard-captures")

    def close(self, timeout_seconds: float = 5.0) -> None:
        """Tries once to send what waits."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(timeout_seconds)

    def _run(self) -> None:
        pause = LINGER_SECONDS
        while not self._closing.wait(pause) or self._waiting:
            batch = [self._waiting.popleft() for _ in range(min(self._most_at_once, len(self._waiting)))]
            pause = self._send(batch) if batch else LINGER_SECONDS
            if self._closing.is_set() and pause > LINGER_SECONDS:
                return

    def _send(self, batch: list[Captured]) -> float:
        """Returns how many seconds to wait before the next."""
        content = protocol.body([_line(*captured) for captured in batch])
        try:
            answer = self._http.post(PATH, content=content, headers=protocol.JSON_LINES)
            protocol.read_counts(answer)
        except (httpx.RequestError, SidecarUnavailable):
            self._put_back(batch)
            return AWAY_SECONDS
        except TooLarge as error:
            if len(batch) > 1:
                self._most_at_once = len(batch) // 2
                self._put_back(batch)
                return 0.0
            log.error("the sidecar refuses the token ids of a request: %s", error.detail)
        except Forbidden as error:
            if not self._is_forbidden:
                log.warning(
                    "the sidecar keeps no token ids; it is asked again every minute: %s", error.detail
                )
            self._is_forbidden = True
            self._waiting.clear()
            return FORBIDDEN_SECONDS
        except DriftGuardError as error:
            if error.detail != self._refusal:
                log.error("the sidecar refuses token ids: %s", error.detail)
            self._refusal = error.detail
        else:
            self._is_forbidden, self._refusal = False, ""
            self._most_at_once = min(2 * self._most_at_once, MOST_AT_ONCE)
        return 0.0 if len(self._waiting) >= self._most_at_once else LINGER_SECONDS

    def _put_back(self, batch: list[Captured]) -> None:
        self._waiting.extendleft(reversed(batch[: MOST_WAITING - len(self._waiting)]))


def _line(record: AcceptanceRecord, prompt: Sequence[int], output: Sequence[int]) -> bytes:
    return msgspec.json.encode(
        {
            "record_id": record.record_id,
            "server": record.server,
            "target": record.target,
            "draft_version": record.draft_version,
            "segment": record.segment,
            "captured_at": record.ended_at,
            "prompt_token_ids": list(prompt),
            "output_token_ids": list(output),
        }
    )
