"""A hybrid mixture without a CUDA device: everything but the native threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hetero_llm.bridge.expert_mailbox import open_mailbox, order_for
from hetero_llm.bridge.host_experts import HostExperts
from hetero_llm.engine.builders.build_experts import expert_modules
from hetero_llm.engine.builders.expert_store import ExpertMemory, ExpertStore, host_experts
from hetero_llm.gpu.expert_bank import ExpertBank
from hetero_llm.gpu.expert_moves import (
    Copies,
    CopiesAtOnce,
    ExpertMoves,
    FixedPlacement,
    Placement,
)
from hetero_llm.gpu.expert_streams import DirectLane, ExpertStreams
from hetero_llm.gpu.fused import speed_up
from hetero_llm.gpu.hybrid_experts import HybridExperts
from hetero_llm.gpu.kernels.expert_requests import ON_HOST, STATE_WORDS, Exchange
from hetero_llm.models.collectives import ONE_RANK, Collectives
from hetero_llm.models.config import ModelConfig
from hetero_llm.models.layers import CausalLM
from hetero_llm.models.loader import expert_sizes, load_model
from hetero_llm.models.rank_config import sharded_config
from hetero_llm.models.read_config import load_model_config
from tests.helpers.expert_team import PythonTeam, expert_outputs


@dataclass(frozen=True)
class Chosen:
    """A promotion."""

    layer: int
    expert: int
    slot: int
    evicted: tuple[int, int] | None


class EveryStep:
    """Promotes at every chance, round and round: nothing stays where it is.

    Args:
        table: [layers, experts] int32; all slots that it names are used.
        most: promotions of one call.
        owners_stay: see `ExpertPlacement`.
    """

    interval = 1

    def __init__(
        self, table: np.ndarray, seed: int = 0, most: int = 2, *, owners_stay: bool = False
    ) -> None:
        self.table = table
        self._owners_stay = owners_stay
        self.observed = np.zeros(table.shape, np.int64)
        self.prompts = np.zeros(table.shape, np.int64)
        self._rng = np.random.default_rng(seed)
        self._most = most
        self._moving: dict[int, tuple[int, int]] = {}

    def observe(self, counts: np.ndarray, *, steps: int, seconds: float) -> None:
        self.observed += counts

    def observe_prompt(
        self, counts: np.ndarray, *, tokens: int, share: float = 1.0, grant_bytes: float = 0
    ) -> None:
        self.prompts += counts

    def choose(
        self,
        movable: np.ndarray | None = None,
        *,
        loads_wait: bool = False,
        most: int | None = None,
    ) -> list[Chosen]:
        found: list[Chosen] = []
        places = np.argwhere(self.table >= 0)
        limit = self._most if most is None else min(most, self._most)
        for layer, expert in self._rng.permutation(places)[: 0 if loads_wait else limit]:
            if movable is not None and not movable[self.table[layer, expert]]:
                continue
            outside = [
                place
                for place in map(tuple, np.argwhere(self.table < 0).tolist())
                if place not in self._moving.values() and place != (layer, expert)
            ]
            if not outside:
                break
            slot = int(self.table[layer, expert])
            new = outside[int(self._rng.integers(len(outside)))]
            if not self._owners_stay:
                self.table[layer, expert] = ON_HOST
            self._moving[slot] = new
            found.append(Chosen(*new, slot, (int(layer), int(expert))))
        return found

    def vacate(self, slot: int) -> None:
        assert self._owners_stay and slot in self._moving
        self.table[self.table == slot] = ON_HOST

    def finish(self, slot: int) -> None:
        assert not (self.table == slot).any()
        self.table[self._moving.pop(slot)] = slot


class DelayedCopies:
    """Copies end some steps after they begin, and the slot, or the place of host memory, holds
    poison until then."""

    def __init__(
        self,
        poison: Callable[[int], None],
        steps: int = 2,
        *,
        poison_place: Callable[[int], None] = lambda place: None,
    ) -> None:
        self._poison, self._steps = poison, steps
        self._poison_place = poison_place
        self._waiting: list[tuple[int, Callable[[], None], list[bool]]] = []
        self.step = 0
        self.ended = 0

    def start(self, slot: int, copy: Callable[[], None]) -> Callable[[], bool]:
        self._poison(slot)
        return self._later(copy)

    def save(self, place: int, copy: Callable[[], None]) -> Callable[[], bool]:
        self._poison_place(place)
        return self._later(copy)

    def _later(self, copy: Callable[[], None]) -> Callable[[], bool]:
        done = [False]
        self._waiting.append((self.step + self._steps, copy, done))
        return lambda: done[0]

    def advance(self) -> None:
        """A step has passed."""
        self.step += 1
        for due, copy, done in self._waiting:
            if due <= self.step and not done[0]:
                copy()
                done[0] = True
                self.ended += 1


def round_robin(count: int, layers: int, experts: int) -> np.ndarray:
    """Table with `count` slots: the first expert of each layer, then the second, and so on."""
    table = np.full((layers, experts), ON_HOST, np.int32)
    for slot in range(min(count, layers * experts)):
        table[slot % layers, slot // layers] = slot
    return table


@dataclass
class Hybrid:
    """A model that has been joined with its bank."""

    config: ModelConfig
    model: CausalLM
    host: HostExperts
    bank: ExpertBank
    experts: HybridExperts
    team: PythonTeam
    exchange: Exchange


def empty_on_host(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, pin_memory=torch.cuda.is_available())


@contextmanager
def open_hybrid(
    checkpoint: Path,
    device: torch.device,
    *,
    residency: float,
    most_rows: int,
    dtype: torch.dtype = torch.float32,
    placement: Callable[[np.ndarray], Placement] = FixedPlacement,
    copies: Callable[[ExpertBank], Copies] | None = None,
    most_looks: int | None = None,
    spares: int | None = None,
    collectives: Collectives = ONE_RANK,
) -> Iterator[Hybrid]:
    """A checkpoint's mixture with a share of its experts in the bank, round robin.

    Args:
        placement: makes one from the table.
        copies: makes what writes slots; None: at once.
        most_looks: None: enough for any thread; on a device, some twenty seconds.
        spares: free places of host memory that holds the other experts; None: it holds all.
        collectives: of the ranks; this one has its part of all experts, and a team for them.
    """
    config = load_model_config(checkpoint)
    sizes = expert_sizes(checkpoint, config, dtype=dtype, rank=collectives.rank)
    shape = (sizes.num_layers, sizes.num_experts)
    slots = round(residency * shape[0] * shape[1])
    table = round_robin(slots, *shape)
    store = None
    if spares is not None:
        store = ExpertStore(
            table, num_places=shape[0] * shape[1] - slots + spares,
            num_slots=slots + 2 * shape[1],
            memory=ExpertMemory(libcuda="libcuda.so.1" if device.type == "cuda" else None),
            dtype=dtype, device=device,
        )  # fmt: skip
    model = load_model(
        checkpoint, config, dtype=dtype, device=device, show_progress=False,
        expert_memory=store or empty_on_host, collectives=collectives,
    )  # fmt: skip
    speed_up(model)
    modules = expert_modules(model)
    if store is None:
        host = host_experts(modules)
        bank = ExpertBank(host, slots, staging=shape[1], device=device)
        bank.place(table)
    else:
        host = store.host_experts(modules)
        bank = store.open_bank(host, slots, staging=shape[1])
    pin = device.type == "cuda"
    k = config.experts_per_token  # type: ignore[attr-defined]
    order = order_for(host.layers[0].gate_up.kind, dtype)
    mailbox = open_mailbox(most_rows, host.hidden, k, dtype, pin=pin, order=order)
    exchange = Exchange(
        mailbox,
        torch.zeros(STATE_WORDS, dtype=torch.int32, device=device),
        torch.zeros(1, dtype=torch.int32, pin_memory=pin),
        most_looks or (20 << 20 if pin else 1 << 30),
    )
    moves = ExpertMoves(
        bank,
        placement(table),
        CopiesAtOnce() if copies is None else copies(bank),
        most_changes=4,  # fewer than some steps have
    )
    experts = HybridExperts(
        bank,
        exchange,
        moves,
        ExpertStreams(bank, moves.placement.table, DirectLane(), most_rows=most_rows),
        activation=modules[0].activation.name,
        most_rows=most_rows,
        wake=lambda: None,
        clock=lambda: 0.0,
    )
    experts.join(modules)
    with PythonTeam(mailbox, expert_outputs(host)) as team:
        own_config = sharded_config(config, collectives.rank)
        yield Hybrid(own_config, model, host, bank, experts, team, exchange)
    if team.error is not None:
        raise team.error
