"""Rows across the cut in few bits: each row of a message has a width of its own, rounding is random and unbiased.

Widths of a direction are known at both ends, so a message is codes and two parameters a row, nothing else. Which way a value
is rounded is a function of (step, layer, direction, the two ranks, the user's node id, column).

Legend: n own rows, H halo rows, P ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from polyhop.errors import InputError
from polyhop.exchange.codec import MixedCodec
from polyhop.exchange.crossing import DIRECTIONS, Direction, Lists, Messages, Spans
from polyhop.kernels import NotFiniteError
from polyhop.kernels.keys import Purpose, fold

__all__ = ["QuantisedMessages", "Widths"]


class Widths:
    """Of one direction of one layer: of the rows that leave, and of those that arrive, for each rank."""

    def __init__(self, leaving: Sequence[Tensor], arriving: Sequence[Tensor]) -> None:
        self.leaving, self.arriving = list(leaving), list(arriving)  # uint8 [rows]

    @classmethod
    def uniform(cls, width: int, leaving: Sequence[int], arriving: Sequence[int]) -> Widths:
        return cls(*([torch.full((k,), width, dtype=torch.uint8) for k in ks] for ks in (leaving, arriving)))


class QuantisedMessages(Messages):
    """Starts with one width for all rows; ``set_widths`` changes them. ``ids``: the user's, of own rows and of the halo."""

    def __init__(
        self, lists: Lists, width: int, ids: tuple[Tensor, Tensor], spans: Spans | None = None
    ) -> None:
        super().__init__(lists, spans)
        own, halo = ids
        self._ids: dict[Direction, list[Tensor]] = {
            "forward": [
                torch.cat(
                    [own[rows], -1 - torch.arange(more, device=own.device)]
                )  # sums have no id of their own
                for rows, more in zip(lists.lent, lists.sums_by_rank, strict=True)
            ],
            "backward": list(halo.split(list(lists.wanted))),  # type: ignore[no-untyped-call]
        }
        self.widths = {
            way: Widths.uniform(width, lists.leaving(way), lists.arriving(way)) for way in DIRECTIONS
        }
        self._codecs: dict[tuple[Direction, str, int], list[MixedCodec]] = {}
        self.traces = False  # whether ranges are noted
        self.squares: dict[Direction, list[Tensor]] = {}  # of ranges, summed over steps, for each rank

    def set_widths(self, direction: Direction, widths: Widths) -> None:
        """From the next step on; the same at both ends of every message."""
        for given, counts in (
            (widths.leaving, self.lists.leaving(direction)),
            (widths.arriving, self.lists.arriving(direction)),
        ):
            if [each.numel() for each in given] != counts:
                raise InputError(
                    f"widths of layer {self.spans.layer}, {direction}: for {[each.numel() for each in given]} rows, and "
                    f"{counts} cross: they are of other parts"
                )
        self.widths[direction] = widths
        self._codecs.clear()

    def take_squares(self) -> dict[Direction, list[Tensor]]:
        """Of each message since the last call: float64, the sum over steps of (largest - smallest value)^2."""
        found, self.squares = self.squares, {}
        return found

    def pack(self, direction: Direction, rows: Tensor, rank: int, sums: Tensor | None = None) -> list[Tensor]:
        with self.spans.span("quantise", direction):
            return super().pack(direction, rows, rank, sums)

    def packed(self, direction: Direction, rows: Tensor, ids: Tensor | None, rank: int, to: int) -> Tensor:
        codec = self._made(direction, "leaving", rows.shape[1])[to]
        ranges = torch.empty(codec.num_rows, device=rows.device) if self.traces else None
        try:
            key = self._round_key(direction, rank, to)
            message = codec.encode(rows, ids, self._ids[direction][to], key, ranges)
        except NotFiniteError as error:
            raise self._not_finite(direction, rank, to, error.row) from error
        if ranges is not None:
            self._note(direction, to, ranges)
        return message

    def opened(self, direction: Direction, piece: Tensor, source: int, like: Tensor) -> Tensor:
        return self._made(direction, "arriving", like.shape[1])[source].decode(piece, like.dtype)

    def counts(self, direction: Direction, num_columns: int) -> list[int]:
        return [codec.num_bytes for codec in self._made(direction, "arriving", num_columns)]

    def opener(self, direction: Direction, like: Tensor) -> Callable[[list[Tensor]], list[Tensor]]:
        codecs = self._made(direction, "arriving", like.shape[1])

        def opened(pieces: list[Tensor]) -> list[Tensor]:
            with self.spans.span("dequantise", direction):
                return [
                    codec.decode(piece, like.dtype)
                    if piece.numel()
                    else like[:0]  # nothing came: see ``skipping``
                    for codec, piece in zip(codecs, pieces, strict=True)
                ]

        return opened

    def _made(self, direction: Direction, which: str, num_columns: int) -> list[MixedCodec]:
        name = (direction, which, num_columns)
        if name not in self._codecs:
            bits = getattr(self.widths[direction], which)
            self._codecs[name] = [MixedCodec(num_columns, each) for each in bits]
        return self._codecs[name]

    def _round_key(self, direction: Direction, sender: int, receiver: int) -> int:
        site = self.key.at(Purpose.ROUND, self.spans.layer)
        return fold(site, DIRECTIONS.index(direction), sender, receiver)

    def _note(self, direction: Direction, rank: int, ranges: Tensor) -> None:
        if direction not in self.squares:
            counts = self.lists.leaving(direction)
            self.squares[direction] = [torch.zeros(k, dtype=torch.float64) for k in counts]
        wide = ranges.cpu().double()
        self.squares[direction][rank].addcmul_(wide, wide)

    def _not_finite(self, direction: Direction, rank: int, to: int, row: int) -> InputError:
        what = "rows" if direction == "forward" else "gradients of rows"
        node = int(self._ids[direction][to][row])
        where = f"node {node}" if node >= 0 else f"sum {-1 - node} of several rows"
        return InputError(
            f"{what} that layer {self.spans.layer} sends from rank {rank} to rank {to} are not finite, first at "
            f"{where}: training has diverged (try a smaller lr, or clip=1.0)"
        )
