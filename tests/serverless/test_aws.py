"""Launcher ``aws`` and its handler: who counts as alive, what is put off, what is refused, and how it is told."""

from __future__ import annotations

import builtins
import json
import logging
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from cloud import NAME, Cloud  # type: ignore[import-not-found]
from remains import Remains  # type: ignore[import-not-found]

from polyhop.errors import ConfigError, LaunchError, UnsupportedError
from polyhop.serverless import aws
from polyhop.serverless.aws import AwsLauncher, lambda_client
from polyhop.serverless.aws_entry import handler
from polyhop.serverless.function import Order
from polyhop.serverless.mail import Came, Left
from polyhop.serverless.secrets import KeyPair

pytest.importorskip("boto3")
pytest.importorskip("cryptography")
KEYS = KeyPair.draw()
ORDER = Order("job", "server0", "tcp://127.0.0.1:1", KEYS.public, KEYS.public, KEYS.secret, idle_s=0.2)


class Said(Exception):  # noqa: N818 (botocore's is ClientError)
    """An answer of the service that is an error, as botocore has it."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.response = {"Error": {"Code": code}}


class Client:
    """Lambda as far as a launcher sees it: says what it is told to, and what was asked."""

    def __init__(self, timeout_s: int = 30, memory_mb: int = 512) -> None:
        self.told = {"Timeout": timeout_s, "MemorySize": memory_mb}
        self.errors: list[Exception] = []
        self.orders: list[dict[str, Any]] = []
        self.settings: dict[str, Any] = {}
        self.refusal: Exception | None = None

    def invoke(self, FunctionName: str, InvocationType: str, Payload: bytes) -> None:
        assert (FunctionName, InvocationType) == (NAME, "Event")
        if self.errors:
            raise self.errors.pop(0)
        self.orders.append(json.loads(Payload))

    def get_function_configuration(self, FunctionName: str) -> Any:
        if self.refusal is not None:
            raise self.refusal
        return self.told

    def put_function_event_invoke_config(self, **given: Any) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.settings = given


class Scene:
    """A launcher, its clock, and what the post would tell it."""

    def __init__(self, client: Client | None = None, **options: Any) -> None:
        self.now, self.news = 100.0, list[Came | Left]()
        self.client = client or Client()
        self.launcher = AwsLauncher(
            ORDER,
            function_name=NAME,
            news=self._told,
            client=self.client,
            clock=lambda: self.now,
            seed=1,
            **options,
        )

    def _told(self) -> list[Came | Left]:
        told, self.news = self.news, []
        return told


def test_alive_until_it_says_so_or_is_lost() -> None:
    scene = Scene()
    assert scene.launcher.ensure(3) == ["server0-0", "server0-1", "server0-2"]
    assert [order["function"] for order in scene.client.orders] == scene.launcher.alive
    assert scene.launcher.ensure(2) == []
    scene.news = [Came("server0-0"), Left("server0-0", False, "idle"), Left("server0-2", True, "its connection is gone"),
                  Left("stranger", True, ""), Left("server0-0", False, "started twice")]  # fmt: skip
    assert [(e.function, e.exit_code, e.said) for e in scene.launcher.ended()] == [
        ("server0-0", 0, "idle"), ("server0-2", 1, "its connection is gone")]  # fmt: skip
    assert scene.launcher.alive == ["server0-1"]
    assert scene.launcher.ended() == []
    assert scene.launcher.ensure(2) == ["server0-3"]


def test_one_that_never_comes_and_one_that_stays_too_long() -> None:
    """From its invocation a function has ``comes_s`` to say Hello, and from then its limit."""
    scene = Scene(Client(timeout_s=30), comes_s=10.0)
    scene.launcher.ensure(2)
    scene.now, scene.news = 109.0, [Came("server0-1")]
    assert scene.launcher.ended() == []
    scene.now = 110.0
    (gone,) = scene.launcher.ended()
    assert (gone.function, gone.is_failure) == ("server0-0", True)
    assert "did not dial in within 10 s: can functions reach tcp://127.0.0.1:1?" in gone.said
    scene.now = 109.0 + 30 + 4
    assert scene.launcher.ended() == []
    scene.now = 109.0 + 30 + 5
    (gone,) = scene.launcher.ended()
    assert (gone.function, gone.exit_code, gone.said) == ("server0-1", 1, "its time limit has passed")


def test_throttling_puts_off_longer_each_time_and_then_no_more() -> None:
    scene = Scene()
    scene.client.errors = [
        Said("TooManyRequestsException"),
        TimeoutError("no answer"),
        Said("ServiceException"),
    ]
    refused, made = [], list[str]()
    while not made:
        left = len(scene.client.errors)
        made = scene.launcher.ensure(2)
        if len(scene.client.errors) < left:
            refused.append(scene.now)
        scene.now += 0.01
    assert made == ["server0-0", "server0-1"]
    assert scene.launcher.num_throttled == len(refused) == 3
    times = [*refused, scene.now - 0.01]
    for wait_s, most_s in zip((b - a for a, b in pairwise(times)), (0.2, 0.4, 0.8), strict=True):
        assert most_s / 2 <= wait_s <= most_s + 0.02
    scene.client.errors = [Said("TooManyRequestsException")]
    scene.launcher.ensure(3)
    scene.now += 0.21  # after a success it begins anew
    assert scene.launcher.ensure(3) == ["server0-2"]


def test_refusals_that_waiting_cannot_mend() -> None:
    scene = Scene()
    scene.client.errors = [Said("AccessDeniedException")]
    with pytest.raises(LaunchError, match=rf"does not start function '{NAME}': AccessDeniedException"):
        scene.launcher.ensure(1)
    scene.client.errors = [Said("TooManyRequestsException")] * 2
    assert scene.launcher.ensure(1) == []
    scene.now += 301
    with pytest.raises(LaunchError, match="for 300 s: TooManyRequestsException"):
        scene.launcher.ensure(1)


def test_no_more_than_may_be_at_a_time() -> None:
    scene = Scene(most=3)
    assert len(scene.launcher.ensure(10)) == 3
    assert scene.launcher.ensure(10) == []


def test_limits_and_memory_are_those_of_the_function() -> None:
    scene = Scene(Client(timeout_s=30, memory_mb=512))
    assert scene.client.settings == {
        "FunctionName": NAME,
        "MaximumRetryAttempts": 0,
        "MaximumEventAgeInSeconds": 60,
    }
    scene.launcher.ensure(1)
    assert (scene.client.orders[0]["limit_s"], scene.client.orders[0]["memory_mb"]) == (30.0, 512)
    with pytest.raises(ConfigError, match="has 512 MB, and 1024 MB are asked for"):
        Scene(memory_mb=1024)
    refused = Client()
    refused.refusal = Said("AccessDeniedException")
    scene = Scene(refused, memory_mb=1024)  # may be invoked, and nothing else: no harm
    scene.launcher.ensure(1)
    assert (scene.client.orders[0]["limit_s"], scene.client.orders[0]["memory_mb"]) == (600.0, 1024)
    refused.refusal = Said("ResourceNotFoundException")
    with pytest.raises(ConfigError, match=rf"has no function '{NAME}' here"):
        Scene(refused)


def test_an_order_that_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aws, "MAX_ORDER_BYTES", 100)
    with pytest.raises(ConfigError, match="100 are allowed"):
        Scene().launcher.ensure(1)


def test_close_waits_for_what_is_still_said(monkeypatch: pytest.MonkeyPatch) -> None:
    scene = Scene()
    scene.launcher.ensure(2)
    monkeypatch.setattr(aws.time, "sleep", lambda s: setattr(scene, "now", scene.now + s))
    scene.news = [Left("server0-1", False, "the run is over")]
    told = {each.function: (each.exit_code, each.said) for each in scene.launcher.close()}
    assert told == {"server0-1": (0, "the run is over"), "server0-0": (0, "was not heard to end")}
    assert scene.launcher.alive == []
    assert scene.now >= 103.0


def test_without_boto3_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **more: Any) -> Any:
        if name.split(".")[0] in ("boto3", "botocore"):
            raise ImportError(name)
        return real(name, *args, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UnsupportedError, match=r"pip install 'polyhop\[aws\]'"):
        lambda_client()


def test_without_a_region_it_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("AWS_DEFAULT_REGION", "AWS_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"AWS Lambda cannot be used: .*region"):
        lambda_client()


class Platform:
    def get_remaining_time_in_millis(self) -> int:
        return 5000


def test_the_handler_ends_in_time_and_tells_no_secret(caplog: pytest.LogCaptureFixture) -> None:
    """Nobody answers at its address: it ends. What is no order is refused, without a word of what it held."""
    told = handler({**ORDER.to_json()}, Platform())
    assert (told["reason"], told["tasks"]) == ("no answer", 0)
    told = handler({**ORDER.to_json(), "limit_s": 0.3, "idle_s": 60.0}, Platform())
    assert told["reason"] == "time"
    with caplog.at_level(logging.DEBUG):
        for wrong in ({"secret": KEYS.secret}, {**ORDER.to_json(), "more": KEYS.secret}, [KEYS.secret],
                      {**ORDER.to_json(), "idle_s": KEYS.secret}):  # fmt: skip
            with pytest.raises(ConfigError) as refused:
                handler(wrong, Platform())
            assert KEYS.secret not in str(refused.value)
    assert KEYS.secret not in caplog.text


def test_the_service_says_what_lambda_says(
    function_folder: Path, remains: Remains, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Real boto3 against the harness: its refusals are those the launcher knows."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    with Cloud(function_folder, throttles=lambda: True) as cloud:
        client = lambda_client(cloud.endpoint, "eu-west-1")
        launcher = AwsLauncher(ORDER, function_name=NAME, news=list, client=client)
        assert cloud.settings == {"MaximumRetryAttempts": 0, "MaximumEventAgeInSeconds": 60}
        assert launcher.ensure(1) == []
        assert (
            launcher.num_throttled == cloud.counts["throttled"] == 1
        )  # asked once: botocore does not retry by itself
        with pytest.raises(ConfigError, match="has no function 'other' here"):
            AwsLauncher(ORDER, function_name="other", news=list, client=client)
        for size, kind in ((1_100_000, "RequestTooLargeException"), (10, "TooManyRequestsException")):
            with pytest.raises(Exception, match=kind) as refused:
                client.invoke(FunctionName=NAME, InvocationType="Event", Payload=b'"' + b"x" * size + b'"')
            assert aws._code(refused.value) == kind
        client.close()
