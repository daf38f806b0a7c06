"""What a launch may be asked for."""

from __future__ import annotations

from typing import Any

import pytest

from polyhop.errors import ConfigError
from polyhop.launch import Launch


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"engine": "torchrum"}, "Did you mean 'torchrun'"),
        ({"backend": "mpi"}, "unknown backend 'mpi'"),
        ({"placement": "x"}, "unknown placement"),
        ({"num_ranks": 0}, "num_ranks=0: expected a whole number of at least 1"),
        ({"threads": 0}, "threads=0"),
        ({"max_restarts": -1}, "max_restarts=-1"),
        ({"peer_timeout_s": 0}, "peer_timeout_s=0"),
        ({"start_timeout_s": float("nan")}, "start_timeout_s=nan"),
        ({"latency_s": -1.0}, "latency_s=-1.0"),
    ],
)
def test_bad_options_are_named(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Launch(**given)


def test_latency_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POLYHOP_LATENCY_S", raising=False)
    assert Launch().latency_s == 0
    monkeypatch.setenv("POLYHOP_LATENCY_S", "0.25")
    assert Launch().latency_s == 0.25
    assert Launch(latency_s=1.0).latency_s == 1.0
    monkeypatch.setenv("POLYHOP_LATENCY_S", "1ms")
    with pytest.raises(ConfigError, match="POLYHOP_LATENCY_S='1ms': expected a number of seconds"):
        Launch()
