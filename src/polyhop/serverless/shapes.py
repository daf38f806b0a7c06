"""What one epoch of full-graph training is made of: graph operations on servers and dense pieces for functions.

    X -> D_0 -> A_1 -> D_1 -> ... -> A_L -> D_L and back again to D_L-1 ... ; D_L goes forward and backward in one task

A layer maps first (its product is in D_k-1, then A_k gathers what came out) or aggregates first (product in D_k). Where the
first layer aggregates first there is no D_0, nothing goes back through A_1, and A_1 gives the same in every epoch. A
backward piece on a function gets its inputs again and computes what it needs anew, on a server it has them; the first piece
gives no gradient of its inputs. Dropout, norms and activations count nothing. Values have four bytes.

Legend: N nodes, E edges, L layers, F and C input and output columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from polyhop.errors import ConfigError, InputError, unknown

__all__ = ["MODELS", "PAPER", "Shape", "Step", "random_ghosts", "steps"]

VALUE_BYTES = 4
LABEL_BYTES = 8
MODELS = ("gat", "gcn", "sage")


@dataclass(frozen=True)
class Shape:
    """Sizes of a graph and of the model on it."""

    name: str
    num_nodes: int
    num_edges: int
    widths: tuple[int, ...]  # L + 1 columns: inputs, after each layer
    model: str = "gcn"
    maps_first: tuple[bool, ...] = ()  # of each layer; () = as published: only gat does
    heads: int = 1
    caches_first: bool = False  # A_1 of a first layer that aggregates first is kept from before
    recomputes: bool = (
        True  # backward pieces compute activations anew; otherwise servers keep them and send them again
    )

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise ConfigError(f"{unknown('model', self.model, MODELS)} Others have no plan on functions yet.")
        if min(self.num_nodes, self.num_edges, self.num_layers, *self.widths) < 1:
            raise InputError(
                f"{self.name}: {self.num_nodes:,} nodes, {self.num_edges:,} edges, columns {list(self.widths)}: a plan "
                "needs one of each at least, and one layer"
            )
        if self.maps_first and len(self.maps_first) != self.num_layers:
            raise InputError(f"{len(self.maps_first)} orders for {self.num_layers} layers: expected one each")

    @property
    def num_layers(self) -> int:
        return len(self.widths) - 1

    @property
    def num_gathered(self) -> int:
        """Edges along which rows are read; GCN adds a loop at every node."""
        return self.num_edges + (self.num_nodes if self.model == "gcn" else 0)

    def does_map_first(self, layer: int) -> bool:
        return self.model == "gat" or (bool(self.maps_first) and self.maps_first[layer - 1])


@dataclass(frozen=True)
class Step:
    """One task of every interval: a graph operation or a dense piece. Of one row, except what names a task or an edge."""

    name: str
    is_tensor: bool
    edge_columns: int = 0  # of one edge
    flops: int = 0
    again_flops: int = 0  # of those, what is computed anew because functions keep nothing
    in_bytes: int = 0
    out_bytes: int = 0
    task_in_bytes: int = 0  # whatever the rows: weights
    task_out_bytes: int = 0  # their gradients, with every task
    scattered_bytes: int = 0  # of what came out: for each other server that reads the row


@dataclass(frozen=True)
class _Piece:
    """A dense piece; products are multiply-adds of one row."""

    updates: int  # products before the activation
    transforms: int  # and after it
    num_weights: int
    columns_in: int
    columns_out: int
    gathered_out: int  # of those, what the next graph operation reads of other nodes
    kept_columns: int  # of activations, where servers keep them
    kept_out: int  # of those, what does not go out anyway
    grad_products: int  # for gradients of what comes in
    grad_columns: int  # of what comes in, columns whose gradients go out

    @property
    def weight_bytes(self) -> int:
        return VALUE_BYTES * self.num_weights


@lru_cache(maxsize=64)
def steps(shape: Shape) -> tuple[Step, ...]:
    """The tasks of an interval in an epoch, in order."""
    pieces = [_piece(shape, at) for at in range(shape.num_layers + 1)]
    has_first = shape.does_map_first(1)
    made = [_forward("D0", pieces[0])] if has_first else []
    for layer in range(1, shape.num_layers + 1):
        if not (layer == 1 and not has_first and shape.caches_first):
            made.append(Step(f"A{layer}", False, edge_columns=_gathered(shape, layer)))
        if layer < shape.num_layers:
            made.append(_forward(f"D{layer}", pieces[layer]))
    last = 0 if has_first else 1
    sent = _gathered(shape, shape.num_layers) if shape.num_layers > last else 0
    made.append(_turn(f"D{shape.num_layers} and back", pieces[-1], sent))
    for layer in range(shape.num_layers, last, -1):
        factor = 2 if shape.model == "gat" else 1  # of attention: gradients of both values and scores
        made.append(Step(f"back A{layer}", False, edge_columns=factor * _gathered(shape, layer)))
        sent = _gathered(shape, layer - 1) if layer - 1 > last else 0
        made.append(_backward(f"back D{layer - 1}", pieces[layer - 1], sent))
    return tuple(made)


def _gathered(shape: Shape, layer: int) -> int:
    """Columns of a row that a graph operation reads."""
    before, after = shape.widths[layer - 1], shape.widths[layer]
    if shape.model == "gat":
        concatenated = shape.heads * after if layer == shape.num_layers else after
        return concatenated + shape.heads
    return after if shape.does_map_first(layer) else before


def _piece(shape: Shape, at: int) -> _Piece:
    """D_at: what follows graph operation ``at`` and comes before the next."""
    widths, first = shape.widths, 0 if shape.does_map_first(1) else 1
    updates = transforms = grad_products = grad_columns = gathered = columns_out = kept = kept_out = 0
    columns_in = widths[0]
    if at > 0:
        columns_in = _gathered(shape, at)
        grad_columns = columns_in if at > first else 0
        product = widths[at - 1] * widths[at]
        if not shape.does_map_first(at):
            updates += product
            grad_products += product if at > first else 0
        if shape.model == "sage":  # a node's own row has a product of its own; inputs need no gradients
            updates += product
            columns_in += widths[at - 1]
            grad_products += product if at > 1 else 0
            grad_columns += widths[at - 1] if at > 1 else 0
    if at < shape.num_layers:
        gathered = columns_out = _gathered(shape, at + 1)
        if shape.does_map_first(at + 1):
            transforms = widths[at] * gathered
            grad_products += transforms if at > 0 else 0
            columns_out += widths[at] if shape.model == "sage" and at > 0 else 0
        kept = 0 if shape.recomputes or not updates else widths[at]
        kept_out = 0 if columns_out >= gathered + widths[at] or not shape.does_map_first(at + 1) else kept
    return _Piece(
        updates, transforms, updates + transforms, columns_in, columns_out, gathered, kept, kept_out, grad_products,
        grad_columns,
    )  # fmt: skip


def _forward(name: str, piece: _Piece) -> Step:
    return Step(
        name, True, flops=2 * (piece.updates + piece.transforms), in_bytes=VALUE_BYTES * piece.columns_in,
        out_bytes=VALUE_BYTES * (piece.columns_out + piece.kept_out), task_in_bytes=piece.weight_bytes,
        scattered_bytes=VALUE_BYTES * piece.gathered_out,
    )  # fmt: skip


def _turn(name: str, piece: _Piece, sent: int) -> Step:
    """The last piece: forward, loss and backward in one task."""
    return Step(
        name, True, flops=2 * (2 * piece.updates + piece.grad_products),
        in_bytes=VALUE_BYTES * piece.columns_in + LABEL_BYTES, out_bytes=VALUE_BYTES * piece.grad_columns,
        task_in_bytes=piece.weight_bytes, task_out_bytes=piece.weight_bytes, scattered_bytes=VALUE_BYTES * sent,
    )  # fmt: skip


def _backward(name: str, piece: _Piece, sent: int) -> Step:
    """Gradients of weights and inputs; what the activation gave is computed anew or received."""
    again = 0 if piece.kept_columns else 2 * piece.updates
    return Step(
        name, True, flops=2 * (piece.updates + piece.transforms + piece.grad_products) + again, again_flops=again,
        in_bytes=VALUE_BYTES * (piece.columns_in + piece.columns_out + piece.kept_columns),
        out_bytes=VALUE_BYTES * piece.grad_columns, task_in_bytes=piece.weight_bytes,
        task_out_bytes=piece.weight_bytes, scattered_bytes=VALUE_BYTES * sent,
    )  # fmt: skip


def random_ghosts(num_nodes: int, num_edges: int, num_servers: int) -> float:
    """Other servers that read a row, on average, where nodes lie at random: a good cut has fewer.

    As if all nodes had the same degree, which is the most there can be.
    """
    unread: float = (1 - 1 / num_servers) ** (num_edges / num_nodes)
    return (num_servers - 1) * (1 - unread)


def _paper(name: str, num_nodes: float, num_edges: float, widths: Sequence[int]) -> Shape:
    return Shape(name, round(num_nodes), round(num_edges), tuple(widths))


PAPER = {
    shape.name: shape
    for shape in (
        _paper("reddit-small", 232.9e3, 114.8e6, (602, 128, 41)),
        _paper("reddit-large", 1.1e6, 1.3e9, (301, 128, 50)),
        _paper("amazon", 9.2e6, 313.9e6, (300, 64, 25)),
        _paper("friendster", 65.6e6, 3.6e9, (32, 48, 50)),
    )
}
"""The four graphs of Dorylus's table 1 with the GCN of its settings."""
