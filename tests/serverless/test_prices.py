"""Tables of prices: exact as written, and every way a file can be wrong is told by its field."""

from __future__ import annotations

import json
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from polyhop.errors import ConfigError
from polyhop.serverless import prices as module
from polyhop.serverless.prices import load_prices


def changed(folder: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """The shipped table with something changed."""
    table = json.loads(module.SHIPPED.read_text())
    change(table)
    path = folder / "prices.json"
    path.write_text(json.dumps(table))
    return path


def test_shipped_table() -> None:
    prices = load_prices()
    assert prices.date.isoformat() == "2021-07-01"
    assert prices.server("c5n.2xlarge").dollars_per_hour == Fraction(432, 1000)
    assert prices.server("c5n.2xlarge").vcpus == 8
    assert prices.server("p3.2xlarge").gpus == 1
    assert prices.functions.dollars_per_gb_s == {
        "x86": Fraction(166667, 10**10),
        "arm": Fraction(133334, 10**10),
    }
    assert prices.functions.dollars_per_request == Fraction(2, 10**7)
    assert prices.functions.vcpus(1769) == 1
    assert prices.border("internet").dollars_per_gb == Fraction(9, 100)


def test_every_entry_names_its_source() -> None:
    prices = load_prices()
    assert all(
        entry.source for entry in (*prices.servers.values(), prices.functions, *prices.egress.values())
    )


def test_function_of_192_mb_costs_what_the_paper_says() -> None:
    hourly = 3600 * load_prices().functions.dollars_per_s(192)
    assert float(hourly) == pytest.approx(0.01125, rel=1e-5)
    assert float(3600 * load_prices().functions.dollars_per_s(1769)) == pytest.approx(0.1037, rel=1e-3)


def test_own_table(tmp_path: Path) -> None:
    def change(table: dict[str, Any]) -> None:
        table["servers"]["kinds"] = {
            "mine": {
                "dollars_per_hour": 0.1,
                "vcpus": 2,
                "memory_gib": 4,
                "network_gbit_s": 1,
                "source": "me",
            }
        }

    prices = load_prices(changed(tmp_path, change))
    assert prices.server("mine").dollars_per_s == Fraction(1, 36000)  # 0.1 is a tenth, not the nearest float


def _kinds(table: dict[str, Any]) -> dict[str, Any]:
    kinds: dict[str, Any] = table["servers"]["kinds"]
    return kinds


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda t: t.pop("date"), "no date"),
        (lambda t: t.update(date="last summer"), "date is 'last summer'"),
        (lambda t: t.pop("egress"), "no egress"),
        (lambda t: t.update(functions=[]), "functions: expected an object"),
        (lambda t: _kinds(t)["c5.xlarge"].pop("vcpus"), "c5.xlarge: no vcpus"),
        (lambda t: _kinds(t)["c5.xlarge"].update(vcpus=0), "vcpus is 0; expected a whole number, 1 or more"),
        (lambda t: _kinds(t)["c5.xlarge"].update(vcpus=True), "vcpus is true"),
        (
            lambda t: _kinds(t)["c5.xlarge"].update(dollars_per_hour=-1),
            "dollars_per_hour is -1; expected 0 or more",
        ),
        (lambda t: _kinds(t)["c5.xlarge"].update(dollars_per_hour="0.17"), "is '0.17'; expected a number"),
        (lambda t: _kinds(t)["c5.xlarge"].update(memory_gib=0), "expected more than 0"),
        (lambda t: _kinds(t)["c5.xlarge"].update(vcpu=4), "unknown field 'vcpu'. Did you mean 'vcpus'?"),
        (lambda t: _kinds(t)["c5.xlarge"].pop("source"), "no source"),
        (lambda t: t["functions"].update(dollars_per_gb_s={}), "a price for each processor"),
        (lambda t: t["functions"]["dollars_per_gb_s"].update(x86=-0.1), "x86 is -0.1"),
        (lambda t: t["functions"]["memory_mb"].update(step=0), "step is 0"),
        (lambda t: t.update(server={}), "unknown field 'server'. Did you mean 'servers'?"),
    ],
)
def test_wrong_field_is_named(tmp_path: Path, change: Callable[[dict[str, Any]], None], told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_prices(changed(tmp_path, change))
    assert told in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_wrong_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_prices(tmp_path / "none.json")
    path = tmp_path / "prices.json"
    path.write_text("prices: 1")
    with pytest.raises(ConfigError, match="is not JSON"):
        load_prices(path)
    path.write_text('{"date": NaN}')
    with pytest.raises(ConfigError, match="NaN is no price"):
        load_prices(path)


def test_unknown_names_have_suggestions() -> None:
    prices = load_prices()
    with pytest.raises(ConfigError, match=r"'c5n.2xlarg'. Did you mean 'c5n.2xlarge'"):
        prices.server("c5n.2xlarg")
    with pytest.raises(ConfigError, match="unknown border 'moon'"):
        prices.border("moon")
    with pytest.raises(ConfigError, match="unknown processor"):
        prices.functions.dollars_per_s(192, "risc")


@pytest.mark.parametrize("memory", [127, 10241, 0])
def test_memory_out_of_range(memory: int) -> None:
    with pytest.raises(ConfigError, match="128 to 10240 MB"):
        load_prices().functions.dollars_per_s(memory)


def test_memory_comes_in_steps(tmp_path: Path) -> None:
    path = changed(tmp_path, lambda t: t["functions"]["memory_mb"].update(step=64))
    functions = load_prices(path).functions
    assert functions.checked(192) == 192
    with pytest.raises(ConfigError, match="steps of 64"):
        functions.checked(200)
