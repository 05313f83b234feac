"""Single cases by hand: odd token ids, odd settings, odd logits, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from driftguard_engine.kernels.backend import backend_of
from driftguard_engine.kernels.reference.verify import Rule
from driftguard_engine.kernels.tensor_checks import InvalidLogits
from driftguard_engine.verify import (
    BackendUnavailable,
    VerifyResult,
    verify_chain,
)
from torch import Tensor

from tests.engine.verify.distributions import (
    BY_RULE,
    assert_distribution,
    counts_of,
    distribution_of,
    draw,
    exact_distribution,
    sample_draft,
    scenario,
)

INF = torch.inf


def arguments(target: Any, draft: Any, tokens: Any, **changes: Any) -> dict[str, Any]:
    """One batch of B equal settings: temperature 1, no filters, seeds 0.., position 0."""
    target, draft, tokens = torch.as_tensor(target), torch.as_tensor(draft), torch.as_tensor(tokens)
    rows = len(target)
    defaults = {
        "target_logits": target,
        "draft_logits": draft,
        "draft_tokens": tokens,
        "draft_lengths": torch.full((rows,), tokens.shape[1]),
        "temperature": torch.ones(rows),
        "top_k": torch.zeros(rows, dtype=torch.int64),
        "top_p": torch.ones(rows),
        "seed": torch.arange(rows),
        "position": torch.zeros(rows, dtype=torch.int64),
    }
    return defaults | changes


def many(
    rows: int, target: list[list[float]], draft: list[list[float]], tokens: list[int], **changes: Any
) -> VerifyResult:
    """The same logits and tokens in every row; only seeds differ."""
    return verify_chain(
        **arguments(
            torch.tensor(target).expand(rows, -1, -1),
            torch.tensor(draft).expand(rows, -1, -1),
            torch.tensor(tokens).expand(rows, -1),
            **changes,
        )
    )


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("token", [-1, 3, 4, -7, 2**40])
def test_an_id_that_the_vocabulary_lacks_is_rejected_and_replaced_by_a_draw_from_p(
    token: int, rule: Rule
) -> None:
    logits = [[0.0, 1.0, 2.0], [0.0, 0.0, 0.0]]
    result = many(30_000, logits, [[2.0, 1.0, 0.0]], [token], rule=rule)
    assert int(result.accepted.max()) == 0
    assert set(result.tokens[:, 1].tolist()) == {-1}
    counts = dict(enumerate(result.tokens[:, 0].bincount(minlength=3).tolist()))
    p = distribution_of(logits[0], 1.0, 0, 1.0)
    assert_distribution(
        {(x,): n for x, n in counts.items()}, {(x,): p[x] for x in range(3)}, f"after id {token}, seeds 0.."
    )


def test_an_id_that_the_vocabulary_lacks_is_rejected_at_temperature_0() -> None:
    result = many(1, [[0.0, 1.0], [5.0, 1.0]], [[0.0, 0.0]], [-1], temperature=torch.zeros(1))
    assert (result.tokens.tolist(), result.accepted.tolist(), result.emitted.tolist()) == (
        [[1, -1]],
        [0],
        [1],
    )


def test_a_draft_after_a_missing_id_is_not_looked_at() -> None:
    certain = [[-INF, 0.0, -INF]] * 3
    result = many(50, certain, [[0.0, 0.0, 0.0]] * 2, [-1, 1])
    assert result.tokens.tolist() == [[1, -1, -1]] * 50


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_greedy_takes_the_lowest_of_equal_logits(dtype: torch.dtype) -> None:
    logits = torch.zeros(1, 3, 9001, dtype=dtype)
    logits[0, 0, [4000, 8000]] = 1
    logits[0, 1, [17, 18]] = 1
    found = verify_chain(
        **arguments(logits, torch.zeros(1, 2, 9001), torch.tensor([[4000, 18]]), temperature=torch.zeros(1))
    )
    assert found.tokens.tolist() == [[4000, 17, -1]]
    assert found.accepted.tolist() == [1]
    args = (torch.zeros(1), torch.tensor([0]), torch.ones(1), torch.tensor([3]), torch.tensor([0]))
    assert sample_draft(logits[:, 0], *args).tolist() == [4000]


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-38, 1e-45])
def test_tiny_temperatures_are_greedy_where_the_maximum_is_alone(temperature: float) -> None:
    logits = torch.tensor([[[1.0, 3.0, 2.9], [4.0, 3.0, 0.0]]]).expand(64, -1, -1)
    tokens = torch.ones(64, 1, dtype=torch.int64)
    found = verify_chain(
        **arguments(
            logits, logits[:, :1], tokens, temperature=torch.full((64,), temperature, dtype=torch.float64)
        )
    )
    assert found.tokens.tolist() == [[1, 0]] * 64


@pytest.mark.parametrize("changes", [{"top_k": 1}, {"top_p": 1e-12}, {"top_p": 0.0}])
def test_filters_that_leave_one_token_are_greedy(changes: dict[str, Any]) -> None:
    """Also among equal logits: the lowest id is the one left."""
    changed = {name: torch.full((100,), value) for name, value in changes.items()}
    result = many(100, [[1.0, 2.0, 2.0], [0.0, 0.0, 0.0]], [[0.0, 0.0, 3.0]], [2], **changed)
    assert result.tokens.tolist() == [[1, -1]] * 100


@pytest.mark.parametrize(
    "changes", [{"top_k": 3}, {"top_k": 99}, {"top_k": -1}, {"top_p": 1.0}, {"top_p": 7.5}]
)
def test_filters_that_leave_everything_change_nothing(changes: dict[str, Any]) -> None:
    changed: dict[str, Any] = {name: torch.full((500,), value) for name, value in changes.items()}
    target, draft = [[1.0, 2.0, 2.5], [0.0, 1.0, 0.0]], [[0.0, 0.0, 3.0]]
    assert torch.equal(many(500, target, draft, [2], **changed).tokens, many(500, target, draft, [2]).tokens)


def test_equal_logits_everywhere_are_uniform() -> None:
    rows, size = 40_000, 7
    flat = [[0.5] * size] * 2
    result = many(rows, flat, [[0.0] * size], [3])
    assert result.accepted.tolist() == [1] * rows  # p = q: nothing to reject
    counts = result.tokens[:, 1].bincount(minlength=size).tolist()
    assert_distribution(
        {(x,): n for x, n in enumerate(counts)}, {(x,): 1 / size for x in range(size)}, "bonus, seeds 0.."
    )


def test_tokens_that_the_target_rules_out_are_never_emitted() -> None:
    target = [[-INF, 1.0, -INF, 0.0], [0.0, -INF, -INF, -INF]]
    result = many(2000, target, [[5.0, 0.0, -INF, 0.0]], [0])
    assert set(result.tokens[:, 0].tolist()) == {1, 3}
    neither = many(2000, target, [[0.0, 0.0, -INF, 0.0]], [2])  # an id that both distributions rule out
    assert set(neither.tokens[:, 0].tolist()) == {1}  # all that p has above q
    accepted = many(2000, target, [[-INF, 0.0, -INF, -INF]], [1])
    assert set(accepted.tokens[accepted.accepted == 1][:, 1].tolist()) == {0}


@pytest.mark.parametrize("rule", ["token", "block"])
def test_an_id_that_the_vocabulary_lacks_ends_the_block_before_it(rule: Rule) -> None:
    case = scenario(5, 3, seed=31)

    verify, sample = BY_RULE[rule]

    def without_third(target: Tensor, draft: Tensor, tokens: Tensor, *rest: Tensor) -> VerifyResult:
        return verify(target, draft, tokens.index_fill(1, torch.tensor(2), -1), *rest)

    seeds, positions = torch.arange(60_000), torch.full((60_000,), 3)
    result = draw(case, 60_000, seeds, positions, verify=without_third, sample=sample)
    assert_distribution(counts_of(result), exact_distribution(case, 2, rule), "seeds 0.., position 3")


def test_ratios_too_small_for_a_number_reject_the_block() -> None:
    """Each draft token has about 2**-125 under p; the product of twelve is below what float64 holds."""
    likely, unlikely = [0.0, -86.0], [-86.0, 0.0]
    result = many(200, [likely] * 13, [unlikely] * 12, [1] * 12, rule="block")
    assert result.accepted.tolist() == [0] * 200
    assert set(result.tokens[:, 0].tolist()) == {0}
    made_up = many(200, [likely] * 13, [unlikely] * 12, [1] * 6 + [0] * 6, rule="block")
    assert made_up.accepted.tolist() == [12] * 200  # six that p likes by as much more make up for six


@pytest.mark.parametrize("rule", ["token", "block"])
def test_an_empty_residual_draws_from_p(rule: Rule) -> None:
    """p = q, and an id that both rule out: it is rejected, and p - q has nothing left to draw."""
    logits = [-INF, 0.0, 1.0, -INF]
    result = many(30_000, [logits, logits], [logits], [0], rule=rule)
    counts = result.tokens[:, 0].bincount(minlength=4).tolist()
    p = distribution_of(logits, 1.0, 0, 1.0)
    assert_distribution(
        {(x,): n for x, n in enumerate(counts) if n}, {(x,): p[x] for x in range(4)}, "seeds 0.."
    )


def test_no_drafts_at_all() -> None:
    logits = torch.tensor([[[0.0, 30.0]]]).expand(4, -1, -1)
    result = verify_chain(**arguments(logits, torch.zeros(4, 0, 2), torch.zeros(4, 0, dtype=torch.int64)))
    assert (result.tokens.tolist(), result.emitted.tolist()) == ([[1]] * 4, [1] * 4)


def test_a_vocabulary_of_one() -> None:
    result = many(3, [[0.3]] * 3, [[-4.0]] * 2, [0, 0], top_k=torch.tensor([0, 1, 5]))
    assert result.tokens.tolist() == [[0, 0, 0]] * 3


def test_narrow_integer_types_and_gradients_are_accepted() -> None:
    given = arguments(
        torch.randn(2, 2, 5, requires_grad=True), torch.randn(2, 1, 5, requires_grad=True), [[1], [2]]
    )
    wide = verify_chain(**given, backend="reference")
    for name in ("draft_tokens", "draft_lengths", "top_k", "seed", "position"):
        given[name] = given[name].to(torch.int32)
    narrow = verify_chain(**given, backend="auto")
    assert torch.equal(narrow.tokens, wide.tokens)
    assert narrow.tokens.dtype == narrow.accepted.dtype == narrow.emitted.dtype == torch.int64
    assert not narrow.tokens.requires_grad


def good() -> dict[str, Any]:
    return arguments(torch.zeros(2, 3, 4), torch.zeros(2, 2, 4), [[0, 1], [2, 3]])


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("target_logits", torch.zeros(2, 3), r"target_logits must have shape .*\[2, 3\]"),
        ("target_logits", torch.zeros(2, 3, 4, dtype=torch.int64), "target_logits must hold floats"),
        ("target_logits", [[0.0]], "target_logits must be a torch.Tensor, got list"),
        ("target_logits", torch.zeros(2, 3, 0), "target_logits must have shape"),
        ("draft_logits", torch.zeros(2, 3, 4), r"draft_logits must have shape \[2, 2, 4\], got \[2, 3, 4\]"),
        ("draft_logits", torch.zeros(2, 2, 5), r"draft_logits must have shape \[2, 2, 4\], got \[2, 2, 5\]"),
        ("draft_tokens", torch.zeros(2, 2), "draft_tokens must hold integers, got torch.float32"),
        ("draft_tokens", torch.zeros(2, 1, dtype=torch.int64), "draft_tokens must have shape"),
        (
            "draft_lengths",
            torch.tensor([1, -1]),
            r"draft_lengths\[1\] must be at least 0 and at most 2, got -1",
        ),
        (
            "draft_lengths",
            torch.tensor([3, 0]),
            r"draft_lengths\[0\] must be at least 0 and at most 2, got 3",
        ),
        ("temperature", torch.tensor([1.0, torch.nan]), r"temperature\[1\] must be at least 0 .* got nan"),
        ("temperature", torch.tensor([-0.5, 1.0]), r"temperature\[0\] must be at least 0 .* got -0.5"),
        ("temperature", torch.tensor([1.0, torch.inf]), r"temperature\[1\] .* got inf"),
        ("temperature", torch.tensor([1, 1]), "temperature must hold floats"),
        ("top_k", torch.ones(2), "top_k must hold integers"),
        ("top_k", torch.ones(2, dtype=torch.bool), "top_k must hold integers, got torch.bool"),
        ("top_p", torch.tensor([torch.nan, 1.0]), r"top_p\[0\] must be at least 0, got nan"),
        ("top_p", torch.tensor([1.0, -0.1]), r"top_p\[1\] must be at least 0"),
        ("seed", torch.tensor([1]), r"seed must have shape \[2\], got \[1\]"),
        ("position", torch.tensor([0, -4]), r"position\[1\] must be at least 0, got -4"),
        ("position", 3, "position must be a torch.Tensor, got int"),
        ("rule", "tree", "rule must be 'token' or 'block', got 'tree'"),
        ("backend", "gpu", "backend must be 'auto', 'reference' or 'cuda', got 'gpu'"),
    ],
)
def test_bad_arguments_are_named(name: str, value: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        verify_chain(**(good() | {name: value}))


@pytest.mark.parametrize("value", [torch.nan, INF, None])
@pytest.mark.parametrize("argument", ["target_logits", "draft_logits"])
def test_a_row_without_a_law_is_named(argument: str, value: float | None) -> None:
    given = good()
    logits: Tensor = given[argument]
    logits[1, 1, :] = -INF
    if value is not None:
        logits[1, 1, 2] = value
    with pytest.raises(InvalidLogits, match=rf"{argument}\[1, 1\].*finite maximum") as refused:
        verify_chain(**given)
    assert refused.value.rows == (1,)
    # At temperature 0 the draft's logits are not read, the target's are.
    greedy = given | {"temperature": torch.tensor([1.0, 0.0])}
    if argument == "target_logits":
        with pytest.raises(InvalidLogits):
            verify_chain(**greedy)
    else:
        assert int(verify_chain(**greedy).emitted.min()) >= 1


def test_sample_draft_refuses_the_same() -> None:
    one = torch.tensor([1])
    with pytest.raises(InvalidLogits, match=r"draft_logits\[0\]"):
        sample_draft(torch.full((1, 4), torch.nan), torch.ones(1), one, torch.ones(1), one, one)
    with pytest.raises(ValueError, match="top_p"):
        sample_draft(torch.zeros(1, 4), torch.ones(1), one, one, one, one)


def test_the_missing_cuda_backend_is_refused_and_auto_says_what_runs() -> None:
    with pytest.raises(BackendUnavailable, match=r"'cuda' is not available: the tensors are on cpu"):
        verify_chain(**good(), backend="cuda")
    assert backend_of(torch.device("cpu")).name == backend_of(torch.device("cuda")).name == "reference"
