"""Tensor work on stateless functions, graph work on servers: the pieces of strategy ``serverless``."""

from __future__ import annotations

__all__: list[str] = []
