"""Plain torch's side: its sparse CSR matrices, with 32-bit ids (faster for both of its kernels)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from polyhop.graph import Block, Graph

__all__ = ["torch_sums"]


def torch_sums(graph: Graph) -> dict[str, Callable[[Tensor], Tensor]]:
    """torch's own ways to sum over in-edges, h [N, F] -> [N, F]: autograd's transpose, and ours made ahead of timing."""
    block = Block(graph.indptr, graph.indices, graph.num_nodes)
    other = block.transposed()
    kind = torch.int32
    size = (graph.num_nodes, graph.num_nodes)
    ones = torch.ones(graph.num_edges)
    forward = torch.sparse_csr_tensor(graph.indptr.to(kind), graph.indices.to(kind), ones, size)
    backward = torch.sparse_csr_tensor(other.indptr.to(kind), other.indices.to(kind), ones, size)

    def both(product: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        class Sum(torch.autograd.Function):
            @staticmethod
            def forward(ctx: object, h: Tensor) -> Tensor:
                return product(forward, h)

            @staticmethod
            def backward(ctx: object, gradient: Tensor) -> Tensor:
                return product(backward, gradient)

        return Sum.apply

    return {
        "csr matmul": lambda h: forward @ h,
        "csr matmul, transposed ahead": both(torch.matmul),
        "csr reduce, transposed ahead": both(lambda a, h: torch.sparse.mm(a, h, "sum")),
    }
