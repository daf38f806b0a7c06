"""``polyhop env``: what is active on this machine and why, what is missing, and how to fix it."""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import typer

from polyhop import __version__
from polyhop.cli import console

__all__ = ["command"]

_NEEDED = ("torch", "numpy", "scipy", "safetensors", "typer", "rich")
_EXTRAS = {"pyg": "torch-geometric", "parquet": "pyarrow", "report": "plotly", "tensorboard": "tensorboard"}
_GAINS = {
    "pyg": "PyG graphs and layers",
    "parquet": "Parquet tables",
    "report": "reports and curves as pictures",
    "tensorboard": "scalars for TensorBoard",
}


def command(
    calibrate: Annotated[
        bool,
        typer.Option(
            "--calibrate",
            help="Measure what this host can do in a second, for plans; kept in the user's cache.",
        ),
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="With --calibrate: write the figures here too, for plans elsewhere.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead.")] = False,
) -> None:
    """Say what is active on this machine, and what to fix.

    Which kernels run and why, versions, cores, memory, optional packages.

    \b
    Examples:
      polyhop env            for people
      polyhop env --json     for programs and bug reports
      polyhop env --calibrate --out host.json
      POLYHOP_KERNELS=reference polyhop env
    """
    facts = _facts()
    if calibrate or out is not None:
        if not calibrate:
            raise typer.BadParameter("goes with --calibrate", param_hint="--out")
        facts["machine"]["measured"] = _calibrated(out)
    if as_json:
        console.print_json(facts)
        return
    kernels, machine = facts["kernels"], facts["machine"]
    console.show_table(
        [
            ("polyhop", facts["polyhop"]),
            ("python", f"{facts['python']} on {machine['platform']}"),
            (
                "machine",
                f"{machine['cores']} cores, {machine['memory_gib']:.1f} GiB memory, {machine['free_gib']:.1f} free",
            ),
            ("gpu", ", ".join(facts["gpus"]) or "none that torch can use"),
            (
                "kernels",
                f"{kernels['cpu']} on the CPU, {kernels['cuda']} on CUDA, {kernels['threads']} threads",
            ),
            ("", f"POLYHOP_KERNELS={kernels['mode']}; {kernels['library']}"),
            (
                "packages",
                ", ".join(f"{name} {version or 'MISSING'}" for name, version in facts["packages"].items()),
            ),
            *[("extra " + name, value or "not installed") for name, value in facts["extras"].items()],
            ("data", facts["data"]),
            *_measured_rows(facts["machine"].get("measured")),
        ]
    )
    for hint in facts["hints"]:
        print(f"\nhint: {hint}")


def _facts() -> dict[str, Any]:
    """Everything the command knows, as JSON values."""
    extras = {name: _version(package) for name, package in _EXTRAS.items()}
    facts: dict[str, Any] = {
        "polyhop": __version__,
        "python": platform.python_version(),
        "machine": {
            "platform": platform.platform(),
            "processor": platform.machine(),
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            **_memory(),
        },
        **_compute(),
        "packages": {name: _version(name) for name in _NEEDED},
        "extras": extras,
        "settings": {
            name: value for name, value in sorted(os.environ.items()) if name.startswith("POLYHOP_")
        },
        "data": _data(),
    }
    return facts | {"hints": _hints(facts)}


def _calibrated(out: Path | None) -> dict[str, Any]:
    from polyhop.cli.calibrate import calibrate
    from polyhop.plan import machine_file

    found = calibrate(console.say, out).to_json()
    return {**found, "file": str(machine_file())}


