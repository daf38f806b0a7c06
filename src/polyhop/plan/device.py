"""What a rank of a cluster can do that nobody measured: a machine and a law, from published rates and the shares reached.

    far_s    4 bytes / (bandwidth * share)     of a value that is summed from memory; near_s a quarter of it
    flop_s   1 / (rate * share)                of a product, float32
    row_s    12 bytes / (bandwidth * share)    of a value that passes through an activation: read, written, kept
    call_s   of a layer, however small: what Python and the launches of its kernels take

A processor's rates are shared by the ranks of its host, and a core alone reaches no more than its own. Input rows of
mini-batches lie in the host's memory and cross to a GPU one copy after another; those of a full graph lie on the GPU.
"""

from __future__ import annotations

from polyhop.plan.cluster import Cluster
from polyhop.plan.law import Law
from polyhop.plan.machine import Machine

__all__ = ["crowding_of", "described", "law_of_device", "machine_of_device"]

# Shares of published rates. A processor's are those of an EPYC core of this project's bench: GraphSAGE of three layers, law
# fitted to its steps while the other core is busy (2.4e-10 s a far value of some 20 GB/s, 1.5e-11 s a flop).
_CPU_FLOPS, _CPU_BYTES = 0.5, 0.8
_GPU_FLOPS, _GPU_BYTES = 0.5, 0.5
_CORE_BYTES = 20e9  # that one core reads a second at the most
_NEAR = 0.25  # of the time of a far value
_PASSED = 12.0  # bytes
_PCIE = 0.8
_CALL_S = {"cpu": 1.2e-4, "gpu": 4e-4}
# Sampling is a processor's work everywhere: measured on the same core.
_NODE_S, _EDGE_S = 1.4e-7, 3.2e-9
_MESSAGE_S = {"cpu": 1.5e-4, "gpu": 3e-5}  # gloo's; nccl's, in groups
_BYTE_S = {"cpu": 3e-10, "gpu": 1e-11}  # copied through the kernel; moved by the card
_QUANTISED = 8.0  # bytes read and written for a value that is rounded, and again where it is restored
_CPU_QUANTISE_S = 1.6e-10
_PROCESS_BYTES = 6e8  # Python and torch; on a GPU its context
_DISK = 1e9
_THREADS = 0.75  # of what a second, third, ... core of a rank adds


def crowding_of(cluster: Cluster, num_ranks: int) -> float:
    """Ranks to a core of a host."""
    return min(cluster.ranks_per_host, num_ranks) / cluster.cores


def machine_of_device(cluster: Cluster, num_ranks: int) -> Machine:
    """A host of the cluster, as one of so many ranks meets it."""
    kind = "gpu" if cluster.gpus else "cpu"
    read = _cpu_bytes_per_s(cluster, num_ranks)
    gathered = min(read, 1e9 * cluster.pcie_gb_s * _PCIE) if cluster.gpus else read
    quantise = _QUANTISED / (1e9 * cluster.gpu_memory_gb_s * _GPU_BYTES) if cluster.gpus else _CPU_QUANTISE_S
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


def law_of_device(cluster: Cluster, num_ranks: int) -> Law:
    """Of any model, on one rank while all others of its host are busy."""
    if cluster.gpus:
        read, cached = 1e9 * cluster.gpu_memory_gb_s * _GPU_BYTES, 1e6 * cluster.gpu_cache_mb
        return _law(read, 1e12 * cluster.gpu_tflops * _GPU_FLOPS, cached, _CALL_S["gpu"])
    here = min(cluster.ranks_per_host, num_ranks)
    flops = 1e12 * cluster.cpu_tflops * _CPU_FLOPS / cluster.cores * _gain(_cores(cluster))
    read = _cpu_bytes_per_s(cluster, num_ranks)
    return _law(read, flops, 1e6 * cluster.cpu_cache_mb / here, _CALL_S["cpu"])


def _law(bytes_per_s: float, flops: float, cache_bytes: float, call_s: float) -> Law:
    far = 4 / bytes_per_s
    return Law(_NEAR * far, far, 1 / flops, _PASSED / bytes_per_s, call_s, cache_bytes)


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


def described(cluster: Cluster, num_ranks: int) -> list[tuple[str, str]]:
    """What is assumed of the cluster, for people: the first of what a plan tells."""
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
    rate = cluster.network_gbit_s
    told.append(
        (
            "network",
            f"{rate:g} Gbit/s a host, {cluster.network_us:g} us; {cluster.inside_gb_s:.3g} GB/s between ranks of a host",
        )
    )
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


def _devices(cluster: Cluster) -> str:
    if cluster.machine is not None:
        return f"as measured: {cluster.source}"
    if cluster.gpus:
        rates = f"{cluster.gpu_tflops:g} TFLOP/s and {cluster.gpu_memory_gb_s:g} GB/s"
        shares = f"{100 * _GPU_FLOPS:.0f} % and {100 * _GPU_BYTES:.0f} %"
        held = f"{cluster.gpu_memory_gb:g} GB each; rows of mini-batches come over PCIe at {cluster.pcie_gb_s:g} GB/s"
        return f"GPUs of {rates}, of which {shares} are reached; {held}"
    rates = f"{cluster.cpu_tflops:g} TFLOP/s and {cluster.cpu_memory_gb_s:g} GB/s"
    shares = f"{100 * _CPU_FLOPS:.0f} % and {100 * _CPU_BYTES:.0f} %"
    return f"{cluster.cores} cores of {rates}, of which {shares} are reached; {cluster.memory_gb:.0f} GB"
