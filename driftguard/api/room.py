"""A limit of memory for the bodies of all requests together."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from driftguard.errors import Busy

WAIT_SECONDS: Final = 10.0
RETRY_AFTER_SECONDS: Final = 2


class WaitingRoom:
    """Used on one event loop. A body for which there is too little room waits, in the order of arrival."""

    def __init__(self, total_bytes: int) -> None:
        self._total = self._free = total_bytes
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def taken(self, size_bytes: int) -> AsyncIterator[None]:
        """A body that is larger than the whole room gets all of it. Raises Busy after WAIT_SECONDS."""
        size = min(size_bytes, self._total)
        if not size:
            yield
            return
        await self._take(size)
        try:
            yield
        finally:
            self._give_back(size)

    async def _take(self, size: int) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((size, turn))
        self._let_in()
        try:
            await asyncio.wait_for(asyncio.shield(turn), WAIT_SECONDS)
        except BaseException as error:
            if turn.done():
                self._give_back(size)
            else:
                turn.cancel()
                self._let_in()
            if isinstance(error, TimeoutError):
                raise Busy(
                    "other large bodies are being processed; send it again later",
                    retry_after_seconds=RETRY_AFTER_SECONDS,
                ) from None
            raise

    def _give_back(self, size: int) -> None:
        self._free += size
        self._let_in()

    def _let_in(self) -> None:
        while self._waiting:
            size, turn = self._waiting[0]
            if not turn.cancelled():
                if size > self._free:
                    return
                self._free -= size
                turn.set_result(None)
            self._waiting.popleft()
