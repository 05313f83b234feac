"""One speculative step of a batch with trees: as `decode.step.Step`, verified on the host."""

from __future__ import annotations

import torch
from torch import Tensor

from driftguard_engine.decode.slots import SlotTable
from driftguard_engine.drafters.base import Drafter, TreeOutcome
from driftguard_engine.kernels import steps
from driftguard_engine.kernels.cuda.launcher import Launcher
from driftguard_engine.models.base import Features, TokenModel, by_row
from driftguard_engine.speculation import TreeVerification


def run_trees(
    target: TokenModel,
    table: SlotTable,
    drafter: Drafter,
    queued: Tensor,
    depth: int,
    launcher: Launcher | None,
) -> Tensor:
    """As `Step.run`. depth: the most draft tokens of any row. Of a row that may have none only the newest
    token is read."""
    rows = steps.begin(launcher, table.state, queued, depth, drafter.context)
    positions = rows.lengths.cpu().numpy()
    tree = TreeVerification(
        table.sampling(rows.slots), positions, rows.drafted, target.max_length - positions, target.vocabulary
    )
    if tree.depth:
        drafter.draft_tree(rows, tree)
    inputs = tree.inputs(rows.fed[:, 0])
    counts, device = [len(each) for each in inputs.parents], target.embedding.device
    features = Features(drafter.features) if drafter.features else None
    logits = target.decode(
        inputs.token_ids.to(device), rows.starts, rows.slots, counts, features, inputs.parents
    )
    verified = tree.verify(logits)
    slots, starts = rows.slots.tolist(), rows.starts.tolist()
    paths = [
        places[: 1 + max(accepted, 0)]
        for places, accepted in zip(verified.places.tolist(), verified.accepted.tolist(), strict=True)
    ]
    target.keep(slots, starts, paths)
    read = None if features is None else by_row(features.of(drafter.features), counts)
    each_row, probes = torch.arange(len(slots))[:, None], torch.from_numpy(tree.places(tree.probes))
    kept = torch.from_numpy(verified.places)
    outcome = TreeOutcome(
        accepted=verified.accepted,
        path=torch.from_numpy(verified.path),
        features=None if read is None else read[each_row, kept],
        probe_logits=logits[each_row, probes],
        probe_features=None if read is None else read[each_row, probes],
    )
    drafter.observe_tree(rows, tree, outcome)
    back = (verified.tokens, verified.accepted.to(rows.drafted.dtype), verified.status)
    there = rows.lengths.device
    tokens, accepted, status = (each.to(there) for each in back)
    return steps.append(launcher, rows, _padded(tokens, depth + 1), accepted, status)


def _padded(tokens: Tensor, width: int) -> Tensor:
    """[B, T] with -1 behind, [B, width]."""
    return torch.nn.functional.pad(tokens, (0, width - tokens.shape[1]), value=-1)
