"""What a rank of a cluster can do that nobody measured: a machine and a law, from published rates and the shares reached.

    far_s    bytes moved / bandwidth    of a value that is summed from memory; near_s a quarter of it
    flop_s   1 / (rate * share)         of a product, float32
    row_s    bytes moved / bandwidth    of a value that passes through bias, norm, activation, dropout
    call_s   of a layer, however small: what Python and the launches of its kernels take

A processor's rates are shared by the ranks of its host, and a core alone reaches no more than its own. Input rows of
mini-batches lie in the host's memory and cross to a GPU one copy after another; those of a full graph lie on the GPU.

Where GPUs were measured, what they took stands in for all of that: ``scripts/bench gpu --only ranks`` writes the file that a
cluster's ``machine`` names.
"""

from __future__ import annotations

from dataclasses import replace

from polyhop.plan.cluster import Cluster
from polyhop.plan.law import Law
from polyhop.plan.machine import Link, Machine

__all__ = ["crowding_of", "described", "law_of_device", "machine_of_device", "measured_device"]

# Shares of published rates. A processor's are those of an EPYC core of this project's bench: GraphSAGE of three layers, law
# fitted to its steps while the other core is busy (2.4e-10 s a far value of some 20 GB/s, 1.5e-11 s a flop).
_CPU_FLOPS, _CPU_BYTES = 0.5, 0.8
_CORE_BYTES = 20e9  # that one core reads a second at the most
_MOVED = {"cpu": (4.0, 12.0), "gpu": (80.0, 96.0)}  # bytes of a far value, of one that is passed
# A GPU's: laws fitted to steps of GraphSAGE and GCN on an H200 (4.8 TB/s, 67 TFLOP/s), where plain torch kernels write
# messages out and read them again: 1.6e-11 to 1.8e-11 s a far value, 1.9e-11 to 3.2e-11 a passed one, 45 TFLOP/s, 1.3 to
# 1.5 ms a layer, forward and backward. GAT: three times as long a value, 3.5 ms a layer.
_GPU_FLOPS = 0.67
_NEAR = 0.25  # of the time of a far value
_PCIE, _PLAIN_BYTES = 0.8, 9e9  # of its rate; what a copy of memory that is not pinned reached there
_CALL_S = {"cpu": 1.2e-4, "gpu": 1.45e-3}
# Sampling is a processor's work everywhere: measured on the same core.
_NODE_S, _EDGE_S = 1.4e-7, 3.2e-9
_MESSAGE_S = {"cpu": 1.5e-4, "gpu": 3e-5}  # gloo's; nccl's, in groups
_BYTE_S = {"cpu": 3e-10, "gpu": 1e-11}  # copied through the kernel; moved by the card
_QUANTISED = 96.0  # bytes moved for a value that is rounded, or restored: as for one that is passed
_CPU_QUANTISE_S = 1.6e-10
_PROCESS_BYTES = 6e8  # Python and torch; on a GPU its context
_DISK = 1e9
_THREADS = 0.75  # of what a second, third, ... core of a rank adds


def crowding_of(cluster: Cluster, cores: int, num_ranks: int) -> float:
    """Ranks to a core of a host; beside GPUs a rank's own computing takes none."""
    return 0.0 if cluster.gpus else min(cluster.ranks_per_host, num_ranks) / cores


def machine_of_device(cluster: Cluster, num_ranks: int) -> Machine:
    """A host of the cluster, as one of so many ranks meets it."""
    kind = "gpu" if cluster.gpus else "cpu"
    read = _cpu_bytes_per_s(cluster, num_ranks)
    gathered = min(read, 1e9 * cluster.pcie_gb_s * _PCIE, _PLAIN_BYTES) if cluster.gpus else read
    quantise = _QUANTISED / (1e9 * cluster.gpu_memory_gb_s) if cluster.gpus else _CPU_QUANTISE_S
    return Machine(
        name=cluster.name or "cluster",
        cores=cluster.cores,
        memory_bytes=1e9 * cluster.memory_gb,
        cache_bytes=1e6 * cluster.cpu_cache_mb,
        gather_bytes_per_s=gathered,
        stream_bytes_per_s=read,
        node_s=_NODE_S,
        edge_s=_EDGE_S,
        message_s=_MESSAGE_S[kind],
        byte_s=_BYTE_S[kind],
        quantise_s=quantise,
        process_bytes=_PROCESS_BYTES,
        disk_bytes_per_s=_DISK,
        thread_gain=_gain(cluster.cores),
        link=cluster.inside,
        gpus=cluster.gpus,
        gpu_memory_bytes=1e9 * cluster.gpu_memory_gb,
        source=cluster.source,
    )


