from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
import torch

from polyhop.errors import ConfigError, KernelError
from polyhop.kernels import native, transpose

INDPTR, INDICES = torch.tensor([0, 2]), torch.tensor([1, 0])


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_load", lambda: (None, "no native library beside kernels/"))
    native._warn_once.cache_clear()


def test_a_missing_library_is_said_once(no_library: None) -> None:
    with pytest.warns(RuntimeWarning, match="plain torch kernels, much slower: no native library"):
        assert transpose(INDPTR, INDICES, 2)[1].tolist() == [0, 0]
    assert native.status()["cpu"] == "reference"
    assert "no native library" in native.status()["library"]
    with pytest.raises(KernelError, match="no native library"):
        native.library()


def test_native_mode_never_falls_back(no_library: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYHOP_KERNELS", "native")
    with pytest.raises(KernelError, match="no native library"):
        transpose(INDPTR, INDICES, 2)


def test_native_mode_refuses_what_it_cannot_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYHOP_KERNELS", "native")
    with pytest.raises(KernelError, match=r"no native kernel for torch\.float16 on cpu"):
        native.serves(torch.ones(1, dtype=torch.float16))
    with pytest.raises(KernelError, match="has no ph_nothing: reinstall"):
        native.serves(torch.ones(1), op="ph_nothing")
    with pytest.raises(KernelError, match="has no ph_nothing: reinstall"):
        native.call("ph_nothing")


def test_auto_mode_serves_other_dtypes_by_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYHOP_KERNELS", "auto")
    assert native.serves(torch.ones(1), None)
    assert not native.serves(torch.ones(1, dtype=torch.float16))
    assert not native.serves(torch.ones(1, device="meta"))


def test_reference_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYHOP_KERNELS", "reference")
    assert not native.serves(torch.ones(1))
    assert native.status()["cpu"] == "reference"


def test_unknown_mode_and_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYHOP_KERNELS", "natve")
    with pytest.raises(ConfigError, match="Did you mean 'native'"):
        native.serves(torch.ones(1))
    for bad in ("0", "two", "-1"):
        monkeypatch.setenv("POLYHOP_THREADS", bad)
        with pytest.raises(ConfigError, match="at least 1"):
            native.num_threads()
    monkeypatch.setenv("POLYHOP_THREADS", "3")
    assert native.num_threads() == 3
    monkeypatch.delenv("POLYHOP_THREADS")
    assert native.num_threads() == torch.get_num_threads()


def test_a_library_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_ABI", 999)
    lib, reason = native._load.__wrapped__()
    assert lib is None
    assert "this code needs 999: reinstall" in reason


def test_a_broken_library_says_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "libpolyhop_native.so").write_bytes(b"not a library")
    monkeypatch.setattr(native, "__file__", str(tmp_path / "native.py"))
    lib, reason = native._load.__wrapped__()
    assert lib is None
    assert "does not load" in reason
    (tmp_path / "libpolyhop_native.so").unlink()
    assert "build it" in native._load.__wrapped__()[1]


def test_pointers() -> None:
    with pytest.raises(AssertionError, match="contiguous"):
        native.call("ph_relabel_ids", 0, torch.ones(2, 3).t())
    assert isinstance(native.library(), ctypes.CDLL)
