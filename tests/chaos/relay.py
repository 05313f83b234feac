"""A TCP relay in front of a server that can discard what it receives, or refuse connections.

python -m tests.chaos.relay SOCKET HOST PORT
"""

from __future__ import annotations

import select
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Literal

State = Literal["forwarding", "swallowing", "refusing"]
_LOOK_SECONDS: Final = 0.05


class Relay:
    """From a port of loopback to a Unix socket, with one thread per connection."""

    def __init__(self, target: Path, address: tuple[str, int] = ("127.0.0.1", 0)) -> None:
        self._target = str(target)
        self._listener = socket.create_server(address, backlog=64)
        self.port: int = self._listener.getsockname()[1]
        self.state: State = "forwarding"
        self._stopping = threading.Event()
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()

    def close(self) -> None:
        self._stopping.set()
        self._accepting.join()
        self._listener.close()

    def _accept(self) -> None:
        self._listener.settimeout(_LOOK_SECONDS)
        while not self._stopping.is_set():
            try:
                client, _ = self._listener.accept()
            except TimeoutError:
                continue
            if self.state == "refusing":
                client.close()
                continue
            threading.Thread(target=self._relay, args=(client,), daemon=True).start()

    def _relay(self, client: socket.socket) -> None:
        """A connection whose data was discarded is never used again: what was sent into it is lost."""
        with client, socket.socket(socket.AF_UNIX) as server, suppress(OSError):
            server.connect(self._target)
            while not self._stopping.is_set() and self.state != "refusing":
                if self.state == "swallowing":
                    self._stay_silent()
                    return
                if not _pass_on(client, server):
                    return

    def _stay_silent(self) -> None:
        """Neither side sees the connection end while the silence lasts."""
        while self.state == "swallowing" and not self._stopping.wait(_LOOK_SECONDS):
            pass


@contextmanager
def relay_to(target: Path) -> Iterator[Relay]:
    relay = Relay(target)
    try:
        yield relay
    finally:
        relay.close()


def _pass_on(client: socket.socket, server: socket.socket) -> bool:
    """False when one side has ended."""
    readable, _, _ = select.select([client, server], [], [], _LOOK_SECONDS)
    for source in readable:
        data = source.recv(65_536)
        if not data:
            return False
        (server if source is client else client).sendall(data)
    return True


def main() -> None:
    target, host, port = sys.argv[1:]
    Relay(Path(target), (host, int(port)))
    print("listening", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
