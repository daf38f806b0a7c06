"""The channels of strategy ``halo`` by its options: what messages look like, when rows cross, who chooses widths."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyhop.comm import Collective
from polyhop.comm.probe import PairCosts, measure_pairs
from polyhop.errors import ConfigError, unknown
from polyhop.exchange.assigner import Assigner, Policy
from polyhop.exchange.crossing import Crossing, Lists, Messages, Spans
from polyhop.exchange.delta import BITS as DELTA_BITS
from polyhop.exchange.delta import DeltaMessages
from polyhop.exchange.layout import LayerEdges
from polyhop.exchange.quantised import QuantisedMessages
from polyhop.exchange.sampled import SampledCrossing
from polyhop.exchange.sequential import SequentialCrossing
from polyhop.exchange.skipping import SkippingCrossing
from polyhop.exchange.stale import StaleCrossing
from polyhop.kernels.keys import Key

__all__ = [
    "BITS",
    "DELTA_BITS",
    "DEPTH",
    "FIRST_BITS",
    "HALOS",
    "Channels",
    "Ends",
    "Options",
    "make_channels",
]

BITS = ("1", "2", "4", "8", "16", "32", "adaptive", "delta", "random")
HALOS = ("exact", "stale", "sampled", "skipping", "sequential")
FIRST_BITS = 8  # before anything is known of the ranges
DEPTH = 1  # rounds of a sequential halo that are ahead
_WATCHED = 10  # steps after which people hear how many rows cross as differences


@dataclass(frozen=True)
class Options:
    """What the trainer is told of them."""

    bits: int | str = 32  # of a value between layers: 1 .. 32, "adaptive", "delta", "random" (for comparison)
    bits_lambda: float = 0.5  # of "adaptive": 0 only time counts, 1 only variance
    bits_group: int = 100  # messages with one width
    bits_period: int = 50  # epochs between choices
    halo: str = "exact"  # exact | stale | sampled | skipping | sequential
    halo_smoothing: float = 0.0  # of "stale"
    halo_share: float = 0.1  # of "sampled": rows that cross
    halo_drift: float = 0.05  # of "skipping": relative distance up to which rows are not sent again
    halo_age: int = 10  # of "skipping": steps after which they are in any case
    link_costs: str | Path | None = (
        None  # file of what messages between ranks cost: read, or measured and written
    )
    overlap: bool = True  # compute central rows while others are on their way


@dataclass(frozen=True, eq=False)
class Ends:
    """One layer's crossing: who reads what, and the user's ids of own rows [n] and of the halo's [H]."""

    layer: int
    lists: Lists
    ids: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, index: int, layer: LayerEdges, num_own: int) -> Ends:
        ids = layer.block.src_ids
        assert ids is not None, "a part's block names its rows"
        return cls(index, layer.lists, (ids[:num_own], ids[num_own:]))


class Channels:
    """All channels of a rank, and who chooses their widths."""

    def __init__(self, channels: Sequence[Crossing], line: Collective, assigner: Assigner | None) -> None:
        self.channels, self._line, self._assigner = list(channels), line, assigner
        self._deltas = {
            at: channel.messages
            for at, channel in enumerate(self.channels)
            if isinstance(channel.messages, DeltaMessages)
        }
        self._num_steps, self._notes = 0, list[str]()

    @property
    def notes(self) -> list[str]:
        """What was found out on the way."""
        return [*self._notes, *([] if self._assigner is None else self._assigner.notes)]

    def begin_step(self, key: Key) -> None:
        """A step is about to run."""
        if self._assigner is not None:
            self._assigner.begin_step(key)
        for channel in self.channels:
            channel.begin_step(key)

    def end_step(self, key: Key) -> None:
        """A step has run, forward and backward."""
        if self._assigner is not None:
            self._assigner.end_step(key)
        for channel in self.channels:
            channel.end_step()
        self._num_steps += 1
        if self._num_steps == _WATCHED and self._deltas:
            self._notes.append(_moved([each.share_moved for each in self._deltas.values()]))

    def state(self) -> dict[str, Tensor]:
        """What this rank's next step depends on."""
        kept = {} if self._assigner is None else {f"widths.{k}": v for k, v in self._assigner.state().items()}
        for at, channel in enumerate(self.channels):
            kept |= {f"{at}.{name}": value for name, value in channel.state().items()}
        for at, messages in self._deltas.items():  # now that nothing is under way
            kept |= {f"held{at}.{name}": value for name, value in messages.state().items()}
        return kept

    def restore(self, tensors: dict[str, Tensor]) -> None:
        """Put back what ``state`` gave."""
        if self._assigner is not None:
            self._assigner.restore(_under(tensors, "widths"))
        for at, channel in enumerate(self.channels):
            channel.restore(_under(tensors, str(at)))
        for at, messages in self._deltas.items():
            messages.restore(_under(tensors, f"held{at}"))

    def close(self) -> None:
        if self._assigner is not None:
            self._assigner.close()
        self._line.close()


