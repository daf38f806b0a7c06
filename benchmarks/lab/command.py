"""Several hosts on one machine: network namespaces on a bridge, every link limited in both directions.

Usage: scripts/lab N [options] -- COMMAND...            run COMMAND once in each host, as rank 0 .. N-1
       scripts/lab N --hosts [options] -- COMMAND...    run COMMAND once, beside the hosts, to start things in them
       scripts/lab exec HOST -- COMMAND...              run COMMAND in one host of a lab that is running
       scripts/lab --clean                              remove what a killed lab left behind

  --rate R       of each link, each way: 1gbit (default), 100mbit, ... or unlimited
  --latency T    1ms, 200us, ...: handed on as POLYHOP_LATENCY_S; polyhop's comm delays its messages, not the kernel
  --extra K      K more hosts, in which no rank is started: ranks find LAB_HOST_<N>, LAB_ADDRESS_<N>, ... of them
  --port P       MASTER_PORT (default 29500; hosts share no ports with the machine, so any will do)
  --timeout S    end everything after S seconds and exit with 124
  --grace S      how long the other ranks may go on after one has failed (default 0)
  --json FILE    write what the table says, and the bytes and messages of each kind, to FILE

A rank finds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT and POLYHOP_TRAFFIC_DIR in its
environment. It may leave rank-<RANK>.json there, {"rank": k, "bytes": {kind: n}, "messages": {kind: n}}: what it counts
as sent, which is compared with what its interface sent. The command of --hosts finds LAB (this script), LAB_NUM_HOSTS,
LAB_HOST_<k> and LAB_ADDRESS_<k>, as in: "$LAB" exec "$LAB_HOST_1" -- torchrun ... Ranks find them too.

The exit code is that of the first rank that failed; the others are then ended. Everything the lab made is removed at its
end, also when it is interrupted. Needs root and iproute2.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from benchmarks.lab.network import LabError, Network, clean, end_processes
from benchmarks.lab.ranks import (
    InterruptError,
    adopt_orphans,
    check_signals,
    collect_orphans,
    enter,
    exit_code,
    note_signals,
    noted,
    start_beside,
    start_ranks,
    wait,
)
from benchmarks.lab.traffic import compare, print_table

__all__ = ["main"]

MOST_HOSTS = 200  # they share one /24 network


def _rate_bits(text: str) -> int | None:
    """Bits per second, None for "unlimited"."""
    if text == "unlimited":
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg])bit", text.lower())
    bits = round(float(match[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[match[2]]) if match else 0
    if not 10_000 <= bits <= 100e9:
        raise LabError(f"--rate {text}: give 10kbit to 100gbit, such as 1gbit or 100mbit, or unlimited")
    return bits


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(us|ms|s)", text)
    if not match:
        raise LabError(f"--latency {text}: give a number and us, ms or s, such as 1ms")
    return float(match[1]) / {"us": 1e6, "ms": 1e3, "s": 1}[match[2]]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise LabError(f"{message} (scripts/lab --help shows the usage)")


def _parse(arguments: list[str], command: list[str]) -> argparse.Namespace:
    parser = _Parser(prog="scripts/lab", add_help=False, allow_abbrev=False)
    parser.add_argument("num_hosts", metavar="N", type=int)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("--latency")
    parser.add_argument("--extra", type=int, default=0)
    parser.add_argument("--port", type=int, default=29500)
    parser.add_argument("--timeout", type=float)
    parser.add_argument("--grace", type=float, default=0.0)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--hosts", action="store_true")
    options = parser.parse_args(arguments)
    if not 1 <= options.num_hosts <= MOST_HOSTS:
        raise LabError(f"N, the number of hosts, must be 1 to {MOST_HOSTS}; given: {options.num_hosts}")
    if not 0 <= options.extra <= MOST_HOSTS - options.num_hosts:
        raise LabError(f"--extra {options.extra}: give 0 or more, at most {MOST_HOSTS} hosts in all")
    if options.extra and options.hosts:
        raise LabError("--extra adds hosts without ranks, and with --hosts there are none: give a larger N")
    if not command:
        raise LabError("no COMMAND to run: give it after --, as in scripts/lab 2 --rate 1gbit -- hostname")
    if shutil.which(command[0]) is None:
        raise LabError(f"cannot run {command[0]!r}: there is no such program")
    if not 1 <= options.port <= 65535:
        raise LabError(f"--port {options.port}: give 1 to 65535")
    if (options.timeout is not None and not options.timeout > 0) or not options.grace >= 0:
        raise LabError("--timeout (above 0) and --grace (0 or more) are in seconds")
    if options.json is not None and not options.json.parent.is_dir():
        raise LabError(f"--json {options.json}: there is no folder {options.json.parent}")
    options.rate_bits = _rate_bits(options.rate)
    options.latency_s = None if options.latency is None else _seconds(options.latency)
    return options


def _run_in(
    network: Network, leaders: list[subprocess.Popen[bytes]], options: argparse.Namespace, command: list[str]
) -> dict[str, Any]:
    """Build the hosts, run the command, compare the counters: what the table and the JSON say."""
    network.build_switch()
    for k in range(len(network.hosts)):
        check_signals()
        network.add_host(k)
    environment = dict(os.environ)
    if options.latency_s is not None:
        environment["POLYHOP_LATENCY_S"] = repr(options.latency_s)
    before, start = network.counters(), time.monotonic()
    copiers = []
    if options.hosts:
        start_beside(network, command, environment, leaders)
    else:
        copiers = start_ranks(network, command, environment, options.port, leaders, options.num_hosts)
    code, why = wait(leaders, options.timeout, options.grace)
    seconds, codes = time.monotonic() - start, [exit_code(process) for process in leaders]
    end_processes(leaders, network.hosts)
    for copier in copiers:
        copier.join(timeout=2.0)
    if options.hosts:
        why = re.sub(r"\brank 0\b", "the command", why)
    rows = compare(network, before, None if options.hosts else codes)
    return {"exit_code": code, "why": why, "seconds": seconds, "hosts": rows}


def _run(options: argparse.Namespace, command: list[str]) -> int:
    """Whatever happens, the lab is removed; then its results are told."""
    note_signals()
    adopt_orphans()
    network = Network(options.num_hosts + options.extra, options.rate_bits)
    leaders: list[subprocess.Popen[bytes]] = []
    told: dict[str, Any] = {"num_hosts": options.num_hosts, "rate_bits_per_s": options.rate_bits}
    told["latency_s"] = options.latency_s
    try:
        told |= _run_in(network, leaders, options, command)
    except InterruptError:
        told |= {
            "exit_code": 128 + noted[0],
            "why": f"interrupted by {signal.Signals(noted[0]).name}",
            "hosts": [],
        }
    finally:
        for failure in network.remove(leaders):
            print(f"lab: could not be removed: {failure}", file=sys.stderr)
        collect_orphans()
    if told["hosts"]:
        print(f"lab: {len(network.hosts)} hosts, {options.rate} each way, {told['seconds']:.1f} s")
        print_table(told["hosts"])
        sys.stdout.flush()
    if told["why"]:
        print(f"lab: {told['why']}", file=sys.stderr)
    if options.json is not None:
        options.json.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    return int(told["exit_code"])


def _clean() -> int:
    note_signals()
    removed, failures = clean()
    for run in removed:
        print(f"lab: removed {run}, whose owner is gone")
    for failure in failures:
        print(f"lab: could not be removed: {failure}", file=sys.stderr)
    if not removed:
        print("lab: nothing to clean")
    return 1 if failures else 0


def _need_root() -> None:
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        raise LabError(
            f"no {' and no '.join(missing)} here: install iproute2 (Debian, Ubuntu: apt install iproute2)"
        )
    if os.geteuid() != 0:
        raise LabError("network namespaces need root: run the lab as root, for example with sudo")


def main(given: list[str]) -> int:
    """The exit code for a command line: the command's own, 2 for a wrong one, 124 for time out, 128 + n for signal n."""
    at = given.index("--") if "--" in given else len(given)
    arguments, command = given[:at], given[at + 1 :]
    if not given or {"-h", "--help"} & set(arguments):
        print(__doc__)
        return 0 if given else 2
    try:
        if arguments == ["--clean"]:
            _need_root()
            return _clean()
        if arguments[:1] == ["exec"]:
            if len(arguments) != 2 or not command:
                raise LabError("exec needs one HOST and a COMMAND: scripts/lab exec HOST -- COMMAND...")
            _need_root()
            enter(arguments[1], command)
        options = _parse(arguments, command)
        _need_root()
        return _run(options, command)
    except LabError as error:
        print(f"lab: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the lab is removed; nobody reads the table
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
