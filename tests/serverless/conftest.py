"""What tests of launchers need: the function's package, unpacked once, and that nothing of a test stays behind."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

for _folder in ("serverless", "strategies", "launch"):
    sys.path.insert(0, str(Path(__file__).parents[1] / _folder))

from remains import Remains  # type: ignore[import-not-found]  # noqa: E402


@pytest.fixture(scope="session")
def function_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package of a function, unpacked."""
    pytest.importorskip("awslambdaric")
    from polyhop.serverless import package

    folder = tmp_path_factory.mktemp("function")
    package.find().unpack(folder)
    return folder


@pytest.fixture
def remains() -> Iterator[Remains]:
    """What was there before; at the end of the test nothing more may be."""
    seen = Remains()
    yield seen
    seen.check(within_s=20)
