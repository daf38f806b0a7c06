"""Input rows of any nodes, fetched from their owners: one request and one reply per peer, each distinct row once.

With the rows come the facts that layers and random keys need of a node wherever it is computed: the user's id, the
in-degree in the whole graph and, where the graph has them, the sum of its in-edge weights and the weight of its loop. A
static cache may hold the rows that are asked for most. Where rows are rounded on the wire (bfloat16, int8), own rows are
rounded alike, so that results do not depend on who owns what.

Legend: S nodes asked for, n nodes of one request, F features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from polyhop.comm import Collective
from polyhop.errors import ConfigError
from polyhop.exchange.codec import RowCodec
from polyhop.graph import AnyPart, FeatureStore, MatrixFeatures, SparseFeatures, SparseRows
from polyhop.kernels import gather_rows
from polyhop.kernels.owners import by_owner
from polyhop.sample.wire import Wire

__all__ = ["FactFormat", "Fetched", "NodeFacts", "Piece", "RowFetch", "RowFormat"]

Rows = Tensor | SparseRows
_WIDE_NODES = 1 << 31


@dataclass(frozen=True, eq=False)
class NodeFacts:
    """What is known of some nodes besides their features."""

    user_ids: Tensor  # int64 [S]
    in_degree: Tensor  # int32 [S]
    in_weight: Tensor | None = None  # float64 [S]
    loop_weight: Tensor | None = None  # float32 [S]

    def at(self, rows: Tensor) -> NodeFacts:
        in_weight, loops = self.in_weight, self.loop_weight
        return NodeFacts(
            self.user_ids.index_select(0, rows),
            self.in_degree.index_select(0, rows),
            None if in_weight is None else in_weight.index_select(0, rows),
            None if loops is None else loops.index_select(0, rows),
        )

    def between(self, start: int, stop: int) -> NodeFacts:
        """Of nodes start .. stop - 1, not copied."""
        in_weight, loops = self.in_weight, self.loop_weight
        return NodeFacts(
            self.user_ids[start:stop],
            self.in_degree[start:stop],
            None if in_weight is None else in_weight[start:stop],
            None if loops is None else loops[start:stop],
        )

    @staticmethod
    def joined(pieces: list[NodeFacts]) -> NodeFacts:
        """One after the other."""

        def join(name: str) -> Tensor | None:
            values = [getattr(piece, name) for piece in pieces]
            return None if values[0] is None else torch.cat(values)

        ids, degree = join("user_ids"), join("in_degree")
        assert ids is not None
        assert degree is not None
        return NodeFacts(ids, degree, join("in_weight"), join("loop_weight"))


@dataclass(frozen=True)
class FactFormat:
    """How facts alone lie in a message: one array after the other."""

    id_dtype: torch.dtype
    is_weighted: bool
    has_loops: bool

    @property
    def num_bytes(self) -> int:
        """Of one node."""
        return self.id_dtype.itemsize + 4 + (8 if self.is_weighted else 0) + (4 if self.has_loops else 0)

    def encode(self, facts: NodeFacts) -> Tensor:
        """uint8."""
        pieces = [facts.user_ids.to(self.id_dtype), facts.in_degree]
        pieces += [fact for fact in (facts.in_weight, facts.loop_weight) if fact is not None]
        return torch.cat([piece.contiguous().view(torch.uint8).reshape(-1) for piece in pieces])

    def decode(self, data: Tensor, num_nodes: int) -> NodeFacts:
        """What ``encode`` was given."""
        return self.read(_Reader(data), num_nodes)

    def read(self, reader: _Reader, num_nodes: int) -> NodeFacts:
        """The same off the front of what is left of a message."""
        return NodeFacts(
            reader.take(num_nodes, self.id_dtype).long(),
            reader.take(num_nodes, torch.int32),
            reader.take(num_nodes, torch.float64) if self.is_weighted else None,
            reader.take(num_nodes, torch.float32) if self.has_loops else None,
        )


@dataclass(frozen=True)
class RowFormat:
    """How rows and facts lie in a reply: rows first, then each fact, one array after the other."""

    codec: RowCodec | None  # None: sparse rows, as lengths, columns and values
    facts: FactFormat

    @classmethod
    def of(cls, part: AnyPart, num_nodes: int, dtype: str, *, is_plain: bool = False) -> RowFormat:
        """The format of a graph's parts."""
        x = part.x
        if isinstance(x, MatrixFeatures):
            codec: RowCodec | None = RowCodec.of(dtype, x.num_features, x.dtype)
        elif isinstance(x, SparseFeatures):
            codec = None
            if dtype not in ("auto", "float32"):
                raise ConfigError(
                    f"feature_dtype={dtype!r}: this graph's features are sparse, and sparse rows are sent as they are; "
                    "leave feature_dtype out"
                )
        else:
            raise ConfigError(
                "the graph has no features: give x [N, F] (for instance degrees or a one-hot id)"
            )
        ids = torch.int64 if is_plain or num_nodes >= _WIDE_NODES else torch.int32
        return cls(codec, FactFormat(ids, part.in_weight is not None, part.loop_weight is not None))

    @property
    def fact_bytes(self) -> int:
        """Of one node's facts."""
        return self.facts.num_bytes

    @property
    def row_bytes(self) -> int | None:
        """Of one node's rows and facts; None where rows differ in length."""
        return None if self.codec is None else self.codec.row_bytes + self.fact_bytes

    def encode(self, rows: Tensor, x: FeatureStore, facts: NodeFacts) -> Tensor:
        """uint8: the features of local rows (int64 [n]) of a store, and their facts."""
        pieces = [*self._encode_rows(rows, x), self.facts.encode(facts)]
        return torch.cat([piece.contiguous().view(torch.uint8).reshape(-1) for piece in pieces])

    def _encode_rows(self, rows: Tensor, x: FeatureStore) -> list[Tensor]:
        if isinstance(x, MatrixFeatures):
            assert self.codec is not None, "a dense store has a codec"
            is_stored = self.codec.dtype == x.dtype and not self.codec.is_quantised
            taken = x.stored(rows) if is_stored else x.gather(rows)
            assert isinstance(taken, Tensor)
            return [self.codec.encode(taken)]
        sparse = x.gather(rows)
        assert isinstance(sparse, SparseRows)
        return [
            sparse.indptr.diff().to(torch.int32),
            sparse.indices.to(torch.int32),
            sparse.values.to(torch.float32),
        ]

    def decode(self, data: Tensor, num_rows: int, x: FeatureStore) -> tuple[Rows, NodeFacts]:
        """What ``encode`` was given, by a store of the same kind."""
        reader = _Reader(data)
        decoded: Rows
        if self.codec is None:
            lengths = reader.take(num_rows, torch.int32).long()
            indptr = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
            total = int(indptr[-1])
            columns, values = reader.take(total, torch.int32), reader.take(total, torch.float32)
            decoded = SparseRows(indptr, columns, values, x.num_features)
        else:
            decoded = self.codec.decode(reader.raw(num_rows * self.codec.row_bytes), num_rows)
            decoded = self._as_floats(decoded, x)
        return decoded, self.facts.read(reader, num_rows)

    def opened(self, data: Tensor, num_rows: int) -> tuple[Tensor, NodeFacts]:
        """(dense rows as they were sent, uint8; facts): what ``decode`` makes rows of."""
        assert self.codec is not None, "sparse rows differ in length"
        reader = _Reader(data)
        return reader.raw(num_rows * self.codec.row_bytes), self.facts.read(reader, num_rows)

    def _as_floats(self, rows: Tensor, x: FeatureStore) -> Tensor:
        """Stored values as the floats that ``x.gather`` would give."""
        assert self.codec is not None
        if self.codec.is_quantised or rows.dtype in (torch.float32, torch.float64):
            return rows
        floats = rows.to(torch.float32)
        scale = x.scale if isinstance(x, MatrixFeatures) else None
        return floats if scale is None or rows.is_floating_point() else floats * scale

    def own(self, rows: Tensor, x: FeatureStore) -> Rows:
        """Features of local rows as they would arrive elsewhere."""
        taken = x.gather(rows)
        if isinstance(taken, SparseRows) or self.codec is None or not self.codec.is_lossy:
            return taken
        is_stored = isinstance(x, MatrixFeatures) and x.dtype == self.codec.dtype
        return taken if is_stored else self._as_floats(self.codec.rounded(taken), x)


