"""The shape of the package, checked by walking its imports: they point backwards along the data flow, siblings are
strangers, nothing goes in a circle, and no folder is a bag.

``violations`` is the checker; the tests below hold the package to it and the checker to planted violations.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "src" / "polyhop"

# The data flow. A module may import only from names to its left.
ORDER = [
    "errors",
    "trace",
    "kernels",
    "graph",
    "datasets",
    "partition",
    "comm",
    "sample",
    "exchange",
    "nn",
    "plan",
    "serverless",
    "strategies",
    "forecast",
    "train",
    "report",
    "launch",
    "planner",
    "cluster_planner",
    "trainer",
    "cli",
    "__main__",
]

# Siblings in a folder never import each other, except these, on which the rest of their folder stands.
GROUND = {
    "kernels": {"checks", "device", "keys", "native", "owned", "reference", "triton", "variates"},
    "kernels.triton": {"philox", "segments", "spmm"},
    "graph": {"block", "checks", "features", "graph", "part", "row_file"},
    "datasets": {"_arrays"},
    "partition": {
        "block",
        "cut",
        "file",
        "files",
        "hash",
        "levels",
        "quality",
        "record",
        "streaming",
        "weights",
    },
    "partition.external": {
        *(
            "bins",
            "budget",
            "inputs",
            "nodes",
            "owners",
            "pieces",
            "renumber",
            "scan",
            "source",
            "streamed",
            "tabular",
        ),
        "work",
    },
    "comm": {"collective", "link", "store", "traffic"},
    "sample": {"ahead", "batch", "lane", "neighbour", "part", "presample", "wire"},
    "exchange": {
        "codec",
        "columns",
        "crossing",
        "features",
        "fronts",
        "halo",
        "hot",
        "loader",
        "pool",
        "quantised",
        "sparse_table",
        "wanted",
        "widths",
    },
    "nn": {"conv", "counts", "halo", "layer", "model", "modules", "rows", "scale"},
    "plan": {"cluster", "curve", "files", "law", "machine", "prediction", "probe", "search"},
    "serverless": {
        "agenda",
        "bill",
        "channel",
        "cluster",
        "crew",
        "doors",
        "drops",
        "edge_ops",
        "edge_tasks",
        "epochs",
        "function",
        "graph_ops",
        "intervals",
        "ledger",
        "lending",
        "local",
        "loss_ops",
        "mail",
        "ops",
        "passes",
        "post",
        "prices",
        "program",
        "ragged",
        "rates",
        "records",
        "roll",
        "sealed",
        "secrets",
        "segments",
        "shapes",
        "states",
        "stream",
        "tables",
        "tasks",
        "tiles",
        "timesheets",
        "value",
        "versions",
        "wire",
    },
    "strategies": {
        "data_cost",
        "flows",
        "halo_channels",
        "halo_cost",
        "halo_memory",
        "halo_plan",
        "halo_probe",
        "halo_recompute",
        "held",
        "inputs",
        "macro_auto",
        "macro_climb",
        "macro_cost",
        "macro_plan",
        "part_step",
        "pipeline_balance",
        "pipeline_check",
        "pipeline_chunks",
        "pipeline_cost",
        "pipeline_fallback",
        "pipeline_given",
        "pipeline_history",
        "pipeline_inputs",
        "pipeline_lane",
        "pipeline_memory",
        "pipeline_messages",
        "pipeline_past",
        "pipeline_pieces",
        "pipeline_probe",
        "pipeline_profile",
        "pipeline_replay",
        "pipeline_schedule",
        "pipeline_setup",
        "pipeline_shared",
        "pipeline_shape",
        "pipeline_simulate",
        "pipeline_stage",
        "pipeline_ways",
        "pipeline_weights",
        "placed",
        "pushpull_cost",
        "serverless_books",
        "serverless_cost",
        "serverless_launch",
        "serverless_live",
        "serverless_step",
        "serverless_tuning",
        "shape",
        "split_auto",
        "split_choice",
        "split_cost",
        "step",
        "work",
    },
    "forecast": {
        "alike",
        "footprint",
        "live",
        "loads",
        "memory",
        "question",
        "sight",
        "statistics",
        "training",
    },
    "train": {"checkpoint", "config", "files", "fingerprint", "folder", "quick", "run", "state", "task"},
    "report": {
        *(
            "explain",
            "history",
            "page",
            "run",
            "run_files",
            "sections",
            "text",
            "traces",
            "units",
            "whole_file",
        ),
    },
    "report.sections": {"phases"},
    "report.traces": {"epochs", "lines", "nesting", "occupancy", "series", "so_far", "tally"},
    "launch": {"options", "outcome", "rank"},
    "cli": {"advice", "calibrate", "clusters", "console", "planned", "ranks", "recipe", "result", "stages"},
}

# A bag is where cycles grow: what two modules share lives under the noun it is about.
BAGS = {
    "util",
    "utils",
    "utilities",
    "common",
    "helper",
    "helpers",
    "core",
    "manager",
    "engine",
    "misc",
    "tools",
    "base",
}

# What only one folder may touch.
RESERVED = {"torch.distributed": "comm"}


def modules(package: Path) -> dict[str, Path]:
    """Dotted name below the package -> file. A folder's __init__ goes by the folder's name; the package's own by ''."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported(path: Path) -> Iterator[tuple[int, str, str | None]]:
    """Every import in a file, also inside functions: (line, module, name taken from it or None)."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, None
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            for alias in node.names:
                yield node.lineno, module, alias.name


def target(module: str, name: str | None, known: dict[str, Path]) -> str | None:
    """The module of the package that an import reaches, by its name below the package; None if it is another library's."""
    is_ours = module == "polyhop" or module.startswith("polyhop.")
    if not is_ours or (module, name) == ("polyhop", "__version__"):  # the version has no other home
        return None
    below = module.removeprefix("polyhop").removeprefix(".")
    deeper = f"{below}.{name}".removeprefix(".")
    return deeper if name is not None and deeper in known else below


