"""Requests that come back to prefixes of others while those leave the device's cache and return
from host memory, faults among the copies, and what has to hold when all is over. For tests on a
CPU and on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import transformers

from hetero_llm import SamplingParams
from hetero_llm.bridge.kv_offload.copier_protocol import Copier, Done
from hetero_llm.core.request import Request
from hetero_llm.core.transfer_order import TransferOrder
from hetero_llm.engine.engine import Engine
from hetero_llm.engine.inputs.input_processor import Prompt
from tests.models.tiny import VOCAB_SIZE, make_tiny_checkpoint, rewrite_config

GOLDEN = "[HIT CNT] total: 132, gpu: 0 (0.00%) cpu: 10 (7.58%) not hit: 122 (92.42%)"
"""The manual's example: 100 blocks, 11 prompts of 10 full blocks and a token, the first again."""
GREEDY = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
_CONTEXT = 512
_MOST_STEPS = 50_000
MOST_ROUNDS = 40
"""Of traffic, where two or three nearly always do."""


def tiny_folder(folder: Path) -> Path:
    """A random Llama of three layers that takes 512 tokens."""
    make_tiny_checkpoint(folder, "llama", "heads_of_16")
    return rewrite_config(folder, max_position_embeddings=_CONTEXT)


def heavy_folder(folder: Path, *, layers: int = 16) -> Path:
    """A random Llama whose KV is large for what it computes: 8 KiB a token and layer in float32."""
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=64, intermediate_size=64, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=8, head_dim=128, max_position_embeddings=4096,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if parameter.dim() == 1 else 0.25 * noise)
    model.save_pretrained(folder)
    return folder


def share_for(num_bytes: int) -> float:
    """`cpu_prefill_memory_utilization` for `num_bytes` and a little more, against rounding."""
    return (num_bytes + 4096) / psutil.virtual_memory().total


def golden_prompts() -> list[list[int]]:
    rng = np.random.default_rng(3)
    prompts = rng.integers(3, VOCAB_SIZE, (11, 161)).tolist()
    return [*prompts, prompts[0]]


# -- traffic ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """A request that comes with step `at`, aborted `abort` steps later if that is given."""

    name: str
    prompt: list[int]
    params: SamplingParams
    at: int
    abort: int | None = None


def traffic(
    seed: int, count: int = 24, *, longest: int = 300, vocab: int = VOCAB_SIZE
) -> list[Job]:
    """Prompts that share heads of several lengths, more than a small pool holds, and some that
    are a whole head and nothing else."""
    rng = np.random.default_rng(seed)
    heads = [rng.integers(3, vocab, rng.integers(40, longest - 60)).tolist() for _ in range(6)]
    jobs, at = [], 0
    for number in range(count):
        head = heads[rng.integers(len(heads))]
        head = head[: rng.integers(20, len(head) + 1)] if rng.random() < 0.5 else head
        tail = rng.integers(3, vocab, rng.integers(0, 40)).tolist()
        tokens = int(rng.integers(1, 24))
        params = replace(GREEDY, max_tokens=tokens)
        if rng.random() < 0.4:
            params = replace(params, temperature=1.0, seed=number)
        abort = int(rng.integers(0, 8)) if rng.random() < 0.25 else None
        jobs.append(Job(f"{seed}-{number}", head + tail, params, at, abort))
        at += int(rng.integers(0, 5))
    return jobs


def serve(
    engine: Engine,
    jobs: Iterable[Job],
    *,
    aborts: bool = True,
    make: Callable[[Job], Request] | None = None,
) -> dict[str, list[int]]:
    """Returns the tokens that outputs brought for each job; checks the scheduler after every step.

    Args:
        make: requests, where the engine itself cannot.
    """

    def made(job: Job) -> Request:
        return engine.make_request(job.name, Prompt(None, job.prompt), job.params)

    waiting = sorted(jobs, key=lambda job: job.at)
    seen: dict[str, list[int]] = {job.name: [] for job in waiting}
    active: set[str] = set()
    ends: dict[str, int] = {}  # steps at which jobs are aborted
    for step in range(_MOST_STEPS):
        while waiting and (waiting[0].at <= step or not active):
            job = waiting.pop(0)
            engine.add_request((make or made)(job))
            active.add(job.name)
            if aborts and job.abort is not None:
                ends[job.name] = step + job.abort
        for name in [name for name, end in ends.items() if end <= step]:
            del ends[name]
            engine.abort(name)
            active.discard(name)
        if not waiting and not active:
            return seen
        for output in engine.step():
            assert output.error is None, output.error
            seen[output.request_id] = list(output.outputs[0].token_ids)
            if output.finished:
                active.discard(output.request_id)
        engine.scheduler.check_integrity()
    raise AssertionError("no end in sight")


class WrongTokens(AssertionError):
    """A request has other tokens than without host memory."""


def check_same(jobs: Iterable[Job], ours: dict[str, list[int]], plain: dict[str, list[int]]) -> int:
    """Compares with the tokens without host memory, where nothing was aborted. Returns the number
    of tokens compared.

    Raises:
        WrongTokens: they differ.
    """
    compared = 0
    for job in jobs:
        mine, its = ours[job.name], plain[job.name]
        assert len(its) == job.params.max_tokens
        if mine != (its if job.abort is None else its[: len(mine)]):
            raise WrongTokens(f"{job}: {mine} instead of {its}")
        compared += len(mine)
    return compared


