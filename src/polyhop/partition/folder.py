"""Partition folders: every part in .npy files that can be mapped, and a manifest that says what each must be.

    manifest.json            format, counts, method, seed, bounds; size and checksum of every file
    new_ids.npy              int64 [N]: new id of each of the user's nodes
    part-00000/ ...          indptr, indices, halo, src_ids, in_degree, out_degree; where there are: x (or x_indptr,
                             x_columns, x_values), x_scale, y, train, val, test, edge_weight, in_weight, loop_weight

A folder is written under a temporary name and renamed when whole, so one with its proper name is complete.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyhop.errors import PartitionError
from polyhop.graph import (
    DenseFeatures,
    DiskFeatures,
    FeatureStore,
    Graph,
    GraphFacts,
    Part,
    SharedGraph,
    SparseFeatures,
    SparseRows,
    Split,
    fingerprint_graph,
    kept_in,
)
from polyhop.partition.cut import cut
from polyhop.partition.files import (
    FORMAT,
    MANIFEST,
    SETS,
    TEMPORARY,
    digest_file,
    finish_folder,
    part_name,
    write_array,
)
from polyhop.partition.quality import quality
from polyhop.partition.record import Partition

__all__ = ["FORMAT", "PartitionFolder", "check_free", "open_parts", "save_parts"]

_SMALL = 1 << 24  # files up to this many bytes are checked whole when opened, larger ones by their size
_AGAIN = "copy it again, or make the folder again"
_ARRAYS = ("indptr", "indices", "halo", "src_ids", "in_degree", "out_degree")
_OPTIONAL = ("y", "edge_weight", "in_weight", "loop_weight")


def save_parts(
    graph: Graph, partition: Partition, path: str | Path, *, done: Callable[[int], None] = lambda part: None
) -> PartitionFolder:
    """Write all parts of a graph in memory; ``done`` is told each part written. Nothing half-written keeps the name."""
    path = Path(path)
    check_free(path)
    temporary = path.with_name(TEMPORARY + path.name)
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        files = {"new_ids.npy": write_array(temporary / "new_ids.npy", partition.new_ids)}
        parts = []
        for index in range(partition.num_parts):
            part = cut(graph, partition, index)
            folder = temporary / part_name(index)
            folder.mkdir()
            for name, tensor in _arrays(part):
                files[f"{folder.name}/{name}.npy"] = write_array(folder / f"{name}.npy", tensor)
            parts.append({"nodes": part.num_nodes, "edges": part.num_edges, "halo": part.halo.numel()})
            done(index)
        about = {
            "format": FORMAT,
            "name": graph.name,
            "metric": graph.metric,
            "num_nodes": graph.num_nodes,
            "num_edges": graph.num_edges,
            "num_features": graph.num_features,
            "num_classes": graph.num_classes,
            "method": partition.method,
            "seed": partition.seed,
            "bounds": partition.bounds.tolist(),
            "quality": vars(quality(graph, partition)),
            "fingerprint": fingerprint_graph(graph),
            "parts": parts,
            "files": files,
        }
        finish_folder(temporary, path, about)
    except BaseException as error:  # Ctrl-C too: nothing half-written stays
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError):
            raise PartitionError(f"cannot write {path}: {error.strerror or error}") from error
        raise
    return open_parts(path)


def check_free(path: Path) -> None:
    """PartitionError if there is something of that name: a folder of parts is never written over."""
    if path.exists():
        raise PartitionError(f"{path} is there already: remove it, or give another --out")


def open_parts(path: str | Path) -> PartitionFolder:
    """The folder, its manifest read and its format known; parts are opened one by one."""
    path = Path(path)
    manifest = path / MANIFEST
    try:
        about = json.loads(manifest.read_text())
    except FileNotFoundError:
        raise PartitionError(
            f"{path} is no partition folder: it has no {MANIFEST} (make one: polyhop partition)"
        ) from None
    except (OSError, ValueError) as error:
        raise PartitionError(f"{manifest}: cannot be read: {error}") from error
    if not isinstance(about, dict) or not isinstance(about.get("format"), int):
        raise PartitionError(f"{manifest}: not a polyhop manifest")
    if about["format"] > FORMAT:
        raise PartitionError(
            f"{path} has format {about['format']}, this polyhop reads up to {FORMAT}: upgrade polyhop, or make the folder "
            "again"
        )
    missing = [name for name in ("bounds", "parts", "files", "num_nodes") if name not in about]
    if missing:
        raise PartitionError(f"{manifest}: without {', '.join(missing)}; make the folder again")
    return PartitionFolder(path, about)


@dataclass(frozen=True, eq=False)
class PartitionFolder:
    """An opened folder."""

    path: Path
    about: dict[str, Any]

    @property
    def num_parts(self) -> int:
        return len(self.about["parts"])

    @property
    def num_nodes(self) -> int:
        return int(self.about["num_nodes"])

    @property
    def bounds(self) -> Tensor:
        """int64 [P + 1]: new ids."""
        return torch.tensor(self.about["bounds"], dtype=torch.int64)

    def new_ids(self) -> Tensor:
        """int64 [N]: new id of each of the user's nodes."""
        return self._read("new_ids.npy")

    def part(self, index: int, *, mmap: bool = True, features: str = "auto") -> Part:
        """One part, its files mapped (or read); PartitionError names a file that is missing, short or changed.

        ``features``: "auto" (as the other files), "memory", "mapped", or "disk" (read when asked for, in large reads).
        """
        if not 0 <= index < self.num_parts:
            raise PartitionError(f"{self.path} has parts 0 .. {self.num_parts - 1}, asked for {index}")
        given: dict[str, Any] = {
            name: self._read(f"{part_name(index)}/{name}.npy", mmap=mmap) for name in _ARRAYS
        }
        given |= {name: self._find(index, name, mmap=mmap) for name in _OPTIONAL}
        sets = [self._find(index, name, mmap=False) for name in SETS]
        split = None if sets[0] is None else Split(*(s if s is not None else given["halo"][:0] for s in sets))
        return Part(index, self.bounds, x=self._features(index, mmap, features), split=split, **given)

    def check_ranks(self, num_ranks: int, num_groups: int = 1) -> None:
        """PartitionError unless so many ranks can share the parts; in groups, the ranks of each."""
        num_ranks //= num_groups
        if num_ranks < 1 or self.num_parts % num_ranks:
            each = f" of each of {num_groups} groups" if num_groups > 1 else ""
            raise PartitionError(
                f"{self.path} has {self.num_parts} parts, which {num_ranks} ranks{each} cannot share evenly: use a number "
                f"of ranks{each and ' per group'} that divides {self.num_parts}, or partition again with --parts {num_ranks}"
            )

    def for_rank(self, rank: int, num_ranks: int, *, mmap: bool = True, features: str = "auto") -> Part:
        """What rank ``rank`` of ``num_ranks`` holds: as many neighbouring parts as come to it, as one.

        Where these are several, their arrays are copied into memory, but for features on "disk".
        """
        self.check_ranks(num_ranks)
        each = self.num_parts // num_ranks
        own = range(rank * each, (rank + 1) * each)
        parts = [self.part(p, mmap=mmap, features=features) for p in own]
        return (
            parts[0]
            if num_ranks == self.num_parts
            else _joined(parts, rank, self.bounds[::each].contiguous())
        )

    @property
    def facts(self) -> GraphFacts:
        """What every rank knows of the whole graph."""
        about = self.about
        return GraphFacts(
            str(about.get("name", self.path.name)),
            self.num_nodes,
            int(about.get("num_edges", 0)),
            int(about.get("num_features", 0)),
            int(about.get("num_classes", 0)),
            str(about.get("metric", "accuracy")),
            about.get("fingerprint", {"files": sorted(e["blake2b"] for e in about["files"].values())}),
        )

    def share(self, rank: int, num_ranks: int, *, mmap: bool = True, features: str = "auto") -> SharedGraph:
        """What rank ``rank`` of ``num_ranks`` holds and knows; ``features``: where its rows are kept, as ``part`` says."""
        part = self.for_rank(rank, num_ranks, mmap=mmap, features=features)
        return SharedGraph(part, self.facts, self.path)

    def check_sizes(self) -> None:
        """See that every file is there and as long as it was written; PartitionError names the first that is not."""
        for name in self.about["files"]:
            self._check_size(name)

    def check(self) -> None:
        """Read every file whole; PartitionError names the first that is not as written."""
        for name in self.about["files"]:
            self._check(name, whole=True)

    def _check(self, name: str, *, whole: bool) -> Path:
        file, size = self._check_size(name)
        is_read = whole or size <= _SMALL
        if is_read and digest_file(file) != self.about["files"][name]["blake2b"]:
            raise PartitionError(f"{file}: its content changed since it was written; {_AGAIN}")
        return file

    def _check_size(self, name: str) -> tuple[Path, int]:
        """The file and its size in bytes."""
        file = self.path / name
        expected = self.about["files"].get(name)
        if expected is None:
            raise PartitionError(f"{self.path / MANIFEST}: knows no {name}; make the folder again")
        try:
            size = file.stat().st_size
        except OSError as error:
            raise PartitionError(f"{file}: {error.strerror or error}; {_AGAIN}") from error
        if size != expected["bytes"]:
            raise PartitionError(f"{file}: {size:,} bytes, expected {expected['bytes']:,}: damaged; {_AGAIN}")
        return file, size

    def _read(self, name: str, *, mmap: bool = False) -> Tensor:
        file = self._check(name, whole=False)
        try:
            is_mapped = mmap and self.about["files"][name]["values"] > 0  # an empty file cannot be mapped
            array = np.load(file, mmap_mode="c" if is_mapped else None, allow_pickle=False)
        except (OSError, ValueError) as error:
            raise PartitionError(f"{file}: cannot be read: {error}; {_AGAIN}") from error
        tensor = torch.from_numpy(array)
        return tensor.view(torch.bfloat16) if self.about["files"][name].get("dtype") == "bfloat16" else tensor

    def _find(self, index: int, name: str, *, mmap: bool) -> Tensor | None:
        file = f"{part_name(index)}/{name}.npy"
        return self._read(file, mmap=mmap) if file in self.about["files"] else None

    def _features(self, index: int, mmap: bool, where: str) -> FeatureStore | None:
        mmap = mmap if where == "auto" else where != "memory"
        values = self._find(index, "x", mmap=mmap)
        if values is not None:
            file = self.path / part_name(index) / "x.npy"
            return kept_in(DenseFeatures(values, self._find(index, "x_scale", mmap=False), mmap, file), where)
        indptr = self._find(index, "x_indptr", mmap=mmap)
        if indptr is None:
            return None
        columns, stored = (
            self._read(f"{part_name(index)}/{name}.npy", mmap=mmap) for name in ("x_columns", "x_values")
        )
        sparse = SparseFeatures(SparseRows(indptr, columns, stored, int(self.about["num_features"])))
        return kept_in(sparse, where)


