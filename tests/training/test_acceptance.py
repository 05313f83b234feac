from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from driftguard_training.acceptance import distillation_loss, distribution
from driftguard_training.drafts.kinds import load_draft
from driftguard_training.evaluate import evaluate
from driftguard_training.model_directories import load_model
from driftguard_training.serving import Expected, score_batch
from driftguard_training.settings import AcceptanceRule, EvaluateSettings
from driftguard_training.traffic import ServedRequest, TrafficRequest, read_traffic

from tests.training.small_models import CONTEXT_TOKENS, save_directory, small_model, write_traffic

TINY_VOCABULARY = 5


def _next_token_law(model: torch.nn.Module, context: list[int], temperature: float) -> list[float]:
    logits = model(input_ids=torch.tensor([context])).logits[0, -1].double().tolist()
    if temperature == 0:
        return [float(index == logits.index(max(logits))) for index in range(len(logits))]
    weights = [torch.tensor(x / temperature).double().exp().item() for x in logits]
    return [weight / sum(weights) for weight in weights]


def _brute_force(
    target: torch.nn.Module, draft: torch.nn.Module, request: TrafficRequest, temperature: float, rule: str
) -> list[float]:
    """The probability that a drafted token is kept, by enumerating every token, of each position."""
    found = []
    for index in range(len(request.output_token_ids)):
        context = request.prompt_token_ids + request.output_token_ids[:index]
        p = _next_token_law(target, context, temperature)
        q = _next_token_law(draft, context, 0.0 if rule == "match" else temperature)
        found.append(sum(q[v] * min(1.0, p[v] / q[v]) for v in range(len(p)) if q[v] > 0))
    return found


def _counts(
    target: Path, draft: str, requests: list[TrafficRequest], temperature: float, rule: str
) -> list[Expected]:
    served = [
        ServedRequest(one.segment, one.prompt_token_ids, one.output_token_ids, temperature, 3)
        for one in requests
    ]
    loaded = load_model(target, "target")
    scores = score_batch(loaded, load_draft(Path(draft), loaded), served)
    return [getattr(score, rule) for score in scores]


@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("rule", ["rejection", "match"])
def test_evaluated_acceptance_is_the_enumerated_one(
    tmp_path: Path, temperature: float, rule: AcceptanceRule
) -> None:
    target = small_model(1, vocabulary=TINY_VOCABULARY)
    drafts = [small_model(seed, vocabulary=TINY_VOCABULARY) for seed in (2, 3)]
    directories = [save_directory(tmp_path / f"draft{i}", draft) for i, draft in enumerate(drafts)]
    traffic = tmp_path / "traffic.jsonl"
    for segment, seed, length in (("b", 5, 9), ("a", 6, 4)):  # ragged rows in one batch
        part = write_traffic(
            tmp_path / "part.jsonl", target, requests=3, seed=seed, tokens=(1, TINY_VOCABULARY),
            segment=segment, output_tokens=length, prompt_tokens=2 * length,
        )  # fmt: skip
        traffic.open("a").write(part.read_text())
    requests = read_traffic(traffic, TINY_VOCABULARY, CONTEXT_TOKENS)

    report = evaluate(
        EvaluateSettings(
            save_directory(tmp_path / "target", target), tuple(directories), traffic, 3, temperature, rule
        )
    )

    for measured, draft in zip(report["drafts"], drafts, strict=True):  # type: ignore[call-overload]
        assert [segment["segment"] for segment in measured["segments"]] == ["a", "b"]
        for segment in measured["segments"]:
            own = [request for request in requests if request.segment == segment["segment"]]
            rates = [_brute_force(target, draft, request, temperature, rule) for request in own]
            means = [sum(rate) / len(rate) for rate in rates]
            assert segment["kept"] == pytest.approx(means, abs=1e-5)
            assert segment["requests"] == 3
            assert segment["positions"] == 3 * (4 if segment["segment"] == "a" else 9)
            # That these counts are a server's is shown in test_serving.
            counts = _counts(directories[0].parent / "target", measured["directory"], own, temperature, rule)
            for name in ("drafted", "accepted"):
                expected = [getattr(one, name) for one in counts]
                assert segment[name] == pytest.approx(expected, abs=1e-5)
        assert measured["seconds_per_draft_token"] > 0


