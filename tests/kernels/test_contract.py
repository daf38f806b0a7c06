from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from polyhop.errors import InputError
from polyhop.kernels.contract import contract


def _graph(nodes: int, edges: int, groups: int, seed: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Lists, groups and edge weights, all random."""
    gen = torch.Generator().manual_seed(seed)
    degree = torch.bincount(torch.randint(nodes, (edges,), generator=gen), minlength=nodes)
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), degree.cumsum(0)])
    indices = torch.randint(nodes, (edges,), generator=gen).to(torch.int32)
    group = torch.randint(groups, (nodes,), generator=gen).to(torch.int32)
    return indptr, indices, group, torch.randint(1, 9, (edges,), generator=gen).float()


def _dense(lists: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    indptr, indices, weight = lists
    groups = indptr.numel() - 1
    found = torch.zeros(groups, groups)
    row = torch.repeat_interleave(torch.arange(groups), indptr.diff())
    assert torch.unique(row * groups + indices).numel() == indices.numel()  # each pair once
    found[row, indices.long()] = weight
    return found


@settings(max_examples=40, deadline=None)
@given(
    st.integers(1, 40),
    st.integers(0, 150),
    st.integers(1, 9),
    st.booleans(),
    st.booleans(),
    st.integers(0, 999),
)
def test_sums_edges_between_groups(
    nodes: int, edges: int, groups: int, is_weighted: bool, is_wide: bool, seed: int
) -> None:
    indptr, indices, group, weight = _graph(nodes, edges, groups, seed)
    given = weight if is_weighted else torch.ones(edges)
    row = torch.repeat_interleave(torch.arange(nodes), indptr.diff())
    expected = torch.zeros(groups, groups).index_put_(
        (group[row].long(), group[indices.long()].long()), given, accumulate=True
    )
    expected.fill_diagonal_(0)
    results = []
    with pytest.MonkeyPatch.context() as patch:
        for mode in ("native", "reference"):
            patch.setenv("POLYHOP_KERNELS", mode)
            results.append(
                contract(
                    indptr,
                    indices.long() if is_wide else indices,
                    group,
                    groups,
                    edge_weight=weight if is_weighted else None,
                )
            )
    assert torch.equal(_dense(results[0]), expected)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_wrong_arguments() -> None:
    indptr, indices, group, _ = _graph(10, 30, 3, 0)
    with pytest.raises(InputError, match=r"groups span 0 \.\. 2, expected 0 \.\. 1"):
        contract(indptr, indices, group, 2)
    with pytest.raises(InputError, match="must be int32"):
        contract(indptr, indices, group.long(), 3)
    with pytest.raises(InputError, match=r"group must have shape \[10\]"):
        contract(indptr, indices, group[:5], 3)
    with pytest.raises(InputError, match="edge_weight"):
        contract(indptr, indices, group, 3, edge_weight=torch.ones(2))
