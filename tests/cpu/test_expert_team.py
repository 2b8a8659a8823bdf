"""A team and its mailbox: requests of every kind, sleep, ends, and what it refuses."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero_llm.bridge.expert_mailbox import (
    ANSWERED,
    COMING,
    LAYER,
    ON_DEVICE,
    SEQUENCE,
    STOPPED,
    TOKENS,
)
from hetero_llm.bridge.host_experts import HostLayer, HostMatrices
from hetero_llm.bridge.host_places import HostPlaces
from hetero_llm.core.errors import ConfigError
from hetero_llm.cpu import native
from hetero_llm.cpu.expert_team import ExpertTeam, declare, post, serves
from tests.cpu.expert_cases import (
    KINDS,
    Mixture,
    expected,
    fill,
    mailbox_for,
    make_mixture,
    torch_threads,
)

pytestmark = [
    pytest.mark.skipif(native.load() is None, reason="needs the compiled library"),
    # A deadlock sits in C, where signals do not reach Python: the thread method ends the process.
    pytest.mark.timeout(300, method="thread"),
]

LAYERS, EXPERTS, K, TOKENS_MOST = 3, 5, 2, 8


@pytest.fixture(autouse=True, scope="module")
def alone() -> Iterator[None]:
    with torch_threads(1):
        yield


@pytest.fixture(scope="module")
def library() -> ctypes.CDLL:
    loaded = native.load()
    assert loaded is not None
    declare(loaded)
    return loaded


@pytest.fixture(scope="module")
def mixture() -> Mixture:
    return make_mixture(KINDS["float32"], layers=LAYERS, experts=EXPERTS)


def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return bool(torch.allclose(found, wanted, rtol=1e-4, atol=1e-5))


def team_threads() -> list[int]:
    """Ids of the library's threads in this process."""
    found = []
    for folder in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that ends meanwhile
            if (folder / "comm").read_text().strip() == "hetero-experts":
                found.append(int(folder.name))
    return found


def test_requests_of_all_layers_in_turn(library: ctypes.CDLL, mixture: Mixture) -> None:
    mailbox = mailbox_for(mixture, TOKENS_MOST, K, torch.float32)
    team = ExpertTeam(mixture.host, mailbox, library, threads=2)
    assert team.threads == 2 and team.stop_reason is None
    for step in range(30):
        tokens = step % TOKENS_MOST + 1
        fill(mailbox, tokens, EXPERTS, seed=step, on_device=0.4)
        post(mailbox, library, step % LAYERS, tokens)
        asked = (mailbox.ids[:tokens] != ON_DEVICE).any(1)
        wanted = expected(mixture, mailbox, step % LAYERS, tokens)
        assert close(mailbox.sums[:tokens][asked], wanted[asked])
    stats = team.stats()
    assert stats.exchanges == 30 and stats.busy_s > 0


@pytest.mark.parametrize("tokens", [0, 1, TOKENS_MOST])
def test_a_request_for_nothing_is_answered(
    library: ctypes.CDLL, mixture: Mixture, tokens: int
) -> None:
    mailbox = mailbox_for(mixture, TOKENS_MOST, K, torch.float32)
    team = ExpertTeam(mixture.host, mailbox, library, threads=2)
    fill(mailbox, TOKENS_MOST, EXPERTS, seed=0)
    mailbox.ids[:tokens] = ON_DEVICE
    post(mailbox, library, 0, tokens, count=3)
    assert mailbox.answer[ANSWERED] == 3 and mailbox.sums.isnan().all()
    assert team.stop_reason is None


def test_sequence_numbers_wrap(library: ctypes.CDLL, mixture: Mixture) -> None:
    mailbox = mailbox_for(mixture, TOKENS_MOST, K, torch.float32)
    last = 2**31 - 2
    mailbox.request[SEQUENCE] = mailbox.answer[ANSWERED] = last
    team = ExpertTeam(mixture.host, mailbox, library, threads=2)
    for number in (2**31 - 1, -(2**31), -(2**31) + 1):
        fill(mailbox, 3, EXPERTS, seed=number % 100, on_device=0.0)
        post(mailbox, library, 1, 3)
        assert mailbox.answer[ANSWERED] == number
        assert close(mailbox.sums[:3], expected(mixture, mailbox, 1, 3))
    assert team.stats().exchanges == 3


