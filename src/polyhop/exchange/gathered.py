"""What every rank keeps, brought to rank 0, who writes checkpoints."""

from __future__ import annotations

import torch
from torch import Tensor

from polyhop.comm import Collective

__all__ = ["gather_tensors"]


def gather_tensors(own: dict[str, Tensor], line: Collective) -> dict[str, Tensor]:
    """On rank 0 the tensors of all ranks, those of rank q under ``rankq.NAME``; nothing on others. All call it together."""
    from safetensors.torch import load, save

    data = torch.frombuffer(bytearray(save(own)), dtype=torch.uint8).to(line.device)
    pieces = line.all_to_all(
        [data if q in (0, line.rank) else data[:0] for q in range(line.num_ranks)], kind="weights"
    )
    if line.rank != 0:
        return {}
    found: dict[str, Tensor] = {}
    for rank, piece in enumerate(pieces):
        tensors = load(bytes(piece.cpu().numpy().tobytes()))
        found |= {f"rank{rank}.{name}": value for name, value in tensors.items()}
    return found
