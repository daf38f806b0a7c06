"""Partitioning out of core: edge files that do not fit in memory -> the folder that ``save_parts`` would write.

scan (check, count) -> owners (streams read neighbours sorted on disk) -> edges filed by the new id of their destination
-> one part after the other sorted and written. Every step is a stage of the journal, so a killed run goes on where it was.

Legend: N nodes, E edges, P parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polyhop.errors import ConfigError, PartitionError, unknown
from polyhop.graph import DenseFeatures
from polyhop.graph.fingerprint import Sampled, digest, row_ids
from polyhop.partition.external.bins import BinFiles, even_bounds
from polyhop.partition.external.budget import Budget, id_dtype
from polyhop.partition.external.inputs import Inputs
from polyhop.partition.external.nodes import NodeFiles, check_nodes, feature_dtype, feature_rows, hand_out
from polyhop.partition.external.owners import NODE_BYTES, TRAIN_BYTES, check_method, place_nodes
from polyhop.partition.external.pieces import NodeTables, PartWriter, Samples
from polyhop.partition.external.renumber import renumber, sample_edges
from polyhop.partition.external.scan import scan_edges
from polyhop.partition.external.source import EdgeSource, NpyRows, identity
from polyhop.partition.external.streamed import Tell
from polyhop.partition.external.work import Work
from polyhop.partition.files import FORMAT, SETS, TEMPORARY, finish_folder, part_name, sync_file, write_array
from polyhop.partition.quality import quality_of_counts
from polyhop.partition.record import check_num_parts

__all__ = ["write_parts"]

_VERSION = 1  # of the work folder: raised when stages change
_ORDER = ("indptr", "indices", "halo", "src_ids", "in_degree", "out_degree", "y", "edge_weight", "in_weight",
          "loop_weight", *SETS, "x", "x_scale")  # fmt: skip


def write_parts(
    inputs: Inputs, num_parts: int, method: str, out: Path, *, memory: int, num_nodes: int | None = None, seed: int = 0,
    duplicates: str = "error", options: dict[str, Any] | None = None, tell: Tell = lambda stage, done, total: None,
) -> None:  # fmt: skip
    """Write the folder ``out``. Started again after a kill with the same arguments and files, it goes on where it was.

    memory: bytes for the work itself. num_nodes: None = as the node data says, else the largest id + 1. duplicates: "error"
    or "keep". options: passes, slack (fennel, ldg), path (file).
    """
    options = options or {}
    check_num_parts(num_parts)
    check_method(method, options)
    if duplicates not in ("error", "keep"):
        raise ConfigError(unknown("duplicates (out of core)", duplicates, ("error", "keep")))
    command = {
        "version": _VERSION, "inputs": inputs.identity(), "parts": num_parts, "method": method, "memory": memory,
        "num_nodes": num_nodes, "seed": seed, "duplicates": duplicates,
        "options": {name: identity(Path(value)) if name == "path" else value for name, value in options.items()},
    }  # fmt: skip
    temporary = out.with_name(TEMPORARY + out.name)
    try:
        with Work(temporary, command) as work:
            run = _Run(inputs, num_parts, method, work, memory, tell)
            run.scan(num_nodes)
            about = run.rest(seed, duplicates == "keep", options)
            _sync(temporary, about["files"])
            work.finish()
            finish_folder(temporary, out, about)
    except OSError as error:
        raise PartitionError(
            f"{error.filename or out}: {error.strerror or error}. Finished stages are kept in {temporary}: make room and "
            "run the same command again, or remove that folder"
        ) from error


def _pieces(values: Tensor) -> Iterator[Tensor]:
    yield from torch.split(values, 1 << 20)


def _sync(folder: Path, names: Iterable[str]) -> None:
    """Wait until the disk has the files."""
    for name in names:
        sync_file(folder / name)
    for part in {(folder / name).parent for name in names}:
        sync_file(part)


class _Run:
    """One run: its stages in order. Arrays of one number a node lie in the work folder and are read where needed."""

    def __init__(
        self, inputs: Inputs, num_parts: int, method: str, work: Work, memory: int, tell: Tell
    ) -> None:
        self.inputs, self.num_parts, self.method, self.work, self.tell = inputs, num_parts, method, work, tell
        self.budget = Budget(memory)
        opened: tuple[EdgeSource, NodeFiles] = inputs.open(work, self.budget, tell)
        self.source, self.given = opened
        more = NODE_BYTES.get(method, 0) + (TRAIN_BYTES.get(method, 0) if "train" in self.given.files else 0)
        self.budget = replace(self.budget, has_weight=self.source.has_weight, more_node_bytes=more)

    def scan(self, asked: int | None) -> None:
        """Count the edges of all nodes; how many nodes there are decides what the memory is spent on."""
        known = self.given.num_nodes()
        known = getattr(self.source, "num_nodes", None) if known is None else known
        if asked is not None and known is not None and asked != known:
            raise ConfigError(f"--num-nodes {asked}, but the node data is of {known} nodes")
        nodes = asked if known is None else known
        if nodes is not None:
            self._spend(nodes)

        def scan() -> dict[str, Any]:
            edges, each = self.source.num_edges, self.budget.chunk_edges
            if nodes is None:  # what the counts will take is not known yet
                each = max(256, each // 4)
            counts = scan_edges(self.source, each, nodes, lambda done: self.tell("scan", done, edges))
            kept = {name: values for name, values in vars(counts).items() if values is not None}
            for name, values in kept.items():
                self.work.save(name, values)
            return {"nodes": counts.in_degree.numel(), "names": [*kept]}

        facts = self.work.stage("scan", scan)
        self._spend(int(facts["nodes"]))
        self.counts: list[str] = facts["names"]

    def _spend(self, num_nodes: int) -> None:
        wide = id_dtype(num_nodes) == torch.int64
        self.budget = replace(self.budget, num_nodes=num_nodes, is_wide=wide)
        _ = self.budget.for_edges  # is it enough?

    def rest(self, seed: int, is_multigraph: bool, options: dict[str, Any]) -> dict[str, Any]:
        """All stages after the scan; the manifest."""
        work, dtype = self.work, id_dtype(self.budget.num_nodes)
        nodes = work.stage("nodes", self._check_nodes)
        work.stage("owner", lambda: work.save("owner", self._place(seed, options)))
        work.remove("lists-*", "degree-*", "pull-*", "stream-*")
        names = [*self.counts, *(["codes"] if nodes["has_split"] else [])]
        numbers = work.stage("numbers", lambda: renumber(work, self.num_parts, dtype, names))
        work.stage("samples", lambda: sample_edges(work, self.source.num_edges))
        bounds = torch.tensor(numbers["bounds"], dtype=torch.int64)
        rows = work.stage("rows", lambda: self._hand_out(nodes, bounds))
        bins = self._file_edges(bounds, dtype)
        parts = self._write(bounds, bins, is_multigraph)
        files = {"new_ids.npy": numbers["entry"]}
        for index, part in enumerate(parts):
            for name in (f"{part_name(index)}/{one}.npy" for one in _ORDER):
                if name in rows or name in part["files"]:
                    files[name] = rows[name] if name in rows else part["files"][name]
        return self._manifest(seed, nodes, bounds, parts, files)

    def _place(self, seed: int, options: dict[str, Any]) -> Tensor:
        return place_nodes(
            self.work, self.source, self.budget, self.num_parts, self.method, seed, options, self.tell
        )

    def _check_nodes(self) -> dict[str, Any]:
        """Labels and splits, checked and kept; what the manifest says of them."""
        y, split, classes = check_nodes(self.given, self.budget.num_nodes)
        if y is not None:
            self.work.save("labels", y)
        if split is not None:
            codes = torch.zeros(self.budget.num_nodes, dtype=torch.uint8)
            for code, name in enumerate(SETS, start=1):
                codes[getattr(split, name)] = code
            self.work.save("codes", codes)
        rows = self._features()
        return {
            "classes": classes,
            "has_y": y is not None,
            "has_split": split is not None,
            "labels": digest(y),
            "split": digest(*((None,) if split is None else (getattr(split, name) for name in SETS))),
            "feature_rows": digest(None if rows is None or self.budget.num_nodes == 0 else self._some(rows)),
        }

    def _features(self) -> NpyRows | None:
        return NpyRows(self.given.files["x"]) if "x" in self.given.files else None

    def _scale(self) -> Tensor | None:
        if "x_scale" not in self.given.files:
            return None
        rows = NpyRows(self.given.files["x_scale"])
        return torch.from_numpy(rows.read(0, int(np.prod(rows.shape))))

    def _some(self, rows: NpyRows) -> Tensor:
        """The feature rows that a graph is recognised by."""
        some = [rows.rows(at, at + 1) for at in row_ids(self.budget.num_nodes).tolist()]
        store = DenseFeatures(torch.from_numpy(np.concatenate(some)).to(feature_dtype(rows)), self._scale())
        return store.gather(torch.arange(len(some)))

    def _hand_out(self, nodes: dict[str, Any], bounds: Tensor) -> dict[str, Any]:
        """Features and labels of every part; the manifest's entries."""
        entries: dict[str, Any] = {}
        sizes: list[int] = bounds.diff().tolist()
        x = self._features()
        if x is None and not nodes["has_y"]:
            return entries
        owner, folder = self.work.load("owner"), self.work.folder
        if nodes["has_y"]:
            y = self.work.load("labels")
            pieces, width = partial(_pieces, y), tuple(y.shape[1:])
            entries |= hand_out(
                "y", pieces, y.dtype, width, owner, sizes, folder, partial(self._tell_nodes, "labels")
            )
            del y
        if x is not None:
            step = max(
                1, min(1 << 16, self.budget.for_edges // 4 // max(1, x.dtype.itemsize * int(x.shape[1])))
            )
            pieces, width, kind = partial(feature_rows, x, step), tuple(x.shape[1:]), feature_dtype(x)
            entries |= hand_out(
                "x", pieces, kind, width, owner, sizes, folder, partial(self._tell_nodes, "features")
            )
        scale = self._scale()
        for part in range(self.num_parts) if scale is not None else ():
            assert scale is not None
            name = f"{part_name(part)}/x_scale.npy"
            entries[name] = write_array(folder / name, scale, sync=False)
        return entries

    def _tell_nodes(self, what: str, done: int) -> None:
        self.tell(f"{what} (nodes)", done, self.budget.num_nodes)

    def _file_edges(self, bounds: Tensor, dtype: torch.dtype) -> BinFiles:
        """Edges by the new id of their destination, in the user's order within a bin."""

        def cut() -> list[int]:
            degree = self.work.load("new_in_degree")
            self.budget.check_heaviest(degree)
            sizes = {"per_edge": self.budget.edge_bytes, "per_node": self.budget.row_bytes}
            made: list[int] = even_bounds(degree, self.budget.bin_bytes, **sizes, within=bounds).tolist()
            return made

        bins = BinFiles(self.work.path, "edges", torch.tensor(self.work.stage("edge bounds", cut)), dtype)

        def file() -> list[int]:
            bins.clear()
            new_ids, done = self.work.load("new_ids"), 0
            for chunk in self.source.chunks(self.budget.chunk_edges):
                bins.file(chunk.dst, chunk.src, to=new_ids, weight=chunk.weight)
                done += chunk.src.numel()
                self.tell("filing edges", done, self.source.num_edges)
            counts: list[int] = bins.counts.tolist()
            return counts

        bins.counts = torch.tensor(self.work.stage("edges", file), dtype=torch.int64)
        return bins

    def _write(self, bounds: Tensor, bins: BinFiles, is_multigraph: bool) -> list[dict[str, Any]]:
        """Every part's own stage."""
        work, done = self.work, [0]

        def tell(edges: int) -> None:
            done[0] += edges
            self.tell("writing parts", done[0], self.source.num_edges)

        tables = NodeTables(
            work.load("user_ids"), work.load("new_in_degree"), work.load("new_out_degree"), work.find("new_in_weight"),
            work.find("new_loop_weight"), work.find("new_codes"),
        )  # fmt: skip
        writer = PartWriter(
            work.folder, bounds, bins, tables, Samples(*work.load("samples")), is_multigraph, tell
        )
        parts, synced = [], []
        with ThreadPoolExecutor(1) as disk:  # waits for the disk while the next part is made
            for part in range(self.num_parts):
                is_known = work.has(f"part {part}")
                sample = work.file(f"sample-{part}.npy")
                parts.append(work.stage(f"part {part}", partial(writer.write, part, sample)))
                writer.clear(part)
                if is_known:
                    tell(parts[-1]["facts"]["edges"])
                synced.append(disk.submit(_sync, work.folder, parts[-1]["files"]))
        for one in synced:
            one.result()  # the disk may have refused
        return parts

    def _manifest(
        self, seed: int, nodes: dict[str, Any], bounds: Tensor, parts: list[dict[str, Any]], files: dict[str, Any]
    ) -> dict[str, Any]:  # fmt: skip
        x, facts = self._features(), [part["facts"] for part in parts]
        features = 0 if x is None else int(x.shape[1])
        quality = quality_of_counts(
            bounds.diff(),
            torch.tensor([one["edges"] for one in facts]),
            torch.tensor([part["train"] for part in parts]) if nodes["has_split"] else None,
            num_cut=sum(part["cut"] for part in parts),
            num_halo=sum(one["halo"] for one in facts),
        )
        fingerprint = {
            "nodes": self.budget.num_nodes, "edges": self.source.num_edges, "features": features,
            "classes": nodes["classes"], "structure": self._structure(), "labels": nodes["labels"],
            "split": nodes["split"], "feature_rows": nodes["feature_rows"],
        }  # fmt: skip
        return {
            "format": FORMAT,
            "name": self.given.about.get("name", self.inputs.name),
            "metric": self.given.about.get("metric", "accuracy"),
            "num_nodes": self.budget.num_nodes,
            "num_edges": self.source.num_edges,
            "num_features": features,
            "num_classes": nodes["classes"],
            "method": self.method,
            "seed": seed,
            "bounds": bounds.tolist(),
            "quality": vars(quality),
            "fingerprint": fingerprint,
            "parts": facts,
            "files": files,
        }

    def _structure(self) -> str:
        """Digest of the in-edge lists, from the edges sampled while parts were written."""
        edges, nodes = self.source.num_edges, self.budget.num_nodes
        found = [np.load(self.work.file(f"sample-{part}.npy")) for part in range(self.num_parts)]
        number, ids, weight = torch.from_numpy(np.concatenate(found, 1))
        order = number.argsort()
        wide = torch.int64 if nodes > 2**31 - 1 or edges > 2**31 - 1 else torch.int32
        indptr = Sampled(torch.int64, [nodes + 1], self.work.load("some_indptr"))
        indices = Sampled(wide, [edges], ids[order].to(wide))
        weights = Sampled(torch.float32, [edges], weight[order].to(torch.float32))
        return digest(indptr, indices, weights if self.source.has_weight else None)