def measured_device(measured: Machine, cluster: Cluster, num_ranks: int) -> Machine:
    """The same with what GPUs like its own were measured to do; the sizes of hosts, and messages, are the cluster's."""
    return replace(
        machine_of_device(cluster, num_ranks),
        gather_bytes_per_s=measured.gather_bytes_per_s,
        node_s=measured.node_s,
        edge_s=measured.edge_s,
        quantise_s=measured.quantise_s,
        laws=measured.laws,
    )


def law_of_device(cluster: Cluster, num_ranks: int) -> Law:
    """Of any model, on one rank while all others of its host are busy."""
    if cluster.gpus:
        flops = 1e12 * cluster.gpu_tflops * _GPU_FLOPS
        return _law("gpu", 1e9 * cluster.gpu_memory_gb_s, flops, 1e6 * cluster.gpu_cache_mb)
    here = min(cluster.ranks_per_host, num_ranks)
    flops = 1e12 * cluster.cpu_tflops * _CPU_FLOPS / cluster.cores * _gain(_cores(cluster))
    return _law("cpu", _cpu_bytes_per_s(cluster, num_ranks), flops, 1e6 * cluster.cpu_cache_mb / here)


def _law(kind: str, bytes_per_s: float, flops: float, cache_bytes: float) -> Law:
    summed, passed = _MOVED[kind]
    far = summed / bytes_per_s
    return Law(_NEAR * far, far, 1 / flops, passed / bytes_per_s, _CALL_S[kind], cache_bytes)


def _cpu_bytes_per_s(cluster: Cluster, num_ranks: int) -> float:
    """That a rank reads while its host's others do."""
    here = min(cluster.ranks_per_host, num_ranks)
    return min(1e9 * cluster.cpu_memory_gb_s * _CPU_BYTES / here, _CORE_BYTES * _gain(_cores(cluster)))


def _cores(cluster: Cluster) -> float:
    """Of a rank."""
    return max(1.0, cluster.cores / cluster.ranks_per_host)


def _gain(cores: float) -> float:
    """Cores that so many are worth together, in one process."""
    return 1 + _THREADS * (cores - 1)


def described(cluster: Cluster, num_ranks: int, link: Link | None = None) -> list[tuple[str, str]]:
    """What is assumed of the cluster, for people: the first of what a plan tells. ``link``: given in place of its own."""
    hosts = cluster.hosts_of(num_ranks)
    name = cluster.name or "hosts as described"
    told = [
        (
            "cluster",
            f"{hosts} of {cluster.hosts} {name}, {num_ranks} ranks, {cluster.ranks_per_host} to a host",
        )
    ]
    if hosts > cluster.hosts:
        told = [("cluster", f"{hosts} {name} ({cluster.hosts} are there), {num_ranks} ranks")]
    told.append(("devices", _devices(cluster)))
    told.append(("network", _network(cluster, link)))
    if cluster.dollars_per_hour is None:
        told.append(("prices", "none given: dollars_per_hour"))
    else:
        since = f", list price of {cluster.date}" if cluster.date else ""
        told.append(
            (
                "prices",
                f"${cluster.dollars_per_hour:g} an hour for each host{since}; whole hosts are paid for",
            )
        )
    return told


def _network(cluster: Cluster, link: Link | None) -> str:
    if link is not None:
        rate, latency = 8e-9 * link.bytes_per_s, 1e6 * link.latency_s
        return f"{rate:g} Gbit/s and {latency:g} us for every rank, as given (--link)"
    rate, latency = cluster.network_gbit_s, cluster.network_us
    return f"{rate:g} Gbit/s a host, {latency:g} us; {cluster.inside_gb_s:.3g} GB/s between ranks of a host"


def _devices(cluster: Cluster) -> str:
    if cluster.machine is not None:
        return f"as measured: {cluster.source}"
    if cluster.gpus:
        rates = f"{cluster.gpu_tflops:g} TFLOP/s and {cluster.gpu_memory_gb_s:g} GB/s"
        shares = f"{100 * _GPU_FLOPS:.0f} % of the former reached, {_MOVED['gpu'][0]:.0f} bytes moved for a summed value"
        held = f"{cluster.gpu_memory_gb:g} GB each; rows of mini-batches come over PCIe, {cluster.pcie_gb_s:g} GB/s"
        return f"GPUs of {rates}: {shares}; {held}"
    rates = f"{cluster.cpu_tflops:g} TFLOP/s and {cluster.cpu_memory_gb_s:g} GB/s"
    shares = f"{100 * _CPU_FLOPS:.0f} % and {100 * _CPU_BYTES:.0f} %"
    return f"{cluster.cores} cores of {rates}, of which {shares} are reached; {cluster.memory_gb:.0f} GB"
