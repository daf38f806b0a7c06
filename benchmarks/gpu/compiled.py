"""Every Triton kernel as compiled for an H200, without one: instructions by pipe, barriers, registers; floors of its time.

``python -m benchmarks.gpu.compiled [--match TEXT] [--json FILE] [--lines]`` lists kernels at the shapes of the bench. The
package's own wrappers run on small tensors of the host, with a driver that compiles and launches nothing.

Counted is the hot path: from the start straight to the loop that reads most, its body once per turn, and out; without such a
loop the longest way. A floor is what the busiest pipe needs, or the bytes at the device's bandwidth; no latency is in it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Case", "Code", "Row", "Way", "cases", "compiling", "is_possible", "listing", "main"]

SMS, CLOCK_HZ, BYTES_PER_S = 132, 1.98e9, 4.2e12
LANES = {"issue": 128, "alu": 64, "fma": 128, "imad": 64, "xu": 16, "fp64": 64, "memory": 32, "uniform": 64}
"""Threads that a multiprocessor serves per cycle. Memory: one thread is one access of up to 4 bytes."""

_ALU = {
    "BMSK", "FCHK", "FMNMX", "FSEL", "FSET", "FSETP", "F2FP", "I2FP", "IABS", "IADD3", "ISETP", "LEA", "LOP3", "PLOP3",
    "PRMT", "SEL", "SGXT", "SHF", "VABSDIFF", "VIADD", "VIMNMX",
}  # fmt: skip
_FMA, _XU = {"FADD", "FMUL", "FFMA"}, {"F2F", "F2I", "I2F", "MUFU", "POPC", "FLO", "BREV"}
_FP64 = {"DADD", "DMUL", "DFMA", "DSETP", "DMNMX"}
_GLOBAL = {"LDG", "STG", "RED", "REDG", "ATOMG", "ATOM"}
_SHARED = {"LDS", "LDSM", "STS", "STSM", "ATOMS"}
_LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)\s*(.*?)\s*;")
_SOURCE = re.compile(r'//## File "(.*)", line (\d+)')


@dataclass(frozen=True)
class Instruction:
    """One instruction of a warp, and the line of Python it comes from."""

    op: str
    is_conditional: bool
    target: str  # label that it may go on at
    line: str

    @property
    def base(self) -> str:
        return self.op.split(".")[0]

    @property
    def pipe(self) -> str:
        if self.base.startswith(("U", "R2UR", "S2UR")):
            return "uniform"
        for pipe, bases in (("alu", _ALU), ("fma", _FMA), ("xu", _XU), ("fp64", _FP64)):
            if self.base in bases:
                return pipe
        if self.base == "IMAD":
            return "imad"
        return "memory" if self.base in _GLOBAL | _SHARED | {"SHFL", "REDUX"} else "other"

    @property
    def accesses(self) -> int:
        """Cycles' worth of 4-byte accesses."""
        return 4 if ".128" in self.op else 2 if ".64" in self.op.replace(".64]", "") else 1


@dataclass(frozen=True)
class Way:
    """What a warp executes along a way through a kernel."""

    instructions: tuple[Instruction, ...] = ()

    @property
    def count(self) -> int:
        return len(self.instructions)

    def of(self, bases: set[str]) -> int:
        return sum(i.base in bases for i in self.instructions)

    def load(self) -> dict[str, float]:
        """Instructions of each pipe; of ``memory`` accesses."""
        found: Counter[str] = Counter()
        for each in self.instructions:
            found["issue"] += 1
            found[each.pipe] += each.accesses if each.pipe == "memory" else 1
        found["fma"] += found["imad"]  # which takes one half of it
        return {pipe: found[pipe] for pipe in LANES}


@dataclass(frozen=True)
class Code:
    """A compiled kernel. ``once`` leads to the hot loop and from it, ``turn`` is one turn of it (empty: there is none)."""

    name: str
    warps: int
    registers: int
    stack_bytes: int
    shared_bytes: int
    conversions: int  # changes of layout that the compiler left in, by shuffles or through shared memory
    size: int  # instructions in all
    once: Way
    turn: Way

    @property
    def hot(self) -> tuple[Instruction, ...]:
        return self.once.instructions + self.turn.instructions

    @property
    def barriers(self) -> int:
        return sum(i.base == "BAR" for i in self.hot)

    @property
    def through_shared(self) -> int:
        return sum(i.base in _SHARED for i in self.hot)


