"""Answers that no sidecar gives: of a login page, a proxy in between, another service at the address."""

from __future__ import annotations

from typing import Final

ForeignAnswer = tuple[int, dict[str, str], bytes]  # status, headers, body

FOREIGN_ANSWERS: Final[dict[str, ForeignAnswer]] = {
    "login page": (200, {"Content-Type": "text/html"}, b"<html>Please log in</html>"),
    "JSON of another service": (200, {}, b'{"status": "ok"}'),
    "page of a bad request": (400, {"Content-Type": "text/html"}, b"<html>400 Bad Request</html>"),
    "JSON of a gateway that refuses": (400, {}, b'{"message": "Bad Request"}'),
    "JSON of a service that checks": (422, {}, b'{"detail": [{"msg": "Field required"}]}'),
    "not compressed as it says": (200, {"Content-Encoding": "gzip"}, b'{"accepted": 1, "duplicates": 0}'),
    "not UTF-8": (503, {}, b'{"detail": "\xff"}'),
    "JSON without end": (422, {}, b'{"errors": ' + b"[" * 100_000),
    "an encoding that decodes no text": (503, {"Content-Type": "text/html; charset=idna"}, b"\xff"),
}
