"""The report of runs that still train, served to a browser on this machine: the same page, which asks for what is new.

Two addresses are known, the page and its data; nothing of the file system can be asked for. A page of another site cannot
read them through a name that it points here: only names of this host are answered.
"""

from __future__ import annotations

import gzip
import hashlib
import html
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from polyhop.errors import ConfigError, InputError
from polyhop.report.explain import Explainer
from polyhop.report.page import in_script, page
from polyhop.report.run_files import check_run

__all__ = ["Server"]

_DATA = "/data.json"
_REST = 4.0  # times as long as the last reading took, before the next
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


class Server:
    """``start`` answers in the background until ``close``; ``address`` is where."""

    def __init__(self, runs: Sequence[Path], host: str = "127.0.0.1", port: int = 0) -> None:
        self._live = _Live(runs)
        try:
            self._http = _Http((host, port), _Handler)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"cannot listen on {host}:{port}: {error}; give another --port, or 0 for any"
            ) from error
        self._http.live, self._http.names = self._live, {host, *_LOOPBACK} if host in _LOOPBACK else None
        self.address = f"http://{host}:{self._http.server_address[1]}/"
        self._thread = threading.Thread(target=self._http.serve_forever, name="report", daemon=True)

    def missing(self) -> list[Path]:
        """Folders that are not there yet, or are no runs yet."""
        return self._live.missing()

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()


class _Live:
    """What is known of the runs, read again when a file has changed."""

    def __init__(self, runs: Sequence[Path]) -> None:
        self._runs, self._lock = list(runs), threading.Lock()
        self._explainer: Explainer | None = None
        self._tag, self._document = "", dict[str, Any]()
        self._read_at, self._took_s = 0.0, 0.0

    def missing(self) -> list[Path]:
        found = []
        for run in self._runs:
            try:
                check_run(run)
            except InputError:
                found.append(run)
        return found

    def now(self) -> tuple[str, dict[str, Any]]:
        """(a tag that changes when anything does, the document)."""
        with self._lock:
            tag, began = self._files_tag(), time.monotonic()
            if tag != self._tag and began - self._read_at >= _REST * self._took_s:
                self._explainer = self._explainer or Explainer(self._runs)
                self._document = self._explainer.document()
                self._tag, self._read_at = tag, time.monotonic()
                self._took_s = self._read_at - began
            return self._tag, self._document

    def _files_tag(self) -> str:
        told = []
        for run in self._runs:
            for path in sorted(run.glob("*.json*")):
                if path.name.startswith(".tmp-"):
                    continue  # not yet complete
                with suppress(FileNotFoundError):  # renamed or removed since it was listed
                    stat = path.stat()
                    told.append((path.name, stat.st_size, stat.st_mtime_ns, time.time() - stat.st_mtime < 60))
        return hashlib.blake2b(repr(told).encode(), digest_size=12).hexdigest()


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    live: _Live
    names: set[str] | None  # that requests may call this host by; None: any


class _Handler(BaseHTTPRequestHandler):
    server: _Http
    server_version, sys_version = "polyhop", ""

    def do_GET(self) -> None:
        """The page, or its data."""
        try:
            self._answer_get()
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True  # the browser left

    def _answer_get(self) -> None:
        asked = self.headers.get("Host", "").rsplit(":", 1)[0].strip("[]")
        if self.server.names is not None and asked not in self.server.names:
            self._answer(403, b"this report is for this host only\n", "text/plain")
        elif self.path not in ("/", _DATA):
            self._answer(404, b"there is only / and /data.json\n", "text/plain")
        elif missing := self.server.live.missing():
            self._answer(200 if self.path == "/" else 503, _waiting(missing), "text/html")
        elif self.path == "/":
            _, document = self.server.live.now()
            self._answer(200, page(document, live=_DATA[1:]).encode(), "text/html")
        else:
            self._answer_data()

    def _answer_data(self) -> None:
        tag, document = self.server.live.now()
        if self.headers.get("If-None-Match") == f'"{tag}"':
            self._answer(304, b"", "application/json", tag)
        else:
            text = in_script({**document, "live": _DATA[1:]}).encode()
            self._answer(200, text, "application/json", tag)

    def _answer(self, status: int, body: bytes, kind: str, tag: str | None = None) -> None:
        self.send_response(status)
        if body and len(body) > 10_000 and "gzip" in self.headers.get("Accept-Encoding", ""):
            body = gzip.compress(body, 1)
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        if tag is not None:
            self.send_header("ETag", f'"{tag}"')
        self.end_headers()
        if status != 304:
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: the terminal belongs to whoever started the server."""


def _waiting(missing: Sequence[Path]) -> bytes:
    """A page that comes back until the runs are there."""
    names = html.escape(", ".join(map(str, missing)))
    return (
        "<!doctype html><html lang='en'><meta charset='utf-8'><meta http-equiv='refresh' content='2'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'><meta name='color-scheme' content='light dark'>"
        "<title>polyhop: waiting</title><link rel='icon' href='data:,'>"
        f"<p style='font-family: sans-serif; margin: 3em'>Waiting for a run in {names} …</p></html>"
    ).encode()