class _Reader:
    """Takes arrays off the front of a buffer."""

    def __init__(self, data: Tensor) -> None:
        self._data, self._at = data, 0

    def raw(self, num_bytes: int) -> Tensor:
        piece = self._data[self._at : self._at + num_bytes]
        self._at += num_bytes
        return piece

    def take(self, count: int, dtype: torch.dtype) -> Tensor:
        raw = self.raw(count * dtype.itemsize)
        aligned = raw if raw.storage_offset() % dtype.itemsize == 0 else raw.clone()
        return aligned.view(dtype)


@dataclass(frozen=True, eq=False)
class Fetched:
    """Rows and facts of the nodes asked for, in their order."""

    x: Rows
    facts: NodeFacts


@dataclass(frozen=True, eq=False)
class Piece:
    """Some of the rows asked for, as they came."""

    at: Tensor  # int64 [n]: positions among the nodes asked for
    x: Rows
    facts: NodeFacts


@dataclass(frozen=True, eq=False)
class _Cache:
    ids: Tensor  # int64 [K], ascending new ids
    rows: Rows
    facts: NodeFacts


class RowFetch:
    """Fetches for one rank and answers the others. Serves one thread; all ranks call it together."""

    def __init__(self, part: AnyPart, layout: RowFormat, wire: Wire) -> None:
        assert part.x is not None, "the format was made from features"
        self.part, self.format, self.wire, self._x = part, layout, wire, part.x
        self._cache: _Cache | None = None

    @property
    def num_cached(self) -> int:
        return 0 if self._cache is None else self._cache.ids.numel()

    def own(self, rows: Tensor) -> Rows:
        """Features of own local rows (int64 [n]), as they would arrive elsewhere."""
        return self.format.own(rows, self._x)

    def own_facts(self, rows: Tensor) -> NodeFacts:
        """Facts of own local rows (int64 [n])."""
        return NodeFacts(*self.part.facts_of(rows))

    def keep(self, line: Collective, ids: Tensor) -> None:
        """Fetch the rows of these remote nodes (int64, ascending new ids) now, and never again."""
        fetched = self.fetch(line, ids)
        self._cache = _Cache(ids, fetched.x, fetched.facts) if ids.numel() else None

    def fetch(self, line: Collective, ids: Tensor) -> Fetched:
        """Features and facts of distinct nodes (int64 [S], new ids, of any owner)."""
        pieces = self.pieces(line, ids)
        return _in_order([(each.x, each.facts) for each in pieces], torch.cat([each.at for each in pieces]))

    def pieces(self, line: Collective, ids: Tensor) -> list[Piece]:
        """The same as it arrives: one piece from each owner, and what the cache holds."""
        own, nothing = line.rank, ids[:0]
        is_sorted = not self.wire.is_plain
        order, rows, counted = by_owner(ids, [0, ids.numel()], self.part.bounds, own, is_sorted=is_sorted)
        sizes = counted[:, 0].tolist()
        placed, asked = (
            list(torch.split(each, sizes)) for each in (order, rows)
        )  # where in ids; rows of each owner
        held: list[Tensor] = []  # positions in the cache
        cached_at: list[Tensor] = []
        if self._cache is not None:
            for q in range(line.num_ranks):
                if q == own:
                    continue
                wanted = ids.index_select(0, placed[q])
                found = torch.searchsorted(self._cache.ids, wanted).clamp_(max=self._cache.ids.numel() - 1)
                is_held = self._cache.ids.index_select(0, found) == wanted
                held.append(found[is_held])
                cached_at.append(placed[q][is_held])
                placed[q], asked[q] = placed[q][~is_held], asked[q][~is_held]
        requests = [self.wire.request(nothing if q == own else some) for q, some in enumerate(asked)]
        arriving = line.all_to_all(requests, kind="ids")
        replies = [self._reply(data) for data in arriving]
        each = self.format.row_bytes
        counts = [0 if q == own else each * some.numel() for q, some in enumerate(asked)] if each else None
        leaving = line.start_all_to_all(replies, kind="features", counts=counts)
        pieces: list[Piece] = []
        mine = self.own(asked[own]), self.own_facts(asked[own])
        for q, data in enumerate(leaving.wait()):
            got = mine if q == own else self.format.decode(data, asked[q].numel(), self._x)
            pieces.append(Piece(placed[q], *got))
        if held and self._cache is not None:
            at = torch.cat(held)
            kept = _rows_at(self._cache.rows, at), self._cache.facts.at(at)
            pieces.append(Piece(torch.cat(cached_at), *kept))
        return pieces

    def _reply(self, data: Tensor) -> Tensor:
        if data.numel() == 0:
            return data
        rows = self.wire.rows(data)
        return self.format.encode(rows, self._x, self.own_facts(rows))


