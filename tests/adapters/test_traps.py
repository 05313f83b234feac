"""What goes wrong when the counters of serving engines are read naively."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import numpy as np
import pytest

from driftguard.adapters.adapter import Kind
from driftguard.adapters.kinds import ADAPTERS, detect
from driftguard.adapters.reading import Reading, Unreadable, has_restarted
from driftguard.adapters.window import Identity, Incomplete, LeftOut, Window, condition_of
from driftguard.detection.statistics.windows import after_gap
from tests.adapters.fake_engines import (
    ENGINES,
    MODEL,
    FakeEngine,
    FakeLlamaCpp,
    FakeLmDeploy,
    FakeSGLang,
    FakeTensorRtLlm,
    FakeTgi,
    FakeVllm,
    K,
)
from tests.adapters.readings import AFTER, BEFORE, window, windows

STEPS = [4, 0, 3, 1, 2]  # accepted draft tokens of each step: 10 of 20


@pytest.mark.parametrize("make", ENGINES, ids=lambda make: make.kind)
def test_every_engine_gives_the_same_counts_of_the_same_history(make: type[FakeEngine]) -> None:
    engine = make()
    engine.serve([1, 1, 1])
    before = engine.text()
    engine.serve(STEPS)
    found = window(engine.kind, before, engine.text(), k=K)
    assert (found.steps, found.drafted, found.accepted) == (5, 20, 10)
    assert (found.begun_at, found.ended_at) == (BEFORE, AFTER)
    assert found.condition == "reporting"
    record = found.record(Identity("server", target="t"))
    assert (record.emitted, record.kind, record.num_speculative_tokens) == (
        15,
        "window",
        found.num_speculative_tokens,
    )


@pytest.mark.parametrize("make", ENGINES, ids=lambda make: make.kind)
def test_each_engine_is_recognised_by_its_metrics(make: type[FakeEngine]) -> None:
    found = detect(make().text())
    assert found is not None
    assert found.kind == make.kind


@pytest.mark.parametrize("make", ENGINES, ids=lambda make: make.kind)
def test_a_restart_loses_nothing_and_is_never_negative(make: type[FakeEngine]) -> None:
    engine = make()
    engine.serve([2] * 1_000)
    before = engine.text()
    engine.restart((AFTER - timedelta(seconds=5)).timestamp())
    engine.serve(STEPS)
    found = window(engine.kind, before, engine.text(), k=K)
    assert (found.steps, found.drafted, found.accepted) == (5, 20, 10)
    assert is_after_gap(found, BEFORE)


def test_a_restart_shows_though_the_counter_is_higher_than_before() -> None:
    engine = FakeVllm()
    engine.serve([1])
    before = engine.text()
    engine.restart((AFTER - timedelta(seconds=5)).timestamp())
    engine.serve(STEPS)
    found = window("vllm", before, engine.text())
    assert (found.steps, found.drafted, found.accepted) == (5, 20, 10)
    assert found.begun_at == AFTER - timedelta(seconds=5)


@pytest.mark.parametrize("make", ENGINES, ids=lambda make: make.kind)
@pytest.mark.parametrize(("down_seconds", "loading_seconds"), [(1, 1), (4, 11), (10, 35), (1, 300)])
def test_the_window_after_a_restart_is_no_evidence_however_long_the_model_takes_to_load(
    make: type[FakeEngine], down_seconds: int, loading_seconds: int
) -> None:
    """Most engines tell when their process started, which then loads its model before it answers."""
    engine = make()
    engine.serve([2] * 1_000)
    before = engine.text()
    restarted_at = BEFORE + timedelta(seconds=down_seconds)
    engine.restart(restarted_at.timestamp())
    engine.serve(STEPS)
    ended_at = restarted_at + timedelta(seconds=loading_seconds)
    found = window(engine.kind, before, engine.text(), k=K, at=ended_at)
    assert is_after_gap(found, BEFORE)


def test_so_is_that_after_a_restart_of_which_only_counters_tell_when_they_began() -> None:
    """As OTLP does, of each."""
    adapter = ADAPTERS["llamacpp"]
    engine = FakeLlamaCpp()
    engine.serve([2] * 1_000)
    before = Reading.parse(engine.text(), adapter.names, BEFORE)
    engine.restart(0.0)
    engine.serve(STEPS * 1_000)
    after = Reading.parse(engine.text(), adapter.names, BEFORE + timedelta(seconds=90))
    first, second = (
        replace(
            reading,
            starts={
                name: dict.fromkeys(series, begun.timestamp()) for name, series in reading.samples.items()
            },
        )
        for reading, begun in ((before, BEFORE - timedelta(hours=1)), (after, BEFORE + timedelta(seconds=5)))
    )
    (found,) = adapter.windows(first, second, Identity("server"))
    assert found.steps == 5_000
    assert is_after_gap(found, BEFORE)


def is_after_gap(window: Window, last_end: datetime) -> bool:
    """Whether the detector leaves it out, where the window before ended then."""
    begun, ended = (np.array([at.timestamp()]) for at in (window.begun_at, window.ended_at))
    (found,), _ = after_gap(np.array([True]), begun, ended, last_end.timestamp())
    return bool(found)


def test_the_clock_of_a_restarted_server_may_be_wrong() -> None:
    engine = FakeVllm()
    before = engine.text()
    engine.restart(datetime(2031, 1, 1, tzinfo=UTC).timestamp())
    engine.serve(STEPS)
    found = window("vllm", before, engine.text())
    assert found.begun_at <= found.ended_at == AFTER


def replicas(first: FakeVllm, second: FakeVllm) -> str:
    """Two of them behind one address, which tells no start time."""
    texts = (first.text(), second.text().replace('engine="0"', 'engine="1"'))
    lines = [line for text in texts for line in text.splitlines()]
    return "\n".join(line for line in lines if not line.startswith("process_start")) + "\n"


def test_replicas_are_added_and_restart_each_for_itself() -> None:
    first, second = FakeVllm(), FakeVllm()
    first.serve([2] * 1_000)
    second.serve([2] * 1_000)
    before = replicas(first, second)
    first.serve(STEPS)
    second.restart(0.0)
    second.serve(STEPS)
    found = window("vllm", before, replicas(first, second))
    assert (found.steps, found.drafted, found.accepted) == (10, 40, 20)
    assert found.accepted_per_position == [8, 6, 4, 2]
    assert found.num_speculative_tokens == K


def test_a_series_that_appears_was_born_since() -> None:
    engine = FakeLlamaCpp()
    before = engine.text()
    assert "per_pos" not in before
    engine.serve(STEPS)
    assert window("llamacpp", before, engine.text()).accepted_per_position == [4, 3, 2, 1]


def test_two_models_of_one_server_are_two_windows() -> None:
    engine = FakeVllm()
    idle = FakeVllm(running=0).text().replace(MODEL, "b")
    before = engine.text() + idle
    engine.serve(STEPS)
    found = windows("vllm", before, engine.text() + idle)
    assert [(item.target, item.condition) for item in found] == [
        ("b", "idle"),
        (MODEL, "reporting"),
    ]
    assert condition_of(found) == "reporting"


def test_times_are_ratios_of_sums() -> None:
    engine = FakeVllm()
    before = engine.text()
    engine.serve(STEPS, requests=2)
    found = window("vllm", before, engine.text())
    assert found.time_to_first_token_seconds == pytest.approx(0.25)
    assert found.time_per_output_token_seconds == pytest.approx(5 * 0.02 / (15 - 2))
    assert (found.concurrency, found.prompt_tokens) == (3, 200)


def test_lmdeploy_is_as_fast_as_its_steps_and_tokens_say() -> None:
    """Its own seconds per token are a mean over steps, whatever number of tokens each of them has."""
    engine = FakeLmDeploy()
    engine.serve(STEPS, requests=2)
    before = engine.text()
    engine.serve(STEPS * 2, requests=3)
    found = window("lmdeploy", before, engine.text())
    assert found.time_per_output_token_seconds == pytest.approx(10 * 0.02 / (30 - 3))
    before, after = (without(text, "lmdeploy:iter_token_latency") for text in (before, engine.text()))
    old = window("lmdeploy", before, after)  # as before 0.10
    assert old.time_per_output_token_seconds == pytest.approx(10 * 0.01 / (30 - 3))


def test_an_idle_window_is_none_and_one_without_drafts_says_that_drafting_stopped() -> None:
    engine = FakeVllm(running=0)
    engine.serve(STEPS)
    before = engine.text()
    assert window("vllm", before, before).condition == "idle"
    engine.plain_tokens += 500
    found = window("vllm", before, engine.text())
    assert (found.condition, found.drafted, found.generated) == ("drafting_stopped", 0, 500)


def test_a_server_that_never_speculated_is_no_server_that_stopped() -> None:
    engine = FakeVllm()
    before = engine.text()
    engine.plain_tokens += 500
    assert window("vllm", before, engine.text()).condition == "not_speculating"


def test_sglang_ranks_are_not_added_and_the_draft_worker_is_not_the_server() -> None:
    engine = FakeSGLang()
    engine.serve(STEPS)
    draft = 'sglang:spec_accept_length{engine_type="draft",model_name="draft-model",tp_rank="0"} 2.7\n'
    found = window("sglang", FakeSGLang().text() + draft, engine.text() + draft)
    assert (found.target, found.num_speculative_tokens, found.fidelity) == (MODEL, K, "counter")
    assert (found.steps, found.drafted, found.accepted) == (5, 20, 10)


def test_the_first_token_of_a_request_of_sglang_was_no_accepted_draft_token() -> None:
    """It comes from reading the prompt. Else acceptance would change with the length of answers."""
    engine = FakeSGLang()
    before = engine.text()
    engine.serve(STEPS, requests=8)
    found = window("sglang", before, engine.text())
    assert (found.steps, found.accepted, found.generated) == (5, 10, 23)


def test_sglang_workers_whose_metrics_their_router_collects_restart_each_for_itself() -> None:
    old, going_on, new = FakeSGLang(), FakeSGLang(), FakeSGLang()
    for engine, steps in ((old, STEPS * 9), (going_on, STEPS * 50), (new, STEPS)):
        engine.serve(steps)

    def collected(*workers: FakeSGLang) -> str:
        texts = (each.text().replace("{", f'{{worker_addr="http://{n}",') for n, each in enumerate(workers))
        return "".join(texts)

    before = collected(old, going_on)
    going_on.serve(STEPS)
    found = window("sglang", before, collected(new, going_on))
    assert (found.steps, found.drafted, found.accepted) == (10, 40, 20)


def test_sglang_counters_of_fewer_labels_than_others_restart_with_them() -> None:
    def text(steps: int, streamed: int, whole: int) -> str:
        tokens = f'sglang:generation_tokens_total{{model_name="{MODEL}",is_streaming="%s"}} %d\n'
        verified = f'sglang:spec_verify_calls_total{{model_name="{MODEL}"}} {steps}\n'
        gauges = without(without(FakeSGLang().text(), "sglang:generation"), "sglang:spec_verify")
        return gauges + verified + tokens % ("true", streamed) + tokens % ("false", whole)

    found = window("sglang", text(300, streamed=1_000, whole=20), text(30, streamed=60, whole=40))
    assert (found.steps, found.generated, found.accepted) == (30, 100, 70)


def test_sglang_requests_of_each_priority_are_not_added_to_those_of_all() -> None:
    text = FakeSGLang().text()
    for name in ("num_running_reqs", "num_queue_reqs"):
        for priority, requests in (("", 7), ("0", 5), ("10", 2)):
            text += f'sglang:{name}{{model_name="{MODEL}",priority="{priority}"}} {requests}\n'
    found = window("sglang", text, text)
    assert (found.concurrency, found.waiting_requests) == (7, 7)


def without(text: str, name: str) -> str:
    return "".join(line + "\n" for line in text.splitlines() if not line.startswith(name))


def test_an_old_sglang_has_a_gauge_that_counts_only_where_tokens_were_generated() -> None:
    engine = FakeSGLang()
    engine.serve([2] * 100)
    before = without(engine.text(), "sglang:spec_verify_calls_total")
    idle = window("sglang", before, before)
    assert (idle.condition, idle.drafted) == ("idle", 0)
    engine.serve([2] * 50)
    found = window("sglang", before, without(engine.text(), "sglang:spec_verify_calls_total"))
    assert (found.steps, found.accepted, found.fidelity) == (50, 100, "gauge")


def test_sglang_may_stop_drafting_or_change_its_k() -> None:
    engine = FakeSGLang()
    engine.serve(STEPS * 2)
    before = engine.text()
    engine.plain_tokens += 300
    off = engine.text().replace(f"}} {K + 1}\n", "} 1\n")
    with pytest.raises(LeftOut, match="from 4 to 0 draft tokens"):
        windows("sglang", before, off)
    engine.plain_tokens += 300
    later = engine.text().replace(f"}} {K + 1}\n", "} 1\n")
    found = window("sglang", off, later)
    assert (found.condition, found.drafted, found.steps, found.generated) == ("drafting_stopped", 0, 0, 300)


def test_an_sglang_that_has_just_started_has_not_stopped_drafting_where_it_does_not_tell_k_yet() -> None:
    """Its gauges are 0 until its first 40 forward passes, also where it warmed itself up with a request."""
    old = FakeSGLang()
    old.serve(STEPS * 10)
    engine = FakeSGLang()

    def text_of_a_start() -> str:
        return re.sub(r"(sglang:spec_(?:accept|num)_\S+) .*", r"\1 0.0", engine.text())

    engine.serve([2, 3, 1])
    warmed_up = text_of_a_start()
    with pytest.raises(LeftOut, match="has not told yet"):
        windows("sglang", old.text(), warmed_up)
    assert window("sglang", warmed_up, warmed_up).condition == "idle"
    engine.serve(STEPS * 10)
    found = window("sglang", warmed_up, engine.text())
    assert (found.steps, found.drafted, found.accepted) == (50, 200, 100)
    engine = FakeSGLang(plain_tokens=7)  # without speculation they stay 0
    assert window("sglang", FakeSGLang().text(), text_of_a_start()).condition == "not_speculating"


def test_an_old_sglang_that_has_just_started_has_not_stopped_drafting_either() -> None:
    """One without the counter of verifications, whose K is in the settings."""
    old, engine = FakeSGLang(), FakeSGLang()

    def text(of: FakeSGLang, length: str = r"\2") -> str:
        kept = without(without(of.text(), "sglang:spec_verify_calls_total"), "sglang:spec_num")
        return re.sub(r"(sglang:spec_accept_length\S+) (.*)", rf"\1 {length}", kept)

    old.serve(STEPS * 10)
    engine.serve([2, 3, 1])
    with pytest.raises(LeftOut, match="has not told yet"):
        windows("sglang", text(old), text(engine, "0.0"), k=K)
    engine.serve(STEPS * 100)
    found = window("sglang", text(old), text(engine, "0.0"), k=K)
    assert (found.condition, found.drafted) == ("not_speculating", 0)  # any more


def test_an_sglang_may_be_started_again_with_another_k() -> None:
    old, engine = FakeSGLang(), FakeSGLang()
    old.serve(STEPS * 10)
    engine.serve(STEPS * 2)
    after = engine.text().replace(f"}} {K + 1}\n", f"}} {K + 3}\n")
    found = window("sglang", old.text(), after)
    assert (found.num_speculative_tokens, found.steps, found.drafted) == (K + 2, 10, 60)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("tgi", FakeTgi(steps=5, accepted=[1, 0, 0, 0]).text()),
        ("sglang", without(without(FakeSGLang(steps=5).text(), "sglang:spec_num"), "sglang:spec_num")),
        (
            "tensorrt_llm",
            without(without(FakeTensorRtLlm(steps=5).text(), "trtllm_spec_decode_d"), "trtllm_speculative"),
        ),
    ],
)
def test_what_an_engine_does_not_tell_has_to_be_set_and_is_named(kind: Kind, text: str) -> None:
    with pytest.raises(Incomplete, match="num_speculative_tokens"):
        windows(kind, text, text)


def test_tensorrt_llm_without_positions_derives_the_steps_and_says_so() -> None:
    engine = FakeTensorRtLlm()
    names = ("trtllm_spec_decode_drafted", "trtllm_spec_decode_accepted")
    before = without(without(engine.text(), names[0]), names[1])
    engine.serve(STEPS)
    found = window("tensorrt_llm", before, without(without(engine.text(), names[0]), names[1]))
    assert (found.steps, found.drafted, found.accepted, found.fidelity) == (5, 20, 10, "gauge")


def test_tensorrt_llm_counts_nothing_twice_when_its_positions_appear() -> None:
    """They are those of finished requests, of which the windows before have counted iterations."""
    engine = FakeTensorRtLlm()
    engine.serve(STEPS * 50)
    before = without(engine.text(), "trtllm_spec_decode_drafted")
    before = without(before, "trtllm_spec_decode_accepted")
    engine.serve(STEPS)
    appeared = engine.text()
    found = window("tensorrt_llm", before, appeared)
    assert (found.steps, found.drafted, found.accepted, found.fidelity) == (5, 20, 10, "gauge")
    engine.serve(STEPS)
    found = window("tensorrt_llm", appeared, engine.text())
    assert (found.steps, found.drafted, found.accepted, found.fidelity) == (5, 20, 10, "counter")


def test_tensorrt_llm_tells_its_draft() -> None:
    engine = FakeTensorRtLlm()
    before = engine.text()
    engine.serve(STEPS)
    found = window("tensorrt_llm", before, engine.text())
    assert (found.draft, found.method, found.fidelity) == ("org/eagle3", "eagle3", "counter")
    assert found.record(Identity("s", method="mtp")).method == "mtp", "the settings win"


def test_a_draft_that_was_replaced_keeps_its_last_counts() -> None:
    old = ADAPTERS["driftguard"]
    engine = next(make for make in ENGINES if make.kind == "driftguard")()
    before = engine.text()
    engine.serve(STEPS)
    promoted = engine.text().replace('draft="small",draft_version="v1"', 'draft="small",draft_version="v2"')
    found = {item.draft_version: item for item in windows(old.kind, before, promoted)}
    assert (found["v1"].drafted, found["v1"].draft, found["v1"].generated) == (20, "small", 0)
    assert found["v2"].drafted == 0


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf"])
def test_a_value_that_is_no_number_is_not_counted(value: str) -> None:
    text = f"llamacpp:spec_decode_num_drafts_total {value}\n"
    assert not Reading.parse(text, ADAPTERS["llamacpp"].names, AFTER).of(
        "llamacpp:spec_decode_num_drafts_total"
    )


@pytest.mark.parametrize("line", ["%s 7", "%s 7 1700000000000", "%s 7 ", "%s  7\r"])
@pytest.mark.parametrize("labels", ["", '{model="a b"}', '{model="a} 3"}', r'{model="\"a\" 3",}'])
def test_a_value_is_told_from_what_stands_around_it(line: str, labels: str) -> None:
    name = "llamacpp:spec_decode_num_drafts_total"
    for _ in range(2):  # as a series that is new, and as one that is known
        reading = Reading.parse(line % (name + labels) + "\n", ADAPTERS["llamacpp"].names, AFTER)
        assert reading.total(name) == 7.0


@pytest.mark.parametrize("label", ["", ',position=""', ',position="one"', ',position="1000000000"'])
def test_a_place_that_is_none_is_refused_by_the_metric_that_has_it(label: str) -> None:
    engine = FakeVllm()
    before = engine.text()
    engine.serve(STEPS)
    after = re.sub(r',position="2"', label, engine.text())
    assert after != engine.text()
    with pytest.raises(Incomplete, match=r"^vllm:spec_decode_num_accepted_tokens_per_pos_total: .*position"):
        window("vllm", before, after)


def test_what_is_no_exposition_is_refused() -> None:
    with pytest.raises(Unreadable, match="not the Prometheus text format"):
        Reading.parse("llamacpp:spec_decode_num_drafts_total{ 7", ADAPTERS["llamacpp"].names, AFTER)


def test_metrics_of_something_else_are_no_engine() -> None:
    assert detect("go_goroutines 7\nprocess_start_time_seconds 1\n") is None
    assert detect("<html>") is None


@pytest.mark.parametrize("after", ["", "other labels"])
def test_counters_of_which_none_is_left_began_anew(after: str) -> None:
    """Of a server that tells no start: it counts from its first request on, or is of another version."""
    engine = FakeSGLang()
    engine.serve(STEPS)
    text = {
        "": 'sglang:num_queue_reqs{model_name="m"} 0\n',
        "other labels": engine.text().replace("engine_type=", 'moe_ep_rank="0",engine_type='),
    }[after]
    names = ADAPTERS["sglang"].names
    first, second = (Reading.parse(told, names, at) for told, at in ((engine.text(), BEFORE), (text, AFTER)))
    assert has_restarted(first, second)
    assert not has_restarted(first, first)
    begun = [one.begun_at for one in ADAPTERS["sglang"].windows(first, second, Identity("server"))]
    assert begun == ([BEFORE + (AFTER - BEFORE) / 2] if after else [])
