"""Small graphs, blocks cut from them by hand, and the comparison with PyG that every layer and model goes through."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from polyhop.graph.block import Block

CLOSE = {"rtol": 1e-10, "atol": 1e-10}  # float64, sums of tens of terms: rounding stays below 1e-13


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Graphs of two dozen nodes are faster without waking threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Sample:
    """A graph as PyG has it, with float64 rows and weights."""

    edge_index: Tensor
    x: Tensor
    weight: Tensor

    @property
    def num_nodes(self) -> int:
        return self.x.shape[0]


def _make(kind: str, num_nodes: int = 24, width: int = 7) -> Sample:
    generator = torch.Generator().manual_seed(sum(map(ord, kind)))
    used = num_nodes - 5 if kind == "isolated" else num_nodes
    chance = torch.rand(used, used, generator=generator)
    chance.fill_diagonal_(1.0)
    if kind == "loops":
        chance.diagonal()[::3] = 0.0
    edge_index = (chance < 0.2).nonzero().t().contiguous()
    edge_index = edge_index[:, torch.randperm(edge_index.shape[1], generator=generator)]
    x = torch.randn(num_nodes, width, dtype=torch.float64, generator=generator)
    weight = torch.rand(edge_index.shape[1], dtype=torch.float64, generator=generator) + 0.1
    return Sample(edge_index, x, weight)


@pytest.fixture(params=["plain", "loops", "isolated"])
def sample(request: pytest.FixtureRequest) -> Sample:
    """Three graphs without repeated edges: no loops; loops on every third node; five nodes without any edge."""
    return _make(request.param)


@pytest.fixture
def loops() -> Sample:
    return _make("loops")


@pytest.fixture
def plain() -> Sample:
    return _make("plain")


@pytest.fixture
def tiny_weights() -> Callable[[nn.Module], nn.Module]:
    """Sets every parameter to seeded noise, so that zero-initialised biases and scales are tested too."""

    def fill(module: nn.Module) -> nn.Module:
        generator = torch.Generator().manual_seed(5)
        module.double()
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64, generator=generator) * 0.4)
        return module

    return fill


@pytest.fixture
def assert_same() -> Callable[..., None]:
    """Two sides give the same values, the same gradient of each input, the same gradient of each named parameter."""

    def check(
        ours: nn.Module,
        theirs: nn.Module,
        run_ours: Callable[..., Tensor],
        run_theirs: Callable[..., Tensor],
        inputs: Sequence[Tensor],
    ) -> None:
        grads = []
        outs = []
        for module, run in ((ours, run_ours), (theirs, run_theirs)):
            module.zero_grad()
            leaves = [t.clone().requires_grad_() for t in inputs]
            out = run(*leaves)
            probe = torch.randn(out.shape, dtype=out.dtype, generator=torch.Generator().manual_seed(3))
            (out * probe).sum().backward()
            outs.append(out.detach())
            named = {name: p.grad for name, p in module.named_parameters() if p.requires_grad}
            grads.append({**named, **{f"input {i}": t.grad for i, t in enumerate(leaves)}})
        torch.testing.assert_close(outs[0], outs[1], **CLOSE)
        assert grads[0].keys() == grads[1].keys()
        for name, mine in grads[0].items():
            other = grads[1][name]
            assert (mine is None) == (other is None), name
            if mine is not None:
                torch.testing.assert_close(mine, other, **CLOSE, msg=lambda m, name=name: f"{name}: {m}")

    return check


@pytest.fixture
def same_as_pyg(
    assert_same: Callable[..., None], tiny_weights: Callable[[nn.Module], nn.Module]
) -> Callable[..., None]:
    """Loads state dicts both ways, strictly, then compares values and gradients."""

    def check(
        ours: nn.Module,
        theirs: nn.Module,
        run_ours: Callable[..., Tensor],
        run_theirs: Callable[..., Tensor],
        inputs: Sequence[Tensor],
    ) -> None:
        tiny_weights(ours)
        theirs.double()
        assert list(ours.state_dict()) == list(theirs.state_dict())
        theirs.load_state_dict(ours.state_dict(), strict=True)
        ours.load_state_dict(theirs.state_dict(), strict=True)
        assert_same(ours, theirs, run_ours, run_theirs, inputs)

    return check


def cut(
    sample: Sample,
    destinations: Tensor,
    *,
    keep: Tensor | None = None,
    weighted: bool = False,
    first: int = 0,
    extra: int = 3,
) -> Block:
    """A block for the given nodes with their in-edges (or those marked in ``keep``), relabelled by hand.

    ``first`` other sources stand before the destinations (so dst_start = first) and ``extra`` that no edge uses come last.
    """
    src, dst = sample.edge_index
    chosen = torch.isin(dst, destinations) if keep is None else keep & torch.isin(dst, destinations)
    position = {int(v): i for i, v in enumerate(destinations)}
    edges = sorted(chosen.nonzero()[:, 0].tolist(), key=lambda e: position[int(dst[e])])
    wanted = set(destinations.tolist())
    others = [v for v in dict.fromkeys(int(src[e]) for e in edges) if v not in wanted]
    unused = [v for v in range(sample.num_nodes) if v not in wanted and v not in others]
    order = others[:first] + destinations.tolist() + others[first:] + unused[:extra]
    row = {v: i for i, v in enumerate(order)}
    counts = torch.bincount(
        torch.tensor([position[int(dst[e])] for e in edges], dtype=torch.int64), minlength=len(destinations)
    )
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    ids = torch.tensor(order)
    n = sample.num_nodes
    weight = sample.weight if weighted else torch.ones(src.numel(), dtype=torch.float64)
    is_loop = src == dst
    loop_weight = torch.zeros(n, dtype=torch.float64).index_put((dst[is_loop],), weight[is_loop])
    return Block(
        indptr,
        torch.tensor([row[int(src[e])] for e in edges], dtype=torch.int32),
        len(order),
        dst_start=min(first, len(others)),
        src_ids=ids,
        edge_weight=weight[edges] if weighted else None,
        in_degree=torch.bincount(dst, minlength=n)[ids].int(),
        in_weight=torch.zeros(n, dtype=torch.float64).index_add(0, dst, weight)[ids] if weighted else None,
        loop_weight=loop_weight[ids] if bool(is_loop.any()) else None,
        is_sampled=keep is not None,
    )


@pytest.fixture
def some_edges() -> Callable[[Sample], Tensor]:
    """Marks about 60 % of the edges, at least one of each node that has any: what a sampler might draw."""

    def mark(sample: Sample) -> Tensor:
        dst = sample.edge_index[1]
        keep = torch.rand(dst.numel(), generator=torch.Generator().manual_seed(1)) < 0.6
        for node in dst.unique():
            keep[(dst == node).nonzero()[0]] = True
        assert not keep.all()
        return keep

    return mark


@pytest.fixture
def cut_block() -> Callable[..., Block]:
    return cut


@pytest.fixture
def all_hops() -> Callable[[Sample, Tensor, int], list[Block]]:
    """Blocks of several layers with every in-edge, for the given seeds: what fan-out -1 gives."""

    def make(sample: Sample, seeds: Tensor, num_layers: int) -> list[Block]:
        blocks: list[Block] = []
        destinations = seeds
        for _ in range(num_layers):
            block = cut(sample, destinations, extra=0)
            blocks.insert(0, block)
            assert block.src_ids is not None
            destinations = block.src_ids
        return blocks

    return make
