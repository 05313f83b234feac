"""Limits the memory for parsing requests and answers, for all requests in flight together."""

from __future__ import annotations


class Room:
    """`most_bytes`: for all together."""

    def __init__(self, most_bytes: int) -> None:
        self._free_bytes = most_bytes

    def share(self) -> Share:
        return Share(self)

    def _take(self, size_bytes: int) -> bool:
        self._free_bytes -= size_bytes
        return self._free_bytes >= 0


class Share:
    """The memory of one request and its answer."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._held_bytes = 0

    def take(self, size_bytes: int) -> bool:
        """Counts bytes that are already held. False: there is no room for them, so they must be released."""
        self._held_bytes += size_bytes
        return self._room._take(size_bytes)

    def give_back(self) -> None:
        """Gives all of it back."""
        self._room._take(-self._held_bytes)
        self._held_bytes = 0