def _order_violation(importer: str, reached: str) -> str | None:
    """Why one module may not import another, or None if it may."""
    here, there = importer.split("."), reached.split(".")
    if reached == "":
        return "imports the package's facade; import the module that defines the name"
    if there[0] not in ORDER:
        return f"imports {there[0]!r}, which has no place in the order of stages"
    if here[0] != there[0]:
        is_later = ORDER.index(there[0]) > ORDER.index(here[0])
        return f"imports {reached!r}, a later stage" if is_later else None
    shared = next((at for at, (a, b) in enumerate(zip(here, there)) if a != b), min(len(here), len(there)))
    if shared == len(here):
        return None  # a folder's __init__ may import all of its folder
    if shared == len(there):
        return f"imports its own folder's __init__ ({reached!r}), that is, all of its siblings"
    folder = ".".join(here[:shared])
    return None if there[shared] in GROUND.get(folder, set()) else f"imports its sibling {reached!r}"


def cycles(edges: dict[str, set[str]]) -> list[str]:
    """Import circles, each as 'a -> b -> a'."""
    found: set[str] = set()
    done: set[str] = set()

    def visit(name: str, trail: list[str]) -> None:
        if name in trail:
            circle = trail[trail.index(name) :]
            first = circle.index(min(circle))  # a circle is told once, from its first name
            found.add(" -> ".join([*circle[first:], *circle[: first + 1]]))
            return
        if name in done:
            return
        for other in sorted(edges.get(name, ())):
            visit(other, [*trail, name])
        done.add(name)

    for name in sorted(edges):
        visit(name, [])
    return sorted(found)


def violations(package: Path) -> list[str]:
    """Everything about the package's imports and names that breaks the rules above."""
    known = modules(package)
    edges: dict[str, set[str]] = {name: set() for name in known}
    found = []
    for importer, path in known.items():
        for part in importer.split("."):
            if part.strip("_") in BAGS:
                found.append(f"{importer}: {part!r} names a bag, not a thing")
        if importer and importer.split(".")[0] not in ORDER:
            found.append(f"{importer}: has no place in the order of stages")
            continue
        for line, module, name in imported(path):
            where = f"{importer or '__init__'}:{line}"
            if module.startswith("."):
                found.append(f"{where}: relative import {module!r}; write the full name")
            for reserved, owner in RESERVED.items():
                full = module if name is None else f"{module}.{name}"
                if f"{full}.".startswith(f"{reserved}.") and importer.split(".")[0] != owner:
                    found.append(f"{where}: only {owner}/ may import {reserved}")
            reached = target(module, name, known)
            if reached is None or (importer == "" and reached != ""):
                continue  # another library's module; or the facade, which may name every stage
            if reached != importer:
                edges[importer].add(reached)
            if importer and (why := _order_violation(importer, reached)):
                found.append(f"{where}: {why}")
    return found + [f"circle: {circle}" for circle in cycles(edges)]