def test_a_draft_equal_to_the_target_is_always_accepted(tmp_path: Path) -> None:
    target = small_model(1)
    directory = save_directory(tmp_path / "target", target)
    traffic = write_traffic(tmp_path / "traffic.jsonl", target, requests=4, seed=1, output_tokens=10)
    report = evaluate(EvaluateSettings(directory, (directory,), traffic, 4))
    segment = report["drafts"][0]["segments"][0]  # type: ignore[index]
    assert segment["acceptance"] == pytest.approx(1, abs=1e-5)
    assert segment["positions"] / segment["steps"] == pytest.approx(5, abs=1e-3)


def test_where_nothing_is_drafted_no_acceptance_is_expected(tmp_path: Path) -> None:
    """An answer of one token leaves no room for a draft."""
    target = small_model(1)
    directory = save_directory(tmp_path / "target", target)
    traffic = write_traffic(tmp_path / "traffic.jsonl", target, requests=4, seed=1, output_tokens=1)
    report = evaluate(EvaluateSettings(directory, (directory,), traffic, 4))
    segment = report["drafts"][0]["segments"][0]  # type: ignore[index]
    assert segment["acceptance"] is None
    assert segment["drafted"] == [0, 0, 0, 0]


def test_losses_vanish_only_when_the_distributions_agree() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 11)
    p = distribution(logits, 1.0)
    for loss in ("nla", "lk-hybrid", "forward-kl"):
        same, accepted = distillation_loss(p, logits, loss)
        other, less = distillation_loss(p, torch.randn(6, 11), loss)
        assert same.item() == pytest.approx(0, abs=1e-5)
        assert accepted.tolist() == pytest.approx([1.0] * 6)
        assert other.item() > 0.1
        assert less.max() < 1


def test_nla_is_minus_the_log_of_the_acceptance_probability() -> None:
    p = torch.tensor([[0.5, 0.5, 0.0], [0.1, 0.2, 0.7]])
    q = torch.tensor([[0.25, 0.25, 0.5], [0.7, 0.2, 0.1]])
    loss, accepted = distillation_loss(p, q.log(), "nla")
    assert accepted.tolist() == pytest.approx([0.5, 0.4])
    assert loss.item() == pytest.approx(-(torch.tensor([0.5, 0.4]).log().mean().item()))


def test_a_request_longer_than_the_context_is_left_out_of_every_draft_s_scores(tmp_path: Path) -> None:
    target = small_model(1)
    traffic = write_traffic(tmp_path / "traffic.jsonl", target, requests=12, seed=5)
    directory = save_directory(tmp_path / "target", target)
    drafts = tuple(save_directory(tmp_path / f"{seed}", small_model(seed)) for seed in (2, 3))
    lines = traffic.read_text().splitlines(keepends=True)
    long = {"segment": "default", "prompt_token_ids": [1] * CONTEXT_TOKENS, "output_token_ids": [2]}
    first, second = json.dumps(long) + "\n", json.dumps({**long, "segment": "long"}) + "\n"
    (tmp_path / "with.jsonl").write_text("".join([first, *lines[:6], first, second, *lines[6:], second]))

    without, found = (
        cast("Any", evaluate(EvaluateSettings(directory, drafts, path)))
        for path in (traffic, tmp_path / "with.jsonl")
    )

    assert [draft["segments"] for draft in found["drafts"]] == [
        draft["segments"] for draft in without["drafts"]
    ]
    assert (without["left_out"], found["left_out"]) == ({}, {"default": 2, "long": 2})