@pytest.mark.parametrize("number", [1, 2**30, -(2**31), -(2**30), 0])
def test_no_old_number_stays_when_numbers_come_round(
    library: ctypes.CDLL, mixture: Mixture, number: int
) -> None:
    """A row that no token has had for 2^32 exchanges bears the number that it will have again."""
    mailbox = mailbox_for(mixture, TOKENS_MOST, K, torch.float32)
    mailbox.request[SEQUENCE] = mailbox.answer[ANSWERED] = (number + 2**31 - 1) % 2**32 - 2**31
    mailbox.numbers.fill_(number)
    team = ExpertTeam(mixture.host, mailbox, library, threads=2)
    for other in (number, number + 1):
        fill(mailbox, 3, EXPERTS, seed=1, on_device=0.0)
        post(mailbox, library, 1, 3)
        assert mailbox.answer[COMING] == other and (mailbox.numbers[:3] == other).all()
        assert (mailbox.numbers[3:] == (number ^ 2**31 if number >= 0 else number + 2**31)).all()
    assert team.stop_reason is None


def test_rows_bear_the_number_of_the_last_exchange_that_asked_for_them(
    library: ctypes.CDLL, mixture: Mixture
) -> None:
    mailbox = mailbox_for(mixture, TOKENS_MOST, K, torch.float32)
    team = ExpertTeam(mixture.host, mailbox, library, threads=2)
    for number, tokens in ((1, 6), (2, 4), (3, 1)):
        fill(mailbox, tokens, EXPERTS, seed=number, on_device=0.0)
        mailbox.ids[2] = ON_DEVICE
        post(mailbox, library, 0, tokens)
    none, numbers = -(2**31) + 1, mailbox.numbers
    assert (numbers == numbers[:, :1]).all()
    assert numbers[:, 0].tolist() == [3, 2, none, 2, 1, 1, none, none]
    assert team.stop_reason is None


def test_a_request_that_waits_when_the_team_is_made(library: ctypes.CDLL, mixture: Mixture) -> None:
    mailbox = mailbox_for(mixture, TOKENS_MOST, K, torch.float32)
    fill(mailbox, 2, EXPERTS, seed=1, on_device=0.0)
    mailbox.request[LAYER], mailbox.request[TOKENS], mailbox.request[SEQUENCE] = 2, 2, 1
    team = ExpertTeam(mixture.host, mailbox, library, threads=2)
    while mailbox.answer[ANSWERED] != 1:
        os.sched_yield()
    assert close(mailbox.sums[:2], expected(mixture, mailbox, 2, 2))
    assert team.stop_reason is None


@pytest.mark.parametrize(
    ("layer", "tokens", "expert", "reason"),
    [
        (LAYERS, 1, 0, "a request named a layer that has no experts"),
        (-1, 1, 0, "a request named a layer that has no experts"),
        (0, TOKENS_MOST + 1, 0, "a request had more tokens than the mailbox"),
        (0, -1, 0, "a request had more tokens than the mailbox"),
        (0, 3, EXPERTS, "a request named an expert that there is not"),
        (0, 3, 2**31 - 1, "a request named an expert that there is not"),
    ],
)
def test_a_malformed_request_ends_the_team(
    library: ctypes.CDLL, mixture: Mixture, layer: int, tokens: int, expert: int, reason: str
) -> None:
    """And writes nothing but STOPPED."""
    mailbox = mailbox_for(mixture, TOKENS_MOST, K, torch.float32)
    team = ExpertTeam(mixture.host, mailbox, library, threads=2)
    fill(mailbox, TOKENS_MOST, EXPERTS, seed=2, on_device=0.0)
    mailbox.ids[2, 1] = expert
    with pytest.raises(
        RuntimeError, match=f"the threads that compute experts have ended: {reason}"
    ):
        post(mailbox, library, layer, tokens)
    assert mailbox.sums.isnan().all() and mailbox.answer[ANSWERED] == 0
    assert team.stop_reason == reason
    team.stop()
    assert team.stop_reason == reason


