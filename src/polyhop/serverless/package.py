"""The package of a function: what a platform unpacks and runs, as a zip or as a folder.

    python -m polyhop.serverless.package OUT.zip

It holds the modules of polyhop that the entry needs, found by following imports, and the installed distributions they need.
Anything else that is imported is refused: torch alone would be larger than a package may be. Binaries are those of the
running environment, so build it on the platform and with the Python of the function; ``polyhop-package.json`` tells them.
The same environment gives the same bytes.
"""

from __future__ import annotations

import ast
import json
import platform
import shutil
import sys
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path, PurePosixPath

from polyhop.errors import PolyhopError, UnsupportedError

__all__ = ["DISTRIBUTIONS", "ENTRIES", "MAX_BYTES", "Package", "find", "main", "own_modules"]

ENTRIES = ("polyhop.serverless.aws_entry", "polyhop.serverless.function")
DISTRIBUTIONS = ("numpy", "pyzmq", "msgspec", "cryptography", "awslambdaric")
MAX_BYTES = 250_000_000  # unpacked, of AWS Lambda
_ALLOWED = {
    "cryptography",
    "msgspec",
    "numpy",
    "zmq",
}  # what modules of the function may import, beside the standard library
_ROOT = Path(__file__).resolve().parents[1]
_DATE = (1980, 1, 1, 0, 0, 0)
_LEFT_OUT_FOLDERS = {"__pycache__", "tests", "include"}
_LEFT_OUT_ENDS = (".pyc", ".pyi", ".a", ".h", ".pxd", ".pyx", ".lib")
_LEFT_OUT_NAMES = {"RECORD", "INSTALLER", "REQUESTED", "direct_url.json", "entry_points.txt"}
_MANIFEST = "polyhop-package.json"


@dataclass(frozen=True)
class Package:
    """Files by their name in the package; ``manifest`` is written beside them."""

    files: dict[str, Path]
    manifest: bytes

    @property
    def num_bytes(self) -> int:
        """Unpacked."""
        return sum(path.stat().st_size for path in self.files.values()) + len(self.manifest)

    @property
    def top_level(self) -> list[str]:
        return sorted({name.split("/")[0] for name in (*self.files, _MANIFEST)})

    def unpack(self, folder: Path) -> None:
        """Write the files to a folder, which is made."""
        for name, source in sorted(self.files.items()):
            target = folder / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
            target.chmod(_mode(name))
        (folder / _MANIFEST).write_bytes(self.manifest)

    def write(self, path: Path) -> int:
        """Write the zip; its bytes. It appears whole or not at all."""
        partial = path.with_name(path.name + ".partial")
        try:
            with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED, compresslevel=6) as target:
                for name in sorted((*self.files, _MANIFEST)):
                    content = self.manifest if name == _MANIFEST else self.files[name].read_bytes()
                    entry = zipfile.ZipInfo(name, _DATE)
                    entry.compress_type, entry.create_system = zipfile.ZIP_DEFLATED, 3
                    entry.external_attr = (0o100000 | _mode(name)) << 16
                    target.writestr(entry, content)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)
        return path.stat().st_size


def find(entries: Sequence[str] = ENTRIES, distributions: Sequence[str] = DISTRIBUTIONS) -> Package:
    """What a package of these entries holds; UnsupportedError if it is too large or something is missing."""
    found = {f"polyhop/{path.relative_to(_ROOT)}": path for path in own_modules(entries).values()}
    versions: dict[str, str] = {}
    for distribution in _closure(distributions):
        versions[distribution.metadata["Name"]] = distribution.version
        found |= dict(_files(distribution))
    told = {
        "polyhop": _version(),
        "python": f"{sys.version_info.major}.{sys.version_info.minor}",
        "system": platform.system(),
        "machine": platform.machine(),
        "distributions": versions,
    }
    made = Package(found, json.dumps(told, indent=1, sort_keys=True).encode() + b"\n")
    if made.num_bytes > MAX_BYTES:
        raise UnsupportedError(
            f"the package of a function would have {made.num_bytes:,} bytes unpacked; {MAX_BYTES:,} are allowed"
        )
    return made


