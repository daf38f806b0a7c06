"""Synthetic graphs by name: ``synth:products?scale=0.2&seed=0``, ``rmat:?scale=20``, ``sbm:?nodes=10000&classes=8``.

``synth:`` graphs follow a published graph's counts (nodes, stored edges, features, classes, split sizes) and the skew of
its degrees, with planted communities: classes cut into groups, most edges inside them, features that are a weak sign of
the class under much noise, and some wrong labels. Averaging over neighbours removes the noise, so a GNN clearly beats an
MLP. Options: scale, seed, features (their number), signal, wrong (share of wrong labels).

``synth:procedural?nodes=1e9&features=256`` is another thing: nothing of it is stored, rows and neighbours are computed
when they are read, by ranks that train on it (``graph/procedural.py``). Options: nodes, features, classes, degree (the
mean), train (nodes), hot (share of neighbours that are popular nodes), hot_nodes, same (share that are of the same class),
signal, seed.

Not followed: the order of time or popularity in the published splits (here nodes are split at random), directed edges
(``arxiv`` and ``papers`` are stored with both directions of every edge), and node order (ids carry no locality).
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from urllib.parse import parse_qsl

import numpy as np
import torch
from torch import Tensor

from polyhop.errors import DatasetError, unknown
from polyhop.graph import DenseFeatures, Graph, Split
from polyhop.kernels import Purpose, fold, random_u32
from polyhop.kernels.procedural import MOST_HOT, MOST_NODES, Virtual
from polyhop.kernels.synth import Communities, Rmat, feature_rows, permutation, synth_edges

__all__ = [
    "PRESETS",
    "Preset",
    "generate",
    "is_procedural",
    "is_synthetic",
    "num_features",
    "procedural_recipe",
    "published_sizes",
]

_CHUNK = 1 << 20  # nodes per step where scratch memory grows with them
_SCHEMES = ("synth", "rmat", "sbm")
_WIDTHS = {"rmat": 0, "sbm": 32}  # columns, unless they are given
_PROCEDURAL = "procedural"


@dataclass(frozen=True)
class Preset:
    """What a published graph looks like. ``edges`` counts stored edges, both directions."""

    nodes: int
    edges: int
    features: int
    classes: int
    split: tuple[int, int, int]
    max_degree: int
    power: int  # of the degree law, see kernels.synth
    in_group: float  # share of edges inside one group of a class
    in_class: float  # share of edges elsewhere in the same class
    signal: float  # distance of class centres over the noise of one feature
    wrong: float  # share of nodes with another community's label
    repeats: float  # measured: 1.03 + repeats / sqrt(scale) draws give one distinct pair


PRESETS = {
    "arxiv": Preset(169_343, 2_315_598, 128, 40, (90_941, 29_799, 48_603), 13_161, 4, 0.40, 0.25, 0.26, 0.20, 0.035),
    "products": Preset(
        2_449_029, 123_718_280, 100, 47, (196_615, 39_323, 2_213_091), 17_481, 4, 0.45, 0.36, 0.28, 0.12, 0.02
    ),
    "reddit": Preset(232_965, 114_615_892, 602, 41, (153_431, 23_831, 55_703), 21_657, 3, 0.40, 0.38, 0.10, 0.03, 0.2),
    "papers": Preset(
        111_059_956, 1_615_685_872, 128, 172, (1_207_179, 125_265, 214_338), 251_471, 4, 0.40, 0.25, 0.30, 0.25, 0.003
    ),
}  # fmt: skip


def is_synthetic(source: str) -> bool:
    """Whether a name asks for a generator."""
    return source.split(":", 1)[0] in _SCHEMES and ":" in source


def generate(source: str, *, features_file: Path | None = None, has_features: bool = True) -> Graph:
    """The graph a generator's name describes. ``features_file``: write features there (.npy) and map them."""
    scheme, _, rest = source.partition(":")
    name, _, query = rest.partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    if not has_features:
        num_features(source)  # what is wrong with the number is said all the same
        options["features"] = "0"
    if is_procedural(source):
        recipe, _ = procedural_recipe(source)
        raise DatasetError(
            f"{source!r}: a procedural graph is computed when it is read and cannot be loaded whole ({recipe.num_nodes:,} "
            f"nodes, {4 * recipe.num_nodes * recipe.num_features:,} bytes of features): ranks train on mini-batches of it, "
            "each making its own part: polyhop train NAME --workers 4 --strategy macro --fanout 10,5"
        )
    if scheme == "synth":
        return _published(source, name, options, features_file)
    if name:
        raise DatasetError(
            f"{source!r}: {scheme}: takes only options, e.g. {scheme}:?seed=1; got name {name!r}"
        )
    return (_rmat if scheme == "rmat" else _sbm)(source, options, features_file)


