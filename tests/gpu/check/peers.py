"""Other verifiers on the same bfloat16 logits, each called in its own package; and a plain one in torch.

A package that is not there is reported as not installed, one whose call fails by its error: its interface
may have changed. Nothing here is a substitute for a peer.

What is there before a verification begins is made outside of its time: the indices of the batch, and the
draft's probabilities where a peer has kept them since it drew the drafts.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module, metadata
from typing import Any

import torch
from torch import Tensor

from tests.gpu.check.rows import PeerTime
from tests.gpu.check.timing import eager_microseconds, graph_microseconds
from tests.gpu.check.workload import Batch

Verify = Callable[[], Tensor]  # [B]: accepted drafts of each request
Prepare = Callable[[Batch], Verify]


@dataclass(frozen=True, slots=True)
class Peer:
    title: str
    distribution: str  # whose version goes into the name
    load: Callable[[], Prepare]  # raises ImportError
    timed: str  # what besides the drawing of accepted tokens
    captured: bool = True  # in a CUDA graph
    most_batch: int = 128
    counts_last: bool = False  # among the accepted: the token behind them

    @property
    def name(self) -> str:
        return self.title if self.version is None else f"{self.title} {self.version}"

    @property
    def version(self) -> str | None:
        try:
            return metadata.version(self.distribution)
        except metadata.PackageNotFoundError:
            return None


def time_peer(peer: Peer, given: Sequence[Batch], cold: float) -> PeerTime:
    """Of one call on cold data. Never raises: what goes wrong in a peer is its note.

    cold: microseconds of our own.
    """
    requests, drafts = given[0].tokens.shape

    def untimed(note: str) -> PeerTime:
        return PeerTime(requests, drafts, peer.name, None, None, note)

    if requests > peer.most_batch:
        return untimed(f"one request at a time: measured up to {peer.most_batch}")
    try:
        prepare = peer.load()
    except Exception as problem:  # noqa: BLE001 - a package may break at import, or lack the module
        if isinstance(problem, ImportError) and peer.version is None:
            return untimed("not installed")
        return untimed(f"cannot be loaded: {_first_line(problem)}")
    try:
        calls = [prepare(one) for one in given]
        accepted = float(torch.stack([call().float().mean() for call in calls]).mean()) - peer.counts_last
        took, how = _microseconds(calls, peer.captured)
    except Exception as problem:  # noqa: BLE001
        return untimed(f"cannot be called: {_first_line(problem)}")
    return PeerTime(requests, drafts, peer.name, took, took / cold, f"{peer.timed}; {how}", accepted)


def plain_torch() -> Prepare:
    """The standard rule: two softmaxes, ratios, residual, one draw by exponentials."""

    return lambda given: lambda: verify_plainly(given)[0]


def verify_plainly(given: Batch) -> tuple[Tensor, Tensor]:
    """Accepted drafts [B], and the token behind them [B]."""
    p, q = _probabilities(given.target), _probabilities(given.draft)
    drafts, tokens = q.shape[1], given.tokens.unsqueeze(2)
    p_token, q_token = p[:, :drafts].gather(2, tokens), q.gather(2, tokens)
    passed = (torch.rand_like(p_token) * q_token < p_token).squeeze(2)
    accepted = passed.long().cumprod(1).sum(1)
    at = accepted.view(-1, 1, 1).expand(-1, 1, p.shape[2])
    own = p.gather(1, at).squeeze(1)
    rejected = q.gather(1, at.clamp(max=drafts - 1)).squeeze(1)
    residual = (own - rejected * (accepted < drafts).unsqueeze(1)).clamp(min=0)
    return accepted, (residual / torch.empty_like(residual).exponential_()).argmax(-1)


def flashinfer_chain() -> Prepare:
    sample = import_module("flashinfer.sampling").chain_speculative_sampling

    def prepare(given: Batch) -> Verify:
        q, tokens = _probabilities(given.draft), given.tokens.int()
        # In a graph it takes no generator.
        seed, offset = torch.randint(2**40, (2, 1), device=q.device)

        def verify() -> Tensor:
            accepted: Tensor
            _, _, accepted = sample(q, tokens, _probabilities(given.target), seed=seed, offset=offset)
            return accepted

        return verify

    return prepare


def vllm_rejection() -> Prepare:
    """Of the V2 model runner, with drafts that were drawn."""
    module = import_module("vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils")
    sample = module.rejection_sample

    def prepare(given: Batch) -> Verify:
        requests, steps, size = given.target.shape
        device = given.target.device
        row = torch.arange(requests, dtype=torch.int32, device=device)
        at = torch.arange(steps, device=device)
        known: dict[str, Any] = {
            "target_logits": given.target.view(requests * steps, size),
            "draft_logits": given.draft,
            "draft_sampled": _behind_one(given.tokens).flatten(),
            "cu_num_logits": torch.arange(requests + 1, dtype=torch.int32, device=device) * steps,
            "pos": at.repeat(requests),
            "idx_mapping": row,
            "expanded_idx_mapping": row.repeat_interleave(steps),
            "expanded_local_pos": at.int().repeat(requests),
            "temperature": torch.ones(requests, device=device),
            "seed": torch.randint(2**40, (requests,), device=device),
            "num_speculative_steps": steps - 1,
        }

        def verify() -> Tensor:
            sampled: Tensor
            _, sampled = sample(**known)
            return sampled

        return verify

    return prepare


def sglang_rejection() -> Prepare:
    """What `--speculative-use-rejection-sampling` calls, behind the softmax that it computes for it."""
    module = import_module("sglang.kernels.ops.speculative.reject_sampling")
    sample = module.chain_speculative_sampling_triton

    def prepare(given: Batch) -> Verify:
        requests, steps, _ = given.target.shape
        device = given.target.device
        q, temperature = _probabilities(given.draft), torch.ones(requests, 1, 1, device=device)
        candidates = _behind_one(given.tokens)
        index = torch.arange(requests * steps, device=device).view(requests, steps)

        def verify() -> Tensor:
            accepted = torch.empty(requests, dtype=torch.int32, device=device)
            sample(
                predicts=torch.zeros(requests * steps, dtype=torch.int32, device=device),
                accept_index=torch.full((requests, steps), -1, dtype=torch.int32, device=device),
                accept_token_num=accepted,
                candidates=candidates,
                retrive_index=index,
                retrive_next_token=index,  # not read in a chain, nor is the next
                retrive_next_sibling=index,
                uniform_samples=torch.rand(requests, steps, device=device),
                uniform_samples_for_final_sampling=torch.rand(requests, device=device),
                target_probs=torch.softmax(given.target.float() / temperature, -1),
                draft_probs=q,
                threshold_single=1.0,
                threshold_acc=1.0,
                deterministic=True,
            )
            return accepted

        return verify

    return prepare


def transformers_assisted() -> Prepare:
    """Its function verifies one request. Older ones also ask whether the request is over."""
    sample = import_module("transformers.generation.utils")._speculative_sampling
    over = {"is_done_candidate": False} if "is_done_candidate" in inspect.signature(sample).parameters else {}

    def prepare(given: Batch) -> Verify:
        requests, drafts = given.tokens.shape
        candidates = given.draft.float()

        def verify() -> Tensor:
            each = [slice(row, row + 1) for row in range(requests)]
            found = [
                sample(given.tokens[one], candidates[one], drafts, given.target[one].float(), **over)
                for one in each
            ]
            return torch.stack([accepted for _, accepted in found])

        return verify

    return prepare


PLAIN_TORCH = Peer("plain torch", "torch", plain_torch, "softmax of both")
PEERS = (
    PLAIN_TORCH,
    Peer(
        "FlashInfer chain_speculative_sampling",
        "flashinfer-python",
        flashinfer_chain,
        "softmax of the target, not of the draft",
    ),
    Peer("vLLM rejection_sample", "vllm", vllm_rejection, "from the logits of both", counts_last=True),
    Peer(
        "SGLang chain_speculative_sampling_triton",
        "sglang",
        sglang_rejection,
        "the target's cast, division by the temperature and softmax, not the draft's softmax",
    ),
    Peer(
        "transformers _speculative_sampling",
        "transformers",
        transformers_assisted,
        "the target's cast, softmax of both",
        captured=False,
        most_batch=8,
    ),
)


def _microseconds(calls: Sequence[Verify], captured: bool) -> tuple[float, str]:
    if not captured:
        return eager_microseconds(calls, repeats=10), "waits for the device itself, so without a graph"
    try:
        return graph_microseconds(calls, replays=10), "in a CUDA graph"
    except Exception as problem:  # noqa: BLE001 - tried again, where it may say more
        torch.cuda.synchronize()
        return eager_microseconds(calls, repeats=10), f"not captured: {_first_line(problem)}"


def _probabilities(logits: Tensor) -> Tensor:
    return torch.softmax(logits, -1, dtype=torch.float32)


def _behind_one(tokens: Tensor) -> Tensor:
    """Drafts [B, K] behind the token that they follow, which no peer reads."""
    return torch.cat((tokens.new_zeros(len(tokens), 1), tokens), 1)


def _first_line(problem: Exception) -> str:
    lines = str(problem).strip().splitlines()
    return f"{type(problem).__name__}: {lines[0][:120]}" if lines else type(problem).__name__