def own_modules(entries: Sequence[str] = ENTRIES, root: Path = _ROOT) -> dict[str, Path]:
    """Modules of polyhop that the entries import, and the entries; UnsupportedError for an import that may not be."""
    found: dict[str, Path] = {}
    open_ = list(entries)
    while open_:
        name = open_.pop()
        if name in found:
            continue
        path = _path(name, root)
        if path is None:
            raise UnsupportedError(f"a function's package needs {name}, which is no module of polyhop")
        found[name] = path
        open_ += [name.rpartition(".")[0]] if "." in name else []
        for module, taken in _imports(ast.parse(path.read_text(encoding="utf-8"))):
            top = module.split(".")[0]
            if top == "polyhop":
                is_module = taken is not None and _path(f"{module}.{taken}", root) is not None
                open_.append(f"{module}.{taken}" if is_module else module)
            elif top not in sys.stdlib_module_names and top not in _ALLOWED:
                raise UnsupportedError(
                    f"{name} imports {module}, which a function has not got: only {', '.join(sorted(_ALLOWED))} and the "
                    "standard library"
                )
    return dict(sorted(found.items()))


def _path(name: str, root: Path) -> Path | None:
    below = root.joinpath(*name.split(".")[1:])
    return next((path for path in (below / "__init__.py", below.with_suffix(".py")) if path.is_file()), None)


def _imports(tree: ast.AST) -> Iterator[tuple[str, str | None]]:
    """(module, name taken from it) of every import, also inside functions, but not of those for type checkers alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from ((node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            yield from (each for other in node.orelse for each in _imports(other))
        else:
            yield from _imports(node)


def _closure(names: Sequence[str]) -> list[metadata.Distribution]:
    """Installed distributions of these names, and all that they need here, by name."""
    try:
        from packaging.requirements import Requirement
        from packaging.utils import canonicalize_name
    except ImportError as error:
        raise UnsupportedError("a function's package needs pip install 'polyhop[aws]'") from error
    found: dict[str, metadata.Distribution] = {}
    open_ = list(names)
    while open_:
        name = canonicalize_name(open_.pop())
        if name in found:
            continue
        try:
            found[name] = distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError as error:
            raise UnsupportedError(
                f"a function's package needs {name}, which is not installed: pip install 'polyhop[aws,serverless]'"
            ) from error
        for text in distribution.requires or ():
            needed = Requirement(text)
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                open_.append(needed.name)
    return [found[name] for name in sorted(found)]


def _files(distribution: metadata.Distribution) -> Iterator[tuple[str, Path]]:
    """Files of a distribution, without its tests, caches, headers and programs."""
    name = distribution.metadata["Name"]
    if not distribution.files:
        raise UnsupportedError(f"{name} does not tell its files: install it from a wheel")
    for listed in distribution.files:
        below = PurePosixPath(listed)
        is_left_out = (
            ".." in below.parts
            or below.is_absolute()
            or _LEFT_OUT_FOLDERS & set(below.parts[:-1])
            or below.name.endswith(_LEFT_OUT_ENDS)
            or below.name in _LEFT_OUT_NAMES
        )
        if not is_left_out:
            path = Path(str(distribution.locate_file(listed)))
            if not path.is_file():
                raise UnsupportedError(f"{name}: {below} is missing; install it again")
            yield str(below), path


def _mode(name: str) -> int:
    return 0o755 if ".so" in PurePosixPath(name).suffixes else 0o644


def _version() -> str:
    from polyhop import __version__

    return __version__


def main(arguments: Sequence[str] | None = None) -> int:
    """Write a package and say what it is."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if len(given) != 1 or not given[0].endswith(".zip"):
        print("usage: python -m polyhop.serverless.package OUT.zip", file=sys.stderr)
        return 2
    try:
        package = find()
        size = package.write(Path(given[0]))
    except (PolyhopError, OSError) as error:
        print(f"package: {error}", file=sys.stderr)
        return 1
    print(
        f"{given[0]}: {size / 1e6:.1f} MB, {package.num_bytes / 1e6:.1f} MB unpacked, {len(package.files)} files"
    )
    print(f"handler {ENTRIES[0]}.handler, runtime python{sys.version_info.major}.{sys.version_info.minor}, "
          f"{platform.machine()}")  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
