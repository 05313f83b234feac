"""A sidecar's ingest behind TLS, with a certificate that no public authority has signed."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

# For localhost, signed by itself; of the tests alone.
CERTIFICATE = """\
-----BEGIN CERTIFICATE-----
MIIBZzCCAQ2gAwIBAgIBeTAKBggqhkjOPQQDAjAUMRIwEAYDVQQDDAlsb2NhbGhv
c3QwIBcNMjAwMTAxMDAwMDAwWhgPMjEyMDAxMDEwMDAwMDBaMBQxEjAQBgNVBAMM
CWxvY2FsaG9zdDBZMBMGByqGSM49AgEGCCqGSM49AwEHA0IABNL71YzaRFcRXu9s
/UGoV14QRFFNo4hzlr9k1qHq6C8PjGEtpXzre+Qqo89KEUX/FIWmT/0RydRhvbu1
ARwPDKqjTjBMMA8GA1UdEwEB/wQFMAMBAf8wGgYDVR0RBBMwEYIJbG9jYWxob3N0
hwR/AAABMB0GA1UdDgQWBBQsXwmcYdijKwXRCuSDPX27yhFRNzAKBggqhkjOPQQD
AgNIADBFAiAS79OAhL1bwvZaai1A9FwoaQ3ObD//VHNRxRRnX33tDQIhAOdbxyYz
e/CZKKYAaM/ckzRKhKOB0qiuPDOpdRODQ3rC
-----END CERTIFICATE-----
"""
KEY = """\
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgnT9OAnAg17blhAna
ZcHorzpe4JN5qY+vknRN7h5Ng/2hRANCAATS+9WM2kRXEV7vbP1BqFdeEERRTaOI
c5a/ZNah6ugvD4xhLaV863vkKqPPShFF/xSFpk/9EcnUYb27tQEcDwyq
-----END PRIVATE KEY-----
"""


@dataclass(slots=True)
class TlsSidecar:
    """authority: the file that says whom to trust. paths: of what it was sent."""

    url: str
    authority: Path
    paths: list[str] = field(default_factory=list)


@contextmanager
def tls_sidecar(directory: Path) -> Iterator[TlsSidecar]:
    authority, key = directory / "authority.pem", directory / "key.pem"
    authority.write_text(CERTIFICATE)
    key.write_text(KEY)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            sidecar.paths.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"accepted": 1, "duplicates": 0}')

        def log_message(self, *_: Any) -> None:
            pass

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(authority, key)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.socket = context.wrap_socket(server.socket, server_side=True)
    sidecar = TlsSidecar(f"https://localhost:{server.server_port}", authority)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield sidecar
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
