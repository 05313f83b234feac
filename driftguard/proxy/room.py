"""How much of requests and answers is held in memory to be read, of all that are under way together."""

from __future__ import annotations


class Room:
    """`most_bytes`: of all together."""

    def __init__(self, most_bytes: int) -> None:
        self._free_bytes = most_bytes

    def share(self) -> Share:
        return Share(self)

    def _take(self, size_bytes: int) -> bool:
        self._free_bytes -= size_bytes
        return self._free_bytes >= 0


class Share:
    """What one request and its answer hold."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._held_bytes = 0

    def take(self, size_bytes: int) -> bool:
        """Counts bytes that are held already. False: there is no room for them, so they may not stay."""
        self._held_bytes += size_bytes
        return self._room._take(size_bytes)

    def give_back(self) -> None:
        """All: they are held no more."""
        self._room._take(-self._held_bytes)
        self._held_bytes = 0
