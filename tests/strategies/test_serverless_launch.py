"""Options of functions: which launcher, and what is refused before anything is started."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("zmq")

from polyhop.errors import ConfigError, LaunchError, UnsupportedError
from polyhop.strategies.serverless import Config
from polyhop.strategies.serverless_launch import LAUNCHERS, Launching, _address_towards


def test_local_is_what_is_chosen() -> None:
    assert Config().function_launcher == LAUNCHERS[0] == "local"
    assert Launching(Config()).host is None
    assert Launching(Config(function_host="127.0.0.2")).host == "127.0.0.2"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"function_launcher": "lambda"}, "unknown function_launcher 'lambda'.* Known: aws, command, local, ray"),
        ({"function_launcher": "aws"}, "needs function_name: the name or ARN"),
        ({"function_name": "f"}, "function_name is for function_launcher='aws', and the launcher is 'local'"),
        ({"function_launcher": "ray", "function_endpoint": "http://h"}, "function_endpoint is for .*the launcher is 'ray'"),
        ({"function_region": "eu-west-1"}, "function_region is for function_launcher='aws'"),
        ({"function_launcher": "command"}, "needs function_command, such as 'ssh HOST python"),
        ({"function_launcher": "command", "function_command": "  "}, "needs function_command"),
        ({"function_launcher": "command", "function_command": "ssh 'x"}, "cannot be taken apart into words: No closing"),
        ({"function_launcher": "command", "function_command": "no-such-program x"}, "no program 'no-such-program' here"),
        ({"function_command": "ssh x"}, "function_command is for function_launcher='command', and the launcher is 'local'"),
        ({"function_launcher": "aws", "function_name": "f", "function_command": "ssh x"}, "function_command is for"),
        ({"function_launcher": "command", "function_command": "env", "function_name": "f"}, "function_name is for"),
        ({"function_host": "192.0.2.1"}, "function_host='192.0.2.1' is no address of this host"),
        ({"function_host": "no.such.host.invalid"}, "is no address of this host"),
        ({"function_memory": 64}, "function_memory=64: expected 128 to 10240 MB"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Launching(Config(**options))


def test_a_server_listens_where_functions_reach_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("boto3")
    made = Launching(Config(function_launcher="aws", function_name="f", function_endpoint="http://127.0.0.1:9",
                            function_region="eu-west-1"))  # fmt: skip
    assert made.host == "127.0.0.1"
    with pytest.raises(
        LaunchError, match=r"no\.such\.host\.invalid, the endpoint of AWS Lambda, cannot be reached"
    ):
        _address_towards("https://no.such.host.invalid")


@pytest.mark.parametrize(("launcher", "module", "extra"), [("aws", "boto3", "aws"), ("ray", "ray", "ray")])
def test_a_missing_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, launcher: str, module: str, extra: str
) -> None:
    real: Callable[..., Any] = builtins.__import__

    def without(name: str, *args: Any, **more: Any) -> Any:
        if name == module:
            raise ImportError(name)
        return real(name, *args, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    name = "f" if launcher == "aws" else None
    with pytest.raises(UnsupportedError, match=rf"pip install 'polyhop\[{extra}\]'"):
        Launching(Config(function_launcher=launcher, function_name=name))