def _measured_rows(found: dict[str, Any] | None) -> list[tuple[str, str]]:
    if found is None:
        return []
    link = found["link"]
    return [
        (
            "measured",
            f"rows gathered {found['gather_bytes_per_s'] / 1e9:.1f} GB/s a core, "
            f"copied {found['stream_bytes_per_s'] / 1e9:.1f}; "
            f"all cores {found['thread_gain']:.2f} times one",
        ),
        (
            "",
            f"between ranks {link['bytes_per_s'] / 1e9:.2f} GB/s, {1e3 * link['latency_s']:.2f} ms a round; "
            f"{1e6 * found['message_s']:.0f} us and {1e9 * found['byte_s']:.2f} ns a byte of processor time",
        ),
        (
            "",
            f"sampling {1e9 * found['node_s']:.0f} ns a node, {1e9 * found['edge_s']:.1f} ns an edge; "
            f"disk {found['disk_bytes_per_s'] / 1e6:.0f} MB/s; kept in {found['file']}",
        ),
    ]


def _compute() -> dict[str, Any]:
    """GPUs and kernels, as far as they can be known: this command is for broken installations too."""
    try:
        import torch
    except ImportError as error:
        why = f"torch does not load: {error}"
        nothing = {"mode": "auto", "cpu": "none", "cuda": "none", "library": why, "threads": "0"}
        return {"gpus": [], "kernels": nothing}
    from polyhop.kernels import native

    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {"gpus": names, "kernels": native.status()}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _memory() -> dict[str, float]:
    """Memory this process may use, in GiB: the machine's, or the limit of its control group where that is smaller."""
    page = os.sysconf("SC_PAGE_SIZE")
    total, free = page * os.sysconf("SC_PHYS_PAGES"), page * os.sysconf("SC_AVPHYS_PAGES")
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024  # counts what the file cache can give back
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        if limit.isdigit() and int(limit) < total:
            total = int(limit)
            free = min(free, total - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    except (OSError, ValueError, KeyError):
        pass  # another system, or no control group: what we have holds
    return {"memory_gib": round(total / 2**30, 2), "free_gib": round(free / 2**30, 2)}


def _data() -> str:
    given = os.environ.get("POLYHOP_DATA")
    if not given:
        return "POLYHOP_DATA is not set: embedded and synthetic graphs, and paths"
    folder = Path(given)
    if not folder.is_dir():
        return f"POLYHOP_DATA={given} is not a folder"
    return f"{given} ({len(list(folder.glob('*.npz')))} graphs)"


def _hints(facts: dict[str, Any]) -> list[str]:
    """What could be better here, and what to do about it."""
    hints = []
    kernels, cores = facts["kernels"], facts["machine"]["cores"]
    if kernels["cpu"] == "none":
        hints.append(
            f"nothing can be computed ({kernels['library']}). Fix: {sys.executable} -m pip install torch"
        )
    elif kernels["cpu"] == "reference":
        is_chosen = kernels["mode"] == "reference"
        why = "POLYHOP_KERNELS=reference is set" if is_chosen else kernels["library"]
        reinstall = f"{sys.executable} -m pip install --force-reinstall --no-deps polyhop"
        hints.append(
            f"the native kernels are not in use ({why}); training is several times slower. "
            f"Fix: {'unset it' if is_chosen else reinstall}"
        )
    elif "instruction set base" in kernels["library"] and facts["machine"]["processor"] in (
        "x86_64",
        "AMD64",
    ):
        hints.append("the kernels run without AVX2: this processor has none, or POLYHOP_ISA=base is set")
    if int(kernels["threads"]) > cores:
        hints.append(
            f"{kernels['threads']} threads on {cores} cores: set POLYHOP_THREADS={cores} and OMP_NUM_THREADS={cores}"
        )
    hints += [
        f"{name} is missing: {sys.executable} -m pip install {name}"
        for name, version in facts["packages"].items()
        if version is None and name != "torch"
    ]
    hints += [
        f"for {_GAINS[name]}: {sys.executable} -m pip install 'polyhop[{name}]'"
        for name, version in facts["extras"].items()
        if version is None
    ]
    if "is not a folder" in facts["data"]:
        hints.append(f"{facts['data']}: point it at a folder of .npz graphs, or unset it")
    return hints
