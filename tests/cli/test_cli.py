"""The frame of the command line: help, version, wrong usage, and where errors go."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import typer

import polyhop as package
from polyhop.cli import app, console

VERBS = ("train", "predict", "data", "env", "bench")


def test_help_lists_every_verb(polyhop) -> None:
    shown = polyhop("--help")
    assert shown.code == 0
    assert all(f"\n  {verb} " in shown.out for verb in VERBS)


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_a_verb_has_examples(polyhop, verb: str) -> None:
    shown = polyhop(verb, "--help")
    assert shown.code == 0
    assert f"\n    polyhop {verb}" in shown.out.split("Examples:")[1]


def test_examples_are_valid_usage() -> None:
    """Every option that a help text shows exists."""
    group = typer.main.get_command(app)
    for verb, command in group.commands.items():  # type: ignore[attr-defined]
        known = {
            name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)
        }
        for line in (command.help or "").splitlines():
            if line.strip().startswith("polyhop ") and verb != "bench":
                used = {word for word in line.split() if word.startswith("--")}
                assert used <= known, line


def test_version(polyhop) -> None:
    assert polyhop("--version").out == f"polyhop {package.__version__}\n"


@pytest.mark.parametrize(
    "arguments",
    [
        ["no-such-verb"],
        ["train"],
        ["train", "tiny", "--no-such-option"],
        ["train", "tiny", "--layers", "two"],
        ["train", "tiny", "--model", "sgae"],
        ["train", "tiny", "--fanout", "many"],
        ["train", "tiny", "--fanout", "5"],
        ["train", "tiny", "--overwrite"],
        ["predict", "run", "--out", "scores.txt"],
    ],
    ids=" ".join,
)
def test_wrong_usage_is_code_2(polyhop, arguments: list[str]) -> None:
    shown = polyhop(*arguments)
    assert shown.code == 2
    assert shown.out == ""
    assert "Usage: polyhop" in shown.err


def test_wrong_usage_suggests(polyhop) -> None:
    assert "Did you mean 'sage'?" in polyhop("train", "tiny", "--model", "sgae").err


def test_error_is_one_line_and_code_1(polyhop) -> None:
    shown = polyhop("data", "debian-package")
    assert shown.code == 1
    assert shown.err.startswith(
        "polyhop: error: unknown data set 'debian-package'. Did you mean 'debian-packages'?"
    )
    assert shown.err.count("\n") == 1


def test_traceback_on_request(polyhop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYHOP_TRACEBACK", "1")
    with pytest.raises(package.errors.DatasetError):
        polyhop("data", "debian-package")


def raised(error: BaseException, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    with pytest.raises(SystemExit) as leave, console.explained():
        raise error
    return int(leave.value.code), capsys.readouterr().err  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (package.errors.ConfigError("two\n  lines"), 1, "polyhop: error: two lines\n"),
        (OSError(28, "No space left on device", "a.npy"), 1, "polyhop: error: [Errno 28] No space left"),
        (MemoryError(), 1, "polyhop: error: out of memory\n"),
        (
            ModuleNotFoundError("No module named 'scipy'"),
            1,
            "polyhop: error: No module named 'scipy' ('polyhop env'",
        ),
        (package.errors.Interrupted("stopped by SIGTERM after step 3"), 143, "polyhop: stopped by SIGTERM"),
        (package.errors.Interrupted("stopped by SIGINT after step 3"), 130, "polyhop: stopped by SIGINT"),
        (package.errors.PolyhopError(""), 1, "polyhop: error: PolyhopError\n"),
    ],
)
def test_known_errors(error: BaseException, code: int, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert raised(error, capsys)[0] == code
    with pytest.raises(SystemExit), console.explained():
        raise error
    assert capsys.readouterr().err.startswith(line)


def test_other_errors_are_ours_to_see(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ZeroDivisionError), console.explained():
        raise ZeroDivisionError


def test_json_has_no_nan(capsys: pytest.CaptureFixture[str]) -> None:
    console.print_json({"a": float("nan"), "b": [1.5, float("inf")], 3: {"c": None}})
    assert (
        capsys.readouterr().out
        == '{\n  "a": null,\n  "b": [\n    1.5,\n    null\n  ],\n  "3": {\n    "c": null\n  }\n}\n'
    )


def test_module_is_the_command() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "polyhop", "--version"], capture_output=True, text=True, check=True
    )
    assert run.stdout == f"polyhop {package.__version__}\n"


def test_warnings_are_one_line_and_a_closed_pipe_is_quiet() -> None:
    code = (
        "import warnings, polyhop.cli.console as c\n"
        "with c.explained():\n"
        "    warnings.warn('a\\n  b')\n"
        "    c.say('said')\n"
        "    print('x', flush=True)\n"
        "    raise BrokenPipeError\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout) == (141, "x\n")
    assert run.stderr == "polyhop: warning: a b\nsaid\n"


def test_plain_ascii_terminals_are_noticed() -> None:
    code = "from polyhop.cli import console; print(console.is_ascii())"
    for encoding, expected in (("ascii", "True\n"), ("utf-8", "False\n")):
        run = subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONIOENCODING": encoding, "PYTHONPATH": os.environ.get("PYTHONPATH", "")},
        )
        assert run.stdout == expected
