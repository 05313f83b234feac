"""What is said of an address at which no engine of ours answers."""

from __future__ import annotations

import pytest

from driftguard.retraining.engines.engine_admin import EngineAdmin, EngineRefused
from driftguard.retraining.engines.vllm_update import VllmUpdate
from tests.client.foreign_answers import FOREIGN_ANSWERS, ForeignAnswer
from tests.retraining.http_stub import StubHandler, serving


@pytest.mark.parametrize("foreign", FOREIGN_ANSWERS.values(), ids=FOREIGN_ANSWERS)
@pytest.mark.parametrize("status", [200, 503])
def test_any_other_answer_is_a_refusal_that_names_it(foreign: ForeignAnswer, status: int) -> None:
    _, headers, body = foreign

    class Foreign(StubHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

    with serving(Foreign) as url, pytest.raises(EngineRefused) as refused:
        EngineAdmin(url, None).info()
    assert url in refused.value.detail


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"\x00\x01page", "\x01page"),
        (rb'{"error": {"message": "half \ud83d of \u0000 it"}}', "half ? of  it"),
    ],
)
def test_a_refusal_of_a_live_update_can_be_stored_as_the_reason_of_a_run(body: bytes, told: str) -> None:
    class Foreign(StubHandler):
        def do_GET(self) -> None:
            self.send_content(500, body)

    with serving(Foreign) as url, pytest.raises(EngineRefused) as refused:
        VllmUpdate(url, None, 1.0).version()
    assert refused.value.detail == f"{url} answered /weight_info with 500: {told}"