@dataclass(frozen=True)
class Case:
    """A call whose kernels are listed, and how much larger it is in the bench."""

    name: str
    run: Callable[[], object]
    scale: float = 1.0  # programs of the bench per program here
    turns: float = 0.0  # of the hot loop in the bench, by all warps of a block of columns together
    bytes: float = 0.0  # that the bench moves
    only: str = ""  # the kernel that turns and bytes are of; "" = the first


def is_possible() -> bool:
    """Whether there is a Triton whose programs can compile for CUDA here."""
    try:
        import triton
    except ImportError:
        return False
    return all(
        (Path(triton.__file__).parent / "backends/nvidia/bin" / name).exists()
        for name in ("ptxas", "nvdisasm")
    )


def _tool(name: str) -> str:
    import triton

    return str(Path(triton.__file__).parent / "backends/nvidia/bin" / name)


class _Driver:
    """What Triton asks of a device before it launches anything."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def compiling() -> Iterator[list[tuple[str, Any, tuple[int, ...]]]]:
    """Kernels are compiled for an H200 and not launched: (name, what the compiler gave, grid) of each, in order."""
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    found: list[tuple[str, Any, tuple[int, ...]]] = []
    plain = JITFunction.run

    def run(self: Any, *args: Any, grid: tuple[int, ...], warmup: bool, **options: Any) -> Any:
        kernel = plain(self, *args, grid=grid, warmup=True, **options)
        found.append((self.__name__, kernel, grid))
        return kernel

    before = driver._active
    driver._active = _Driver()
    JITFunction.run = run
    try:
        yield found
    finally:
        JITFunction.run, driver._active = plain, before


def code_of(name: str, kernel: Any) -> Code:
    """What the compiler made of a kernel."""
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(kernel.asm["cubin"])
        text = _output("nvdisasm", "-c", "-g", str(binary))
        usage = _output("cuobjdump", "-res-usage", str(binary))
    used = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", usage)}
    once, turn, size = _hot_path(text)
    return Code(
        name, kernel.metadata.num_warps, used["REG"], used["STACK"] + used["LOCAL"], kernel.metadata.shared,
        kernel.asm["ttgir"].count("ttg.convert_layout"), size, once, turn,
    )  # fmt: skip


def _output(tool: str, *arguments: str) -> str:
    return subprocess.run([_tool(tool), *arguments], capture_output=True, text=True, check=True).stdout


def _parsed(text: str) -> tuple[list[Instruction], dict[str, int]]:
    """Instructions of the kernel (not of the functions behind it), and where labels stand."""
    code, labels, line = list[Instruction](), dict[str, int](), ""
    for row in text.splitlines():
        if source := _SOURCE.search(row):
            line = f"{Path(source[1]).name}:{source[2]}"
        elif row.startswith((".L_x", "$")):
            if row.startswith("$"):
                break  # functions that the kernel calls on rare values
            labels[row.rstrip(":").strip()] = len(code)
        elif found := _LINE.match(row):
            op, rest = found[3], found[4]
            target = re.search(r"`\((\S+?)\)", rest)
            leaves = op.split(".")[0] in ("BRA", "EXIT")
            if op != "NOP":
                is_conditional = bool(found[2]) or bool(re.match(r"!?U?P\d", rest)) or "DIV" in op
                code.append(Instruction(op, is_conditional, target[1] if target and leaves else "", line))
    return code, labels


def _hot_path(text: str) -> tuple[Way, Way, int]:
    """(once, one turn of the hot loop, instructions in all)."""
    code, labels = _parsed(text)
    while code and code[-1].op == "BRA" and labels.get(code[-1].target) == len(code) - 1:
        code.pop()  # padding
    jumps = {at: labels[i.target] for at, i in enumerate(code) if i.target in labels}
    loops = sorted({(to, at) for at, to in jumps.items() if to <= at and code[at].base == "BRA"})
    inner = [a for a in loops if not any(b != a and a[0] <= b[0] and b[1] <= a[1] for b in loops)]

    def reads(loop: tuple[int, int]) -> int:
        return sum(i.base == "LDG" for i in code[loop[0] : loop[1] + 1])

    most = max((reads(loop) for loop in inner), default=0)
    hot = [loop for loop in inner if most >= 2 and 2 * reads(loop) >= most]
    if not hot:
        return Way(_way(code, jumps, 0, len(code), longest=True)), Way(), len(code)
    into = {loop: _way(code, jumps, 0, loop[0], longest=False) for loop in hot}
    reached = [loop for loop in hot if into[loop]]
    best = min(reached, key=lambda loop: len(into[loop]))
    turn = _way(code, jumps, best[0], best[1] + 1, longest=True)
    out = _way(code, jumps, best[1] + 1, len(code), longest=False)
    return Way(into[best] + out), Way(turn), len(code)


def _way(
    code: list[Instruction], jumps: dict[int, int], begin: int, end: int, *, longest: bool
) -> tuple[Instruction, ...]:
    """Instructions of the longest or shortest way forward from begin to end (the last: to an exit); () if there is none.

    What lies behind a jump of diverged threads is not gone through, nor a jump back.
    """
    to_exit = end == len(code)
    best: dict[int, tuple[int, int]] = {}  # at -> (length, next)
    sign = -1 if longest else 1
    for at in range(end - 1, begin - 1, -1):
        each, options = code[at], list[tuple[int, int]]()
        follows = [] if each.base in ("BRA", "EXIT") and not each.is_conditional else [at + 1]
        if at in jumps and jumps[at] > at and ".DIV" not in each.op:
            follows.append(jumps[at])
        if each.base == "EXIT" and to_exit and not (each.is_conditional and longest):
            options.append((1, -1) if not each.is_conditional else (10**6, -1))
        for follow in follows:
            if follow == end:
                options.append((1, -1))
            elif follow in best:
                options.append((best[follow][0] + 1, follow))
        if options:
            best[at] = min(options, key=lambda option: sign * option[0])
    if begin not in best:
        return ()
    found, at = list[Instruction](), begin
    while at >= 0:
        found.append(code[at])
        at = best[at][1]
    return tuple(found)


@dataclass(frozen=True)
class Row:
    """A line of the listing."""

    case: str
    kernel: str
    once: int
    turn: int
    pipes: Mapping[str, float]  # of both, per warp
    barriers: int
    shared_bytes: int
    through_shared: int
    conversions: int
    registers: int
    stack_bytes: int
    instructions_ms: float
    bytes_ms: float
    bound: str
    code: Code = field(repr=False, compare=False)


def listing(match: str = "", *, is_quick: bool = False) -> Iterator[Row]:
    """The rows of cases whose name has ``match``; of the tests' cases only, if quick."""
    made: dict[str, Code] = {}
    for case in cases(is_quick=is_quick):
        if match not in case.name:
            continue
        with compiling() as found:
            case.run()
        main = case.only or found[0][0]
        for name, kernel, grid in found:
            if kernel.hash not in made:
                made[kernel.hash] = code_of(name, kernel)
            yield _row(case, made[kernel.hash], grid, name == main)


