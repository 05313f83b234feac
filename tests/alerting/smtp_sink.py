"""A real SMTP server that accepts every mail and keeps it."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from email import message_from_bytes, policy
from email.message import EmailMessage


@contextmanager
def smtp_sink() -> Iterator[tuple[str, list[EmailMessage]]]:
    """(host and port, the mails so far). Knows what a client without login and TLS says (RFC 5321)."""
    mails: list[EmailMessage] = []

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            self.wfile.write(b"220 sink\r\n")
            for line in self.rfile:
                verb = line[:4].upper()
                if verb == b"DATA":
                    self.wfile.write(b"354 go on\r\n")
                    body = b"".join(iter(self.rfile.readline, b".\r\n"))
                    mails.append(message_from_bytes(body, policy=policy.default))
                self.wfile.write(b"221 bye\r\n" if verb == b"QUIT" else b"250 ok\r\n")

    server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_address[1]}", mails
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
