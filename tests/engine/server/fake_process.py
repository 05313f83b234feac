"""A FakeEngine's server as a process of its own."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from socket import socket
from typing import Any

from driftguard_engine.server import app as server_app
from driftguard_engine.server import runner
from driftguard_engine.server.app import ServeOptions, serve
from driftguard_engine.server.listener import bind
from driftguard_engine.telemetry.telemetry import Telemetry

from tests.engine.server.fake_engine import FakeEngine
from tests.engine.server.tiny_models import byte_tokenizer


def main(arguments: Sequence[str]) -> int:
    engine = FakeEngine(byte_tokenizer())
    if "--fail" in arguments:
        server_app.FAILURE_GRACE_SECONDS = 4.0  # a busy test has time to ask it
        engine.step_error = RuntimeError("device lost")
    if "--hang" in arguments:
        runner.LOOK_EVERY_SECONDS, runner.STOP_LIMIT_SECONDS = 0.01, 0.1
        engine.step_ends.clear()
    if "--signalled" in arguments:
        run = server_app.EngineServer.run

        def run_signalled(server: Any, sockets: list[socket] | None = None) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            run(server, sockets)

        server_app.EngineServer.run = run_signalled  # type: ignore[method-assign, assignment]
    telemetry = Telemetry(None, None, "test", engine.target_name)
    return serve(engine, telemetry, bind("127.0.0.1", 0), ServeOptions())
