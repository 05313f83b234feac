"""DriftGuard's own engine. It sends a record per request itself; this adapter is for an engine that cannot
reach the sidecar."""

from __future__ import annotations

from collections.abc import Sequence

from driftguard.adapters.adapter import Kind
from driftguard.adapters.reading import Increase, Reading, sums_and_counts, value_of
from driftguard.adapters.window import Identity, Window
from driftguard.records import Fidelity

_P = "driftguard_engine_"
_STEPS, _DRAFTED, _ACCEPTED = f"{_P}steps_total", f"{_P}draft_tokens_total", f"{_P}accepted_tokens_total"
_BY_POSITION = (f"{_P}position_draft_tokens_total", f"{_P}position_accepted_tokens_total")
_GENERATED, _PROMPTS = f"{_P}output_tokens_total", f"{_P}prompt_tokens_total"
_FIRST_TOKEN, _PER_TOKEN = f"{_P}time_to_first_token_seconds", f"{_P}time_per_output_token_seconds"
_RUNNING, _WAITING, _INFO = f"{_P}running_requests", f"{_P}waiting_requests", f"{_P}info"
_COUNTERS = frozenset(
    {_STEPS, _DRAFTED, _ACCEPTED, *_BY_POSITION, _GENERATED, _PROMPTS}
    | sums_and_counts(_FIRST_TOKEN, _PER_TOKEN)
)


class BuiltInEngine:
    kind: Kind = "driftguard"
    name = "the built-in engine"
    prefix = _P
    path = "/metrics"
    names = _COUNTERS | {_RUNNING, _WAITING, _INFO}
    fidelity: Fidelity = "counter"
    names_target = True
    show_metrics = "use the port of `driftguard engine`"
    speculate = "start `driftguard engine` with --draft"

    def windows(self, before: Reading, after: Reading, known: Identity) -> Sequence[Window]:
        """One per draft version; counts without a version belong to the one in service."""
        del known
        increase = Increase.between(before, after, _COUNTERS)
        drafts = _drafts(before) | _drafts(after)
        serving = next(iter(_drafts(after)), None)
        versions = sorted(after.values_of(_DRAFTED, "draft_version") | ({serving} if serving else set()))
        windows = (
            _window(version, version == serving, drafts.get(version, {}), increase, after)
            for version in versions
        )
        return [window for window in windows if window.drafted or window.draft_version == serving]


def _drafts(reading: Reading) -> dict[str, dict[str, str]]:
    """Version -> labels of the info series."""
    return {value_of(_INFO, labels, "draft_version"): dict(labels) for labels in reading.of(_INFO)}


def _window(version: str, serving: bool, info: dict[str, str], increase: Increase, after: Reading) -> Window:
    label = {"draft_version": version}
    return Window(
        target=info.get("target"),
        begun_at=increase.begun_at,
        ended_at=after.at,
        steps=increase.whole(_STEPS, **label) or 0,
        drafted=increase.whole(_DRAFTED, **label) or 0,
        accepted=increase.whole(_ACCEPTED, **label) or 0,
        generated=(increase.whole(_GENERATED) or 0) if serving else 0,
        fidelity="counter",
        speculated_before=bool(after.total(_DRAFTED)),
        drafted_per_position=increase.per_position(_BY_POSITION[0], "position", **label),
        accepted_per_position=increase.per_position(_BY_POSITION[1], "position", **label),
        prompt_tokens=increase.whole(_PROMPTS) if serving else None,
        time_to_first_token_seconds=increase.mean(_FIRST_TOKEN) if serving else None,
        time_per_output_token_seconds=increase.mean(_PER_TOKEN) if serving else None,
        concurrency=after.whole(_RUNNING) if serving else None,
        waiting_requests=after.whole(_WAITING) if serving else None,
        started_requests=increase.whole(f"{_FIRST_TOKEN}_count") if serving else None,
        draft=info.get("draft"),
        draft_version=version,
        method=info.get("method"),
    )


BUILT_IN_ENGINE = BuiltInEngine()
