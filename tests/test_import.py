"""What ``import polyhop`` offers, and that it stays lazy."""

from __future__ import annotations

import subprocess
import sys

import pytest

import polyhop


def test_bare_import_loads_no_torch_and_a_name_does() -> None:
    code = (
        "import sys, polyhop; assert 'torch' not in sys.modules; polyhop.Graph; assert 'torch' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_names_are_the_objects_of_their_homes() -> None:
    from polyhop.graph import Graph
    from polyhop.trainer import Trainer

    assert polyhop.Graph is Graph
    assert polyhop.Trainer is Trainer
    assert polyhop.nn.GCN.__name__ == "GCN"
    assert issubclass(polyhop.errors.ConfigError, ValueError)


@pytest.mark.parametrize("name", polyhop.__all__)
def test_every_listed_name_is_there(name: str) -> None:
    assert getattr(polyhop, name) is not None
    assert name in dir(polyhop)


def test_unknown_name() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Trianer'"):
        _ = polyhop.Trianer
