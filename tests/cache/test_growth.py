"""How capacity grows as tokens arrive."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from exkv.cache import Dynamic, Static

CAPACITIES = st.integers(1, 2000)


@given(
    growth=st.sampled_from([Static(), Dynamic(), Dynamic(16), Dynamic(first=32), Dynamic(96, 8)]),
    capacity=CAPACITIES,
)
def test_growth_has_room_for_every_token_up_to_capacity(growth, capacity):
    rooms = [growth.room_for(tokens, capacity) for tokens in range(capacity + 1)]
    assert all(tokens <= room <= capacity for tokens, room in enumerate(rooms))
    assert rooms == sorted(rooms) and rooms[-1] == capacity
    before = [room for room in rooms if room < capacity]
    assert growth.last_room(capacity) == max(before, default=0)


def test_first_block_grows_in_smaller_steps():
    growth = Dynamic(256, first=32)
    rooms = [growth.room_for(tokens, 1 << 20) for tokens in (0, 32, 33, 256, 257, 513)]
    assert rooms == [32, 32, 64, 256, 512, 768]


@pytest.mark.parametrize(
    ("block", "first", "says"),
    [(0, None, "a block of 0"), (256, 0, "first steps of 0"), (256, 48, "48 tokens in a block")],
)
def test_invalid_steps_are_refused(block, first, says):
    with pytest.raises(ValueError, match=says):
        Dynamic(block, first)
