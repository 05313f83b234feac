"""Memory for what requests and answers hold, limited for all in flight together.

Used on one event loop. Nothing waits for room: what there is none for is refused, or passed on unread.
"""

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
        self.held_bytes = 0

    def take(self, size_bytes: int) -> bool:
        """Counts bytes that are already held. False: there is no room for them, so they must be released."""
        self.held_bytes += size_bytes
        return self._room._take(size_bytes)

    def give_back(self) -> None:
        """Gives all of it back."""
        self._room._take(-self.held_bytes)
        self.held_bytes = 0