def test_ids_below_zero_are_the_devices(library: ctypes.CDLL, mixture: Mixture) -> None:
    mailbox = mailbox_for(mixture, TOKENS_MOST, K, torch.float32)
    team = ExpertTeam(mixture.host, mailbox, library, threads=1)
    fill(mailbox, 2, EXPERTS, seed=3, on_device=0.0)
    mailbox.ids[0, 0] = mailbox.ids[1, 1] = ON_DEVICE
    post(mailbox, library, 0, 2)
    assert close(mailbox.sums[:2], expected(mixture, mailbox, 0, 2)) and team.stop_reason is None


def test_stop_is_final_and_may_be_called_again(library: ctypes.CDLL, mixture: Mixture) -> None:
    mailbox = mailbox_for(mixture, TOKENS_MOST, K, torch.float32)
    before = len(team_threads())
    team = ExpertTeam(mixture.host, mailbox, library, threads=2)
    fill(mailbox, 1, EXPERTS, seed=4)
    post(mailbox, library, 0, 1)
    for _ in range(2):
        team.stop()
        team.wake()
        assert mailbox.answer[STOPPED] == 1 and team.stop_reason == "it was stopped"
        assert len(team_threads()) == before
    with pytest.raises(RuntimeError, match="it was stopped"):
        post(mailbox, library, 0, 1)


def test_stop_amid_requests(library: ctypes.CDLL, mixture: Mixture) -> None:
    """What was answered before is whole; who waits then learns of the end."""
    mailbox = mailbox_for(mixture, TOKENS_MOST, K, torch.float32)
    fill(mailbox, TOKENS_MOST, EXPERTS, seed=5, on_device=0.0)
    team = ExpertTeam(mixture.host, mailbox, library, threads=2)
    with ThreadPoolExecutor(1) as pool:
        poster = pool.submit(post, mailbox, library, 0, TOKENS_MOST, count=1_000_000)
        while team.stats().exchanges < 20:
            os.sched_yield()
        team.stop()
        with pytest.raises(RuntimeError, match="it was stopped"):
            poster.result()
    answered, asked = int(mailbox.answer[ANSWERED]), int(mailbox.request[SEQUENCE])
    assert answered == team.stats().exchanges and asked - answered in (0, 1)
    assert close(mailbox.sums, expected(mixture, mailbox, 0, TOKENS_MOST))


def test_a_team_that_nobody_holds_ends(library: ctypes.CDLL, mixture: Mixture) -> None:
    before = len(team_threads())
    mailbox = mailbox_for(mixture, TOKENS_MOST, K, torch.float32)
    team = ExpertTeam(mixture.host, mailbox, library, threads=2)
    fill(mailbox, 1, EXPERTS, seed=9)
    post(mailbox, library, 0, 1)  # by now the thread has its name
    assert len(team_threads()) == before + 1
    del team
    gc.collect()
    assert len(team_threads()) == before and mailbox.answer[STOPPED] == 1


def test_naps_end_with_a_request_or_a_call(library: ctypes.CDLL, mixture: Mixture) -> None:
    mailbox = mailbox_for(mixture, TOKENS_MOST, K, torch.float32)
    team = ExpertTeam(mixture.host, mailbox, library, threads=2, spin_us=0)
    for round_ in range(3):
        naps = team.stats().naps
        while team.stats().naps < naps + 3:
            os.sched_yield()
        if round_ == 1:
            team.wake()
        fill(mailbox, 2, EXPERTS, seed=round_, on_device=0.0)
        post(mailbox, library, 0, 2)
        assert close(mailbox.sums[:2], expected(mixture, mailbox, 0, 2))
    assert team.stats().exchanges == 3


