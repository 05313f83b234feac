"""A FakeEngine's server as a process of its own: `python -m tests.engine.server.fake_process`."""

from __future__ import annotations

import sys

from driftguard_engine.listener import bind
from driftguard_engine.server import ServeOptions, serve
from driftguard_engine.telemetry import Telemetry

from tests.engine.server.fake_engine import FakeEngine
from tests.engine.server.tiny_models import byte_tokenizer

if __name__ == "__main__":
    engine = FakeEngine(byte_tokenizer())
    if "--fail" in sys.argv:
        engine.step_error = RuntimeError("device lost")
    telemetry = Telemetry(None, None, "test", engine.target_name)
    sys.exit(serve(engine, telemetry, bind("127.0.0.1", 0), ServeOptions()))
