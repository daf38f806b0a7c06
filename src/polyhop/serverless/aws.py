"""Launcher ``aws``: functions are asynchronous invocations of one AWS Lambda function.

The function must be there already, made of what ``package`` writes. An invocation gives no handle, so the launcher is
told by its caller what a server heard (``news``: the post's). A function counts as alive from its invocation until it said
Bye, was lost, or its time limit has passed; one that never says Hello, until ``comes_s`` have passed. Lambda may start an
invocation twice or late: the ledger makes good what comes of it, so here nothing is done about it but asking for no retries.

Throttling and passing faults of the service put off further invocations, longer each time and by chance; nothing waits here.
"""

from __future__ import annotations

import json
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from polyhop.errors import ConfigError, LaunchError, UnsupportedError
from polyhop.serverless.function import Order
from polyhop.serverless.local import Ended
from polyhop.serverless.mail import Came, Left

__all__ = ["MAX_ORDER_BYTES", "AwsLauncher", "lambda_client"]

MAX_ORDER_BYTES = 1_000_000  # of an asynchronous invocation: the platform's limit is 1 MB
_LOG = logging.getLogger("polyhop.serverless")
_LIMIT_S = 900.0  # the longest that Lambda lets a function run
_SLACK_S = 5.0  # after the limit, before a function that says nothing counts as gone
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.2, 20.0
_REFUSED_S = 300.0  # nothing could be started for so long, and nothing runs: the run ends
_PATIENCE_S = 3.0
_PASSING = {
    "TooManyRequestsException", "ThrottlingException", "Throttling", "EC2ThrottledException", "ServiceException",
    "InternalFailure", "ServiceUnavailable", "ServiceUnavailableException", "ENILimitReachedException",
    "SnapStartNotReadyException", "ResourceNotReadyException", "RequestTimeout",
}  # fmt: skip


def lambda_client(endpoint: str | None = None, region: str | None = None) -> Any:
    """boto3's client of Lambda; credentials are found as boto3 finds them. Faults are ours to retry."""
    try:
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError
    except ImportError as error:
        raise UnsupportedError(
            "functions on AWS Lambda need boto3: pip install 'polyhop[aws]', or use launcher 'local'"
        ) from error
    options = Config(
        retries={"total_max_attempts": 1}, connect_timeout=5, read_timeout=20, tcp_keepalive=True
    )
    try:
        return boto3.client("lambda", endpoint_url=endpoint, region_name=region, config=options)
    except (BotoCoreError, ValueError) as error:
        raise ConfigError(f"AWS Lambda cannot be used: {error}") from error


@dataclass
class _Invoked:
    start_s: float  # Unix
    gone_at: float  # by the launcher's clock
    came_s: float | None = None


