"""Ranks that train together start from, and end with, the same state: what rank 0 has, sent to all."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from polyhop.comm import Collective
from polyhop.train.files import pack, unpack
from polyhop.train.state import Session, State

__all__ = ["gather_rows_at_first", "share_session", "share_value"]


def share_session(session: Session, line: Collective) -> None:
    """Give every rank the session of rank 0: weights, optimiser, best weights, where the run stands."""
    if line.num_ranks == 1:
        return
    if line.rank == 0:
        files = session.tensors()
        share_value({"files": sorted(files), "state": session.state.to_json()}, line)
        for name in sorted(files):
            _broadcast(pack(files[name]), line)
        return
    head = share_value(None, line)
    files = {name: unpack(_broadcast(b"", line)) for name in head["files"]}
    session.restore(files, State.from_json(head["state"]))


def share_value(value: Any, line: Collective) -> Any:
    """Rank 0's JSON value, on every rank."""
    if line.num_ranks == 1:
        return value
    return json.loads(_broadcast(json.dumps(value).encode() if line.rank == 0 else b"", line))


def _broadcast(data: bytes, line: Collective) -> bytes:
    size = int(line.broadcast(torch.tensor([len(data)], device=line.device), kind="sizes"))
    if line.rank == 0:
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(line.device)
    else:
        tensor = torch.empty(size, dtype=torch.uint8, device=line.device)
    return bytes(line.broadcast(tensor, kind="weights").cpu().numpy().tobytes())


def gather_rows_at_first(rows: Tensor, user_ids: Tensor, num_nodes: int, line: Collective) -> Tensor:
    """Rank 0: every rank's rows (float32 or float64 [n, C]) as one CPU tensor [N, C] in the user's order; others: empty.

    A rank without rows need not know their width or dtype.
    """
    has_rows = rows.shape[0] > 0
    about = torch.tensor([[rows.shape[1] if has_rows else 0, has_rows and rows.dtype == torch.float64]])
    known = torch.cat(line.all_gather(about, kind="sizes", counts=[1] * line.num_ranks))
    width, is_double = known.amax(dim=0).tolist()
    flat = rows.reshape(-1).to("cpu", torch.float64 if is_double else torch.float32)
    nothing = flat[:0]
    values = line.all_to_all([flat if q == 0 else nothing for q in range(line.num_ranks)], kind="scores")
    ids = line.all_to_all([user_ids if q == 0 else user_ids[:0] for q in range(line.num_ranks)], kind="ids")
    if line.rank != 0:
        return torch.empty(0, width, dtype=flat.dtype)
    out = torch.empty(num_nodes, width, dtype=flat.dtype)
    for at, piece in zip(ids, values, strict=True):
        out[at] = piece.view(at.numel(), width)
    return out
