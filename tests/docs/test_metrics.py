"""docs/metrics.md is what the programs export."""

from __future__ import annotations

from pathlib import Path

from docs.generate_metrics import document

COMMITTED = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_the_committed_table_is_the_generated_one() -> None:
    assert COMMITTED.read_text(encoding="utf-8") == document(), "run `make metrics`"


def test_every_metric_says_what_it_is_and_has_bounded_labels() -> None:
    rows = [line.split(" | ") for line in document().splitlines() if line.startswith("| `driftguard")]
    assert len(rows) > 60
    for name, _, labels, meaning in rows:
        assert meaning.removesuffix(" |").endswith("."), name
        assert not {"`request`", "`session`", "`user`", "`record_id`"} & set(labels.split(", ")), name
