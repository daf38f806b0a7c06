"""AWS Lambda on this host, for tests: the service's own HTTP, the real runtime client, sandboxes that can be made to fail.

    boto3 -> Cloud (Invoke API) -> queue -> Sandbox: a Runtime API server and a process, python -m awslambdaric HANDLER

Each sandbox has a Runtime API server of its own, closed with it: one that died while it waited leaves nobody behind that
would swallow the next event. Deaths are seen by looking at processes, as HTTP does not tell them. Servers send without
delay. A sandbox sees the unpacked package and the standard library, and nothing else.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

__all__ = ["HANDLER", "NAME", "Cloud", "Event", "Sandbox"]

NAME, HANDLER = "polyhop-function", "polyhop.serverless.aws_entry.handler"
_MAX_EVENT_BYTES = 1_048_576
_RUNTIME = "/2018-06-01/runtime/"
_SETTINGS = (
    "OPENBLAS_CORETYPE",
    "OPENBLAS_L2_SIZE",
    "NPY_",
)  # that change bits: a function is made with them
_LOOKS_S = 0.02
_START_S = 120.0  # for the start of a sandbox, which its limit does not count


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else 40 ms for every call
    wbufsize = 1 << 16

    def log_message(self, *args: Any) -> None:
        return

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def answer(self, code: int, body: Any = b"", **headers: str) -> None:
        sent = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(sent)))
        self.end_headers()
        self.wfile.write(sent)
        self.wfile.flush()

    def refuse(self, code: int, kind: str) -> None:
        self.answer(
            code, {"Type": "User", "Message": kind}, x_amzn_ErrorType=kind, Content_Type="application/json"
        )


def _serving(handler: type[_Handler]) -> tuple[_Server, threading.Thread]:
    server = _Server(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    return server, thread


def _ended(server: _Server, thread: threading.Thread) -> None:
    server.shutdown()
    server.server_close()
    thread.join(timeout=10)
    assert not thread.is_alive(), "a server's thread is left"


@dataclass
class Event:
    """An invocation that was accepted."""

    payload: bytes
    request: str = field(default_factory=lambda: str(uuid.uuid4()))
    attempts: int = 0

    @property
    def function(self) -> str:
        return str(json.loads(self.payload).get("function", "?"))


class Sandbox:
    """A process that serves one event at a time, and the Runtime API it talks to."""

    def __init__(self, folder: Path, limit_s: float, handler: str) -> None:
        self.limit_s, self.deadline = limit_s, time.monotonic() + _START_S
        self.event: Event | None = None
        self.given: queue.Queue[Event | None] = queue.Queue()
        self.outcome: tuple[str, Any] | None = None  # of the event: ("response" | "error", what was said)
        self.init_error: Any = None
        self._server, self._thread = _serving(type("Runtime", (_RuntimeHandler,), {"sandbox": self}))
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 (read when it has ended)
        host, port = self._server.server_address[:2]
        environment = {
            "AWS_LAMBDA_RUNTIME_API": f"{host}:{port}",
            "AWS_LAMBDA_FUNCTION_NAME": NAME,
            "AWS_LAMBDA_FUNCTION_MEMORY_SIZE": "512",
            "PYTHONPATH": str(folder),
            "PYTHONNOUSERSITE": "1",
            "PATH": "/usr/bin:/bin",
            **{k: v for k, v in os.environ.items() if k == "POLYHOP_TEST_MARK" or k.startswith(_SETTINGS)},
        }
        command = [sys.executable, "-S", "-m", "awslambdaric", handler]
        self.process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log
        )

    @property
    def pid(self) -> int:
        return self.process.pid

    def take(self, event: Event) -> None:
        event.attempts += 1
        self.event, self.outcome, self.deadline = event, None, time.monotonic() + _START_S
        self.given.put(event)

    def said(self) -> str:
        """What it wrote."""
        self.log.flush()
        return os.pread(self.log.fileno(), 1 << 20, 0).decode(errors="replace")

    def close(self) -> str:
        """End it, whatever it does; what it wrote."""
        self.process.kill()  # also one that was stopped
        self.process.wait()
        self.given.put(None)
        _ended(self._server, self._thread)
        said = self.said()
        self.log.close()
        return said


class _RuntimeHandler(_Handler):
    sandbox: Sandbox

    def do_GET(self) -> None:
        if self.path != _RUNTIME + "invocation/next":
            self.answer(404)
            return
        event = self.sandbox.given.get()
        if event is None:  # it is gone
            self.close_connection = True
            return
        self.sandbox.deadline = time.monotonic() + self.sandbox.limit_s
        deadline_ms = round(1000 * (time.time() + self.sandbox.limit_s))
        self.answer(
            200,
            event.payload,
            Content_Type="application/json",
            Lambda_Runtime_Aws_Request_Id=event.request,
            Lambda_Runtime_Deadline_Ms=str(deadline_ms),
            Lambda_Runtime_Invoked_Function_Arn=f"arn:aws:lambda:eu-west-1:000000000000:function:{NAME}",
            Lambda_Runtime_Trace_Id="Root=1-0-0",
        )

    def do_POST(self) -> None:
        said = json.loads(self.body() or b"null")
        kind = self.path.rsplit("/", 1)[-1]
        if self.path == _RUNTIME + "init/error":
            self.sandbox.init_error = said
        elif self.sandbox.event is None or f"/{self.sandbox.event.request}/" not in self.path:
            self.answer(400)
            return
        else:
            self.sandbox.outcome = kind, said
        self.answer(202, {"status": "OK"})


class Cloud:
    """The service with one function. Faults are made by signals to ``pids``, and by what it asks at each invocation:
    ``throttles()``, whether it is refused; ``repeats()``, whether its event is delivered twice; ``delay_s()``, how long it
    waits.
    """

    def __init__(
        self,
        folder: Path,
        *,
        concurrency: int = 4,
        limit_s: float = 60.0,
        memory_mb: int = 512,
        throttles: Callable[[], bool] = lambda: False,
        delay_s: Callable[[], float] = lambda: 0.0,
        repeats: Callable[[], bool] = lambda: False,
        is_open: bool = True,
        handler: str = HANDLER,
    ) -> None:
        self.folder, self.concurrency, self.limit_s, self.memory_mb = folder, concurrency, limit_s, memory_mb
        self.throttles, self.delay_s, self.repeats = throttles, delay_s, repeats
        self.is_open, self.handler = is_open, handler
        self.counts: Counter[str] = Counter()
        self.settings: dict[str, Any] = {}
        self.results: list[tuple[str, str, Any]] = []  # (function, response | error | death, what was said)
        self.logs: list[str] = []
        self.payloads: list[bytes] = []
        self._waiting: deque[tuple[float, Event]] = deque()  # (not before, event)
        self._sandboxes: list[Sandbox] = []
        self._lock, self._over = threading.Lock(), threading.Event()
        self._server, self._serves = _serving(type("Invoke", (_InvokeHandler,), {"cloud": self}))
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._pool = threading.Thread(target=self._run, name="sandboxes", daemon=True)
        self._pool.start()

    def __enter__(self) -> Cloud:
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._pool.join(timeout=20)
        assert not self._pool.is_alive(), "the pool's thread is left"
        _ended(self._server, self._serves)
        with self._lock:
            for each in self._sandboxes:
                self.logs.append(each.close())
            self._sandboxes.clear()

    def pids(self, function: str | None = None) -> list[int]:
        """Processes that serve an event: of one function, or all."""
        with self._lock:
            busy = [(each.event.function, each.pid) for each in self._sandboxes if each.event is not None]
        return [pid for name, pid in busy if function in (None, name)]

    def submit(self, payload: bytes) -> None:
        with self._lock:
            for _ in range(2 if self.repeats() else 1):
                self._waiting.append((time.monotonic() + self.delay_s(), Event(payload)))
                self.counts["delivered"] += 1

    def settle(self, within_s: float = 60.0) -> None:
        """Wait until every invocation has come to its end, so that all results are there."""
        until = time.monotonic() + within_s
        while self._is_busy():
            assert time.monotonic() < until, f"still running: {self.pids()}"
            time.sleep(_LOOKS_S)

    def _is_busy(self) -> bool:
        with self._lock:
            return bool(self._waiting) or any(each.event is not None for each in self._sandboxes)

    def _run(self) -> None:
        while not self._over.wait(_LOOKS_S):
            with self._lock:
                for sandbox in list(self._sandboxes):
                    self._look(sandbox)
                self._hand_out()

    def _look(self, sandbox: Sandbox) -> None:
        """What has become of a sandbox."""
        event = sandbox.event
        if event is not None and sandbox.outcome is not None:
            self.results.append((event.function, *sandbox.outcome))
            self.counts[sandbox.outcome[0]] += 1
            if sandbox.outcome[0] == "error":
                self._again(event)
            sandbox.event, sandbox.outcome, sandbox.deadline = None, None, float("inf")
            return
        is_late = time.monotonic() >= sandbox.deadline
        if is_late or sandbox.process.poll() is not None:
            self._sandboxes.remove(sandbox)
            self.logs.append(sandbox.close())
            self.counts["late" if is_late else "died"] += 1
            if event is not None:
                self.results.append((event.function, "death", sandbox.init_error))
                self._again(event)

    def _again(self, event: Event) -> None:
        """As the service retries what failed, unless it was told not to."""
        if event.attempts <= self.settings.get("MaximumRetryAttempts", 2):
            self.counts["retried"] += 1
            self._waiting.append((time.monotonic() + 0.2, event))

    def _hand_out(self) -> None:
        while self._waiting and self._waiting[0][0] <= time.monotonic():
            free = next((each for each in self._sandboxes if each.event is None), None)
            if free is None and len(self._sandboxes) >= self.concurrency:
                return
            if free is None:
                free = Sandbox(self.folder, self.limit_s, self.handler)
                self._sandboxes.append(free)
                self.counts["sandboxes"] += 1
            free.take(self._waiting.popleft()[1])


class _InvokeHandler(_Handler):
    cloud: Cloud

    def do_POST(self) -> None:
        body, cloud = self.body(), self.cloud
        if self.path != f"/2015-03-31/functions/{NAME}/invocations":
            self.refuse(404, "ResourceNotFoundException")
        elif self.headers.get("X-Amz-Invocation-Type") != "Event":
            self.refuse(400, "InvalidParameterValueException")
        elif len(body) > _MAX_EVENT_BYTES:
            self.refuse(413, "RequestTooLargeException")
        elif cloud.throttles():
            cloud.counts["throttled"] += 1
            self.refuse(429, "TooManyRequestsException")
        else:
            cloud.counts["invoked"] += 1
            cloud.payloads.append(body)
            cloud.submit(body)
            self.answer(202)

    def do_PUT(self) -> None:
        given = json.loads(self.body())
        if self.path != f"/2019-09-25/functions/{NAME}/event-invoke-config":
            self.refuse(404, "ResourceNotFoundException")
        elif not self.cloud.is_open:
            self.refuse(403, "AccessDeniedException")
        else:
            self.cloud.settings = given
            self.answer(200, given, Content_Type="application/json")

    def do_GET(self) -> None:
        if self.path != f"/2015-03-31/functions/{NAME}/configuration":
            self.refuse(404, "ResourceNotFoundException")
        elif not self.cloud.is_open:
            self.refuse(403, "AccessDeniedException")
        else:
            told = {
                "FunctionName": NAME,
                "Timeout": round(self.cloud.limit_s),
                "MemorySize": self.cloud.memory_mb,
            }
            self.answer(200, told, Content_Type="application/json")
