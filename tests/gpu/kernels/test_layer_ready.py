"""Layer-ready flags in front of attention: when they let a step run, and what happens if never."""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from hetero_llm.bridge.kv_offload.copier_protocol import LayerReadyFlag
from hetero_llm.gpu.graph_set import token_buckets, waiting_buckets
from hetero_llm.gpu.kernels.layer_ready import (
    ARMED_WORDS,
    GAVE_UP,
    MOST_LOOKS,
    PLACES,
    TURN,
    wait_for_loads,
    wait_for_loads_reference,
)
from hetero_llm.gpu.layer_ready import DeviceLayerReadyFlags
from hetero_llm.runner.model_runner import TimedLayerReadyFlags

LOOKS = 3
LOWEST, HIGHEST = -(2**31), 2**31 - 1


@dataclass
class State:
    flags: torch.Tensor
    armed: torch.Tensor
    errors: torch.Tensor

    @classmethod
    def of(cls, places: dict[int, tuple[int, int]], device: torch.device, turn: int = 0) -> State:
        """Armed places as base and flag; all others have flags that no one has to look at."""
        flags = torch.full((PLACES,), -5, dtype=torch.int32)
        armed = torch.zeros(ARMED_WORDS, dtype=torch.int32)
        for place, (base, flag) in places.items():
            armed[place], armed[PLACES + place], flags[place] = base, 1, flag
        armed[TURN] = turn
        errors = torch.zeros(4, dtype=torch.int32, pin_memory=device.type == "cuda")
        return cls(flags.to(device), armed.to(device), errors)

    def wait(self, layer: int, *, reference: bool = False, most_looks: int = LOOKS) -> bool:
        """Whether the step may run."""
        wait = wait_for_loads_reference if reference else wait_for_loads
        before = self.errors.tolist()
        wait(self.flags, self.armed, self.errors, layer=layer, most_looks=most_looks)
        gave_up = bool(self.armed[GAVE_UP].item())
        after = self.errors.tolist()
        turn = int(self.armed[TURN])
        assert after[:turn] + after[turn + 1 :] == before[:turn] + before[turn + 1 :]
        assert bool(after[turn]) == gave_up
        return not gave_up


def write(tensor: torch.Tensor, place: int, value: int) -> None:
    """As a copy stream does, beside whatever runs."""
    if tensor.device.type != "cuda":
        tensor[place] = value
        return
    with torch.cuda.stream(torch.cuda.Stream()):
        tensor[place : place + 1].fill_(value)


@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize(
    ("places", "layer", "opens"),
    [
        ({}, 0, True),
        ({7: (100, 100)}, 0, False),
        ({7: (100, 101)}, 0, True),
        ({7: (100, 101)}, 1, False),
        ({7: (100, 132)}, 31, True),
        ({7: (100, 131)}, 31, False),
        ({0: (0, 1)}, 0, True),  # no base is special
        ({0: (0, 0)}, 0, False),
        ({7: (100, 300)}, 5, True),  # the place has been used again: this load is long over
        ({7: (300, 132)}, 0, False),  # so far it tells of the load before
        ({0: (0, 4), 31: (50, 54), 63: (-9, -5)}, 3, True),
        ({0: (0, 4), 31: (50, 54), 63: (-9, -6)}, 3, False),
        ({0: (0, 3), 31: (50, 54), 63: (-9, -5)}, 3, False),
        # What is waited for lies beyond the largest number, and so does the flag, or not yet.
        ({5: (HIGHEST - 1, LOWEST + 2)}, 3, True),
        ({5: (HIGHEST - 1, LOWEST + 1)}, 3, False),
        ({5: (HIGHEST - 1, HIGHEST)}, 3, False),
        ({5: (HIGHEST - 1, HIGHEST)}, 0, True),
        ({5: (HIGHEST, HIGHEST)}, 0, False),
        ({5: (HIGHEST, LOWEST)}, 0, True),
        (dict.fromkeys(range(PLACES), (10, 12)), 1, True),
        ({**dict.fromkeys(range(PLACES), (10, 12)), 40: (10, 11)}, 1, False),
    ],
)
def test_a_step_runs_once_the_layer_has_landed_everywhere(
    places: dict[int, tuple[int, int]],
    layer: int,
    opens: bool,
    reference: bool,
    device: torch.device,
) -> None:
    state = State.of(places, device, turn=2)
    assert state.wait(layer, reference=reference) == opens
    for place, (_, flag) in places.items():
        assert state.flags[place] == flag  # nobody but who loads writes there


