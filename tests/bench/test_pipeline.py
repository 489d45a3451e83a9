"""What many hosts give by arithmetic, beside a simulation that takes one event after the other."""

from __future__ import annotations

import heapq
import random

import pytest

from bench.pipeline import Card, Round, Work, decode_round, many_sequences, one_sequence
from exkv.planning.plan import Link

CARD = Card(memory=24e9, bandwidth=936e9, flops=71e12, beside=40e9)
WORK = Work(units=80, weights=40e9, parameters=70e9, cache=2.7e9, hidden=16384)
LINK = Link(bandwidth=1.25e9, latency=2e-4)


def simulated(busy, idle, groups: int, rounds: int) -> list[float]:
    """The times at which groups come round, first come, first served at each station: a group
    waits for the station, has it for ``busy``, and is on its way for ``idle`` after it."""
    free = [0.0] * len(busy)
    events = [(0.0, group, 0) for group in range(groups)]
    done = []
    while len(done) < rounds:
        now, group, station = heapq.heappop(events)
        free[station] = max(now, free[station]) + busy[station]
        then, following = free[station] + idle[station], station + 1
        if following == len(busy):
            done.append(then)
            following = 0
        heapq.heappush(events, (then, group, following))
    return done


def steady(busy, idle, groups: int, warm: int, rounds: int) -> float:
    """Rounds a second of the simulation in its steady state, over whole rounds of all groups."""
    done = sorted(simulated(busy, idle, groups, (warm + rounds) * groups))
    return rounds * groups / (done[-1] - done[warm * groups - 1])


def test_rounds_a_second_are_those_of_a_simulation_event_by_event():
    rng = random.Random(5)
    for stations in (1, 2, 3, 8, 40):
        for groups in (1, 2, 3, 8, 60):
            busy = [rng.choice([0.1, 0.5, 1.0, 3.0]) * rng.uniform(0.5, 1) for _ in range(stations)]
            idle = [rng.choice([0.0, 0.2, 2.0]) for _ in range(stations)]
            found = steady(busy, idle, groups, 20, 40)
            expected = Round.of(busy, idle).per_second(groups)
            assert found == pytest.approx(expected, rel=0.01), (stations, groups)


def test_a_thousand_hosts_are_simulated_too():
    busy, idle = [0.006, *[0.001] * 999], [0.0005] * 1000
    for groups in (1, 100, 300):  # from 251 on the first host is never idle
        expected = Round.of(busy, idle).per_second(groups)
        assert steady(busy, idle, groups, 1, 1) == pytest.approx(expected, rel=0.01)


def test_a_prompts_chunks_are_through_when_the_simulation_says():
    rng = random.Random(7)
    for chunks in (1, 2, 9):
        busy, idle = [rng.uniform(0.1, 3) for _ in range(6)], [rng.uniform(0, 1) for _ in range(6)]
        last = max(simulated(busy, idle, chunks, chunks))
        assert last == pytest.approx(Round.of(busy, idle).prefill_seconds(chunks))


def test_one_sequence_gains_room_from_hosts_and_no_speed():
    rates = {hosts: one_sequence(WORK, CARD, LINK, hosts) for hosts in (1, 2, 4, 80, 1000)}
    assert rates[2] > 8 * rates[1]  # which reads 16 GB from host memory
    assert rates[4] < rates[2] and rates[1000] == rates[80] < rates[4]
    # By hand: 42.7 GB read, two hosts' latencies, a hidden state sent once.
    assert 1 / rates[2] == pytest.approx(42.7e9 / 936e9 + 2 * 2e-4 + 16384 / 1.25e9)


def test_many_sequences_gain_with_every_host():
    rates = [many_sequences(WORK, CARD, LINK, hosts) for hosts in (2, 4, 8, 16, 1000)]
    assert all(more > 1.9 * few for few, more in zip(rates, rates[1:], strict=False))
    assert many_sequences(WORK, CARD, LINK, 1) == one_sequence(WORK, CARD, LINK, 1)


def test_a_slow_link_is_the_busiest_station():
    slow = Link(bandwidth=1e6, latency=0.0)
    round_ = decode_round(WORK, CARD, slow, 4, rows=8)
    assert round_.busiest == 8 * 16384 / 1e6
    with pytest.raises(ValueError, match="81 hosts for 80 units"):
        decode_round(WORK, CARD, slow, 81, rows=1)


def test_no_more_sequences_than_have_room():
    assert [WORK.most_rows(CARD, hosts) for hosts in (1, 2, 3, 80)] == [0, 2, 11, 696]