def test_package_keeps_the_rules() -> None:
    assert violations(PACKAGE) == []


def test_layout_page_is_in_step() -> None:
    """docs/layout.md has a row for every stage, in order, with its ground modules."""
    text = (PACKAGE.parents[1] / "docs" / "layout.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([\w.]+)` \|.*\| ?([^|]*) \|$", text, flags=re.MULTILINE)
    named = {folder: set(re.findall(r"`(\w+)`", ground)) for folder, ground in rows}
    documented = {folder: ground for folder, ground in named.items() if folder.split(".")[0] in ORDER}
    present = {name.split(".")[0] for name in modules(PACKAGE)} - {"", "__main__"}
    assert [folder for folder in documented if "." not in folder] == sorted(present, key=ORDER.index)
    assert {stage: ground for stage, ground in documented.items() if ground} == GROUND


GOOD = {
    "__init__.py": "",
    "errors.py": "import os",
    "kernels/__init__.py": "from polyhop.kernels.spmm import spmm",
    "kernels/native.py": "from polyhop.errors import PolyhopError",
    "kernels/spmm.py": "from polyhop.kernels import native\nfrom polyhop.kernels.native import library",
    "graph/__init__.py": "",
    "graph/block.py": "from polyhop.kernels import spmm",
    "trainer.py": "def f():\n    import polyhop.graph.block",
}


def plant(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = folder / "polyhop" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return folder / "polyhop"


def test_checker_accepts_a_good_tree(tmp_path: Path) -> None:
    assert violations(plant(tmp_path, GOOD)) == []


@pytest.mark.parametrize(
    ("planted", "expected"),
    [
        (
            {"kernels/spmm.py": "import polyhop.graph.block"},
            "kernels.spmm:1: imports 'graph.block', a later stage",
        ),
        (
            {"kernels/spmm.py": "def f():\n    from polyhop import trainer"},
            "kernels.spmm:2: imports 'trainer'",
        ),
        (
            {"kernels/gather.py": "from polyhop.kernels.spmm import spmm"},
            "imports its sibling 'kernels.spmm'",
        ),
        ({"kernels/gather.py": "from polyhop.kernels import spmm"}, "imports its sibling 'kernels.spmm'"),
        (
            {"kernels/deep/a.py": "import polyhop.kernels.deep.b", "kernels/deep/b.py": ""},
            "sibling 'kernels.deep.b'",
        ),
        ({"kernels/deep/a.py": "import polyhop.kernels.spmm"}, "imports its sibling 'kernels.spmm'"),
        ({"kernels/gather.py": "from polyhop.kernels import fast"}, "imports its own folder's __init__"),
        ({"graph/utils.py": ""}, "graph.utils: 'utils' names a bag"),
        ({"graph/_common/__init__.py": ""}, "graph._common: '_common' names a bag"),
        ({"extras/__init__.py": ""}, "extras: has no place in the order"),
        ({"graph/block.py": "import polyhop.extras"}, "imports 'extras', which has no place"),
        ({"graph/block.py": "from polyhop import Trainer"}, "imports the package's facade"),
        ({"graph/block.py": "from .graph import Graph"}, "relative import '.graph'"),
        ({"trainer.py": "import torch.distributed as dist"}, "only comm/ may import torch.distributed"),
        ({"trainer.py": "from torch import distributed"}, "only comm/ may import torch.distributed"),
        (
            {
                "kernels/keys.py": "import polyhop.kernels.native",
                "kernels/native.py": "import polyhop.kernels.keys",
            },
            "circle: kernels.keys -> kernels.native -> kernels.keys",
        ),
    ],
)
def test_checker_finds_what_is_planted(tmp_path: Path, planted: dict[str, str], expected: str) -> None:
    found = violations(plant(tmp_path, GOOD | planted))
    assert any(expected in line for line in found), found