def test_threads_are_pinned(library: ctypes.CDLL, mixture: Mixture) -> None:
    mailbox = mailbox_for(mixture, TOKENS_MOST, K, torch.float32)
    granted = sorted(os.sched_getaffinity(0))
    cpus = [granted[-1], granted[0], 100_000]  # one that is not there is left to the system
    team = ExpertTeam(mixture.host, mailbox, library, threads=3, cpus=cpus)
    fill(mailbox, 2, EXPERTS, seed=6)
    post(mailbox, library, 0, 2)
    places = [os.sched_getaffinity(thread) for thread in team_threads()]
    assert {granted[-1]} in places and sorted(os.sched_getaffinity(0)) == granted
    team.stop()


def test_a_fork_leaves_the_team_to_the_parent(library: ctypes.CDLL, mixture: Mixture) -> None:
    mailbox = mailbox_for(mixture, TOKENS_MOST, K, torch.float32)
    team = ExpertTeam(mixture.host, mailbox, library, threads=2)
    child = os.fork()
    if child == 0:
        team.stop()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    fill(mailbox, 2, EXPERTS, seed=7, on_device=0.0)
    post(mailbox, library, 0, 2)
    assert close(mailbox.sums[:2], expected(mixture, mailbox, 0, 2)) and team.stop_reason is None


def test_experts_may_move_between_exchanges(library: ctypes.CDLL) -> None:
    """An exchange of two experts' memory, as promotions without room for all of them do it."""
    own = make_mixture(KINDS["float32"], experts=EXPERTS)
    mailbox = mailbox_for(own, TOKENS_MOST, K, torch.float32)
    team = ExpertTeam(own.host, mailbox, library, threads=2)
    fill(mailbox, 4, EXPERTS, seed=8, on_device=0.0)
    for matrices, dense in (
        (own.host.layers[0].gate_up, own.gate_up), (own.host.layers[0].down, own.down),
    ):  # fmt: skip
        matrices.data[[1, 3]] = matrices.data[[3, 1]]
        dense[0, [1, 3]] = dense[0, [3, 1]]
    post(mailbox, library, 0, 4)
    assert close(mailbox.sums[:4], expected(own, mailbox, 0, 4)) and team.stop_reason is None


def test_experts_that_change_places_between_exchanges(library: ctypes.CDLL) -> None:
    """Of a host that does not hold all of them: addresses follow places, and an expert that is not
    there ends the team."""
    mixture = make_mixture(KINDS["float32"], layers=LAYERS, experts=EXPERTS)
    places = HostPlaces(LAYERS, EXPERTS, LAYERS * EXPERTS)
    bank = np.full((LAYERS, EXPERTS), -1)
    bank[1, 2] = 0  # this one is on the GPU alone
    places.fill(bank)

    def shared(name: str) -> list[HostMatrices]:
        parts = [getattr(layer, name) for layer in mixture.host.layers]
        data = torch.full_like(torch.cat([part.data for part in parts]), float("nan"))
        for layer, expert in np.argwhere(places.table >= 0).tolist():
            data[places.table[layer, expert]] = parts[layer].data[expert]
        return [replace(part, data=data, places=places.table[i]) for i, part in enumerate(parts)]

    layers = tuple(map(HostLayer, shared("gate_up"), shared("down")))
    host = replace(mixture.host, layers=layers, places=places)
    mailbox = mailbox_for(mixture, TOKENS_MOST, K, torch.float32)
    team = ExpertTeam(host, mailbox, library, threads=2)

    def ask() -> bool:
        fill(mailbox, 3, EXPERTS, seed=1, on_device=0.0)
        mailbox.ids[:3, 0], mailbox.ids[:3, 1:] = 2, ON_DEVICE
        post(mailbox, library, 1, 3)
        return close(mailbox.sums[:3], expected(mixture, mailbox, 1, 3))

    place = places.begin(1, 2)
    layers[0].gate_up.data[place] = mixture.host.layers[1].gate_up.data[2]
    layers[0].down.data[place] = mixture.host.layers[1].down.data[2]
    places.publish(place)
    assert ask() and ask()
    places.release(places.leave(1, 2))
    with pytest.raises(RuntimeError, match="an expert that host memory does not hold"):
        ask()
    assert team.stop_reason is not None