# -- inside an engine ---------------------------------------------------------------------------


def tier_of(engine: Engine) -> Any:
    """The engine's `bridge.kv_offload.pinned_host_tier.PinnedHostTier`."""
    return engine.scheduler.blocks.transfers.tier  # type: ignore[union-attr]


def rest(engine: Engine) -> None:
    """Polls until no copy is under way."""
    assert engine.step() == []  # finishes a step of ended requests, if there is one
    deadline = time.monotonic() + 60
    while engine.poll_host_memory():
        assert time.monotonic() < deadline, "copies do not end"
        tier_of(engine).wait(1e-3)


def check_over(engine: Engine) -> None:
    """Checks that nothing is left when all requests are over: no copy, no pin, no block."""
    assert not engine.has_unfinished
    rest(engine)
    scheduler, tier = engine.scheduler, tier_of(engine)
    scheduler.check_integrity()
    tier.check_integrity()
    blocks = scheduler.blocks
    assert blocks.num_free == blocks.num_blocks, "a block was lost"
    metrics = engine.metrics()
    assert metrics["kv_offload_open_loads"] == metrics["kv_offload_open_stores"] == 0
    assert tier.index.num_pinned == 0, "a host block is still pinned"
    assert tier.copier.poll() == []


def repeat_until(engine: Engine, serve_round: Callable[[int], int], **wanted: int) -> int:
    """Serves at least two rounds, until each of these metrics is as large as wanted: how many
    copies there are, and which of them are aborted, depends on when the copy threads run. No copy
    is under way between rounds.

    Args:
        serve_round: takes the round's number and returns the number of tokens it has checked.

    Returns:
        The sum of these numbers.
    """
    checked = 0
    for turn in range(MOST_ROUNDS):
        checked += serve_round(turn)
        rest(engine)
        metrics = engine.metrics()
        missing = {name: metrics[name] for name, least in wanted.items() if metrics[name] < least}
        if turn > 0 and not missing:
            return checked
    raise AssertionError(f"after {MOST_ROUNDS} rounds: {missing}, wanted are {wanted}")


class FaultyCopier:
    """Spoils some copies: a spoiled load brings bytes of other host blocks to its blocks, sets its
    layer-ready flag and is reported as failed; a spoiled store is reported as failed.

    Attributes:
        inner: the copier that copies.
        spoiled: how many loads and stores.
    """

    def __init__(self, inner: Copier, seed: int, share: float) -> None:
        self.inner = inner
        self._rng = np.random.default_rng(seed)
        self._share = share
        self._bad: set[int] = set()
        self.spoiled = {"loads": 0, "stores": 0}

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def load(self, order: TransferOrder) -> None:
        if self._spoils(order.transfer_id, "loads"):
            others = (order.host_blocks + 1) % self.inner.num_host_blocks
            order = replace(order, host_blocks=others)
        self.inner.load(order)

    def store(self, order: TransferOrder) -> None:
        self._spoils(order.transfer_id, "stores")
        self.inner.store(order)

    def poll(self) -> list[Done]:
        ended = self.inner.poll()
        return [replace(done, ok=done.ok and done.transfer_id not in self._bad) for done in ended]

    def _spoils(self, transfer_id: int, kind: str) -> bool:
        spoils = self._rng.random() < self._share
        if spoils:
            self._bad.add(transfer_id)
            self.spoiled[kind] += 1
        return bool(spoils)


def spoil(engine: Engine, seed: int, share: float) -> FaultyCopier:
    """From now on some of the engine's copies fail."""
    tier = tier_of(engine)
    tier.copier = FaultyCopier(tier.copier, seed, share)
    return tier.copier


def join_at_once(engine: Engine) -> None:
    """Sequences run as soon as their loads have begun, so that steps wait for layer-ready flags."""
    tier_of(engine).seconds_left = lambda transfer_ids: 0.0


def load_always(engine: Engine) -> None:
    """Whatever host memory holds is loaded, even if it were computed faster."""
    tier_of(engine).worth_loading = lambda hit, start, rest: len(hit.host_blocks)


class LateCopier:
    """Begins loads when `start_loads` is called: a step that does not wait for them reads what
    their blocks held before."""

    def __init__(self, inner: Copier) -> None:
        self.inner = inner
        self._held: list[TransferOrder] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def load(self, order: TransferOrder) -> None:
        self._held.append(order)

    def start_loads(self) -> None:
        for order in self._held:
            self.inner.load(order)
        self._held.clear()


class OpenGates:
    """Layer-ready flags at which no step waits.

    Args:
        flags: of the runner.
        when_read: called when a step has finished that should have waited.
    """

    def __init__(self, flags: Any, when_read: Callable[[], None]) -> None:
        self._flags = flags
        self._when_read = when_read

    @property
    def turn(self) -> int:
        return self._flags.turn

    def arm(self, transfer_ids: Any) -> None:
        self._flags.arm(())

    def wait(self, layer: int) -> None:
        pass

    def take_error(self, turn: int) -> bool:
        self._when_read()
        return self._flags.take_error(turn)
