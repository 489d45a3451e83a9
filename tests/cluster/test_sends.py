"""The bound on tensors in flight to one process."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from exkv.cluster.sends import Sends


@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=30),
    room=st.sampled_from([0, 20, 60]),
    largest=st.sampled_from([1, 3]),
)
def test_bytes_in_flight_are_bounded_by_waiting_for_the_oldest(sizes, room, largest):
    waited: list[int] = []
    sends = Sends(waited.append, room, largest)
    for number, size in enumerate(sizes):
        before = len(waited)
        sends.make_room(size)
        most = max(room, largest * max(sizes[: number + 1]))
        assert sum(sizes[len(waited) : number + 1]) <= most
        # and no longer than necessary
        assert len(waited) == before or sum(sizes[len(waited) - 1 : number + 1]) > most
        sends.add(number, torch.empty(size, dtype=torch.uint8))
    assert waited == list(range(len(waited)))


def test_small_states_are_sent_behind_a_large_one():
    waited: list[str] = []
    sends = Sends(waited.append)
    for name, nbytes in (("chunk", 512), ("chunk", 512), ("step", 8), ("step", 8)):
        sends.make_room(nbytes)
        sends.add(name, torch.empty(nbytes, dtype=torch.uint8))
    assert waited == ["chunk", "chunk"]
