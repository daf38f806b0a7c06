"""The server answers two addresses and nothing else, says when nothing is new, and waits for a run that is not there yet."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import pytest

from polyhop.errors import ConfigError
from polyhop.report.serve import Server

pytest.importorskip("plotly")


@contextmanager
def served(*runs: Path) -> Iterator[Server]:
    server = Server(runs)
    server.start()
    try:
        yield server
    finally:
        server.close()


def ask(server: Server, path: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    address = urlsplit(server.address)
    with closing(http.client.HTTPConnection(address.hostname or "", address.port, timeout=20)) as line:
        line.putrequest(method, path, skip_host="Host" in headers)
        for name, value in headers.items():
            line.putheader(name.replace("_", "-"), value)
        line.endheaders()
        answer = line.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()


def test_the_page_and_its_data(make_run: Any) -> None:
    with served(make_run()) as server:
        status, headers, body = ask(server, "/")
        assert status == 200
        assert b'"live":"data.json"' in body
        assert headers["Content-Type"] == "text/html; charset=utf-8"
        status, headers, body = ask(server, "/data.json")
        assert status == 200
        assert json.loads(body)["runs"][0]["numbers"]["epochs"] == 5
        assert ask(server, "/data.json", If_None_Match=headers["ETag"])[0] == 304


def test_what_is_new_is_told(make_run: Any, made: SimpleNamespace) -> None:
    run = make_run(epochs=3, is_done=False)
    with served(run) as server:
        _, headers, _ = ask(server, "/data.json")
        for rank in range(2):
            made.write(run / f"trace-rank{rank}.jsonl", made.rank_lines(rank, 6))
        server._live._took_s = 0.0  # no rest for the test
        status, again, body = ask(server, "/data.json", If_None_Match=headers["ETag"])
        assert status == 200
        assert again["ETag"] != headers["ETag"]
        assert json.loads(body)["runs"][0]["lengths"]["count"] == 6


def test_files_that_come_and_go_are_no_news(make_run: Any) -> None:
    run = make_run()
    with served(run) as server:
        _, headers, _ = ask(server, "/data.json")
        server._live._took_s = 0.0  # no rest for the test
        (run / ".tmp-result.json").write_text("{")
        (run / "gone.json").symlink_to(run / "nowhere")  # listed, and not there once it is looked at
        assert ask(server, "/data.json", If_None_Match=headers["ETag"])[0] == 304


@pytest.mark.parametrize(
    "path",
    [
        "/config.json",
        "/../config.json",
        "/..%2fconfig.json",
        "/data.json/../config.json",
        "//etc/passwd",
        "/?a=1",
        "/data.json?x",
    ],
)
def test_nothing_else_can_be_reached(make_run: Any, path: str) -> None:
    with served(make_run()) as server:
        status, _, body = ask(server, path)
        assert status == 404
        assert body == b"there is only / and /data.json\n"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_nothing_can_be_changed(make_run: Any, method: str) -> None:
    with served(make_run()) as server:
        assert ask(server, "/", method)[0] == 501


def test_other_names_of_this_host_are_refused(make_run: Any) -> None:
    with served(make_run()) as server:
        assert ask(server, "/data.json", Host="evil.example")[0] == 403
        assert ask(server, "/data.json", Host="localhost:1234")[0] == 200


def test_a_run_that_is_not_there_yet(make_run: Any, tmp_path: Path) -> None:
    with served(tmp_path / "<run>") as server:
        assert server.missing() == [tmp_path / "<run>"]
        status, _, body = ask(server, "/")
        assert status == 200
        assert b"Waiting for a run in" in body
        assert b"&lt;run&gt;" in body
        assert ask(server, "/data.json")[0] == 503
        make_run("<run>")
        assert server.missing() == []
        assert json.loads(ask(server, "/data.json")[2])["runs"][0]["name"] == "<run>"


def test_a_port_that_is_taken_is_named(make_run: Any) -> None:
    with closing(socket.socket()) as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match=r"cannot listen on 127\.0\.0\.1:\d+: .*--port"):
            Server([make_run()], port=taken.getsockname()[1])
