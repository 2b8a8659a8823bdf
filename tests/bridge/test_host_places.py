"""Places of host memory: one owner each, and addresses that lead to what is whole."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero_llm.bridge.host_places import NOT_HELD, HostPlaces

LAYERS, EXPERTS = 2, 3
FIRSTS, STRIDES = (1000, 5000), (10, 20)


def places_of(outside: list[int], spares: int) -> tuple[HostPlaces, np.ndarray]:
    places = HostPlaces(LAYERS, EXPERTS, len(outside) + spares)
    bank = np.zeros((LAYERS, EXPERTS), np.int32)
    bank.flat[outside] = -1
    places.fill(bank)
    addresses = np.zeros((LAYERS, EXPERTS, 2), np.int64)
    places.lead(addresses, FIRSTS, STRIDES)
    return places, addresses


def test_the_first_content_and_its_addresses() -> None:
    places, addresses = places_of([1, 3], spares=1)
    assert places.table.ravel().tolist() == [-1, 0, -1, 1, -1, -1] and places.num_free == 1
    assert addresses[0, 1].tolist() == [1000, 5000] and addresses[1, 0].tolist() == [1010, 5020]
    assert not addresses[0, 0].any()
    places.check_integrity()


def test_no_address_leads_to_a_place_that_is_written_or_free() -> None:
    places, addresses = places_of([1, 3], spares=1)
    place = places.begin(0, 0)
    assert place == 2 and not addresses[0, 0].any() and places.table[0, 0] == NOT_HELD
    places.publish(place)
    assert addresses[0, 0].tolist() == [1020, 5040]
    left = places.leave(1, 0)
    assert left == 1 and addresses[1, 0].all() and places.num_free == 0  # old steps read it
    places.release(left)
    assert not addresses[1, 0].any() and places.num_free == 1
    assert places.begin(1, 2) == left


def test_each_array_of_addresses_has_memory_of_its_own() -> None:
    places, addresses = places_of([1, 3], spares=1)
    others = np.zeros((LAYERS, EXPERTS, 1), np.int64)
    places.lead(others, (70_000,), (100,))
    places.publish(places.begin(0, 0))
    assert addresses[0, 0].tolist() == [1020, 5040] and others[0, 0].tolist() == [70_200]
    places.release(places.leave(0, 0))
    assert not addresses[0, 0].any() and not others[0, 0].any()
    places.check_integrity()


@pytest.mark.parametrize("wrong", ["publish", "release"])
def test_no_state_is_left_out(wrong: str) -> None:
    places, _ = places_of([1, 3], spares=1)
    with pytest.raises(AssertionError):
        getattr(places, wrong)(0)  # it is held
    place = places.begin(0, 0)
    with pytest.raises(AssertionError):
        places.release(place)
    with pytest.raises(AssertionError):
        places.begin(0, 2)  # none is free


@given(st.data())
def test_any_order_of_exchanges(data: st.DataObject) -> None:
    places, _ = places_of([0, 4, 5], spares=2)
    written: list[tuple[int, int]] = []
    left: list[int] = []
    for _ in range(data.draw(st.integers(0, 30))):
        inside = [i for i, p in enumerate(places.table.ravel()) if p == NOT_HELD]
        held = [i for i, p in enumerate(places.table.ravel()) if p >= 0 and p not in left]
        what = data.draw(st.integers(0, 3))
        if what == 0 and places.num_free and inside:
            one = data.draw(st.sampled_from(inside))
            if one not in [owner for _, owner in written]:
                written.append((places.begin(*divmod(one, EXPERTS)), one))
        elif what == 1 and written:
            places.publish(written.pop(0)[0])
        elif what == 2 and held:
            left.append(places.leave(*divmod(data.draw(st.sampled_from(held)), EXPERTS)))
        elif what == 3 and left:
            places.release(left.pop(0))
        places.check_integrity()
