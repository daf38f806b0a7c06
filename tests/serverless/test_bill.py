"""Bills: to the millisecond, the same in any order and in any pieces, and equal to a replay that is written another way."""

from __future__ import annotations

import json
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyhop.errors import ConfigError, InputError
from polyhop.serverless.bill import Bill, EgressTrace, FunctionTrace, ServerTrace, Trace, bill
from polyhop.serverless.prices import load_prices

PRICES = load_prices()

# The shipped prices once more, in whole numbers: 1e-10 dollars, per hour, per GB and second, per request, per GB.
SERVER = {"c5.xlarge": 1_700_000_000, "c5n.2xlarge": 4_320_000_000, "p3.2xlarge": 30_600_000_000}
GB_S = {"x86": 166_667, "arm": 133_334}
REQUEST = 2_000
BORDER = {"zone": 0, "region": 200_000_000, "internet": 900_000_000}


def replayed(traces: list[Trace]) -> Fraction:
    """Dollars by another road: every trace alone, in whole microseconds and whole 1e-10 dollars."""
    total = Fraction(0)
    for trace in traces:
        if isinstance(trace, FunctionTrace):
            micros = round(1000 * trace.init_ms) + round(1000 * trace.end_ms) - round(1000 * trace.start_ms)
            steps = -(-micros // 1000)
            total += Fraction(steps * trace.memory_mb * GB_S[trace.processor], 1000 * 1024) + REQUEST
        elif isinstance(trace, ServerTrace):
            micros = round(1000 * trace.end_ms) - round(1000 * trace.start_ms)
            seconds = max(60, -(-micros // 1_000_000))
            total += Fraction(trace.count * seconds * SERVER[trace.kind], 3600)
        else:
            total += Fraction(trace.num_bytes * BORDER[trace.border], 2**30)
    return total / 10**10


micros = st.integers(0, 800_000_000).map(lambda value: Fraction(value, 1000))  # ms, to the microsecond


@st.composite
def functions(draw: st.DrawFn) -> FunctionTrace:
    start, alive = draw(micros), draw(micros)
    busy = draw(st.one_of(st.none(), st.integers(0, 1000).map(lambda share: alive * share / 1000)))
    return FunctionTrace(
        start,
        start + alive,
        draw(micros),
        draw(st.integers(128, 10240)),
        busy,
        draw(st.sampled_from(["x86", "arm"])),
    )


@st.composite
def servers(draw: st.DrawFn) -> ServerTrace:
    start = draw(micros)
    return ServerTrace(
        draw(st.sampled_from(sorted(SERVER))), start, start + draw(micros), draw(st.integers(0, 40))
    )


traced = st.one_of(
    functions(), servers(), st.builds(EgressTrace, st.sampled_from(sorted(BORDER)), st.integers(0, 2**45))
)


@settings(max_examples=150, deadline=None)
@given(st.lists(traced, max_size=20), st.randoms(use_true_random=False))
def test_bill_is_the_sum_of_its_traces(traces: list[Trace], random: object) -> None:
    whole = bill(traces, PRICES)
    assert whole.dollars == replayed(traces)
    shuffled = list(traces)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert bill(shuffled, PRICES) == whole
    cut = len(traces) // 3
    assert bill(traces[:cut], PRICES) + bill(traces[cut:], PRICES) == whole
    assert sum((bill([trace], PRICES) for trace in traces), Bill()).dollars == whole.dollars


@settings(max_examples=100, deadline=None)
@given(functions())
def test_time_of_a_function_has_three_parts(trace: FunctionTrace) -> None:
    made = bill([trace], PRICES)
    spent = made.init_ms + made.busy_ms + made.parked_ms
    assert 0 <= made.billed_ms - spent < 1


def test_by_hand() -> None:
    made = bill(
        [
            ServerTrace("c5n.2xlarge", 0, 100_000, count=8),
            FunctionTrace(500, 1500.25, init_ms=200, memory_mb=192, busy_ms=400),
            EgressTrace("internet", 2**30),
        ],
        PRICES,
    )
    assert made.servers == {"graph c5n.2xlarge": Fraction(8 * 100 * 432, 3_600_000)}
    assert made.billed_ms == 1201  # 200 + 1000.25, up
    assert made.functions == Fraction(1201, 1000) * Fraction(192, 1024) * Fraction(166667, 10**10)
    assert made.requests == Fraction(2, 10**7)
    assert made.parked_ms == Fraction("600.25")
    assert made.dollars == sum([*made.servers.values(), made.functions, made.requests, Fraction(9, 100)])


def test_steps_are_not_passed_by_rounding() -> None:
    """0.1 + 0.2 is above 0.3 in floats; what floats hold is taken exactly and rounded up once."""
    exact = FunctionTrace(0, Fraction(7, 10), Fraction(3, 10), 128)
    assert bill([exact], PRICES).billed_ms == 1
    assert bill([FunctionTrace(0, 1, 0, 128)], PRICES).billed_ms == 1
    assert bill([FunctionTrace(0, 1 + 2**-40, 0, 128)], PRICES).billed_ms == 2
    assert bill([FunctionTrace(2.0**40, 2.0**40 + 1, 0, 128)], PRICES).billed_ms == 1


def test_servers_are_billed_a_minute_at_least() -> None:
    assert bill([ServerTrace("c5.xlarge", 0, 1)], PRICES).server_s == 60
    assert bill([ServerTrace("c5.xlarge", 0, 60_001)], PRICES).server_s == 61


def test_roles_are_kept_apart() -> None:
    made = bill([ServerTrace("c5.xlarge", 0, 1e5), ServerTrace("c5.xlarge", 0, 1e5, role="weights")], PRICES)
    assert set(made.servers) == {"graph c5.xlarge", "weights c5.xlarge"}


def test_nothing_costs_nothing() -> None:
    assert bill([], PRICES) == Bill()
    assert Bill().dollars == 0


def test_json_and_text() -> None:
    made = bill([ServerTrace("c5.xlarge", 0, 3_600_000), FunctionTrace(0, 1000, 0, 1024)], PRICES)
    told = json.loads(json.dumps(made.to_json()))
    assert told["servers"] == {"graph c5.xlarge": 0.17}
    assert Fraction(told["dollars_exact"]) == made.dollars
    assert told["dollars"] == pytest.approx(0.17 + 0.0000166667 + 0.0000002)
    assert "servers graph c5.xlarge  $0.170000" in str(made)
    assert str(made).splitlines()[-1].startswith("total")


def test_refused() -> None:
    with pytest.raises(InputError, match="before its start"):
        FunctionTrace(2, 1, 0, 128)
    with pytest.raises(InputError, match="init_ms"):
        FunctionTrace(0, 1, -1, 128)
    with pytest.raises(InputError, match="busy_ms"):
        FunctionTrace(0, 1, 0, 128, busy_ms=2)
    with pytest.raises(InputError, match="expected numbers"):
        ServerTrace("c5.xlarge", 0, float("nan"))
    with pytest.raises(InputError, match="count"):
        ServerTrace("c5.xlarge", 0, 1, count=-1)
    with pytest.raises(InputError, match="bytes"):
        EgressTrace("zone", -1)
    with pytest.raises(ConfigError, match="100 MB"):
        bill([FunctionTrace(0, 1, 0, 100)], PRICES)
    with pytest.raises(InputError, match="900 s"):
        bill([FunctionTrace(0, 900_001, 0, 128)], PRICES)
    with pytest.raises(ConfigError, match="Did you mean"):
        bill([ServerTrace("c5.xlarg", 0, 1)], PRICES)
