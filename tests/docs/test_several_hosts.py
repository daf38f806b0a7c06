"""docs/several-hosts.md, executed as written: its hosts are the lab's namespaces, each with its own files, home and name.

A comment before a block says where it runs. Blocks run in the order of the page; they must come to the same bits.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "several-hosts.md"
LAB = ROOT / "scripts" / "lab"
HOSTS = ("host-0", "host-1")
MARK = re.compile(
    r"<!-- run on (host-\d|every host)(, together with the next)? -->\n```bash\n(.*?)^```$", re.M | re.S
)
LIMIT_S = 900


class Block(NamedTuple):
    hosts: tuple[str, ...]
    goes_with_next: bool  # it is started, and the next one too, before either has ended
    text: str


def blocks() -> list[Block]:
    """The commands of the page, in order."""
    found = MARK.findall(PAGE.read_text(encoding="utf-8"))
    return [
        Block(HOSTS if where == "every host" else (where,), bool(together), text)
        for where, together, text in found
    ]


def why_not() -> str:
    """Why the page cannot be run here; empty when it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not (shutil.which("ip") and shutil.which("tc")):
        return "no ip or tc (iproute2)"
    if importlib.util.find_spec("ray") is None:
        return "no Ray (pip install 'polyhop[ray]')"
    tried = subprocess.run([LAB, "1", "--", "true"], capture_output=True, text=True, timeout=60)
    return f"no namespaces here: {tried.stderr.strip()}" if tried.returncode == 2 else ""


def write_script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/bash\n" + textwrap.dedent(text), encoding="utf-8")
    path.chmod(0o755)
    return path


def make_hosts(folder: Path) -> Path:
    """``at HOST COMMAND``: what a terminal on that host would run. Each has its own work folder, at the same path, and home.

    Ray keeps its files in one place of a machine, so a host has its own of that too. ``ssh`` runs something on another host.
    """
    for host in HOSTS:
        for name in ("work", "home", "ray"):
            (folder / host / name).mkdir(parents=True)
    (folder / "work").mkdir()
    ray = Path(tempfile.gettempdir(), "ray")
    ray.mkdir(exist_ok=True)
    inside = write_script(
        folder / "inside",
        f"""\
        set -e
        mount --bind {folder}/$1/work {folder}/work
        mount --bind {folder}/$1/ray {ray}
        cd {folder}/work
        export HOME={folder}/$1/home
        exec bash -euo pipefail -c "$2"
        """,
    )
    write_script(folder / "bin" / "ssh", f'host=$1; shift; exec {folder}/at "$host" "$*"\n')
    return write_script(
        folder / "at", f'name=LAB_HOST_${{1#host-}}\nexec "$LAB" exec "${{!name}}" -- {inside} "$1" "$2"\n'
    )


def as_script(page: list[Block], at: Path) -> str:
    """The page as one script; the first command that fails ends it."""
    lines, started = ["set -e"], 0
    for block in page:
        for host in block.hosts:
            lines += [f"echo {shlex.quote(f'=== {host}: {block.text.strip()}')}"]
            lines += [f"{at} {host} {shlex.quote(block.text)} & started[{started}]=$!"]
            started += 1
        if not block.goes_with_next:
            lines += [f"wait ${{started[{k}]}}" for k in range(started)]
            started = 0
    return "\n".join([*lines, ""])


def digests(folder: Path) -> dict[str, str]:
    """Name of each run -> sha256 of the weights it ended with, wherever rank 0 was."""
    found = folder.glob("host-*/work/runs/*/model.safetensors")
    return {path.parent.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in found}


def test_every_command_is_marked_or_meant_to_be_read() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text.count("```bash") == len(blocks())
    assert {host for block in blocks() for host in block.hosts} == set(HOSTS)
    for word in (
        "torchrun",
        "--rdzv-backend c10d",
        "--engine ray",
        "--workers 2",
        "--resume auto",
        "--parts parts",
    ):
        assert any(word in block.text for block in blocks()), word


@pytest.mark.slow
def test_the_page_works_as_written(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    at = make_hosts(tmp_path)
    page = blocks()
    at_end = next(k for k, block in enumerate(page) if "--resume" in block.text)
    script = write_script(tmp_path / "page", as_script(page[:at_end], at))
    rest = write_script(tmp_path / "rest", as_script(page[at_end:], at))
    environment = os.environ | {
        "PATH": f"{tmp_path}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    environment = {
        k: v for k, v in environment.items() if k not in ("RAY_ADDRESS", "RAY_AUTH_MODE", "POLYHOP_DATA")
    }
    before = f"{script} && sha256sum {tmp_path}/host-*/work/runs/*/model.safetensors > {tmp_path}/digests && {rest}"
    command = [LAB, "2", "--hosts", "--rate", "1gbit", "--timeout", str(LIMIT_S), "--", "bash", "-c", before]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT_S + 60
    )
    said = f"{done.stdout}\n{done.stderr}"
    assert done.returncode == 0, said
    lines = [line.split() for line in (tmp_path / "digests").read_text().splitlines()]
    found = {Path(path).parent.name: digest for digest, path in lines}
    print("\n".join(f"{digest}  {name}" for name, digest in found.items()))
    assert set(found) == {"local", "torchrun", "c10d", "ray"}, said
    assert len(set(found.values())) == 1, found
    assert digests(tmp_path)["torchrun"] != found["torchrun"], "the resumed run trained no further"
    held = sorted(path.name for path in (tmp_path / "host-1" / "work" / "parts").iterdir())
    assert held == ["manifest.json", "part-00001"]
    for name in ("torchrun", "c10d", "ray"):
        traces = {
            path.parent.parts[-4] for path in tmp_path.glob(f"host-*/work/runs/{name}/trace-rank*.jsonl")
        }
        assert traces == set(HOSTS), (name, traces, said)
