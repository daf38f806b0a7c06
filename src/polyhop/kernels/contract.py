"""A graph's groups of nodes as the nodes of a smaller graph: edges between two groups become one, their weights summed.

Legend: N nodes, E edges, G groups, M edges between groups.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polyhop.kernels import checks, native

__all__ = ["contract"]


def contract(
    indptr: Tensor, indices: Tensor, group: Tensor, num_groups: int, *, edge_weight: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(indptr int64 [G + 1], indices int32 [M], weight float32 [M]) of lists indptr int64 [N + 1], indices [E].

    ``group`` int32 [N] names every node's group; ``edge_weight`` float32 [E] > 0 (None = 1). Edges inside a group are left
    out. A group's neighbours come by first appearance over its nodes, ascending.
    """
    nodes = indptr.numel() - 1
    checks.csr("contract", indptr, indices, nodes)
    checks.vector("contract", "group", group, nodes)
    checks.vector("contract", "edge_weight", edge_weight, indices.numel())
    checks.require(group.dtype == torch.int32, f"contract: group must be int32 [N], got {group.dtype}")
    low, high = (0, -1) if nodes == 0 else (int(group.min()), int(group.max()))
    checks.require(
        low >= 0 and high < num_groups,
        f"contract: groups span {low} .. {high}, expected 0 .. {num_groups - 1}",
    )
    if not native.serves(indptr, indices, group, edge_weight, op="ph_contract"):
        return _reference(indptr, indices, group, num_groups, edge_weight)
    bounds = torch.zeros(num_groups + 1, dtype=torch.int64)
    torch.cumsum(torch.bincount(group, minlength=num_groups), 0, out=bounds[1:])
    members = torch.sort(group, stable=True).indices
    found = torch.empty(num_groups + 1, dtype=torch.int64)
    to = torch.empty(indices.numel(), dtype=torch.int32)
    weight = torch.empty(indices.numel(), dtype=torch.float32)
    count = native.call(
        "ph_contract", indptr.contiguous(), indices.contiguous(), native.id_code(indices),
        None if edge_weight is None else edge_weight.float().contiguous(), group.contiguous(), num_groups, bounds,
        members, found, to, weight,
    )  # fmt: skip
    return found, to[:count].clone(), weight[:count].clone()


def _reference(
    indptr: Tensor, indices: Tensor, group: Tensor, num_groups: int, edge_weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    lists: list[dict[int, float]] = [{} for _ in range(num_groups)]
    starts, everyone, groups = indptr.tolist(), indices.tolist(), group.tolist()
    pulls = [1.0] * len(everyone) if edge_weight is None else edge_weight.tolist()
    for v, mine in enumerate(groups):
        for e in range(starts[v], starts[v + 1]):
            other = groups[everyone[e]]
            if other != mine:
                lists[mine][other] = lists[mine].get(other, 0.0) + pulls[e]
    found = torch.zeros(num_groups + 1, dtype=torch.int64)
    torch.cumsum(torch.tensor([len(one) for one in lists], dtype=torch.int64), 0, out=found[1:])
    to = torch.tensor([other for one in lists for other in one], dtype=torch.int32)
    return found, to, torch.tensor([pull for one in lists for pull in one.values()], dtype=torch.float32)