def _rows_at(rows: Rows, at: Tensor) -> Rows:
    return SparseFeatures(rows).gather(at) if isinstance(rows, SparseRows) else rows.index_select(0, at)


def _in_order(pieces: list[tuple[Rows, NodeFacts]], placed: Tensor) -> Fetched:
    """Pieces whose rows belong at ``placed``, as one, in order."""
    back = torch.empty_like(placed)
    back[placed] = torch.arange(placed.numel())
    facts = NodeFacts.joined([facts for _, facts in pieces]).at(back)
    dense = [rows for rows, _ in pieces if isinstance(rows, Tensor)]
    if dense:
        # Rows side by side and one native gather: two thirds of the time of placing each piece with index_copy_.
        return Fetched(gather_rows(torch.cat(dense), back), facts)
    sparse = [rows for rows, _ in pieces if isinstance(rows, SparseRows)]
    lengths = torch.cat([rows.indptr.diff() for rows in sparse])
    joined = SparseRows(
        torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
        torch.cat([rows.indices.to(torch.int32) for rows in sparse]),
        torch.cat([rows.values for rows in sparse]),
        sparse[0].num_columns,
    )
    ordered = SparseFeatures(joined).gather(back)
    return Fetched(
        SparseRows(ordered.indptr, ordered.indices, ordered.values, ordered.num_columns, facts.user_ids),
        facts,
    )