@pytest.mark.parametrize("seed", range(8))
def test_any_state_is_judged_as_the_twin_does(seed: int, device: torch.device) -> None:
    rng = np.random.default_rng(seed)
    layer = int(rng.integers(0, 80))
    bases = rng.integers(LOWEST, HIGHEST, PLACES, np.int32, endpoint=True)
    short = rng.choice([0, 0, 0, 0, 0, 0, 0, 1], PLACES).astype(np.int32)
    landed = np.int32(layer + 1) + rng.integers(0, 3, PLACES, np.int32) * (1 - short) - short
    armed = np.flatnonzero(rng.random(PLACES) < 0.1)
    places = {int(p): (int(bases[p]), int(bases[p] + landed[p])) for p in armed}
    ours, reference = (State.of(places, device, turn=seed % 4) for _ in "ab")
    assert ours.wait(layer) == reference.wait(layer, reference=True) == (not short[armed].any())
    assert torch.equal(ours.armed, reference.armed) and torch.equal(ours.errors, reference.errors)


def test_a_step_that_gave_up_waits_no_more(device: torch.device) -> None:
    """The looks are no small number here: the test would not end."""
    state = State.of({3: (0, 1)}, device)
    assert not state.wait(1)
    assert not state.wait(2, most_looks=HIGHEST - 1)
    state.errors[0] = 0  # the host took notice; the step still knows
    assert not state.wait(3, most_looks=HIGHEST - 1)


def test_it_waits_for_who_comes_late(device: torch.device) -> None:
    state = State.of({3: (10, 10), 9: (20, 21)}, device)
    write(state.flags, 9, 20)
    state.wait(1)  # everything is compiled and loaded now
    state = State.of({3: (10, 10), 9: (20, 21)}, device)

    def load() -> None:
        write(state.flags, 9, 22)
        write(state.flags, 3, 11)
        write(state.flags, 3, 12)

    thread = threading.Timer(0.01, load)
    thread.start()
    # Other processes' tests take turns on the same GPU, so patience is longer than a step's.
    assert state.wait(1, most_looks=32 * MOST_LOOKS)
    thread.join()
    assert state.flags[3] == 12 and state.flags[9] == 22


# -- arming ---------------------------------------------------------------------------------------


def test_flags_are_armed_for_running_loads(device: torch.device) -> None:
    found = {11: LayerReadyFlag(4, 30), 12: None, 13: LayerReadyFlag(63, 2**31 + 5)}
    layer_ready = DeviceLayerReadyFlags(device, found.__getitem__, most_looks=LOOKS)
    layer_ready.flags[4], layer_ready.flags[63] = 30, 5 - 2**31
    assert isinstance(layer_ready, TimedLayerReadyFlags)
    assert layer_ready.flags_address == layer_ready.flags.data_ptr()

    def opens(tickets: tuple[int, ...], layer: int) -> bool:
        layer_ready.arm(tickets)
        layer_ready.wait(layer)
        if device.type == "cuda":
            torch.cuda.synchronize()
        turn = layer_ready.turn
        gave_up = layer_ready.take_error(turn)
        assert not layer_ready.take_error(turn)  # it is told once
        return not gave_up

    assert opens((), 5) and opens((12,), 5)  # nothing to wait for, or over
    assert not opens((11,), 0)
    write(layer_ready.flags, 4, 32)
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert opens((11,), 0) and opens((12, 11), 1) and not opens((11,), 2)
    assert not opens((11, 13), 0)
    write(layer_ready.flags, 63, 6 - 2**31)
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert opens((11, 13), 0) and not opens((11, 13), 1)
    assert opens((11,), 1)  # what an earlier step was armed for is forgotten


def test_every_step_has_its_own_error(device: torch.device) -> None:
    """Steps are launched ahead of the results of those before."""
    layer_ready = DeviceLayerReadyFlags(
        device, lambda ticket: LayerReadyFlag(ticket, 0), most_looks=LOOKS
    )
    layer_ready.flags[1] = 8
    turns = []
    for tickets in ((1,), (2,), (1,), (1, 2), (1,)):
        layer_ready.arm(tickets)
        for layer in range(3):
            layer_ready.wait(layer)
        turns.append(layer_ready.turn)
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert len(set(turns)) == len(turns)
    assert [layer_ready.take_error(turn) for turn in turns] == [False, True, False, True, False]


def test_a_place_belongs_to_one_load(device: torch.device) -> None:
    layer_ready = DeviceLayerReadyFlags(
        device, lambda ticket: LayerReadyFlag(7, ticket), most_looks=LOOKS
    )
    with pytest.raises(AssertionError, match="two loads at one place"):
        layer_ready.arm((1, 2))


@pytest.mark.parametrize("limit", [1, 4, 5, 24, 100, 512, 8192])
def test_every_step_that_is_captured_finds_a_waiting_bucket(limit: int) -> None:
    buckets = token_buckets(limit)
    waiting = waiting_buckets(buckets)
    assert set(waiting) <= set(buckets) and waiting[-1] == buckets[-1] and len(waiting) <= 12
    for rows in range(1, buckets[-1] + 1):
        bucket = next(b for b in waiting if b >= rows)
        assert bucket <= 128 or bucket == next(b for b in buckets if b >= rows)
