"""Trains with graph servers and stateless functions: messages, ledger, programs of dense pieces, launchers, prices."""

from __future__ import annotations

__all__: list[str] = []
