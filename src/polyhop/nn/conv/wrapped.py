"""Any PyG convolution as a layer with only ``forward``, so that a model need not wait for its layer to be written here.

On the full graph the convolution runs as PyG runs it. On any other block a convolution that takes (source, destination)
pairs gets them; others run on all source rows and are sliced to the destinations. Convolutions that read degrees off the
edges they are given, or that walk several hops at once, would compute something else on a block than on the graph: they are
refused there. PyG is not imported: what the convolution is, is read off the object.
"""

from __future__ import annotations

import inspect
import typing
import warnings
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from polyhop.errors import InputError, UnsupportedError
from polyhop.graph.aggregated import AggregatedRows
from polyhop.graph.block import Block
from polyhop.graph.features import SparseRows
from polyhop.graph.halo_block import HaloBlock, Sizes
from polyhop.graph.sliced import MappedRows
from polyhop.kernels.keys import Key
from polyhop.nn.halo import complete_rows
from polyhop.nn.layer import Layer, as_block
from polyhop.nn.rows import Messages, Rows, gathered

__all__ = ["Wrapped", "wrap"]

_DEGREE_READERS = frozenset({"gcn_norm", "get_laplacian", "degree", "pyg_degree"})


def wrap(conv: nn.Module, *, bipartite: bool | None = None) -> Wrapped:
    """A PyG ``MessagePassing`` layer as a Layer. ``bipartite``: whether it takes (x_src, x_dst); None = by its signature."""
    return Wrapped(conv, bipartite)


class Wrapped(Layer):
    """What ``wrap`` returns: the PyG layer under the name ``conv``. Its pieces cannot be run apart."""

    has_pieces = False

    def __init__(self, conv: nn.Module, bipartite: bool | None = None) -> None:
        super().__init__()
        parameters = _parameters(conv)
        self.conv = conv
        self.bipartite = _takes_pairs(conv) if bipartite is None else bipartite
        self.takes_weight = "edge_weight" in parameters
        self.in_channels = _width(getattr(conv, "in_channels", -1))
        self.out_channels = _out_width(conv)
        if _drops(conv):
            warnings.warn(
                f"{type(conv).__name__} drops units by torch's own generator: runs with it are repeatable by "
                "torch.manual_seed only, and differ between numbers of workers",
                UserWarning,
                stacklevel=3,
            )

    def reset_parameters(self) -> None:
        """The convolution's own initialisation."""
        reset = getattr(self.conv, "reset_parameters", None)
        if callable(reset):
            reset()

    def forward(
        self,
        x: Rows | AggregatedRows | MappedRows,
        edge_index: Block | Tensor,
        edge_weight: Tensor | None = None,
        *,
        carried: Tensor | None = None,
        key: Key | None = None,
        site: int = 0,
    ) -> Tensor:
        """As ``Layer.forward``. Sparse rows are made dense: PyG's layers take no others."""
        if isinstance(x, (AggregatedRows, MappedRows)):
            self._no_pieces("update")
        block = as_block(edge_index, x.shape[0], edge_weight)
        self._check(x, block, carried)
        x, block = gathered(x, block)
        if isinstance(block, HaloBlock):
            assert isinstance(x, Tensor), "rows between layers are dense"
            x, block = complete_rows(self, x, block), block.complete
        h = x.dense() if isinstance(x, SparseRows) else x
        weight = (
            {"edge_weight": block.edge_weight} if self.takes_weight and block.edge_weight is not None else {}
        )
        if block.num_dst == block.num_src and not block.is_sampled:
            out: Tensor = self.conv(h, _edges(block), **weight)
            return out
        _refuse_on_part(self.conv)
        if self.bipartite:
            pair, edges = _as_pair(h, block)
            out = self.conv(pair, edges, **weight)
            return out
        src, dst = _edges(block)
        out = self.conv(h, torch.stack([src, dst + block.dst_start]), **weight)
        return out[block.dst_start : block.dst_start + block.num_dst]

    def map_first(self, block: Block | Sizes, input_grad: bool) -> bool:
        self._no_pieces("map_first")

    def transform(self, h: Rows, map_first: bool) -> Tensor:
        self._no_pieces("transform")

    def edge(self, block: Block, m: Messages) -> Any:
        self._no_pieces("edge")

    def aggregate(self, block: Block, m: Messages, e: Any, key: int | None = None) -> Tensor:
        self._no_pieces("aggregate")

    def update(self, z: Tensor, h_dst: Rows | None, carried: Tensor | None, map_first: bool) -> Tensor:
        self._no_pieces("update")

    def _no_pieces(self, piece: str) -> NoReturn:
        raise UnsupportedError(
            f"{type(self.conv).__name__} is a wrapped PyG layer and has no separate {piece}(); strategies that run a layer "
            "in pieces need one of polyhop.nn's own layers"
        )

    def extra_repr(self) -> str:
        return f"bipartite={self.bipartite}"


