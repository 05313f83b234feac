"""Other verifiers on the same bfloat16 logits, each called in its own package; and a plain one in torch.

A package that is not there is reported as not installed, one whose call fails by its error: its interface
may have changed. Nothing here is a substitute for a peer.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.gpu.check.timing import eager_microseconds, graph_microseconds
from tests.gpu.check.workload import Batch

Verify = Callable[[Batch], object]


@dataclass(frozen=True, slots=True)
class Peer:
    name: str
    load: Callable[[], Verify]  # raises ImportError
    captured: bool = True  # in a CUDA graph
    most_batch: int = 128


def microseconds_of(peer: Peer, batches: list[Batch]) -> tuple[float | None, str]:
    """Of one call on cold data, and a note. Never raises: what goes wrong in a peer is its note."""
    if len(batches[0].lengths) > peer.most_batch:
        return None, f"one request at a time: measured up to {peer.most_batch}"
    try:
        verify = peer.load()
    except ImportError:
        return None, "not installed"
    except Exception as problem:  # noqa: BLE001 - a package that breaks at import
        return None, f"cannot be loaded: {_first_line(problem)}"
    calls = [lambda one=one: verify(one) for one in batches]
    if peer.captured:
        try:
            return graph_microseconds(calls, replays=10), "in a CUDA graph"
        except Exception as problem:  # noqa: BLE001 - tried again below, where it may say more
            torch.cuda.synchronize()
            why = f"not captured: {_first_line(problem)}"
    else:
        why = "waits for the device itself, so without a graph"
    try:
        return eager_microseconds(calls, repeats=10), why
    except Exception as problem:  # noqa: BLE001
        return None, f"cannot be called: {_first_line(problem)}"


def plain_torch() -> Verify:
    """The standard rule: two softmaxes, ratios, residual, one draw by exponentials."""

    def verify(given: Batch) -> tuple[Tensor, Tensor]:
        p, q = given.target.float().softmax(-1), given.draft.float().softmax(-1)
        drafts, tokens = q.shape[1], given.tokens.unsqueeze(2)
        p_token, q_token = p[:, :drafts].gather(2, tokens), q.gather(2, tokens)
        passed = (torch.rand_like(p_token) * q_token < p_token).squeeze(2)
        accepted = passed.long().cumprod(1).sum(1)
        at = accepted.view(-1, 1, 1).expand(-1, 1, p.shape[2])
        own = p.gather(1, at).squeeze(1)
        rejected = q.gather(1, at.clamp(max=drafts - 1)).squeeze(1)
        residual = (own - rejected * (accepted < drafts).unsqueeze(1)).clamp(min=0)
        return accepted, (residual / torch.empty_like(residual).exponential_()).argmax(-1)

    return verify


def flashinfer_chain() -> Verify:
    sample = import_module("flashinfer.sampling").chain_speculative_sampling

    def verify(given: Batch) -> object:
        p, q = given.target.float().softmax(-1), given.draft.float().softmax(-1)
        return sample(q, given.tokens.int(), p)

    return verify


def vllm_rejection() -> Verify:
    sample = import_module("vllm.v1.sample.rejection_sampler").rejection_sample
    known = inspect.signature(sample).parameters

    def verify(given: Batch) -> object:
        batch, drafts, size = given.draft.shape
        p, q = given.target.float().softmax(-1), given.draft.float().softmax(-1)
        bonus = (p[:, -1] / torch.empty_like(p[:, -1]).exponential_()).argmax(-1, keepdim=True)
        temperature = torch.ones(batch, device=p.device)
        offered: dict[str, Any] = {
            "draft_token_ids": given.tokens.int().flatten(),
            "num_draft_tokens": [drafts] * batch,
            "max_spec_len": drafts,
            "cu_num_draft_tokens": torch.arange(1, batch + 1, device=p.device, dtype=torch.int32) * drafts,
            "draft_probs": q.reshape(-1, size),
            "target_probs": p[:, :drafts].reshape(-1, size),
            "target_logits": given.target[:, :drafts].float().reshape(-1, size),
            "bonus_token_ids": bonus.int(),
            "sampling_metadata": SimpleNamespace(
                temperature=temperature,
                all_greedy=False,
                all_random=True,
                generators={},
                top_k=None,
                top_p=None,
            ),
        }
        return sample(**{name: value for name, value in offered.items() if name in known})

    return verify


def sglang_tree() -> Verify:
    """A chain as its tree kernel takes it. It reads the target's distribution alone, and accepts by that."""
    sample = import_module("sgl_kernel").tree_speculative_sampling_target_only

    def verify(given: Batch) -> object:
        batch, steps, _ = given.target.shape
        device, p = given.target.device, given.target.float().softmax(-1)
        index = torch.arange(batch * steps, device=device).view(batch, steps)
        after = torch.arange(1, steps + 1, device=device).expand(batch, steps).clone()
        after[:, -1] = -1
        first = torch.zeros(batch, 1, dtype=torch.int64, device=device)
        return sample(
            predicts=torch.full((batch * steps,), -1, dtype=torch.int32, device=device),
            accept_index=torch.full((batch, steps), -1, dtype=torch.int32, device=device),
            accept_token_num=torch.zeros(batch, dtype=torch.int32, device=device),
            candidates=torch.cat((first, given.tokens), 1),
            retrive_index=index,
            retrive_next_token=after,
            retrive_next_sibling=torch.full_like(after, -1),
            uniform_samples=torch.rand(batch, steps, device=device),
            uniform_samples_for_final_sampling=torch.rand(batch, device=device),
            target_probs=p,
            draft_probs=torch.zeros_like(p),
            threshold_single=1.0,
            threshold_acc=1.0,
            deterministic=True,
        )

    return verify


def transformers_assisted() -> Verify:
    """Its function verifies one request. Older ones also ask whether the request is over."""
    sample = import_module("transformers.generation.utils")._speculative_sampling
    over = {"is_done_candidate": False} if "is_done_candidate" in inspect.signature(sample).parameters else {}

    def verify(given: Batch) -> object:
        drafts = given.tokens.shape[1]
        return [
            sample(
                given.tokens[row : row + 1],
                given.draft[row : row + 1].float(),
                drafts,
                target.float(),
                **over,
            )
            for row, target in enumerate(torch.split(given.target, 1))
        ]

    return verify


PLAIN_TORCH = Peer("plain torch", plain_torch)
PEERS = (
    PLAIN_TORCH,
    Peer("FlashInfer chain_speculative_sampling", flashinfer_chain),
    Peer("vLLM rejection sampler", vllm_rejection),
    Peer("SGLang tree sampling", sglang_tree),
    Peer("transformers _speculative_sampling", transformers_assisted, captured=False, most_batch=8),
)


def _first_line(problem: Exception) -> str:
    lines = str(problem).strip().splitlines()
    return f"{type(problem).__name__}: {lines[0][:120]}" if lines else type(problem).__name__
