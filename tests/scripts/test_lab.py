"""scripts/lab: what ranks find, how failures come out, what the table says, and that nothing stays behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LAB = ROOT / "scripts" / "lab"
sys.path.insert(0, str(ROOT))
from benchmarks.lab import network, traffic  # noqa: E402


def why_not() -> str:
    """Why there can be no lab on this machine; empty when there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not (shutil.which("ip") and shutil.which("tc")):
        return "no ip or tc (iproute2)"
    tried = subprocess.run(
        [LAB, "1", "--rate", "1gbit", "--", "true"], capture_output=True, text=True, timeout=60
    )
    return f"no namespaces here: {tried.stderr.strip()}" if tried.returncode == 2 else ""


@pytest.fixture(scope="module")
def _can_run() -> None:
    reason = why_not()
    if reason:
        pytest.skip(reason)


needs_namespaces = pytest.mark.usefixtures("_can_run")


def lab(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([LAB, *arguments], capture_output=True, text=True, timeout=60, **options)  # type: ignore[call-overload,no-any-return]


def left_by(pid: int) -> list[str]:
    """Namespaces, files and folders of the lab with this pid (other labs may run at the same time)."""
    folders = [network.NAMESPACES, network.ETC, Path(tempfile.gettempdir())]
    names = [path.name for folder in folders if folder.is_dir() for path in folder.iterdir()]
    return [name for name in names if name.startswith(f"polyhop-lab-{pid}-")]


def links() -> list[str]:
    """The machine's own interfaces."""
    return sorted(row["ifname"] for row in json.loads(network.ip("-j", "link")))


def is_running(pid: int) -> bool:
    return network.start_of(pid) != ""


class Started:
    """A lab whose ranks have each told their pid and that of a child, and then wait to be ended."""

    def __init__(self, *options: str, num_ranks: int = 2) -> None:
        script = "sleep 300 & echo pids $$ $!; wait"
        command = [LAB, str(num_ranks), *options, "--", "bash", "-c", script]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        lines = [self.process.stdout.readline().split() for _ in range(num_ranks)]
        assert sorted(line[0] for line in lines) == [f"[{k}]" for k in range(num_ranks)]
        self.pids = [int(pid) for line in lines for pid in line[2:]]
        self.pid = self.process.pid

    def finish(self) -> tuple[int, str]:
        _, stderr = self.process.communicate(timeout=30)
        return self.process.returncode, stderr


@pytest.fixture
def machine() -> Iterator[None]:
    """The machine's own interfaces are the same before and after."""
    before = links()
    yield
    assert links() == before


# ---------------------------------------------------------------- without namespaces


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["0", "--", "true"], "must be 1 to 200; given: 0"),
        (["-3", "--", "true"], "must be 1 to 200; given: -3"),
        (["two", "--", "true"], "invalid int value: 'two'"),
        (["--", "true"], "required: N"),
        (["2"], "no COMMAND"),
        (["2", "--"], "no COMMAND"),
        (["2", "--", "no-such-program"], "cannot run 'no-such-program'"),
        (["2", "--rate", "fast", "--", "true"], "--rate fast"),
        (["2", "--rate", "100", "--", "true"], "--rate 100"),
        (["2", "--rate", "0mbit", "--", "true"], "--rate 0mbit"),
        (["2", "--latency", "1", "--", "true"], "--latency 1"),
        (["2", "--extra", "-1", "--", "true"], "--extra -1"),
        (["150", "--extra", "51", "--", "true"], "--extra 51: give 0 or more, at most 200"),
        (["2", "--extra", "1", "--hosts", "--", "true"], "give a larger N"),
        (["2", "--port", "70000", "--", "true"], "--port 70000"),
        (["2", "--timeout", "0", "--", "true"], "--timeout"),
        (["2", "--json", "no/such/folder/x.json", "--", "true"], "no folder"),
        (["2", "--burst", "1mb", "--", "true"], "unrecognized arguments"),
        (["exec", "--", "true"], "exec needs one HOST"),
    ],
)
def test_wrong_command_lines_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks.lab.command import main

    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_without_root_or_iproute2_it_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks.lab import command

    monkeypatch.setattr(command.shutil, "which", lambda name: None if name == "tc" else f"/bin/{name}")
    assert command.main(["1", "--", "true"]) == 2
    assert "no tc here: install iproute2" in capsys.readouterr().err
    monkeypatch.setattr(command.shutil, "which", lambda name: f"/bin/{name}")
    monkeypatch.setattr(command.os, "geteuid", lambda: 1000)
    assert command.main(["--clean"]) == 2
    assert "root" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("sent", "counted", "agrees"),
    [
        (10_599_999, 10_000_000, True),
        (10_600_001, 10_000_000, False),
        (9_399_999, 10_000_000, False),
        (9_999_999 * 2, 9_999_999, None),  # below 10 MB nothing is judged
        (1000, 0, None),
        (1000, None, None),
    ],
)
def test_interface_and_rank_agree_within_six_percent(
    sent: int, counted: int | None, agrees: bool | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = network.Network(1, None)
    one.folder, one.addresses = tmp_path, ["10.0.0.1"]
    one.counters = lambda: [(sent + 5, 9)]  # type: ignore[method-assign]
    if counted is not None:
        said = {
            "rank": 0,
            "bytes": {"rows": counted - counted // 2, "ids": counted // 2},
            "messages": {"rows": 3},
        }
        (tmp_path / "rank-0.json").write_text(json.dumps(said), encoding="utf-8")
    (row,) = traffic.compare(one, [(5, 4)], [0])
    assert (row["sent_bytes"], row["received_bytes"], row["agrees"]) == (sent, 5, agrees)
    assert row.get("counted_bytes") == counted
    traffic.print_table([row])
    verdict = {True: "yes", False: "NO", None: "too little" if counted is not None else "counted nothing"}[
        agrees
    ]
    assert verdict in capsys.readouterr().out


def test_a_damaged_count_is_named_and_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = network.Network(1, None)
    one.folder, one.addresses = tmp_path, ["10.0.0.1"]
    one.counters = lambda: [(7, 7)]  # type: ignore[method-assign]
    (tmp_path / "rank-0.json").write_text('{"bytes": 3}', encoding="utf-8")
    (row,) = traffic.compare(one, [(0, 0)], [0])
    assert "counted_bytes" not in row
    assert "rank-0.json is not" in capsys.readouterr().err


def test_what_ignores_sigterm_is_killed_with_its_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "END_S", 0.2)
    script = "trap '' TERM; sleep 300 & echo $!; while :; do wait; done"
    with subprocess.Popen(["bash", "-c", script], stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        network.end_processes([process], [])
        assert process.wait(10) == -signal.SIGKILL
        deadline = time.monotonic() + 5
        while is_running(child) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not is_running(child)


# ---------------------------------------------------------------- with namespaces

RANK = """
import json, os, socket, struct
names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "POLYHOP_LATENCY_S"]
print("env", json.dumps({name: os.environ[name] for name in names}))
print("host", socket.gethostname(), socket.gethostbyname(socket.gethostname()))
payload, rank = 12_000_000, int(os.environ["RANK"])
master = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
if rank == 0:
    peer, _ = socket.create_server(("", master[1])).accept()
    got = 0
    while part := peer.recv(1 << 20):
        got += len(part)
    print("got", got)
else:
    peer = None
    while peer is None:
        try:
            peer = socket.create_connection(master)
        except ConnectionRefusedError:
            pass
    peer.sendall(bytes(payload))
    peer.close()
said = {"rank": rank, "bytes": {"rows": payload * rank}, "messages": {"rows": rank}}
with open(os.path.join(os.environ["POLYHOP_TRAFFIC_DIR"], f"rank-{rank}.json"), "w") as file:
    json.dump(said, file)
"""


@needs_namespaces
@pytest.mark.usefixtures("machine")
def test_ranks_find_each_other_and_the_interfaces_agree_with_them(tmp_path: Path) -> None:
    report = tmp_path / "lab.json"
    options = ["--rate", "1gbit", "--latency", "1.5ms", "--port", "4321", "--json", str(report)]
    process = subprocess.Popen(
        [LAB, "2", *options, "--", sys.executable, "-c", RANK], stdout=subprocess.PIPE, text=True
    )
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0, out
    assert left_by(process.pid) == []
    lines = out.splitlines()
    told = json.loads(report.read_text(encoding="utf-8"))
    addresses = [row["address"] for row in told["hosts"]]
    for k in range(2):
        (env,) = [line.split(" ", 2)[2] for line in lines if line.startswith(f"[{k}] env")]
        assert json.loads(env) == {
            "RANK": str(k),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": addresses[0],
            "MASTER_PORT": "4321",
            "POLYHOP_LATENCY_S": "0.0015",
        }
        assert f"[{k}] host host-{k} {addresses[k]}" in lines
    assert "[0] got 12000000" in lines
    receiver, sender = told["hosts"]
    assert (receiver["counted_bytes"], receiver["ratio"], receiver["agrees"]) == (0, None, None)
    assert (sender["counted_bytes"], sender["bytes"], sender["agrees"]) == (
        12_000_000,
        {"rows": 12_000_000},
        True,
    )
    assert receiver["received_bytes"] == pytest.approx(sender["sent_bytes"], abs=10_000)
    assert told["rate_bits_per_s"] == 1_000_000_000


@needs_namespaces
def test_links_are_limited_at_both_ends_with_a_small_bucket() -> None:
    script = 'tc -j qdisc show dev eth0; echo; tc -n "${LAB_HOST_0%-0}-switch" -j qdisc show dev port0'
    inside = lab(
        "1", "--rate", "50mbit", "--hosts", "--", "bash", "-c", f'"$LAB" exec "$LAB_HOST_0" -- {script}'
    )
    assert inside.returncode == 0, inside.stderr
    found = [json.loads(line)[0] for line in inside.stdout.splitlines() if line.startswith("[")]
    assert [qdisc["kind"] for qdisc in found] == ["tbf", "tbf"]
    for qdisc in found:
        assert qdisc["options"]["rate"] == 50_000_000 // 8
        assert 1514 < qdisc["options"]["burst"] <= 32_768


@needs_namespaces
@pytest.mark.usefixtures("machine")
def test_a_failing_rank_ends_the_others_and_gives_the_exit_code() -> None:
    script = '[ "$RANK" = 1 ] && { echo failing; exit 7; }; sleep 300 & sleep 300'
    process = subprocess.Popen(
        [LAB, "3", "--", "bash", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    out, err = process.communicate(timeout=30)
    assert process.returncode == 7
    assert "rank 1 failed with exit code 7" in err
    assert "[1] failing" in out.splitlines()
    assert out.count("ended") == 2
    assert left_by(process.pid) == []


@needs_namespaces
@pytest.mark.usefixtures("machine")
def test_a_host_without_a_rank_is_reached_by_the_ranks() -> None:
    script = (
        'echo size $WORLD_SIZE; ip netns exec "$LAB_HOST_2" ip -br address show eth0; echo at $LAB_ADDRESS_2'
    )
    process = subprocess.Popen(
        [LAB, "2", "--extra", "1", "--", "bash", "-c", script], stdout=subprocess.PIPE, text=True
    )
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0, out
    lines = out.splitlines()
    assert sorted(line for line in lines if "size" in line) == ["[0] size 2", "[1] size 2"]
    address = next(line.split()[-1] for line in lines if line.startswith("[0] at"))
    assert sum(f"{address}/24" in line for line in lines) == 2
    assert [line.split()[0] for line in lines if address in line and " MB" in line] == [
        "2"
    ]  # its traffic is told
    assert left_by(process.pid) == []


@needs_namespaces
def test_a_signal_that_ends_a_rank_is_its_exit_code() -> None:
    assert lab("1", "--", "bash", "-c", "kill -KILL $$").returncode == 128 + 9


@needs_namespaces
def test_time_out_ends_all_ranks_and_gives_124() -> None:
    started = Started("--timeout", "0.5")
    code, err = started.finish()
    assert (code, "still running: rank 0, 1" in err) == (124, True)
    assert left_by(started.pid) == []
    assert not any(map(is_running, started.pids))


@needs_namespaces
@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_lab_removes_everything(signum: signal.Signals) -> None:
    started = Started()
    assert left_by(started.pid) != []
    assert all(map(is_running, started.pids))
    started.process.send_signal(signum)
    code, err = started.finish()
    assert (code, signum.name in err) == (128 + signum, True)
    assert left_by(started.pid) == []
    assert not any(map(is_running, started.pids))


@needs_namespaces
@pytest.mark.usefixtures("machine")
def test_a_lab_interrupted_while_it_builds_removes_everything() -> None:
    process = subprocess.Popen([LAB, "40", "--", "sleep", "300"], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 20
    while not left_by(process.pid) and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 128 + signal.SIGINT
    assert left_by(process.pid) == []


@needs_namespaces
@pytest.mark.usefixtures("machine")
def test_clean_removes_dead_labs_only() -> None:
    dead, living = Started(), Started()
    dead.process.kill()
    dead.finish()
    own = f"polyhop-lab-{os.getpid()}-1-abcdef-0"  # this process lives, but did not start then: its pid was used again
    network.ip("netns", "add", own)
    strange = f"other-lab-{dead.pid}"
    network.ip("netns", "add", strange)
    try:
        assert left_by(dead.pid) != []
        cleaned = lab("--clean")
        assert cleaned.returncode == 0, cleaned.stderr
        assert f"polyhop-lab-{dead.pid}-" in cleaned.stdout
        assert left_by(dead.pid) == []
        assert not any(map(is_running, dead.pids))
        assert all(map(is_running, living.pids))
        assert len(left_by(living.pid)) == 3 + 2 + 1  # namespaces, /etc files, folder
        assert not (network.NAMESPACES / own).exists()
        assert (network.NAMESPACES / strange).exists()
    finally:
        network.ip("netns", "del", strange)
        living.process.terminate()
        living.finish()
    assert left_by(living.pid) == []


@needs_namespaces
@pytest.mark.usefixtures("machine")
def test_one_command_beside_the_hosts_and_daemons_do_not_outlive_the_lab() -> None:
    script = """
        "$LAB" exec "$LAB_HOST_1" -- bash -c 'hostname; getent hosts host-0; setsid sleep 300 >&- 2>&- & echo pid $!'
        echo addresses $LAB_ADDRESS_0 $LAB_ADDRESS_1 of $LAB_NUM_HOSTS
        ip netns exec "$LAB_HOST_0" ip -br address show eth0
        exit 5"""
    done = lab("2", "--hosts", "--", "bash", "-c", script)
    assert (done.returncode, "the command failed with exit code 5" in done.stderr) == (5, True), done.stderr
    words = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines() if line.strip()}
    assert "host-1" in words
    first, second, _, count = words["addresses"]
    assert count == "2"
    assert first != second
    assert first in words  # host 1 can look up host 0
    assert f"{first}/24" in done.stdout  # host 0 has that address
    assert not Path("/proc", words["pid"][0]).exists()  # not even as a zombie


@needs_namespaces
def test_exec_refuses_a_host_that_is_not_there() -> None:
    done = lab("exec", "polyhop-lab-1-1-abcdef-0", "--", "true")
    assert (done.returncode, "no host" in done.stderr) == (2, True)