def _row(case: Case, code: Code, grid: tuple[int, ...], is_main: bool) -> Row:
    blocks = grid[1] if len(grid) > 1 else 1
    warps = grid[0] * blocks * code.warps * case.scale
    turns = case.turns * blocks * code.warps
    once, turn = code.once.load(), code.turn.load()
    need = {pipe: 32 * (warps * once[pipe] + turns * turn[pipe]) / LANES[pipe] for pipe in LANES}
    busiest = max(need, key=lambda pipe: need[pipe])
    instructions_ms = 1e3 * need[busiest] / (SMS * CLOCK_HZ) if is_main else 0.0
    bytes_ms = 1e3 * case.bytes / BYTES_PER_S if is_main else 0.0
    return Row(
        case.name, code.name, code.once.count, code.turn.count, {pipe: once[pipe] + turn[pipe] for pipe in LANES},
        code.barriers, code.shared_bytes, code.through_shared, code.conversions, code.registers, code.stack_bytes,
        instructions_ms, bytes_ms, "" if not is_main else busiest if instructions_ms > bytes_ms else "bytes", code,
    )  # fmt: skip


NODES, EDGES, MEAN_TAIL = 2_449_029, 123_718_280, 0.5  # of synth:products; a list's last turn is half full


def cases(*, is_quick: bool = False) -> Iterator[Case]:
    """What is listed; ``is_quick``: one case of each kernel and of each way through it, for the tests."""
    yield from _aggregation(is_quick)
    yield from _attention(is_quick)
    yield from _rows(is_quick)
    yield from _quantised(is_quick)
    yield from _sampling()


