"""A TCP proxy between a sidecar and its database that can simulate network failures.

What it holds back arrives later, as after lost packets, which are sent again. But here the proxy's kernel has
acknowledged them, so that neither keepalives nor tcp_user_timeout notice anything: as with a frozen server,
whose kernel still acknowledges.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Literal

from sqlalchemy import URL, make_url

Direction = Literal["to_database", "to_client"]
DIRECTIONS: tuple[Direction, ...] = ("to_database", "to_client")
_CHUNK_BYTES = 65_536


class _Pair:
    """One connection: the client's half, the database's half, and what may pass."""

    def __init__(self, client: socket.socket, database: socket.socket) -> None:
        self.halves = {"to_database": (client, database), "to_client": (database, client)}
        self.open = {direction: threading.Event() for direction in DIRECTIONS}

    def pump(self, direction: Direction) -> None:
        source, sink = self.halves[direction]
        with contextlib.suppress(OSError):
            while True:
                data = source.recv(_CHUNK_BYTES)
                self.open[direction].wait()  # the end of a connection is held back like everything else
                if not data:
                    sink.shutdown(socket.SHUT_WR)
                    return
                sink.sendall(data)
        for half in (source, sink):  # a reset on one side is one on the other
            with contextlib.suppress(OSError):
                half.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for half in self.halves["to_database"]:
            with contextlib.suppress(OSError):
                half.shutdown(socket.SHUT_RDWR)
            half.close()
        for event in self.open.values():
            event.set()


class BlackHole:
    """Passes everything until a method is called. `url`: that of the database, through the proxy."""

    def __init__(self, database_url: str) -> None:
        parsed = make_url(database_url)
        self._upstream = _address(parsed)
        self._pairs: list[_Pair] = []
        self._shut: set[Direction] = set()
        self._lock = threading.Lock()
        self._listener = _listen(0)
        self._port: int = self._listener.getsockname()[1]
        rest = {name: value for name, value in parsed.query.items() if name not in ("host", "port")}
        through = parsed.set(host="127.0.0.1", port=self._port, query=rest)
        self.url = through.render_as_string(hide_password=False)
        self._accept_from(self._listener)

    def hold(self, *directions: Direction, new_connections: bool = True) -> None:
        """Passes nothing on from now, and closes nothing. `new_connections`: False lets those pass that begin
        later, as when an address has moved to another machine."""
        with self._lock:
            if new_connections:
                self._shut.update(directions or DIRECTIONS)
            for pair in self._pairs:
                for direction in directions or DIRECTIONS:
                    pair.open[direction].clear()

    def refuse(self) -> None:
        """Cuts every connection, and accepts no new one."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def cut(self) -> None:
        """Cuts the connections there are."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            pair.close()

    def resume(self) -> None:
        """Passes what was held back, and all that follows."""
        with self._lock:
            self._shut.clear()
            for pair in self._pairs:
                for event in pair.open.values():
                    event.set()
        if self._listener.fileno() < 0:
            self._listener = _listen(self._port)
            self._accept_from(self._listener)

    def close(self) -> None:
        if self._listener.fileno() >= 0:
            self.refuse()
        else:
            self.cut()

    def _accept_from(self, listener: socket.socket) -> None:
        threading.Thread(target=self._accept, args=(listener,), name="black-hole", daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                client, _ = listener.accept()
                try:
                    database = socket.socket(self._upstream[0])
                    database.connect(self._upstream[1])
                except OSError:
                    client.close()
                    continue
                self._begin(_Pair(client, database))

    def _begin(self, pair: _Pair) -> None:
        with self._lock:
            self._pairs.append(pair)
            for direction in DIRECTIONS:
                if direction not in self._shut:
                    pair.open[direction].set()
        for direction in DIRECTIONS:
            threading.Thread(target=pair.pump, args=(direction,), name="black-hole", daemon=True).start()


@contextlib.contextmanager
def black_hole(database_url: str) -> Iterator[BlackHole]:
    """Between the caller and the database of this URL."""
    hole = BlackHole(database_url)
    try:
        yield hole
    finally:
        hole.close()


def _address(url: URL) -> tuple[socket.AddressFamily, str | tuple[str, int]]:
    host, port = url.host or url.query.get("host"), url.port or 5432
    assert isinstance(host, str)
    if host.startswith("/"):
        return socket.AF_UNIX, f"{host}/.s.PGSQL.{port}"
    return socket.AF_INET, (host, port)


def _listen(port: int) -> socket.socket:
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", port))
    listener.listen(128)
    return listener