class AwsLauncher:
    """``order`` is a model of what functions are told; each gets a name of its own. ``most``: of functions at a time."""

    def __init__(
        self,
        order: Order,
        *,
        function_name: str,
        news: Callable[[], list[Came | Left]],
        endpoint: str | None = None,
        region: str | None = None,
        most: int = 1000,
        memory_mb: int | None = None,
        comes_s: float = 60.0,
        client: Any = None,
        clock: Callable[[], float] = time.monotonic,
        seed: int | None = None,
    ) -> None:
        self._client = client or lambda_client(endpoint, region)
        self._name, self._news, self._most = function_name, news, most
        self._comes_s, self._clock = comes_s, clock
        self._rng = random.Random(seed)
        self._invoked: dict[str, _Invoked] = {}
        self._gone: list[Ended] = []
        self._not_before, self._wait_s = clock(), 0.0
        self._last_success = clock()
        self.num_started = self.num_throttled = 0
        self._order = self._fitted(order, memory_mb)
        self._retries_no_more()

    @property
    def alive(self) -> list[str]:
        """Names of the functions that were started and are not known to be gone."""
        return list(self._invoked)

    @property
    def memory_mb(self) -> int:
        """Of its functions, as far as it may be read."""
        return self._order.memory_mb

    def ensure(self, wanted: int) -> list[str]:
        """Start functions until so many are alive, or the service says to wait; names of the new ones."""
        made: list[str] = []
        missing = min(wanted, self._most) - len(self._invoked)
        while len(made) < missing and self._clock() >= self._not_before:
            name = self._invoke()
            if name is None:
                break
            made.append(name)
        return made

    def ended(self) -> list[Ended]:
        """Functions that are gone, as far as can be known, since the last call."""
        for each in self._news():
            at = self._invoked.get(each.function)
            if at is None:
                continue  # started twice, or late
            if isinstance(each, Came):
                at.came_s, at.gone_at = time.time(), self._clock() + self._order.limit_s + _SLACK_S
            else:
                self._end(each.function, int(each.is_failure), each.reason)
        for name, at in list(self._invoked.items()):
            if self._clock() >= at.gone_at:
                never = f"it did not dial in within {self._comes_s:g} s: can functions reach {self._order.address}?"
                self._end(name, 1, never if at.came_s is None else "its time limit has passed")
        found, self._gone = self._gone, []
        return found

    def close(self) -> list[Ended]:
        """Wait a while for functions to end; those that do not are left to their limit, and told as ended now."""
        deadline = self._clock() + _PATIENCE_S
        found = self.ended()
        while self._invoked and self._clock() < deadline:
            time.sleep(0.05)
            found += self.ended()
        for name in list(self._invoked):
            self._end(name, 0, "was not heard to end")
        close = getattr(self._client, "close", None)
        if close is not None:
            close()
        return found + self._gone

    def _end(self, name: str, code: int, said: str) -> None:
        at = self._invoked.pop(name)
        self._gone.append(Ended(name, code, at.start_s, time.time(), said))

    def _invoke(self) -> str | None:
        """Name of a function that was started; None: not now."""
        name = f"{self._order.function}-{self.num_started}"
        payload = json.dumps(replace(self._order, function=name).to_json()).encode()
        if len(payload) > MAX_ORDER_BYTES:
            raise ConfigError(f"an order of {len(payload)} bytes; {MAX_ORDER_BYTES} are allowed")
        start_s = time.time()
        try:
            self._client.invoke(FunctionName=self._name, InvocationType="Event", Payload=payload)
        except Exception as error:
            self._put_off(error)
            return None
        self.num_started += 1
        self._invoked[name] = _Invoked(start_s, self._clock() + self._comes_s)
        self._wait_s, self._last_success = 0.0, self._clock()
        return name

    def _put_off(self, error: Exception) -> None:
        """Wait longer, by chance, after every refusal in a row; raise if waiting cannot help."""
        code = _code(error)
        if code is not None and code not in _PASSING:
            raise LaunchError(f"AWS Lambda does not start function {self._name!r}: {error}") from None
        is_hopeless = not self._invoked and self._clock() - self._last_success > _REFUSED_S
        if is_hopeless:
            raise LaunchError(
                f"AWS Lambda has started no function {self._name!r} for {_REFUSED_S:g} s: {error}"
            ) from None
        self.num_throttled += 1
        self._wait_s = min(max(2 * self._wait_s, _FIRST_WAIT_S), _LONGEST_WAIT_S)
        self._not_before = self._clock() + self._wait_s * self._rng.uniform(0.5, 1.0)
        _LOG.info(
            "%s of AWS Lambda: no more functions for up to %.1f s", code or type(error).__name__, self._wait_s
        )

    def _fitted(self, order: Order, memory_mb: int | None) -> Order:
        """The order with limit and memory of the function, where they may be read."""
        limit_s, has_mb = _LIMIT_S, None
        try:
            told = self._client.get_function_configuration(FunctionName=self._name)
            limit_s, has_mb = float(told["Timeout"]), int(told["MemorySize"])
        except Exception as error:
            code = _code(error)
            if code == "ResourceNotFoundException":
                raise ConfigError(
                    f"AWS Lambda has no function {self._name!r} here: make it of what python -m "
                    "polyhop.serverless.package writes, or name another"
                ) from None
            _LOG.info("limits of function %r may not be read (%s)", self._name, code or type(error).__name__)
        if memory_mb is not None and has_mb is not None and memory_mb != has_mb:
            raise ConfigError(
                f"function {self._name!r} has {has_mb} MB, and {memory_mb} MB are asked for: a function's memory is set "
                "where it is made; leave function_memory out, or change the function"
            )
        memory = has_mb or memory_mb or order.memory_mb
        return replace(order, limit_s=min(order.limit_s, limit_s), memory_mb=memory)

    def _retries_no_more(self) -> None:
        """Lambda would start what failed again, up to twice: leases do that better. Refusal is no harm."""
        try:
            self._client.put_function_event_invoke_config(
                FunctionName=self._name, MaximumRetryAttempts=0, MaximumEventAgeInSeconds=60
            )
        except Exception as error:
            _LOG.info(
                "retries of function %r stay as they are (%s)",
                self._name,
                _code(error) or type(error).__name__,
            )


def _code(error: Exception) -> str | None:
    """The service's word for an error; None: there was no answer."""
    response = getattr(error, "response", None)
    return str(response.get("Error", {}).get("Code", "unknown")) if isinstance(response, dict) else None