def _graph(nodes: int = 64, degree: int = 4) -> Any:
    import torch

    from polyhop.graph import Block

    gen = torch.Generator().manual_seed(0)
    indptr = torch.arange(0, nodes * degree + 1, degree)
    return Block(indptr, torch.randint(nodes, (nodes * degree,), generator=gen).int(), nodes)


def _aggregation(is_quick: bool) -> Iterator[Case]:
    import torch

    from polyhop.kernels.triton import spmm

    block = _graph(32, 16)  # no list is short, none is cut
    factors = {
        "sum": {},
        "weighted": {"edge_weight": torch.rand(block.num_edges)},
        "scaled": {"src_scale": torch.rand(block.num_src)},
        "mean": {"dst_scale": torch.rand(block.num_dst)},
        "all": {
            "edge_weight": torch.rand(block.num_edges), "src_scale": torch.rand(block.num_src),
            "dst_scale": torch.rand(block.num_dst), "self_scale": torch.rand(block.num_dst),
            "own": (0, block.num_dst, 0),
        },
    }  # fmt: skip
    kinds = [
        ("sum", torch.float32, 128), ("weighted", torch.float32, 128), ("scaled", torch.float32, 128),
        ("mean", torch.float32, 128), ("all", torch.float32, 128), ("sum", torch.float32, 256),
        ("sum", torch.float32, 47), ("weighted", torch.float32, 47), ("sum", torch.bfloat16, 128),
        ("weighted", torch.bfloat16, 128), ("sum", torch.float64, 128),
    ]  # fmt: skip
    if is_quick:
        kinds = [
            ("weighted", torch.float32, 128),
            ("all", torch.float32, 47),
            ("scaled", torch.bfloat16, 128),
        ]
    for kind, dtype, width in kinds:
        h = torch.randn(block.num_src, width).to(dtype)
        given = {
            name: value.double() if dtype == torch.float64 and isinstance(value, torch.Tensor) else value
            for name, value in factors[kind].items()
        }

        def run(h: Any = h, given: Any = given, block: Any = block) -> None:
            spmm.spmm(
                block.indptr, block.indices, h, torch.empty(block.num_dst, h.shape[1], dtype=h.dtype), **given
            )

        size, shape = h.element_size(), spmm._shape(width, h.element_size(), EDGES / NODES)
        turns = NODES * (EDGES / NODES / (shape["T"] * shape["A"]) + MEAN_TAIL)
        moved = EDGES * (width * size + 4 + 4 * (kind in ("weighted", "all"))) + NODES * (width * size + 8)
        yield Case(f"spmm {kind} {_short(dtype)} {width}", run, NODES / block.num_dst, turns, moved)
    h, long = torch.randn(4, 128), torch.tensor([0, 3000, 3000, 3001, 3002])
    indices = torch.zeros(3002, dtype=torch.int32)
    yield Case(
        "spmm of long lists", lambda: spmm.spmm(long, indices, h, torch.empty(4, 128)), only="_long_lists"
    )