def num_features(source: str) -> int:
    """Columns of the rows that a name such as ``sbm:?features=8`` asks for."""
    scheme, _, rest = source.partition(":")
    name, _, query = rest.partition("?")
    usual = PRESETS[name].features if name in PRESETS else _WIDTHS.get(scheme, 0)
    return _whole(source, dict(parse_qsl(query, keep_blank_values=True)), "features", usual, 0, 65536)


def is_procedural(source: str) -> bool:
    """Whether a name asks for a graph that is computed when read."""
    return source.partition("?")[0] == f"synth:{_PROCEDURAL}"


def procedural_recipe(source: str) -> tuple[Virtual, int]:
    """(the virtual graph, how many train nodes) of a name such as ``synth:procedural?nodes=1e9&features=256``."""
    options = dict(parse_qsl(source.partition("?")[2], keep_blank_values=True))
    nodes = _whole(source, options, "nodes", 10**6, 2, MOST_NODES)
    hot_share = _number(source, options, "hot", 0.3, 0.0, 1.0)
    recipe = Virtual(
        seed=_whole(source, options, "seed", 0, 0, 2**63 - 1),
        num_nodes=nodes,
        num_features=_whole(source, options, "features", 128, 1, 65536),
        num_classes=_whole(source, options, "classes", min(16, nodes), 1, min(nodes, 65536)),
        mean_degree=_number(source, options, "degree", 12.0, 0.0, 500.0),
        num_hot=_whole(source, options, "hot_nodes", min(max(nodes // 10_000, 16), 100_000), 1, MOST_HOT),
        hot_share=hot_share,
        same_share=_number(source, options, "same", min(0.4, 1 - hot_share), 0.0, 1 - hot_share),
        signal=_number(source, options, "signal", 0.2, 0.0, 100.0),
    )
    train = _whole(source, options, "train", min(100_000, max(1, nodes // 10)), 1, min(nodes, 2**31))
    _no_more(source, options, "nodes features classes degree train hot hot_nodes same signal seed")
    return recipe, train


def _number(source: str, options: dict[str, str], key: str, default: float, low: float, high: float) -> float:
    """A numeric option, taken out of options, checked against its range."""
    text = options.pop(key, None)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        raise DatasetError(f"{source!r}: {key}={text!r} is not a number") from None
    if not low <= value <= high:
        raise DatasetError(f"{source!r}: {key}={text} is outside {low:g} .. {high:g}")
    return value


def _whole(source: str, options: dict[str, str], key: str, default: int, low: int, high: int) -> int:
    """A whole-number option, taken out of options, checked against its range."""
    value = _number(source, options, key, default, low, high)
    if value != int(value):
        raise DatasetError(f"{source!r}: {key}={value:g} is not a whole number")
    return int(value)


def _no_more(source: str, options: dict[str, str], known: str) -> None:
    for key in options:
        raise DatasetError(f"{source!r}: {unknown('option', key, known.split())}")


def published_sizes(source: str) -> tuple[int, int, int, int]:
    """(nodes, edges, features, classes) of a name such as ``synth:papers?scale=0.1``, without making it."""
    name, _, query = source.partition(":")[2].partition("?")
    preset, _, _, nodes, pairs = _scaled(source, name, dict(parse_qsl(query, keep_blank_values=True)))
    return nodes, 2 * pairs, preset.features, preset.classes


def _scaled(source: str, name: str, options: dict[str, str]) -> tuple[Preset, float, int, int, int]:
    """(preset as the options change it, scale, seed, nodes, undirected edges)."""
    if name not in PRESETS:
        raise DatasetError(f"{source!r}: {unknown('synthetic graph', name, [*PRESETS, _PROCEDURAL])}")
    preset = PRESETS[name]
    scale = _number(source, options, "scale", 1.0, 1e-6, 10.0)
    seed = _whole(source, options, "seed", 0, 0, 2**63)
    preset = replace(
        preset,
        features=_whole(source, options, "features", preset.features, 0, 65536),
        signal=_number(source, options, "signal", preset.signal, 0.0, 100.0),
        wrong=_number(source, options, "wrong", preset.wrong, 0.0, 1.0),
    )
    _no_more(source, options, "scale seed features signal wrong")
    nodes = max(round(preset.nodes * scale), 8 * preset.classes)
    pairs = min(
        round(preset.edges * scale / 2), nodes * nodes // 64
    )  # a small graph cannot be as dense as all that
    return preset, scale, seed, nodes, pairs


def _published(source: str, name: str, options: dict[str, str], file: Path | None) -> Graph:
    preset, scale, seed, nodes, pairs = _scaled(source, name, options)
    recipe = _communities(preset, nodes, 2 * pairs / nodes, fold(seed, Purpose.SYNTH, 1))
    node_of = permutation(fold(seed, Purpose.SYNTH, 0), nodes)
    overdraw = min(1.03 + preset.repeats / scale**0.5, 3.0)
    indptr, indices = synth_edges(recipe, node_of, num_pairs=pairs, overdraw=overdraw)
    community = _community(recipe, node_of)
    train, val, test = (round(size * scale) for size in preset.split)
    covers = sum(preset.split) == preset.nodes
    split = _split(fold(seed, Purpose.SYNTH, 3), nodes, train, val, nodes - train - val if covers else test)
    y = _labels(fold(seed, Purpose.SYNTH, 2), community, preset.classes, preset.wrong)
    if not covers:
        y = _only(y, split)
    x = _features(seed, community, preset.classes, preset.features, preset.signal, file)
    meta = {"source": "generated", "preset": name, "scale": scale, "seed": seed}
    return Graph(indptr, indices, x, y, split, num_classes=preset.classes, name=source, meta=meta)


def _communities(preset: Preset, nodes: int, degree: float, key: int) -> Communities:
    """Class sizes, groups and hub limits for a graph of this many nodes and mean degree."""
    share = torch.tensor([1 / (c + 10) for c in range(preset.classes)], dtype=torch.float64)
    ends = (share.cumsum(0) / share.sum() * nodes).round().long()
    ends[-1] = nodes
    start = (0, *(int(end) for end in ends))
    group_size = max(500, int(8 * degree))
    groups = tuple(max(1, (b - a) // group_size) for a, b in pairwise(start))
    far = degree * (1 - preset.in_group)
    class_ratio = min(preset.max_degree, nodes / 4) / far
    group_ratio = group_size / 8 / (degree * preset.in_group)
    return Communities(
        key, nodes, start, groups, preset.in_group, preset.in_class, preset.power,
        _floor(class_ratio, preset.power), _floor(group_ratio, preset.power),
    )  # fmt: skip


def _floor(ratio: float, power: int) -> float:
    """Floor of the degree law at which the largest degree is about ``ratio`` times the mean; a multiple of 2^-12."""
    if power == 1:
        return 0.0
    floor: float = (1 / (power * max(ratio, 1.0))) ** (1 / (power - 1))
    return min(round(floor * 4096), 4000) / 4096


def _community(recipe: Communities, node_of: Tensor) -> Tensor:
    """int64 [N]: community of each node."""
    sizes = torch.tensor(recipe.class_start).diff()
    out = torch.empty(recipe.num_nodes, dtype=torch.int64)
    out[node_of.long()] = torch.repeat_interleave(torch.arange(sizes.numel()), sizes)
    return out


def _labels(key: int, community: Tensor, classes: int, wrong: float) -> Tensor:
    """int64 [N]: the community, or for a share of nodes any class."""
    y = community.clone()
    for begin in range(0, y.numel(), _CHUNK):
        ids = torch.arange(begin, min(begin + _CHUNK, y.numel()))
        words = random_u32(key, ids)
        other = (words[:, 1] * classes) >> 32
        y[ids] = torch.where(words[:, 0] < wrong * 2**32, other, y[ids])
    return y


def _split(key: int, nodes: int, *sizes: int) -> Split:
    """Disjoint random sets of train, val and test nodes."""
    order = permutation(key, nodes)
    ends = [0, *accumulate(sizes)]
    train, val, test = (order[a:b].long().sort().values for a, b in pairwise(ends))
    return Split(train, val, test)


def _only(y: Tensor, split: Split) -> Tensor:
    """Labels of the nodes in the split; -1 elsewhere."""
    out = torch.full_like(y, -1)
    for ids in (split.train, split.val, split.test):
        out[ids] = y[ids]
    return out


def _features(
    seed: int, community: Tensor, classes: int, width: int, signal: float, file: Path | None
) -> DenseFeatures | None:
    if width == 0:
        return None
    centres = feature_rows(fold(seed, Purpose.SYNTH, 5), None, None, num_rows=classes, width=width) * signal
    out = None if file is None else _mapped(file, (community.numel(), width))
    values = feature_rows(
        fold(seed, Purpose.SYNTH, 4), community, centres, num_rows=community.numel(), width=width, out=out
    )
    return DenseFeatures(values, is_mapped=file is not None)


def _mapped(file: Path, shape: tuple[int, int]) -> Tensor:
    """A new float32 .npy file, mapped for writing."""
    file.parent.mkdir(parents=True, exist_ok=True)
    need, free = 4 * shape[0] * shape[1], shutil.disk_usage(file.parent).free
    if need > free:  # writing to a mapped file on a full disk would kill the process
        raise DatasetError(
            f"{file}: needs {need / 2**30:.1f} GiB, but only {free / 2**30:.1f} GiB are free there"
        )
    return torch.from_numpy(np.lib.format.open_memmap(file, mode="w+", dtype=np.float32, shape=shape))


def _random_split(seed: int, nodes: int) -> Split:
    """60/20/20, for the graphs given by parameters."""
    train, val = round(0.6 * nodes), round(0.2 * nodes)
    return _split(fold(seed, Purpose.SYNTH, 3), nodes, train, val, nodes - train - val)


def _rmat(source: str, options: dict[str, str], file: Path | None) -> Graph:
    """R-MAT (Graph500's a, b, c by default): 2^scale nodes, edge_factor undirected draws per node.

    Loops and repeats are dropped, so fewer edges come out than were drawn.
    """
    levels = _whole(source, options, "scale", 16, 1, 30)
    factor = _number(source, options, "edge_factor", 16, 0.01, 4096)
    a, b, c = (_number(source, options, k, v, 0.0, 1.0) for k, v in (("a", 0.57), ("b", 0.19), ("c", 0.19)))
    if a + b + c > 1:
        raise DatasetError(
            f"{source!r}: a + b + c = {a + b + c:g}; expected at most 1 (the fourth quadrant gets the rest)"
        )
    seed = _whole(source, options, "seed", 0, 0, 2**63)
    width = _whole(source, options, "features", _WIDTHS["rmat"], 0, 65536)
    classes = _whole(source, options, "classes", 0, 0, 65536)
    signal = _number(source, options, "signal", 0.25, 0.0, 100.0)
    _no_more(source, options, "scale edge_factor a b c seed features classes signal")
    recipe = Rmat(fold(seed, Purpose.SYNTH, 1), levels, a, b, c)
    node_of = permutation(fold(seed, Purpose.SYNTH, 0), recipe.num_nodes)
    indptr, indices = synth_edges(recipe, node_of, num_pairs=int(factor * recipe.num_nodes), exact=False)
    community = torch.zeros(recipe.num_nodes, dtype=torch.int64)
    y = None
    if classes:
        y = community = _labels(fold(seed, Purpose.SYNTH, 2), community, classes, 1.0)
    x = _features(seed, community, max(classes, 1), width, signal, file)
    split = _random_split(seed, recipe.num_nodes) if classes else None
    meta = {"source": "generated", "a": a, "b": b, "c": c, "seed": seed}
    return Graph(indptr, indices, x, y, split, num_classes=classes, name=source, meta=meta)


def _sbm(source: str, options: dict[str, str], file: Path | None) -> Graph:
    """Stochastic block model: equal classes, an undirected edge with p_in inside one and p_out between two.

    Edge counts are their expected values, not drawn; which edges exist is.
    """
    nodes = _whole(source, options, "nodes", 10_000, 2, 2**31 - 1)
    classes = _whole(source, options, "classes", 8, 1, min(nodes, 65536))
    p_in = _number(source, options, "p_in", min(1.0, 10 * classes / nodes), 0.0, 0.5)
    p_out = _number(source, options, "p_out", p_in / (4 * classes), 0.0, 0.5)
    seed = _whole(source, options, "seed", 0, 0, 2**63)
    width = _whole(source, options, "features", _WIDTHS["sbm"], 0, 65536)
    signal = _number(source, options, "signal", 0.25, 0.0, 100.0)
    _no_more(source, options, "nodes classes p_in p_out seed features signal")
    start = tuple(c * nodes // classes for c in range(classes + 1))
    sizes = [b - a for a, b in pairwise(start)]
    within = sum(n * (n - 1) // 2 for n in sizes)
    inside, between = p_in * within, p_out * (nodes * (nodes - 1) // 2 - within)
    pairs = round(inside + between)
    in_class = inside / max(inside + between, 1e-30)
    recipe = Communities(fold(seed, Purpose.SYNTH, 1), nodes, start, (1,) * classes, 0.0, in_class, power=1)
    node_of = permutation(fold(seed, Purpose.SYNTH, 0), nodes)
    indptr, indices = synth_edges(recipe, node_of, num_pairs=pairs, overdraw=1.01 + 2 * max(p_in, p_out))
    y = _community(recipe, node_of)
    x, split = _features(seed, y, classes, width, signal, file), _random_split(seed, nodes)
    meta = {"source": "generated", "p_in": p_in, "p_out": p_out, "seed": seed}
    return Graph(indptr, indices, x, y, split, num_classes=classes, name=source, meta=meta)