def _arrays(part: Part) -> Iterator[tuple[str, Tensor]]:
    """What is written of a part, by file name."""
    for name in (*_ARRAYS, *_OPTIONAL):
        tensor = getattr(part, name)
        if tensor is not None:
            yield name, tensor
    if part.split is not None:
        yield from ((name, getattr(part.split, name)) for name in SETS)
    if isinstance(part.x, DenseFeatures):
        yield "x", part.x.values
        if part.x.scale is not None:
            yield "x_scale", part.x.scale
    elif part.x is not None:
        rows = part.x.all()
        assert isinstance(rows, SparseRows)
        yield from (("x_indptr", rows.indptr), ("x_columns", rows.indices), ("x_values", rows.values))


def _joined(parts: list[Part], index: int, bounds: Tensor) -> Part:
    """Neighbouring parts as one part of a coarser partition with these bounds. Copies their arrays."""
    start, stop = int(bounds[index]), int(bounds[index + 1])
    sources = torch.cat([part.new_ids()[part.indices.long()] for part in parts])
    is_own = (sources >= start) & (sources < stop)
    halo = torch.unique(sources[~is_own])
    rows = torch.where(is_own, sources - start, stop - start + torch.searchsorted(halo, sources))
    lengths = torch.cat([part.indptr.diff() for part in parts])
    indptr = torch.zeros(lengths.numel() + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, out=indptr[1:])
    # Each value per source: those of the own nodes in order, then of the halo, wherever a part has it.
    known = torch.cat([part.new_ids() for part in parts])
    first = torch.sort(known, stable=True)
    at = first.indices[torch.searchsorted(first.values, torch.cat([torch.arange(start, stop), halo]))]

    def per_source(name: str) -> Tensor | None:
        values = [getattr(part, name) for part in parts]
        return None if values[0] is None else torch.cat(values)[at]

    def per_own(values: list[Tensor | None]) -> Tensor | None:
        return None if values[0] is None else torch.cat([v for v in values if v is not None])

    def ids(name: str) -> Tensor:
        return torch.cat([getattr(part.split, name) + part.start - start for part in parts])

    named: dict[str, Any] = {
        name: per_source(name) for name in ("src_ids", "in_degree", "out_degree", "in_weight", "loop_weight")
    }
    return Part(
        index,
        bounds,
        indptr,
        rows.to(torch.int32),
        halo,
        x=_joined_features([part.x for part in parts]),
        y=per_own([part.y for part in parts]),
        split=None if parts[0].split is None else Split(*(ids(name) for name in SETS)),
        edge_weight=per_own([part.edge_weight for part in parts]),
        **named,
    )


def _joined_features(stores: list[FeatureStore | None]) -> FeatureStore | None:
    on_disk = [store for store in stores if isinstance(store, DiskFeatures)]
    if on_disk:
        return DiskFeatures.joined(on_disk)
    dense = [store for store in stores if isinstance(store, DenseFeatures)]
    if dense:
        return DenseFeatures(torch.cat([store.values for store in dense]), dense[0].scale)
    sparse = [store.rows for store in stores if isinstance(store, SparseFeatures)]
    if not sparse:
        return None
    lengths = torch.cat([rows.indptr.diff() for rows in sparse])
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    columns, values = (
        torch.cat([rows.indices for rows in sparse]),
        torch.cat([rows.values for rows in sparse]),
    )
    return SparseFeatures(SparseRows(indptr, columns, values, sparse[0].num_columns))