def _attention(is_quick: bool) -> Iterator[Case]:
    import torch

    from polyhop.graph import Block
    from polyhop.kernels.triton.attention import _blocks, attention, attention_backward

    block = _graph()
    kinds = [
        (heads, channels, dtype, drop)
        for dtype in (torch.float32, torch.bfloat16)
        for heads, channels in ((1, 16), (4, 16), (1, 64), (4, 64), (3, 7))
        for drop in (False, True)
        if dtype == torch.float32 or channels == 16
    ]
    if is_quick:
        kinds = [(4, 16, torch.float32, True), (1, 64, torch.bfloat16, False), (3, 7, torch.float32, False)]
    nodes, edges = NODES / 2, EDGES / 2  # PyG keeps rows of edges
    for heads, channels, dtype, drop in kinds:
        x = torch.randn(block.num_src, heads, channels).to(dtype)
        a_src, a_dst = torch.randn(block.num_src, heads), torch.randn(block.num_dst, heads)
        keys = torch.zeros((heads + 7) // 8, dtype=torch.int64) if drop else None
        given = (block, x, a_src, a_dst, keys, 16384 if drop else 0, 0.2, True)
        consts = _blocks(x)[0]
        per_turn = consts["A"] * consts["T"]
        turns = nodes * (edges / nodes / per_turn + MEAN_TAIL)
        size, width = x.element_size(), heads * channels
        name = f"{heads}x{channels} {_short(dtype)}" + (" dropped" if drop else "")
        forward = edges * (width * size + 4 + 4 * heads) + nodes * (width * (size + 4) + 16 * heads + 8)
        yield Case(
            f"attention {name}", lambda g=given: attention(*g, True), nodes / block.num_dst, turns, forward
        )  # fmt: skip
        kept = (x.float(), x.float(), *(torch.randn(block.num_dst, heads) for _ in range(3)))
        backward = edges * (width * size + 4 + 16 * heads) + nodes * (2 * width * size + 24 * heads + 8)
        yield Case(
            f"attention backward {name}", lambda g=given, k=kept, x=x: attention_backward(*g, k, x),
            nodes / block.num_dst, turns, backward, "_backward",
        )  # fmt: skip
    long = Block(torch.tensor([0, 3000, 3000, 3001]), torch.zeros(3001, dtype=torch.int32), 3)
    x, score = torch.randn(3, 4, 16), torch.randn(3, 4)
    kept = (x, x, score, score, score)
    given = (long, x, score, score, None, 0, 0.2, True)
    yield Case("attention of long lists", lambda: attention(*given, True), only="_join")
    yield Case("attention backward of long lists", lambda: attention_backward(*given, kept, x), only="_add")


def _rows(is_quick: bool) -> Iterator[Case]:
    import torch

    from polyhop.kernels.triton.dropout import dropout, dropout_relu_backward
    from polyhop.kernels.triton.gather import gather_rows
    from polyhop.kernels.triton.scatter import scatter_add_rows

    num = 4096
    for width, dtype in ((128, torch.float32), (47, torch.float32), (128, torch.bfloat16)):
        if is_quick and (width, dtype) == (128, torch.float32):
            continue
        h = torch.randn(num, width).to(dtype)
        ids, name, size = torch.randint(num, (num,)), f"{_short(dtype)} {width}", h.element_size()
        scale, moved = NODES / num, 2 * size * width * NODES
        out = torch.empty_like(h)
        yield Case(
            f"dropout {name}", lambda h=h, out=out: dropout(h, None, 0, 7, 32768, False, out), scale, 0, moved
        )
        yield Case(
            f"dropout relu {name}", lambda h=h, out=out, ids=ids: dropout(h, ids, 0, 7, 32768, True, out), scale, 0,
            moved,
        )  # fmt: skip
        signs = torch.zeros(num, (width + 7) // 8, dtype=torch.uint8)
        yield Case(
            f"dropout relu backward {name}",
            lambda h=h, s=signs, out=out: dropout_relu_backward(h, s, 32768, out), scale, 0, moved,
        )  # fmt: skip
        yield Case(
            f"gather {name}", lambda h=h, ids=ids, out=out: gather_rows(h, None, ids, None, out), scale / 2, 0,
            moved / 2 + 4 * NODES,
        )  # fmt: skip
        yield Case(
            f"gather of two {name}", lambda h=h, ids=ids, out=out: gather_rows(h, h, ids, None, out), scale / 2, 0,
            moved / 2 + 4 * NODES,
        )  # fmt: skip
        yield Case(
            f"scatter {name}", lambda h=h, ids=ids, out=out: scatter_add_rows(out, ids % 1024, h), scale, NODES / 2,
            size * width * NODES * 2.5,
        )  # fmt: skip


def _quantised(is_quick: bool) -> Iterator[Case]:
    import torch

    from polyhop.kernels.triton.quantise import count_widths, dequantise_rows, quantise_rows

    num = 4096
    for width, dtype, bits in (
        (128, torch.float32, 2), (128, torch.float32, 4), (128, torch.float32, 8), (128, torch.float32, 0),
        (47, torch.float32, 4), (128, torch.bfloat16, 4),
    ):  # fmt: skip
        if is_quick and (width, bits) in ((128, 2), (47, 4)):
            continue
        h = torch.randn(num, width).to(dtype)
        each = torch.tensor([2, 4, 8]).repeat(num)[:num] if bits == 0 else torch.full((num,), bits)
        counts = {b: int((each == b).sum()) for b in (1, 2, 4, 8, 16, 32)}
        of_codes = sum(count * ((width * b + 7) // 8 + 4) for b, count in counts.items())
        message, narrow = torch.zeros(of_codes, dtype=torch.uint8), each.to(torch.uint8)
        name = f"{bits or 'mixed'} bits {_short(dtype)} {width}"
        scale, moved = NODES / num, (h.numel() * h.element_size() + of_codes) * NODES / num
        yield Case(
            f"quantise {name}",
            lambda h=h, b=narrow, c=counts, m=message: quantise_rows(h, b, c, 7, None, None, m, None),
            scale, 0, moved,
        )  # fmt: skip
        yield Case(
            f"dequantise {name}", lambda h=h, b=narrow, c=counts, m=message: dequantise_rows(m, b, c, h), scale, 0,
            moved,
        )  # fmt: skip
    yield Case(
        "count widths", lambda: count_widths(torch.zeros(num, dtype=torch.uint8)), NODES / num, 0, NODES
    )


def _sampling() -> Iterator[Case]:
    import torch

    from polyhop.kernels.triton import relabel
    from polyhop.kernels.triton.sample import draw, draw_hops
    from polyhop.kernels.triton.transpose import transpose

    block, rows = _graph(4096, 40), torch.arange(4096)
    num, edges = 165_000, 600_000  # of the last of the bench's hops, about
    yield Case(
        "draw of 5", lambda: draw(block.indptr, rows, 5, 7, rows), num / 4096, 0, num * (32 + 16) + 8 * edges
    )
    table = torch.zeros(4096, dtype=torch.int32)
    yield Case(
        "relabel", lambda: relabel._place[(4,)](rows, table, 4096, BLOCK=relabel._IDS, num_warps=4), edges / 4096, 0,
        16 * edges,
    )  # fmt: skip
    hops: dict[str, Any] = {"table": table, "keep_edges": False}
    yield Case(
        "mini-batch of 15, 10, 5", lambda: draw_hops(block.indptr, block.indices, rows[:64], [15, 10, 5], [1, 2, 3], **hops),
        1, 0, 0,
    )  # fmt: skip
    yield Case(
        "transpose", lambda: transpose(block.indptr, block.indices, 4096), edges / 163_840, 0, 40 * edges
    )


def _short(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.compiled", description=__doc__)
    parser.add_argument("--match", default="", metavar="TEXT", help="only cases with this in their names")
    parser.add_argument(
        "--lines", action="store_true", help="instructions of each line of Python on the hot path, too"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows")
    given = parser.parse_args(arguments)
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0") or not is_possible():
        sys.exit("needs Triton with its compiler for CUDA, and no TRITON_INTERPRET")
    print(
        f"{'case':42}{'kernel':15}{'once':>6}{'turn':>6}{'alu':>6}{'fma':>6}{'imad':>6}{'xu':>5}{'mem':>6}{'bar':>5}"
        f"{'shared':>8}{'ld/st':>6}{'conv':>5}{'regs':>5}{'stack':>6}{'instr ms':>10}{'bytes ms':>10}  bound"
    )
    rows = []
    for row in listing(given.match):
        rows.append({key: value for key, value in asdict(row).items() if key != "code"})
        pipes = row.pipes
        print(
            f"{row.case:42}{row.kernel:15}{row.once:6}{row.turn:6}{pipes['alu']:6}{pipes['fma']:6}{pipes['imad']:6}"
            f"{pipes['xu']:5}{pipes['memory']:6}{row.barriers:5}{row.shared_bytes:8}{row.through_shared:6}"
            f"{row.conversions:5}{row.registers:5}{row.stack_bytes:6}{row.instructions_ms:10.3f}{row.bytes_ms:10.3f}"
            f"  {row.bound}",
            flush=True,
        )
        if given.lines:
            for way in ("once", "turn"):
                count = Counter(i.line for i in getattr(row.code, way).instructions)
                for line, number in sorted(count.items(), key=lambda item: -item[1]):
                    print(f"{'':8}{way} {number:4} {line}")
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
