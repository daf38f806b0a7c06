"""Section ``additions``: what would be gained by ways to make messages smaller that go beyond bits for each row.

Four ranks as threads train exactly; beside every epoch the gradient is made again, from the same weights with the same units
dropped, with messages as each coder (``coders``) would deliver them: how far is it from the exact one, for how many bytes.
Also the entropy of the codes of rows as they cross, which is all that a coder of single symbols could save, what one that is
at hand (zlib, Huffman alone) saves at which rate, and what rate a coder would need for its saving to be worth its time.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import astuple
from statistics import mean
from typing import Any

import torch
from torch import Tensor

from benchmarks.halo.coders import Delta, Direct, Kept, Seen, Undropped, dropouts_noted, install
from benchmarks.halo.graphs import REAL, cut, load_real, make, narrowed
from benchmarks.halo.running import build_step
from benchmarks.halo.workload import LR, SEED, model_of
from benchmarks.harness import Figure
from polyhop.comm import Collective, run_in_threads
from polyhop.exchange.crossing import DIRECTIONS, Direction
from polyhop.kernels import quantise_rows
from polyhop.kernels.keys import Key
from polyhop.partition import share
from polyhop.strategies.halo_cost import crossed
from polyhop.trace import NO_TRACE

__all__ = ["Codes", "entropy", "run", "unpacked"]

NUM_RANKS, HIDDEN, EPOCHS, LAST = 4, 64, 40, 15  # figures are means over the last epochs
NO_SUMS = {"halo_sums": False}
# name -> coder and its arguments (None: as the options say), options of the step
SIDES: dict[str, tuple[Any, tuple[int, ...], dict[str, Any]]] = {
    "direct 2": (Direct, (2,), {}),
    "direct 4": (Direct, (4,), {}),
    "direct 8": (Direct, (8,), {}),
    "adaptive": (None, (), {"bits": "adaptive"}),
    "delta 2": (Delta, (2,), {}),
    "bits delta": (None, (), {"bits": "delta"}),  # as it was built
    "delta 2, refreshed": (Delta, (2, 10), {}),
    "delta 4": (Delta, (4,), {}),
    "kept 2": (Kept, (2,), {}),
    "kept 4": (Kept, (4,), {}),
    "rows, direct 2": (Direct, (2,), NO_SUMS),
    "rows, direct 4": (Direct, (4,), NO_SUMS),
    "rows, kept 2": (Kept, (2,), NO_SUMS),
    "rows, kept 4": (Kept, (4,), NO_SUMS),
    "rows, kept 8": (Kept, (8,), NO_SUMS),
    "undropped delta 2": (Undropped, (2,), NO_SUMS),
    "undropped delta 4": (Undropped, (4,), NO_SUMS),
}
LINKS = (100, 200, 1000)  # Mbit/s


def run(*, is_quick: bool) -> Iterator[Figure]:
    """For each graph, model and dropout: error of the gradient, and bytes, over those of 2 bits; entropies."""
    epochs = 6 if is_quick else EPOCHS
    for graph in _graphs(is_quick):
        made = cut(graph.name, graph, NUM_RANKS)
        for model in ("sage",) if is_quick else ("gcn", "sage"):
            for p in (0.0, 0.5):
                print(f"  {made}; {model}, hidden {HIDDEN}, dropout {p}, {epochs} epochs", flush=True)
                with dropouts_noted():
                    found = run_in_threads(NUM_RANKS, _trained, made, model, p, epochs)
                name = f"{model}_{graph.name.replace('-', '_')}_{'dropout' if p else 'plain'}"
                yield from _sides(name, found, min(LAST, epochs // 2))
                yield from _entropies(name, found[0]["codes"])


def _graphs(is_quick: bool) -> Iterator[Any]:
    real = [] if is_quick else [load_real(name) for name in REAL]
    there = [narrowed(graph) for graph in real if not isinstance(graph, str)]
    yield from there or [make("products", scale=1 / 32)]


def _trained(line: Collective, made: Any, model_name: str, p: float, epochs: int) -> dict[str, Any]:
    """Of each side and epoch: error of the gradient, bytes; what crossed in the last epoch; codes of the last epoch."""
    torch.set_num_threads(1)
    held = share(made.graph, made.partition, line.rank)
    model = model_of(
        model_name, held.num_features, held.num_classes, HIDDEN, dropout=p, norm="layer_norm"
    ).train()
    optimizer = torch.optim.Adam(model.parameters(), lr=LR)
    exact = build_step(model, held, line.fork(), {}, NO_TRACE)
    steps, told = {}, {}
    for side, (kind, given, options) in SIDES.items():
        if p or not issubclass(kind or Direct, Kept):
            steps[side] = build_step(model, held, line.fork(), options, NO_TRACE)
            told[side] = [] if kind is None else install(steps[side], line, kind, *given)
    codes = Codes(exact, line.rank)
    found: dict[str, Any] = {side: [] for side in steps}
    for epoch in range(epochs):
        key, grads = Key(SEED, epoch), {}
        codes.is_on = epoch == epochs - 1
        for side, step in {**steps, "exact": exact}.items():
            for layer in told.get(side, ()):
                layer.seen.clear()
            optimizer.zero_grad(set_to_none=True)
            step.gradients(0, key)
            grads[side] = torch.cat([w.grad.flatten() for w in model.parameters() if w.grad is not None])
        for side, step in steps.items():
            away = float((grads[side] - grads["exact"]).norm() / grads["exact"].norm())
            found[side].append((away, _crossed(step, told[side], line)))
        optimizer.step()
    for step in (*steps.values(), exact):
        step.close()
    return {"sides": found, "codes": codes.gathered(line)}


def _crossed(step: Any, told: Sequence[Any], line: Collective) -> dict[str, list[float]]:
    """By layer and way, of all ranks: bytes, squared error, squared size, rows, rows as deltas."""
    mine: dict[str, list[float]] = {}
    if told:
        for layer, each in enumerate(told, start=1):
            for way in DIRECTIONS:
                mine[f"{layer} {way}"] = [float(value) for value in astuple(each.seen.get(way, Seen()))]
    else:
        for message in crossed(step._channels.channels):
            at = mine.setdefault(f"{message.layer} {message.direction}", [0.0] * 5)
            at[0] += message.num_bytes
            at[3] += message.num_rows
    names = sorted({f"{layer} {way}" for layer in range(1, 3) for way in DIRECTIONS})
    own = torch.tensor([mine.get(name, [0.0] * 5) for name in names], dtype=torch.float64)
    every = line.all_gather(own, kind="sizes", counts=[len(names)] * line.num_ranks)
    return dict(zip(names, torch.stack(every).sum(0).tolist(), strict=True))


def _sides(name: str, found: Sequence[Any], last: int) -> Iterator[Figure]:
    sides = found[0]["sides"]
    table = {side: _late(each, last) for side, each in sides.items()}
    base_error, base_bytes = table["direct 2"]
    print(
        f"    {'':20} {'bytes':>10} {'error of gradient':>18}   errors of messages by layer and way",
        flush=True,
    )
    for side, (error, size) in table.items():
        late = [where for _, where in sides[side][-last:]]
        rows = []
        for way in late[0]:
            err, norm = sum(each[way][1] for each in late), sum(each[way][2] for each in late)
            deltas = sum(each[way][4] for each in late) / max(1.0, sum(each[way][3] for each in late))
            if norm:
                rows.append(
                    f"{way} {(err / norm) ** 0.5:.3f}" + (f" ({100 * deltas:.0f} % deltas)" if deltas else "")
                )
        at = [epoch for epoch in (0, 1, 2, 5, 10, 20, 39) if epoch < len(sides[side])]
        over = " ".join(f"{sides[side][epoch][0]:.3f}" for epoch in at)
        print(
            f"    {side:20} {size:10.0f} {error:18.4f}   {', '.join(rows)}; epochs {at}: {over}", flush=True
        )
        yield Figure(
            f"additions_{side.replace(',', '').replace(' ', '_')}_{name}",
            error / base_error,
            "x",
            f"error of the gradient {error:.4f} over that of 2 bits, with {size / base_bytes:.2f} times the bytes",
        )


def _late(epochs: Sequence[tuple[float, dict[str, list[float]]]], last: int) -> tuple[float, float]:
    """(error, bytes), means over the last epochs."""
    late = epochs[-last:]
    sizes = [sum(each[0] for each in where.values()) for _, where in late]
    return mean(error for error, _ in late), mean(sizes)


# Entropy of codes


class Codes:
    """Watches what a rank's channels send, in 2, 4 and 8 bits, when it is on."""

    def __init__(self, step: Any, rank: int) -> None:
        self.is_on = False
        self.found: dict[tuple[int, Direction, int], list[float]] = {}
        for channel in step._channels.channels:
            self._watch(channel.messages)

    def _watch(self, messages: Any) -> None:
        plain, layer = messages.packed, messages.spans.layer

        def packed(direction: Direction, rows: Tensor, ids: Tensor | None, rank: int, to: int) -> Tensor:
            leaves: Tensor = plain(direction, rows, ids, rank, to)
            if self.is_on and len(leaves):
                for bits in (2, 4, 8):
                    self._note(layer, direction, bits, leaves)
            return leaves

        messages.packed = packed

    def _note(self, layer: int, direction: Direction, bits: int, rows: Tensor) -> None:
        widths = torch.full((len(rows),), bits, dtype=torch.uint8)
        message = quantise_rows(rows.contiguous(), widths, 7)
        codes = unpacked(message, bits, *rows.shape)
        counted = torch.bincount(codes.flatten().long(), minlength=1 << bits).double()
        data = message[: len(rows) * -(-rows.shape[1] * bits // 8)].numpy().tobytes()
        began = time.thread_time()
        coder = zlib.compressobj(9, zlib.DEFLATED, -15, 9, zlib.Z_HUFFMAN_ONLY)
        small = coder.compress(data) + coder.flush()
        packed_s, began = time.thread_time() - began, time.thread_time()
        zlib.decompress(small, -15)
        spent = packed_s + time.thread_time() - began
        row = [codes.numel(), len(rows), len(data), len(small), spent, *counted.tolist()]
        old = self.found.get((layer, direction, bits), [0.0] * len(row))
        self.found[layer, direction, bits] = [a + b for a, b in zip(old, row, strict=True)]

    def gathered(self, line: Collective) -> dict[tuple[int, Direction, int], list[float]]:
        """Of all ranks."""
        total = {}
        for layer in (1, 2):
            for way in DIRECTIONS:
                for bits in (2, 4, 8):
                    own = torch.tensor(
                        [self.found.get((layer, way, bits), [0.0] * (5 + (1 << bits)))], dtype=torch.float64
                    )
                    every = line.all_gather(own, kind="sizes", counts=[1] * line.num_ranks)
                    total[layer, way, bits] = torch.cat(every).sum(0).tolist()
        return total


def unpacked(message: Tensor, bits: int, num_rows: int, num_columns: int) -> Tensor:
    """uint8 [k, F]: the codes of a message whose rows all have the same width."""
    each = -(-num_columns * bits // 8)
    data = message[: num_rows * each].view(num_rows, each)
    parts = [(data >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)]
    return torch.stack(parts, 2).view(num_rows, -1)[:, :num_columns]


def entropy(counts: Tensor) -> float:
    """Bits a symbol."""
    share = counts[counts > 0].double() / counts.sum()
    return float(-(share * share.log2()).sum())


def _entropies(name: str, codes: dict[tuple[int, Direction, int], list[float]]) -> Iterator[Figure]:
    total = {bits: [0.0, 0.0] for bits in (2, 4, 8)}  # bytes now, bytes at the entropy
    for (layer, way, bits), (values, rows, plain, small, spent, *counts) in codes.items():
        if not values:
            continue
        found = entropy(torch.tensor(counts))
        factor = (plain + 4 * rows) / (values * found / 8 + 4 * rows)
        total[bits][0] += plain + 4 * rows
        total[bits][1] += values * found / 8 + 4 * rows
        # A value is worth coding if (encode + decode) takes less than the link needs for what is saved of it.
        saved = max(bits - found, 1e-9)
        needs = ", ".join(f"{link} Mbit/s {4 * link / 1e3 / saved:.2f}" for link in LINKS)
        print(
            f"    layer {layer} {way:8} {bits} bits: entropy {found:.2f}, zeros {100 * counts[0] / values:.0f} %, factor at "
            f"most {factor:.2f} with parameters; zlib {(plain + 4 * rows) / (small + 4 * rows):.2f} at "
            f"{4 * values / spent / 1e9:.2f} GB/s of float32 there and back; worth it above (GB/s) {needs}",
            flush=True,
        )
    for bits, (now, least) in total.items():
        yield Figure(
            f"additions_entropy_{bits}bit_{name}",
            now / least,
            "x",
            "bytes over those at the entropy, both ways",
        )
