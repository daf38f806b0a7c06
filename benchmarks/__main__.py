"""``python -m benchmarks NAME [--json FILE]``: run a bench, print its table, append its rows, write flat JSON."""

from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path

from benchmarks.environment import run_section
from benchmarks.harness import Figure, append_rows, print_table, write_json

__all__ = ["BENCHES", "main"]

# bench -> its sections, each with the threads it runs on
BENCHES: dict[str, dict[str, int]] = {
    "kernels": {"spmm": 2, "attention": 2, "sampler": 1, "dropout": 1, "gather": 1, "quantise": 1},
    "epoch": {"minibatch": 1, "fullgraph": 1, "memory": 1},
    "accuracy": {"paired": 1},
    "partition": {"methods": 1, "stream": 1},
    "data": {"sides": 1},
    "macro": {"rows": 1, "times": 1, "choice": 1, "latency": 1, "disk": 1, "limited": 1, "context": 1},
    "split": {"redundancy": 1, "quality": 1, "sent": 1, "epochs": 1, "phases": 1},
    "halo": {"codec": 1, "speed": 1, "accuracy": 1, "convergence": 1, "rivals": 1, "additions": 1},
    "pipeline": {"traffic": 1, "simulated": 1, "times": 1, "memory": 1},
    "pipeline-accuracy": {"paired": 1},
    "plan": {"grid": 1, "memory": 1, "published": 1, "speed": 1},
    "gpu": {"spmm": 16, "attention": 16, "rows": 16, "fullgraph": 16, "minibatch": 16, "ranks": 4},
    "serverless": {
        "money": 1,
        "transport": 1,
        "overlap": 1,
        "convergence": 1,
        "savings": 1,
        "scale": 1,
        "value": 1,
        "tuner": 1,
    },
}
WITHOUT_PEERS = {
    "partition",
    "data",
    "macro",
    "split",
    "halo",
    "pipeline",
    "pipeline-accuracy",
    "plan",
    "gpu",
    "serverless",
}  # these run in the project's own environment


def _arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench", description=__doc__)
    parser.add_argument("name", nargs="?", choices=sorted(BENCHES), help="which bench; none lists them")
    parser.add_argument("--only", metavar="SECTION", help="run one section of it")
    parser.add_argument("--skip", metavar="SECTION", help="run all sections but one")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures as one flat JSON object")
    parser.add_argument("--quick", action="store_true", help="smaller and noisier; writes no rows")
    parser.add_argument("--no-rows", action="store_true", help="do not append to benchmarks/results/")
    return parser.parse_args(given)


def main(given: list[str] | None = None) -> int:
    """Exit status 0 when every section ran (aims missed are reported, not failed), 1 otherwise, 2 for a wrong name."""
    arguments = _arguments(given)
    if arguments.name is None:
        for name, parts in BENCHES.items():
            print(f"{name:17} {', '.join(parts)}")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # subprocess.run then ends the section too
    sections = BENCHES[arguments.name]
    for named in (arguments.only, arguments.skip):
        if named is not None and named not in sections:
            print(
                f"no section {named!r} in {arguments.name}; there is: {', '.join(sections)}", file=sys.stderr
            )
            return 2
    start = time.perf_counter()
    figures: list[Figure] = []
    is_complete = True
    for section, num_threads in sections.items():
        if arguments.only in (None, section) and arguments.skip != section:
            found = run_section(
                arguments.name,
                section,
                num_threads,
                is_quick=arguments.quick,
                has_peers=arguments.name not in WITHOUT_PEERS,
            )
            is_complete &= bool(found)
            figures += found
    print(f"\n{arguments.name}: {time.perf_counter() - start:.0f} s")
    print_table(figures)
    if arguments.json is not None:
        write_json(figures, arguments.json)
    if not arguments.quick and not arguments.no_rows:
        import polyhop

        print(f"rows appended to {append_rows(arguments.name, figures, polyhop.__version__).name}")
    return 0 if is_complete else 1


if __name__ == "__main__":
    sys.exit(main())