def _under(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {
        name.removeprefix(f"{prefix}."): value
        for name, value in tensors.items()
        if name.startswith(f"{prefix}.")
    }


def _moved(shares: Sequence[float]) -> str:
    each = ", ".join(f"{100 * share:.0f} %" for share in shares)
    text = f"bits='delta': {each} of the rows of each layer cross as differences"
    if min(shares) < 0.5:
        text += (
            "; the others change too much from step to step (dropout does that) and are sent as with bits=2: "
            "bits='adaptive' suits such a model better"
        )
    return text


def make_channels(
    ends: Sequence[Ends], options: Options, line: Collective, spans: Callable[[int], Spans]
) -> Channels:
    """One channel for each. All ranks call it together: lines are opened."""
    bits = str(options.bits)
    if bits not in BITS:
        raise ConfigError(unknown("bits", bits, BITS))
    is_chosen = bits in ("adaptive", "random")
    if is_chosen and options.halo == "sampled":
        raise ConfigError(
            f"bits={bits!r} follows single rows over epochs, and halo='sampled' draws others in each: give a number of bits"
        )
    if bits == "delta" and options.halo not in ("exact", "stale"):
        raise ConfigError(
            f"bits='delta' sends what rows have moved since all of them crossed last, and halo={options.halo!r} "
            + ("keeps no rows of other ranks" if options.halo == "sequential" else "leaves some out")
            + ": give a number of bits, or halo='exact' or 'stale'"
        )
    own = line.fork()
    channels = [_channel(each, options, own, spans(each.layer)) for each in ends]
    assigner = None
    if is_chosen and channels:
        policy = Policy(
            lam=options.bits_lambda,
            group_size=options.bits_group,
            period=options.bits_period,
            first=min(10, options.bits_period),
            is_random=bits == "random",
            links=None if options.link_costs is None else _links(Path(options.link_costs), line),
        )
        assigner = Assigner(channels, line.fork(), policy)
    return Channels(channels, own, assigner)


def _links(path: Path, line: Collective) -> PairCosts:
    """Of the file where there is one, else measured now and kept there: widths must not change from run to run.

    Rank 0 reads and writes; the others hear of it.
    """
    text = ""
    if line.rank == 0 and path.exists():
        text = _file(path, path.read_text)
    text = _said_by_first(text, line)
    if not text:
        text = json.dumps({"ranks": line.num_ranks, **measure_pairs(line).to_json()}, indent=1)
        if line.rank == 0:
            _file(path, partial(path.write_text, text + "\n"))
    try:
        found = json.loads(text)
        costs, num_ranks = PairCosts.from_json(found), int(found["ranks"])
        for table in (costs.per_byte, costs.per_message):
            if [len(row) for row in table] != [num_ranks] * num_ranks:
                raise ValueError(f"expected {num_ranks} rows of {num_ranks} numbers")
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"link_costs={str(path)!r} is no file of link costs: {error}") from error
    if num_ranks != line.num_ranks:
        raise ConfigError(
            f"link_costs={str(path)!r} was measured with {num_ranks} ranks, this run has {line.num_ranks}: "
            "give another file name"
        )
    return costs


def _file(path: Path, access: Callable[..., Any]) -> Any:
    try:
        return access(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"link_costs={str(path)!r} cannot be read or written: {error.strerror or error}"
        ) from error


def _said_by_first(text: str, line: Collective) -> str:
    data = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8).to(line.device)
    size = int(line.broadcast(torch.tensor([data.numel()], device=line.device), kind="sizes"))
    mine = data if line.rank == 0 else torch.empty(size, dtype=torch.uint8, device=line.device)
    return bytes(line.broadcast(mine, kind="sizes").cpu().numpy().tobytes()).decode().strip()


def _channel(ends: Ends, options: Options, line: Collective, spans: Spans) -> Crossing:
    def messages(lists: Lists, halo: Tensor | None = None) -> Messages:
        own_ids, halo_ids = ends.ids
        if str(options.bits) == "32":
            return Messages(lists, spans)
        if options.bits == "delta":
            return DeltaMessages(lists, ends.ids, spans)
        width = FIRST_BITS if options.bits in ("adaptive", "random") else int(options.bits)
        return QuantisedMessages(lists, width, (own_ids, halo_ids if halo is None else halo_ids[halo]), spans)

    made, overlaps = messages(ends.lists), options.overlap
    if options.halo == "exact":
        return Crossing(made, line, overlaps=overlaps)
    if options.halo == "stale":
        return StaleCrossing(made, line, overlaps=overlaps, smoothing=options.halo_smoothing)
    if options.halo == "sampled":
        share = options.halo_share
        return SampledCrossing(made, line, share=share, ids=ends.ids, make=messages, overlaps=overlaps)
    if options.halo == "skipping":
        drift, age = options.halo_drift, options.halo_age
        return SkippingCrossing(made, line, drift=drift, max_age=age, overlaps=overlaps)
    if options.halo == "sequential":
        return SequentialCrossing(made, line, overlaps=overlaps, depth=DEPTH)
    raise ConfigError(unknown("halo", options.halo, HALOS))
