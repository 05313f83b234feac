"""The sidecar under a path of a reverse proxy, as in https://ops.example.com/driftguard/.

The prefix is the path of alerting.external_url; every link of a page begins with it. Proxies may pass it on
or strip it, and whoever asks the port itself, such as a health check, need not know it.
"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


class Prefix:
    """Pure ASGI, in front of everything that looks at a path. Behind it each path has the prefix, and
    `root_path` names it, as the ASGI specification says. A second prefix is a path that does not exist: what
    is guarded has no other name behind this."""

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app = app
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            path = scope["path"]
            if path == self._prefix:
                path += "/"
            elif not path.startswith(f"{self._prefix}/"):
                path = self._prefix + path
            # Not in a copy: unexpected errors are answered further out.
            scope["path"], scope["root_path"] = path, self._prefix
        await self._app(scope, receive, send)


def path_of(scope: Scope) -> str:
    """What is routed: the path without the prefix."""
    path: str = scope["path"]
    return path.removeprefix(prefix_of(scope))


def prefix_of(scope: Scope) -> str:
    """Without a slash at its end; empty where there is none."""
    prefix: str = scope.get("root_path", "")
    return prefix
