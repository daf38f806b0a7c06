"""How strategy ``serverless`` starts its functions: on this host, by a command, on AWS Lambda, or on a Ray cluster.

    local     processes of this host
    command   runs of a command (ssh, srun, docker run -i, ip netns exec) that ends in python -m polyhop.serverless.function
    aws       invocations of a Lambda function, made of what ``python -m polyhop.serverless.package`` writes
    ray       tasks of a Ray cluster

Functions dial out to their server, so it must listen where they reach it: on AWS at the address that this host has on its
way to Lambda (in a VPC: its private one), on Ray at its address in the cluster, otherwise where other ranks reach it;
``function_host`` says another.
"""

from __future__ import annotations

import shlex
import shutil
import socket
from typing import Protocol
from urllib.parse import urlsplit

from polyhop.errors import ConfigError, LaunchError, unknown
from polyhop.serverless.crew import Launcher
from polyhop.serverless.function import Order
from polyhop.serverless.post import Post

__all__ = ["LAUNCHERS", "FunctionOptions", "Launching"]

LAUNCHERS = ("local", "command", "aws", "ray")
_FOR_AWS = ("function_name", "function_endpoint", "function_region")


class FunctionOptions(Protocol):
    """What is used of the strategy's options."""

    @property
    def functions(self) -> int | str: ...
    @property
    def function_launcher(self) -> str: ...
    @property
    def function_name(self) -> str | None: ...
    @property
    def function_endpoint(self) -> str | None: ...
    @property
    def function_region(self) -> str | None: ...
    @property
    def function_memory(self) -> int | None: ...
    @property
    def function_command(self) -> str | None: ...
    @property
    def function_host(self) -> str | None: ...


class Launching:
    """The launcher of a rank, in two steps: where the server must listen (``host``), then, once it does, ``launcher``."""

    def __init__(self, options: FunctionOptions) -> None:
        self._options = options
        _check(options)
        self.host = options.function_host  # None: wherever ranks reach it
        if options.function_launcher == "ray":
            from polyhop.serverless.ray_launcher import RayCluster

            self._cluster = RayCluster(options.functions if isinstance(options.functions, int) else None)
            self.host = self.host or self._cluster.address
        elif options.function_launcher == "aws":
            from polyhop.serverless.aws import lambda_client

            self._client = lambda_client(options.function_endpoint, options.function_region)
            self.host = self.host or _address_towards(self._client.meta.endpoint_url)

    def launcher(self, order: Order, post: Post) -> Launcher:
        """Of functions that do not run on this host. ``order`` is a model of what they are told."""
        options = self._options
        assert options.function_launcher in ("command", "aws", "ray"), options.function_launcher
        if options.function_launcher == "command":
            from polyhop.serverless.command import CommandLauncher

            return CommandLauncher(order, command=shlex.split(options.function_command or ""), news=post.news)
        if options.function_launcher == "ray":
            from polyhop.serverless.ray_launcher import RayLauncher

            return RayLauncher(order, cluster=self._cluster)
        from polyhop.serverless.aws import AwsLauncher

        assert options.function_name is not None, "checked"
        return AwsLauncher(
            order,
            function_name=options.function_name,
            news=post.news,
            memory_mb=options.function_memory,
            client=self._client,
        )


def _check(options: FunctionOptions) -> None:
    launcher = options.function_launcher
    if launcher not in LAUNCHERS:
        raise ConfigError(unknown("function_launcher", launcher, LAUNCHERS))
    if launcher == "aws" and not options.function_name:
        raise ConfigError(
            "function_launcher='aws' needs function_name: the name or ARN of a Lambda function, made of what python -m "
            "polyhop.serverless.package writes"
        )
    for owner, names in (("aws", _FOR_AWS), ("command", ("function_command",))):
        given = [name for name in names if getattr(options, name) is not None]
        if given and launcher != owner:
            raise ConfigError(
                f"{given[0]} is for function_launcher={owner!r}, and the launcher is {launcher!r}"
            )
    if launcher == "command":
        _check_command(options.function_command)
    if options.function_host is not None:
        _check_host(options.function_host)
    if options.function_memory is not None and not 128 <= options.function_memory <= 10240:
        raise ConfigError(f"function_memory={options.function_memory}: expected 128 to 10240 MB")


def _check_command(command: str | None) -> None:
    """Refuse what could not be run, before anything is started."""
    example = "such as 'ssh HOST python -m polyhop.serverless.function'"
    try:
        words = shlex.split(command or "")
    except ValueError as error:
        raise ConfigError(f"function_command={command!r} cannot be taken apart into words: {error}") from None
    if not words:
        raise ConfigError(f"function_launcher='command' needs function_command, {example}")
    if shutil.which(words[0]) is None:
        raise ConfigError(
            f"function_command={command!r}: there is no program {words[0]!r} here; give one, {example}"
        )


def _check_host(host: str) -> None:
    """It must be an address of this host."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind((host, 0))
    except OSError as error:
        raise ConfigError(
            f"function_host={host!r} is no address of this host ({error.strerror or error}): give the one at which "
            "functions and other ranks reach it"
        ) from None


def _address_towards(url: str) -> str:
    """The address that this host has on its way to another. Nothing is sent."""
    parts = urlsplit(url)
    try:
        family, _, _, _, target = socket.getaddrinfo(
            parts.hostname, parts.port or 443, socket.AF_INET, socket.SOCK_DGRAM
        )[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError as error:
        raise LaunchError(
            f"{parts.hostname}, the endpoint of AWS Lambda, cannot be reached: {error}"
        ) from error
