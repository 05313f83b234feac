from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from driftguard_training.acceptance import distillation_loss, distribution
from driftguard_training.evaluate import ExpectedCounts, evaluate, expected_counts
from driftguard_training.settings import AcceptanceRule, EvaluateSettings
from driftguard_training.traffic import TrafficRequest, read_traffic

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
            rates = [
                _brute_force(target, draft, request, temperature, rule)
                for request in requests
                if request.segment == segment["segment"]
            ]
            counts = [_enumerated(rate, 3) for rate in rates]
            means = [sum(rate) / len(rate) for rate in rates]
            assert segment["per_request"] == pytest.approx(means, abs=1e-5)
            assert segment["requests"] == 3
            assert segment["positions"] == 3 * (4 if segment["segment"] == "a" else 9)
            ratio = sum(one.accepted for one in counts) / sum(one.drafted for one in counts)
            assert segment["acceptance"] == pytest.approx(ratio, abs=1e-5)
        assert measured["seconds_per_draft_token"] > 0


def test_a_draft_equal_to_the_target_is_always_accepted(tmp_path: Path) -> None:
    target = small_model(1)
    directory = save_directory(tmp_path / "target", target)
    traffic = write_traffic(tmp_path / "traffic.jsonl", target, requests=4, seed=1, output_tokens=10)
    report = evaluate(EvaluateSettings(directory, (directory,), traffic, 4))
    segment = report["drafts"][0]["segments"][0]  # type: ignore[index]
    assert segment["acceptance"] == pytest.approx(1, abs=1e-5)
    assert segment["expected_emitted_per_step"] == pytest.approx(5, abs=1e-3)


def _enumerated(rates: list[float], k: int) -> ExpectedCounts:
    """Over all ways in which draft tokens may be kept."""
    total = [0.0, 0.0, 0.0]
    for kept in itertools.product([True, False], repeat=len(rates)):  # would position t be accepted?
        probability = 1.0
        for rate, keep in zip(rates, kept, strict=True):
            probability *= rate if keep else 1 - rate
        position = 0
        while position < len(rates):
            drafted = min(k, len(rates) - position)
            accepted = 0
            while accepted < drafted and kept[position + accepted]:
                accepted += 1
            position += accepted + 1
            total = [old + probability * new for old, new in zip(total, (1, drafted, accepted), strict=True)]
    return ExpectedCounts(*total)


@pytest.mark.parametrize("k", [1, 2, 4])
def test_expected_counts_are_the_enumerated_ones(k: int) -> None:
    rates = [0.9, 0.2, 0.6, 0.5, 0.8]
    assert expected_counts(rates, k) == pytest.approx(_enumerated(rates, k))


def test_expected_counts_at_the_extremes() -> None:
    assert expected_counts([0.0] * 12, 4) == pytest.approx((12, 4 * 9 + 3 + 2 + 1, 0))
    assert expected_counts([1.0] * 12, 3) == pytest.approx((3, 9, 9))


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
