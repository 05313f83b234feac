"""What several threads of a process read: msgspec (0.22) looks at a type when it first decodes it, without a
lock, and a thread that finds it half looked at ends the process (SIGSEGV). So imports look at all of them."""

from __future__ import annotations

import subprocess
import sys

import pytest

READ_BY_SIX = """
import threading, time
import msgspec
from driftguard.store.column_types import Document
from driftguard.store.tables import Base

columns = [column.type for table in Base.metadata.sorted_tables for column in table.columns]
documents = [each for each in columns if isinstance(each, Document)]
assert documents

def let_others_go_on(frame, event, argument):
    if "/msgspec/" in frame.f_code.co_filename or "/typing.py" in frame.f_code.co_filename:
        time.sleep(0.0005)

def read():
    for document in documents:
        for stored in ({"x": 1}, [{"x": 1}]):
            try:
                document.process_result_value(stored, None)
            except Exception:
                pass

threading.setprofile(let_others_go_on)
threads = [threading.Thread(target=read) for _ in range(6)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print("read by all")
"""
LOOKED_AT = """
import gc
from dataclasses import is_dataclass
{imports}
kinds = {kinds}
for kind in kinds:
    known = [type(each).__name__ for each in gc.get_referents(kind)]
    print(kind.__name__, "__msgspec_cache__" in vars(kind) if is_dataclass(kind) else "StructInfo" in known)
"""


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr)
    return done.stdout


def test_documents_that_several_threads_read_first_are_read() -> None:
    assert run(READ_BY_SIX) == "read by all\n"


@pytest.mark.parametrize(
    ("imports", "kinds"),
    [
        (
            "from driftguard.client import Client, answers, protocol",
            "[answers.BatchCounts, answers.Status, answers.IncidentPage, protocol._Refusals]",
        ),
        ("from driftguard.status.gather import StreamSummary", "[StreamSummary]"),
        ("from driftguard.detection.state import codec", "[codec._State, codec._Piece]"),
        (
            "from driftguard.retraining.engines import engine_admin as admin",
            "[admin.EngineDraft, admin.EngineInfo, admin._Problem]",
        ),
    ],
    ids=["client", "summaries", "states", "engine"],
)
def test_what_threads_read_is_looked_at_by_its_import(imports: str, kinds: str) -> None:
    told = run(LOOKED_AT.format(imports=imports, kinds=kinds)).splitlines()
    assert told
    assert [line for line in told if not line.endswith(" True")] == []
