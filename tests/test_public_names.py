"""The public surface: ``__all__`` says exactly what a module offers, and each name it says exists."""

from __future__ import annotations

import importlib
import inspect
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import polyhop

PACKAGE = Path(polyhop.__file__).parent
NAMES = sorted(
    ".".join(("polyhop", *path.relative_to(PACKAGE).with_suffix("").parts)).removesuffix(".__init__")
    for path in PACKAGE.rglob("*.py")
    if path.parent != PACKAGE or path.stem not in ("__init__", "__main__")
)


OPTIONAL = {"msgspec", "zmq", "boto3"}  # of extras


def defined_here(module: ModuleType) -> set[str]:
    """Public functions and classes whose home is this module."""
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isroutine(value))
        and getattr(value, "__module__", None) == module.__name__
    }


def complaints(module: ModuleType) -> list[str]:
    """What is wrong with a module's ``__all__``; empty if nothing is."""
    if not hasattr(module, "__all__"):
        return [f"{module.__name__} has no __all__"]
    listed = list(module.__all__)
    found = [f"{name} is listed twice" for name in sorted(set(listed)) if listed.count(name) > 1]
    found += [f"{name} is listed but does not exist" for name in listed if not hasattr(module, name)]
    found += [f"{name} is public but not listed" for name in sorted(defined_here(module) - set(listed))]
    return found


@pytest.mark.parametrize("name", NAMES)
def test_module_lists_its_public_names(name: str) -> None:
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name not in OPTIONAL:
            raise
        pytest.skip(f"{error.name} is not installed")
    assert complaints(module) == []
    assert module.__doc__, f"{name} does not say why it exists"


def test_package_lists_its_public_names() -> None:
    assert complaints(polyhop) == []
    assert set(polyhop.__all__) <= set(dir(polyhop))


def test_version_is_that_of_the_project() -> None:
    project = tomllib.loads((PACKAGE.parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    assert polyhop.__version__ == project["project"]["version"]


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        polyhop.no_such_name  # noqa: B018


def test_checker_finds_what_is_planted() -> None:
    module = ModuleType("planted")
    assert complaints(module) == ["planted has no __all__"]
    exec("def shown(): ...\ndef forgotten(): ...\ndef _private(): ...", vars(module))
    for name in ("shown", "forgotten", "_private"):
        vars(module)[name].__module__ = "planted"
    module.__all__ = ["missing", "shown", "shown"]
    assert complaints(module) == [
        "shown is listed twice",
        "missing is listed but does not exist",
        "forgotten is public but not listed",
    ]
