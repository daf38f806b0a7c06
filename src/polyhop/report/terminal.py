"""The report for a terminal: the same document in words, tables and a curve; with rich if it is there, plain otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from polyhop.report.text import bars, curve
from polyhop.report.units import in_unit, percent, seconds, size

__all__ = ["Table", "plain", "sections", "show"]

Table = tuple[list[str], list[list[str]]]
Section = tuple[str, str | Table]
"""Title, and a text or (headers, rows)."""

_LEAST_SHARE = 0.0005  # of an epoch, below which a name has no column
_MOST_ROWS = 24


def show(document: dict[str, Any], *, ascii: bool = False) -> None:
    """Print everything to standard output."""
    try:
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table as RichTable
    except ImportError:
        print(plain(document, ascii=ascii))
        return
    console = Console(highlight=False, soft_wrap=True)
    for title, content in sections(document, ascii=ascii):
        console.print(f"\n[bold]{escape(title)}[/bold]")
        if isinstance(content, str):
            console.print(content, markup=False)
            continue
        headers, rows = content
        shown = RichTable(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
        for at, header in enumerate(headers):
            shown.add_column(escape(header), justify="left" if at == 0 else "right", overflow="fold")
        for row in rows:
            shown.add_row(*map(escape, row))
        console.print(shown, soft_wrap=False)


def plain(document: dict[str, Any], *, ascii: bool = False) -> str:
    """The same as one text."""
    parts = []
    for title, content in sections(document, ascii=ascii):
        parts += ["", title, content if isinstance(content, str) else _aligned(*content)]
    return "\n".join(parts[1:])


def _aligned(headers: list[str], rows: list[list[str]]) -> str:
    widths = [max(len(row[at]) for row in [headers, *rows]) for at in range(len(headers))]
    lines = [
        "  ".join(
            text.ljust(width) if at == 0 else text.rjust(width)
            for at, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in [headers, *rows]
    ]
    return "\n".join(lines)


def sections(document: dict[str, Any], *, ascii: bool = False) -> Iterator[Section]:
    """What there is to say, in order."""
    for run in document["runs"]:
        yield run["name"], _head(run)
        for title, make in _PARTS.items():
            content = make(run, ascii)
            if content:
                yield title, content
    if document["comparison"] is not None:
        yield from _comparison(document)


def _head(run: dict[str, Any]) -> str:
    about, numbers = run["about"], run["numbers"]
    ranks = f"{about['num_ranks']} ranks" if (about["num_ranks"] or 1) > 1 else "one process"
    lines = [
        f"{about['model'] or 'model'} on {about['graph'] or 'a graph without a name'}, strategy {about['strategy'] or '?'}, "
        f"{ranks} ({run['state']})"
    ]
    told = [
        (f"test {about['metric']}", percent(numbers["test"], 2)),
        (f"best validation {about['metric']}", percent(numbers["best_val"], 2)),
        ("epochs", in_unit(numbers["epochs"], "count")),
        ("trained for", seconds(numbers["seconds"])),
        ("median epoch, training alone", seconds(numbers["epoch_s"])),
        ("of it waiting", percent(numbers["wait_share"])),
        ("sent by all ranks in an epoch", size(numbers["sent_bytes"])),
        ("memory of a rank, at most", size(numbers["peak_bytes"])),
        ("cost", in_unit(numbers["dollars"], "$")),
    ]
    known = [(name, value) for name, value in told if value != "-"]
    margin = max((len(name) for name, _ in known), default=0)
    lines += [f"{name:<{margin}}  {value}" for name, value in known]
    lines += [f"note: {note}" for note in run["notes"]]
    return "\n".join(lines)


def _curve(run: dict[str, Any], ascii: bool) -> str:
    course = run["course"]
    name = "val" if sum(value is not None for value in course.get("val", [])) > 1 else "loss"
    points = [(x, y) for x, y in zip(course["epoch"], course.get(name, []), strict=False) if y is not None]
    return f"{name}\n{curve(points, height=8, ascii=ascii)}" if len(points) > 1 else ""


def _phases(run: dict[str, Any], ascii: bool) -> Table | str:
    if not run["phases"] or not run["lengths"]:
        return ""
    threads, whole = run["phases"]["threads"], run["lengths"]["whole_s"]
    names = [
        name
        for name in run["phases"]["names"]
        if max(thread["seconds"].get(name, 0.0) for thread in threads) > whole * _LEAST_SHARE
    ]
    rows = [
        [
            f"rank {thread['rank']} {'' if thread['is_main'] else thread['thread']}".strip(),
            *(seconds(thread["seconds"].get(name, 0.0)) for name in names),
        ]
        for thread in threads[:_MOST_ROWS]
    ]
    if len(threads) > _MOST_ROWS:
        rows.append([f"{len(threads) - _MOST_ROWS} more, on the page", *("" for _ in names)])
    return ["", *names], rows


def _traffic(run: dict[str, Any], ascii: bool) -> Table | str:
    if not run["traffic"]:
        return ""
    ranks = run["traffic"]["ranks"]
    busiest = next(rank["training"] for rank in ranks if rank["rank"] == run["traffic"]["busiest"])
    rows = []
    for kind in run["traffic"]["kinds"]:
        training, evaluation = (
            sum(rank[part].get(kind, 0.0) for rank in ranks) for part in ("training", "evaluation")
        )
        if training or evaluation:
            rows.append([kind, size(training), size(busiest.get(kind, 0.0)), size(evaluation)])
    headers = ["", "training, all ranks", "training, busiest rank", "evaluation, all ranks"]
    return (headers, rows) if rows else ""


def _layers(run: dict[str, Any], ascii: bool) -> Table | str:
    layers = run["traffic"]["layers"] if run["traffic"] else []
    rows = [[f"layer {each['layer']}", each["direction"], size(each["bytes"])] for each in layers]
    return (["", "direction", "bytes"], rows) if rows else ""


def _bubbles(run: dict[str, Any], ascii: bool) -> str:
    ranks = run["bubbles"]["ranks"] if run["bubbles"] else []
    return (
        bars({f"rank {each['rank']} %": 100 * each["idle"] for each in ranks}, ascii=ascii) if ranks else ""
    )


def _bits(run: dict[str, Any], ascii: bool) -> Table | str:
    if not run["bits"]:
        return ""
    rows = [
        [f"layer {each['layer']} {each['direction']}", str(each["epoch"]), f"{each['mean']:.2f}"]
        for each in run["bits"]["choices"][-12:]
    ]
    return ["", "from epoch", "mean bits"], rows


def _partition(run: dict[str, Any], ascii: bool) -> str:
    found = run["partition"]
    if not found:
        return ""
    nodes, edges, halo = (
        in_unit(found.get(name), "count") for name in ("node_balance", "edge_balance", "halo")
    )
    return (
        f"{found.get('num_parts', '?')} parts, {percent(found.get('cut'))} of edges cut (at random: "
        f"{percent(found.get('chance_cut'))}), halo of {halo} rows a node; largest part over the mean: nodes {nodes}, "
        f"edges {edges}"
    )


def _prediction(run: dict[str, Any], ascii: bool) -> Table | str:
    rows = [
        [
            row["what"],
            in_unit(row["predicted"], row["unit"]),
            in_unit(row["measured"], row["unit"]),
            in_unit(row["ratio"], "count"),
        ]
        for row in (run["prediction"] or {}).get("rows", [])
    ]
    return (["", "predicted", "measured", "measured / predicted"], rows) if rows else ""


def _functions(run: dict[str, Any], ascii: bool) -> str:
    found = run["functions"]
    if not found:
        return ""
    alive = [max((v for v in rank["functions"] if v is not None), default=0) for rank in found["ranks"]]
    bill = found["bill"] or {}
    return f"at most {int(sum(alive))} functions alive; cost {in_unit(bill.get('dollars'), '$')}"


_PARTS: dict[str, Callable[[dict[str, Any], bool], Table | str]] = {
    "course": _curve,
    "seconds of a mean epoch": _phases,
    "bytes sent in a mean epoch": _traffic,
    "bytes between layers, all ranks": _layers,
    "bubbles: share of a step without a chunk": _bubbles,
    "bits of a value that crosses": _bits,
    "functions": _functions,
    "parts": _partition,
    "predicted and measured": _prediction,
}


def _comparison(document: dict[str, Any]) -> Iterator[Section]:
    found, names = document["comparison"], [run["name"] for run in document["runs"]]
    rows = [
        [row["name"], *(in_unit(value, row["unit"]) for value in row["values"])] for row in found["results"]
    ]
    yield "results compared", (["", *names], rows)
    options = [[row["name"], *(_option(value) for value in row["values"])] for row in found["options"]]
    yield "options that differ", ((["", *names], options) if options else "none")
    for note in found["notes"]:
        yield "note", note


def _option(value: Any) -> str:
    return "-" if value is None else str(value)
