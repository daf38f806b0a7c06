"""Parts written from edges on disk: the same files as ``save_parts`` makes of a graph in memory.

Legend: N nodes, n own nodes, H halo nodes, E edges of the part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyhop.errors import PartitionError
from polyhop.kernels.bins import group_edges
from polyhop.kernels.edges import first_of_each, num_repeated
from polyhop.kernels.halo import Halo
from polyhop.partition.external.bins import BinFiles
from polyhop.partition.external.nodes import split_of
from polyhop.partition.files import SETS, ArrayFile, part_name, write_array

__all__ = ["NodeTables", "PartWriter", "Samples"]

_STEP = 1 << 20  # nodes written at a time


@dataclass(frozen=True, eq=False)
class NodeTables:
    """Of every node, by new id."""

    user_ids: Tensor  # int32 or int64 [N]
    in_degree: Tensor  # int32 [N]
    out_degree: Tensor  # int32 [N]
    in_weight: Tensor | None = None  # float64 [N]
    loop_weight: Tensor | None = None  # float32 [N]
    codes: Tensor | None = None  # uint8 [N]: 1 train, 2 val, 3 test


@dataclass(frozen=True, eq=False)
class Samples:
    """Edges that a graph is recognised by: new id of the destination (rising), place in its list, number of the sample."""

    node: Tensor
    place: Tensor
    number: Tensor


@dataclass(frozen=True, eq=False)
class PartWriter:
    """Writes one part after the other into ``folder``."""

    folder: Path
    bounds: Tensor  # int64 [P + 1]
    bins: BinFiles  # of destinations by new id, none across a bound
    nodes: NodeTables
    samples: Samples
    is_multigraph: bool  # repeated edges are meant
    tell: Callable[[int], None]  # edges written since the last call

    def write(self, part: int, sample_to: Path) -> dict[str, Any]:
        """Counts and the manifest's entries of the topology and split of one part."""
        start, stop = int(self.bounds[part]), int(self.bounds[part + 1])
        folder = self.folder / part_name(part)
        folder.mkdir(exist_ok=True)
        mine = self._bins_of(part)
        halo = Halo(self.nodes.user_ids.numel(), start, stop)
        cut = sum(halo.mark(self.bins.values(index)) for index in mine)
        sources = stop - start + halo.close()
        if sources >= 2**31:
            raise PartitionError(f"part {part} has {sources:,} sources, more than 2**31: give more --parts")
        files = self._write_lists(folder, halo, mine, stop - start, sample_to)
        files |= self._write_sources(folder, halo, start, stop, sources)
        train = 0
        if self.nodes.codes is not None:
            split = split_of(self.nodes.codes[start:stop])
            train = split.train.numel()
            files |= {
                f"{s}.npy": write_array(folder / f"{s}.npy", getattr(split, s), sync=False) for s in SETS
            }
        files = {f"{folder.name}/{name}": entry for name, entry in files.items()}
        edges = int(self.bins.counts[mine.start : mine.stop].sum())
        facts = {"nodes": stop - start, "edges": edges, "halo": sources - (stop - start)}
        return {"facts": facts, "cut": cut, "train": train, "files": files}

    def clear(self, part: int) -> None:
        """Delete the edges on disk of a part that is written and recorded."""
        for index in self._bins_of(part):
            self.bins.remove(index)

    def _bins_of(self, part: int) -> range:
        return range(*torch.searchsorted(self.bins.bins.bounds, self.bounds[part : part + 2]).tolist())

    def _write_lists(
        self, folder: Path, halo: Halo, mine: range, num_rows: int, sample_to: Path
    ) -> dict[str, Any]:
        edges = int(self.bins.counts[mine.start : mine.stop].sum())
        has_weight = self.nodes.in_weight is not None
        found: list[Tensor] = []
        done = 0
        with ExitStack() as stack:
            indptr = stack.enter_context(ArrayFile(folder / "indptr.npy", torch.int64, (num_rows + 1,)))
            rows = stack.enter_context(ArrayFile(folder / "indices.npy", torch.int32, (edges,)))
            files = {"indptr.npy": indptr, "indices.npy": rows}
            if has_weight:
                path = folder / "edge_weight.npy"
                files["edge_weight.npy"] = stack.enter_context(ArrayFile(path, torch.float32, (edges,)))
            indptr.write(torch.zeros(1, dtype=torch.int64))
            for index in mine:
                ends, sources, weight = group_edges(
                    self.bins.keys(index),
                    self.bins.values(index),
                    self.bins.num_rows(index),
                    self.bins.weights(index) if has_weight else None,
                )
                if not self.is_multigraph:
                    self._check_repeated(ends, sources, self.bins.first(index))
                found.append(self._sampled(index, ends, sources, weight))
                indptr.write(ends[1:] + done)
                rows.write(halo.rows(sources, out=sources if sources.dtype == torch.int32 else None))
                if weight is not None:
                    files["edge_weight.npy"].write(weight)
                elif has_weight:
                    assert sources.numel() == 0
                done += sources.numel()
                self.tell(sources.numel())
            _save_samples(sample_to, found)
            return {name: file.entry(sync=False) for name, file in files.items()}

    def _check_repeated(self, ends: Tensor, sources: Tensor, first: int) -> None:
        repeated = num_repeated(ends, sources)
        if repeated == 0:
            return
        edge = int((~first_of_each(ends, sources)).nonzero()[0])
        row = int(torch.searchsorted(ends, edge, right=True)) - 1
        names = [int(self.nodes.user_ids[new]) for new in (int(sources[edge]), first + row)]
        raise PartitionError(
            f"duplicate edges, such as {names[0]} -> {names[1]} ({repeated:,} among {sources.numel():,} edges); give "
            "--duplicates keep for a multigraph (each copy sends its own message), or remove them from the file"
        )

    def _sampled(self, index: int, ends: Tensor, sources: Tensor, weight: Tensor | None) -> Tensor:
        """float64 [3, k]: number, the user's id of the source and weight of the samples in a bin."""
        first = self.bins.first(index)
        span = torch.tensor([first, first + self.bins.num_rows(index)])
        low, high = torch.searchsorted(self.samples.node, span).tolist()
        at = ends[self.samples.node[low:high] - first] + self.samples.place[low:high]
        ids = self.nodes.user_ids[sources[at].long()]
        pull = torch.zeros(at.numel()) if weight is None else weight[at]
        return torch.stack([self.samples.number[low:high].double(), ids.double(), pull.double()])

    def _write_sources(self, folder: Path, halo: Halo, start: int, stop: int, count: int) -> dict[str, Any]:
        """What is told of every source: own nodes, then halo."""
        entries = {}
        with ArrayFile(folder / "halo.npy", torch.int64, (count - (stop - start),)) as file:
            for ids in halo.ids(_STEP):
                file.write(ids)
            entries["halo.npy"] = file.entry(sync=False)
        tables = {
            "src_ids": (self.nodes.user_ids, torch.int64),
            "in_degree": (self.nodes.in_degree, torch.int32),
            "out_degree": (self.nodes.out_degree, torch.int32),
            "in_weight": (self.nodes.in_weight, torch.float64),
            "loop_weight": (self.nodes.loop_weight, torch.float32),
        }
        for name, (table, dtype) in tables.items():
            if table is not None:
                with ArrayFile(folder / f"{name}.npy", dtype, (count,)) as file:
                    for values in _of_sources(table, halo, start, stop):
                        file.write(values.to(dtype))
                    entries[f"{name}.npy"] = file.entry(sync=False)
        return entries


def _of_sources(table: Tensor, halo: Halo, start: int, stop: int) -> Iterator[Tensor]:
    yield from torch.split(table[start:stop], _STEP)
    for ids in halo.ids(_STEP):
        yield table[ids]


def _save_samples(path: Path, found: list[Tensor]) -> None:
    np.save(path, torch.cat(found, 1).numpy() if found else np.zeros((3, 0)))