def test_what_no_kernel_serves(library: ctypes.CDLL) -> None:
    odd = make_mixture(replace(KINDS["int4_32"], group=48), hidden=96, inner=48)
    scaled = make_mixture(KINDS["fp4"])
    matrices = scaled.host.layers[0].gate_up
    assert matrices.scale is not None
    small = replace(matrices, scale=matrices.scale.to(torch.float8_e4m3fn))
    table = replace(matrices, kind="nf4")
    assert serves(matrices, library)
    assert not any(serves(m, library) for m in (small, table, odd.host.layers[0].gate_up))
    mailbox = mailbox_for(odd, TOKENS_MOST, K)
    message = "moe_cpu_experts='int4 in groups of 48 with float16 scales': the CPU has no kernel"
    with pytest.raises(ConfigError, match=message):
        ExpertTeam(odd.host, mailbox, library, threads=1)


def test_what_does_not_fit_together(library: ctypes.CDLL, mixture: Mixture) -> None:
    mailbox = mailbox_for(mixture, TOKENS_MOST, K, torch.float32)
    unknown = replace(mixture.host, activation="sigmoid")
    with pytest.raises(ConfigError, match="moe_cpu_experts='sigmoid': the CPU has no such activat"):
        ExpertTeam(unknown, mailbox, library, threads=1)
    biased = make_mixture(KINDS["bf16"], bias=torch.float32)
    with pytest.raises(ConfigError, match="biases must be torch.bfloat16, as the model is"):
        ExpertTeam(biased.host, mailbox_for(biased, 1, K), library, threads=1)
    one = make_mixture(KINDS["int4_32"], hidden=128, inner=128)
    other = make_mixture(KINDS["int4_64"], hidden=128, inner=128)
    mixed = replace(one.host, layers=one.host.layers + other.host.layers)
    with pytest.raises(ConfigError, match="layers with other experts .* are not supported"):
        ExpertTeam(mixed, mailbox_for(one, 1, K), library, threads=1)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_sequence_of_requests(data: st.DataObject) -> None:
    """One team answers whatever comes: layers, tokens, choices, pauses."""
    library = native.load()
    assert library is not None
    own = make_mixture(KINDS["float32"], layers=LAYERS, experts=EXPERTS)
    mailbox = mailbox_for(own, TOKENS_MOST, K, torch.float32)
    threads = data.draw(st.integers(1, 3), label="threads")
    team = ExpertTeam(
        own.host, mailbox, library, threads=threads,
        spin_us=data.draw(st.sampled_from((0, 50)), label="spin"),
    )  # fmt: skip
    for step in range(data.draw(st.integers(1, 6), label="steps")):
        tokens = data.draw(st.integers(0, TOKENS_MOST), label="tokens")
        layer = data.draw(st.integers(0, LAYERS - 1), label="layer")
        fill(mailbox, tokens, EXPERTS, seed=step, on_device=data.draw(st.sampled_from((0, 0.5, 1))))
        times = post(mailbox, library, layer, tokens, gap_us=data.draw(st.sampled_from((0, 300))))
        assert times.shape == (1,) and np.isfinite(times).all()
        asked = (mailbox.ids[:tokens] != ON_DEVICE).any(1)
        wanted = expected(own, mailbox, layer, tokens)
        assert close(mailbox.sums[:tokens][asked], wanted[asked])
        assert mailbox.sums[:tokens][~asked].isnan().all()
    team.stop()
    assert team.stop_reason == "it was stopped"
