"""Rates: read from a file, checked, and between measured sizes of functions."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from math import inf
from pathlib import Path
from typing import Any

import pytest

from polyhop.errors import ConfigError, InputError
from polyhop.serverless.rates import PUBLISHED, Rates, load_rates

GIVEN: dict[str, Any] = {
    "gather": 1e9, "server_flops": 2e10, "function_flops": {"128": 1e8, "256": 3e8}, "function_bytes": 1e8,
    "server_bytes": 2.5e9, "scatter_bytes": 2.5e9, "latency_s": 0.004, "source": "measured",
}  # fmt: skip


def written(folder: Path, found: Any) -> Path:
    path = folder / "rates.json"
    path.write_text(json.dumps(found))
    return path


def test_file(tmp_path: Path) -> None:
    rates = load_rates(written(tmp_path, GIVEN))
    assert rates == Rates(**{**GIVEN, "function_flops": {128: 1e8, 256: 3e8}})
    assert rates.leases == inf
    assert (
        load_rates(written(tmp_path, {n: v for n, v in asdict(PUBLISHED).items() if v != inf})) == PUBLISHED
    )


def test_flops_follow_memory() -> None:
    rates = replace(PUBLISHED, function_flops={128: 1e8, 256: 3e8})
    assert [rates.flops_of(memory) for memory in (64, 128, 192, 256, 512)] == [5e7, 1e8, 2e8, 3e8, 6e8]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"gather": 0}, "gather is 0.0; expected more than 0"),
        ({"gather": "fast"}, "gather is 'fast'; expected a number"),
        ({"latency_s": -1}, "latency_s is -1.0; expected 0 or more"),
        ({"function_flops": {}}, "function_flops needs"),
        ({"function_flops": 3}, "expected an object"),
        ({"function_flops": {"much": 3}}, "much"),
        ({"gathers": 3}, "unknown field 'gathers'. Did you mean 'gather'?"),
    ],
)
def test_wrong_field_is_named(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_rates(written(tmp_path, {**GIVEN, **change}))
    assert told in str(caught.value)


def test_wrong_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_rates(tmp_path / "none.json")
    with pytest.raises(ConfigError, match="expected an object"):
        load_rates(written(tmp_path, [1]))
    with pytest.raises(ConfigError, match="no server_flops, scatter_bytes"):
        load_rates(
            written(tmp_path, {n: v for n, v in GIVEN.items() if n not in ("server_flops", "scatter_bytes")})
        )
    with pytest.raises(InputError, match="nan"):
        replace(PUBLISHED, gather=float("nan"))
