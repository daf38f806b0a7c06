"""The function's package: what it holds, that this is enough, and that it is the same every time."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from polyhop.errors import UnsupportedError
from polyhop.serverless import package
from polyhop.serverless.package import MAX_BYTES, find, own_modules

pytest.importorskip("awslambdaric")
OWN = {
    "polyhop", "polyhop.errors", "polyhop.serverless",
    *(f"polyhop.serverless.{name}" for name in (
        "aws_entry", "channel", "edge_ops", "function", "loss_ops", "ops", "program", "ragged", "sealed", "secrets",
        "stream", "tasks", "tiles", "wire")),
}  # fmt: skip
OTHERS = {
    "awslambdaric",
    "cffi",
    "cryptography",
    "msgspec",
    "numpy",
    "numpy.libs",
    "pycparser",
    "pyzmq.libs",
    "simplejson",
    "zmq",
}

# Runs out of the folder alone: one task of a program, handler and all that it imports, and then what is loaded.
ALONE = """
import sys
sys.path[:] = [path for path in sys.path if "site-packages" not in path] + [{folder!r}]
import json, os
import numpy as np
from polyhop.serverless import aws_entry, function
from polyhop.serverless.program import Call, Program, Row
from polyhop.serverless.tasks import run_task
import zmq, awslambdaric.bootstrap, runtime_client
program = Program({{"x": Row((3,))}}, {{"b": (3,)}}, (Call("bias", ("x", "b"), ("y",)),), ("y",))
found, _ = run_task(program, False, {{"x": np.ones((2, 3))}}, {{"b": np.arange(3.0)}})
homes = {{name: sys.modules[name].__file__ for name in ("numpy", "zmq", "msgspec", "polyhop", "awslambdaric")}}
loaded = sorted({{name.split(".")[0] for name in sys.modules}})
maps = sorted({{line.split()[-1] for line in open("/proc/self/maps") if ".libs/" in line}})
print(json.dumps([found["y"].tolist(), homes, loaded, zmq.has("curve"), maps]))
"""


def test_it_holds_what_a_function_needs_and_no_more() -> None:
    assert set(own_modules()) == OWN
    made = find()
    assert {name for name in made.top_level if not name.endswith((".dist-info", ".so", ".py", ".json"))} == (
        OTHERS | {"polyhop"}
    )
    assert {name for name in made.files if name.startswith("polyhop/")} == {
        str(path.relative_to(package._ROOT.parent)) for path in own_modules().values()
    }
    assert any(name.startswith("numpy.libs/libscipy_openblas") for name in made.files)
    assert any(name.startswith("pyzmq.libs/libzmq") for name in made.files)
    assert any(name.startswith("pyzmq.libs/libsodium") for name in made.files)
    assert any("LICENSE" in name for name in made.files if name.startswith("numpy-"))
    left_out = [
        n
        for n in made.files
        if "/tests/" in n or "__pycache__" in n or n.endswith((".pyc", "direct_url.json"))
    ]
    assert left_out == []
    assert 20e6 < made.num_bytes < MAX_BYTES


def test_the_folder_alone_is_enough(function_folder: Path) -> None:
    """No site-packages, no environment: everything is found in the package, libraries too, and torch is not loaded."""
    program = ALONE.format(folder=str(function_folder))
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", program], capture_output=True, text=True, env={}, cwd="/"
    )
    assert done.returncode == 0, done.stderr[-2000:]
    y, homes, loaded, has_curve, libraries = json.loads(done.stdout)
    assert y == [[1.0, 2.0, 3.0]] * 2
    assert has_curve
    assert all(path.startswith(str(function_folder)) for path in homes.values()), homes
    assert {"torch", "scipy", "boto3", "ray"} & set(loaded) == set()
    assert all(path.startswith(str(function_folder)) for path in libraries), libraries
    assert {"numpy.libs", "pyzmq.libs"} == {Path(path).parent.name for path in libraries}


def test_the_zip_is_the_folder_and_the_same_every_time(tmp_path: Path) -> None:
    made = find(distributions=("msgspec",))
    sizes = [made.write(tmp_path / name) for name in ("a.zip", "b.zip")]
    assert (tmp_path / "a.zip").read_bytes() == (tmp_path / "b.zip").read_bytes()
    assert sizes == [(tmp_path / "a.zip").stat().st_size] * 2
    made.unpack(tmp_path / "folder")
    with zipfile.ZipFile(tmp_path / "a.zip") as read:
        zipped = {name: read.read(name) for name in read.namelist()}
        assert read.namelist() == sorted(read.namelist())
        assert {each.date_time for each in read.infolist()} == {(1980, 1, 1, 0, 0, 0)}
        assert all(each.external_attr >> 16 in (0o100644, 0o100755) for each in read.infolist())
    unpacked = {
        str(path.relative_to(tmp_path / "folder")): path.read_bytes()
        for path in (tmp_path / "folder").rglob("*")
        if path.is_file()
    }
    assert zipped == unpacked
    assert sum(len(content) for content in zipped.values()) == made.num_bytes
    told = json.loads(zipped["polyhop-package.json"])
    assert (told["python"], set(told["distributions"])) == (f"3.{sys.version_info.minor}", {"msgspec"})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.zip", "b.zip", "folder"]


def test_torch_is_refused(tmp_path: Path) -> None:
    """Also where a module imports it inside a function, or through another; but not for type checkers alone."""
    root = tmp_path / "polyhop"
    root.mkdir()
    (root / "__init__.py").write_text("")
    (root / "good.py").write_text(
        "from typing import TYPE_CHECKING\nimport numpy\nif TYPE_CHECKING:\n    import torch\nelse:\n    import json\n"
    )
    (root / "bad.py").write_text("from polyhop import good, worse\n")
    (root / "worse.py").write_text("def f():\n    from torch import nn\n")
    assert set(own_modules(["polyhop.good"], root)) == {"polyhop", "polyhop.good"}
    with pytest.raises(UnsupportedError, match=r"polyhop\.worse imports torch"):
        own_modules(["polyhop.bad"], root)
    with pytest.raises(UnsupportedError, match=r"polyhop\.none"):
        own_modules(["polyhop.none"], root)
    with pytest.raises(UnsupportedError, match="imports torch"):
        own_modules(["polyhop.serverless.server"])


def test_what_is_not_installed_or_too_large_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        UnsupportedError, match=r"no-such-thing, which is not installed: pip install 'polyhop\[aws"
    ):
        find(distributions=("no-such-thing",))
    monkeypatch.setattr(package, "MAX_BYTES", 1000)
    with pytest.raises(UnsupportedError, match="1,000 are allowed"):
        find(distributions=("msgspec",))


def test_the_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = package.find
    monkeypatch.setattr(package, "find", lambda: real(distributions=("msgspec",)))
    assert package.main([str(tmp_path / "out.zip")]) == 0
    told = capsys.readouterr().out
    assert "MB unpacked" in told
    assert "handler polyhop.serverless.aws_entry.handler" in told
    assert package.main(["out.tar"]) == 2
    assert package.main([str(tmp_path / "missing" / "out.zip")]) == 1
    assert "package: " in capsys.readouterr().err
