"""A hybrid mixture without a CUDA device: everything but the native threads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hetero_llm.bridge.expert_mailbox import open_mailbox
from hetero_llm.bridge.host_experts import HostExperts
from hetero_llm.engine.build_experts import expert_modules, host_experts
from hetero_llm.gpu.expert_bank import ExpertBank
from hetero_llm.gpu.expert_moves import (
    Copies,
    CopiesAtOnce,
    ExpertMoves,
    NoPlacement,
    Placement,
    Promotion,
)
from hetero_llm.gpu.expert_streams import DirectLane, ExpertStreams
from hetero_llm.gpu.fused import speed_up
from hetero_llm.gpu.hybrid_experts import HybridExperts
from hetero_llm.gpu.kernels.expert_requests import STATE_WORDS, Exchange
from hetero_llm.models.config import ModelConfig
from hetero_llm.models.layers import CausalLM
from hetero_llm.models.loader import load_model
from hetero_llm.models.read_config import load_model_config
from tests.helpers.expert_team import PythonTeam, expert_outputs


class EveryStep:
    """Promotes as many experts as it may, round and round: nothing stays where it is."""

    def __init__(self, owners: np.ndarray, shape: tuple[int, int], seed: int = 0) -> None:
        self._owners = owners.copy()
        self._shape = shape
        self._rng = np.random.default_rng(seed)
        self.observed = np.zeros(shape, np.int64)

    def observe(self, counts: np.ndarray) -> None:
        self.observed += counts

    def promotions(self, budget: int) -> list[Promotion]:
        layers, experts = self._shape
        found: list[Promotion] = []
        for slot in self._rng.permutation(len(self._owners))[:budget].tolist():
            outside = np.setdiff1d(np.arange(layers * experts), self._owners)
            if not len(outside):
                break
            place = int(self._rng.choice(outside))
            if any(place == layer * experts + expert for layer, expert, _ in found):
                continue
            self._owners[slot] = place
            found.append((*divmod(place, experts), slot))
        return found


class DelayedCopies:
    """Copies end some steps after they begin, and the slot holds poison until then."""

    def __init__(self, poison: Callable[[int], None], steps: int = 2) -> None:
        self._poison, self._steps = poison, steps
        self._waiting: list[tuple[int, Callable[[], None], list[bool]]] = []
        self.step = 0
        self.ended = 0

    def start(self, slot: int, copy: Callable[[], None]) -> Callable[[], bool]:
        self._poison(slot)
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
    """Owners of `count` slots: the first expert of each layer, then the second, and so on."""
    order = np.arange(layers * experts).reshape(layers, experts).T.ravel()
    owners = np.full(count, -1, np.int64)
    owners[: min(count, len(order))] = order[:count]
    return owners


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
    placement: Callable[[np.ndarray, tuple[int, int]], Placement] | None = None,
    copies: Callable[[ExpertBank], Copies] | None = None,
    most_looks: int = 1 << 30,
) -> Iterator[Hybrid]:
    """A checkpoint's mixture with a share of its experts in the bank, round robin.

    Args:
        placement: makes one from the owners of slots and [layers, experts]; None: none moves.
        copies: makes what writes slots; None: at once.
    """
    config = load_model_config(checkpoint)
    model = load_model(
        checkpoint, config, dtype=dtype, device=device, show_progress=False,
        expert_memory=empty_on_host,
    )  # fmt: skip
    speed_up(model)
    modules = expert_modules(model)
    host = host_experts(modules)
    shape = (host.num_layers, host.num_experts)
    slots = round(residency * shape[0] * shape[1])
    bank = ExpertBank(host, slots, staging=host.num_experts, device=device)
    owners = round_robin(slots, *shape)
    bank.place(owners)
    pin = device.type == "cuda"
    k = config.experts_per_token  # type: ignore[attr-defined]
    mailbox = open_mailbox(most_rows, host.hidden, k, dtype, pin=pin)
    exchange = Exchange(
        mailbox,
        torch.zeros(STATE_WORDS, dtype=torch.int32, device=device),
        torch.zeros(1, dtype=torch.int32, pin_memory=pin),
        most_looks,
    )
    ticks = iter(range(1 << 40))
    moves = ExpertMoves(
        bank, owners,
        NoPlacement() if placement is None else placement(owners, shape),
        CopiesAtOnce() if copies is None else copies(bank),
        bytes_per_second=8.0 * host.expert_bytes, clock=lambda: float(next(ticks)),
    )  # fmt: skip
    streams = ExpertStreams(bank, moves.table, DirectLane())
    experts = HybridExperts(
        bank, exchange, moves, streams, activation=modules[0].activation.name, most_rows=most_rows
    )
    experts.join(modules)
    with PythonTeam(mailbox, expert_outputs(host)) as team:
        yield Hybrid(config, model, host, bank, experts, team, exchange)
    if team.error is not None:
        raise team.error
