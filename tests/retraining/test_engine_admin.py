"""What is said of an address at which no engine of ours answers."""

from __future__ import annotations

import pytest

from driftguard.retraining.engines.engine_admin import EngineAdmin, EngineRefused
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