def _parameters(conv: nn.Module) -> list[str]:
    """Names of the arguments of the layer's forward; an error if it cannot be called as forward(x, edge_index)."""
    name = type(conv).__name__
    if not hasattr(conv, "propagate"):
        raise InputError(f"wrap: expected a PyG MessagePassing layer, got {name}")
    given = list(inspect.signature(conv.forward).parameters.values())
    names = [p.name for p in given]
    needed = [p.name for p in given if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    if names[:2] != ["x", "edge_index"] or needed[2:]:
        raise UnsupportedError(
            f"wrap: {name}.forward takes ({', '.join(names)}); only forward(x, edge_index, ...) can be wrapped"
        )
    return names


def _takes_pairs(conv: nn.Module) -> bool:
    """Whether x may be a pair of tensors, by the annotation of the layer's forward."""
    annotation = inspect.signature(conv.forward).parameters["x"].annotation
    if isinstance(annotation, str):
        return "Pair" in annotation or "uple" in annotation
    return any(typing.get_origin(arm) is tuple for arm in typing.get_args(annotation))


def _width(given: Any) -> int:
    return int(given[0] if isinstance(given, (tuple, list)) else given)


def _out_width(conv: nn.Module) -> int:
    heads = getattr(conv, "heads", 1) if getattr(conv, "concat", False) else 1
    return _width(getattr(conv, "out_channels", -1)) * int(heads)


def _drops(conv: nn.Module) -> bool:
    chances = [getattr(conv, "dropout", 0.0), *(m.p for m in conv.modules() if isinstance(m, nn.Dropout))]
    return any(isinstance(p, float) and p > 0 for p in chances)


def _refuse_on_part(conv: nn.Module) -> None:
    """UnsupportedError if the layer means something else on a block than on the whole graph."""
    name = type(conv).__name__
    if _reads_degrees(conv):
        raise UnsupportedError(
            f"{name} normalises by the degrees of the edges it is given; on a sampled or partial block these are not the "
            "graph's degrees. Use polyhop.nn's own layer (GCNConv, GCN2Conv), or train on the full graph"
        )
    if int(getattr(conv, "K", 1) or 1) > 1:
        raise UnsupportedError(
            f"{name} walks K={conv.K} hops in one layer; a block holds one hop. Use K=1 or the full graph"
        )


def _reads_degrees(conv: nn.Module) -> bool:
    if getattr(conv, "normalize", True) is False:
        return False
    if "DegreeScaler" in type(getattr(conv, "aggr_module", None)).__name__:
        return True
    kinds = [
        kind for kind in type(conv).__mro__ if kind.__name__ not in ("MessagePassing", "Module", "object")
    ]
    functions = [f for kind in kinds for f in vars(kind).values() if inspect.isfunction(f)]
    return any(_DEGREE_READERS & set(f.__code__.co_names) for f in functions)


def _edges(block: Block) -> Tensor:
    """int64 [2, E]: source row and destination 0 .. D-1 of each edge; kept with the block."""
    if "edges" not in block._cache:
        dst = torch.repeat_interleave(torch.arange(block.num_dst, device=block.device), block.drawn)
        block._cache["edges"] = torch.stack([block.indices.long(), dst])
    kept: Tensor = block._cache["edges"]
    return kept


def _as_pair(h: Tensor, block: Block) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """((source rows, destination rows), edges), with the destinations as the first sources: PyG adds loops i -> i."""
    edges, start, stop = _edges(block), block.dst_start, block.dst_start + block.num_dst
    if start == 0:
        return (h, h[:stop]), edges
    order = torch.cat(
        [torch.arange(start, stop), torch.arange(start), torch.arange(stop, block.num_src)],
    ).to(block.device)
    place = torch.empty_like(order)
    place[order] = torch.arange(block.num_src, device=block.device)
    moved = h[order]
    return (moved, moved[: block.num_dst]), torch.stack([place[edges[0]], edges[1]])
