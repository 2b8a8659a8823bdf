"""Rows 1 to 5 of the fault matrix: a draft worker that dies, hangs, talks nonsense or cannot start,
beside a whole engine. The tokens are those without drafts, and nothing is leaked.

Steps are counted, not timed; back-off and silence are shortened where a test has to see them end.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from hetero_llm import LLM, SamplingParams
from hetero_llm.bridge.ipc.rings import Ring, create_ring
from hetero_llm.core.errors import ConfigError, ModelLoadError
from hetero_llm.core.outputs import RequestOutput
from hetero_llm.core.step_times import StepTimes
from hetero_llm.engine.engine import Engine
from hetero_llm.engine.inputs.input_processor import Prompt
from hetero_llm.spec_decode.draft_model import worker_client
from hetero_llm.spec_decode.draft_model.proposer import DraftModelProposer
from hetero_llm.spec_decode.draft_model.worker_client import DraftWorkerClient, WorkerLimits
from hetero_llm.spec_decode.hybrid_drafter import HybridDrafter
from hetero_llm.spec_decode.proposal_account import ProposalAccount
from tests.bridge.ipc.tools import HEAD, SLOT_BYTES, SLOTS_AT, TAIL
from tests.helpers.draft_traffic import (
    EVERYTHING,
    MAX_LEN,
    Served,
    build,
    differing,
    make_draft,
    make_model,
    make_traffic,
    serve,
)
from tests.models.tiny import make_tiny_checkpoint, rewrite_config

pytestmark = pytest.mark.faults

BATCH = 64
PATIENCE = 120.0  # seconds until what must come counts as missed
DRAFTS = {"num_speculative_tokens": 4, "cpu_draft_worker": True, "draft_weight_dtype": "float32"}


class Broken:
    """An engine with a real worker, to which something is done before each step.

    Attributes:
        hurt: what is done; receives the number of the step.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.hurt: Callable[[int], None] = lambda _: None
        self._num_steps = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def step(self) -> list[RequestOutput]:
        self._num_steps += 1
        self.hurt(self._num_steps)
        return self.engine.step()

    @property
    def proposer(self) -> DraftModelProposer:
        drafter = self.engine.background_drafter
        assert isinstance(drafter, HybridDrafter)
        assert isinstance(drafter.model, DraftModelProposer)
        return drafter.model

    @property
    def worker(self) -> DraftWorkerClient:
        return self.proposer.worker

    @property
    def rings(self) -> tuple[Ring, Ring]:
        assert self.worker.rings is not None
        return self.worker.rings

    def serve(self, hurt: Callable[[int], None]) -> Served:
        self.hurt = hurt
        try:
            served = serve(self, make_traffic(0, BATCH, EVERYTHING))  # type: ignore[arg-type]
        finally:
            self.hurt = lambda _: None
        self.engine.reset_prefix_cache()
        return served

    def wait_until_up(self) -> None:
        """Does what an engine does for its worker between steps, without steps."""
        until = time.monotonic() + PATIENCE
        while not self.metric("draft_worker_up"):
            self.proposer.run_deferred()
            self.worker.poll(5000)
            assert time.monotonic() < until
        self.proposer.run_deferred()

    def wait_for_drafts(self) -> None:
        """Waits until the worker has drafted for all sequences; on a busy machine that takes a
        while."""
        for _ in range(100):
            if self.proposer.is_caught_up:
                break
            self.proposer.receive(5000)

    def metric(self, name: str) -> float:
        return self.engine.metrics()[name]

    def check_nothing_is_held(self) -> None:
        self.proposer.run_deferred()
        assert self.metric("num_requests_running") == self.metric("num_requests_waiting") == 0
        assert self.metric("kv_cache_usage_perc") == 0
        self.proposer.check_integrity()
        assert self.proposer.num_sequences == 0
        assert len(children()) == (self.worker.pid is not None)


def children() -> list[psutil.Process]:
    """Zombies included."""
    return sorted(psutil.Process().children(), key=lambda child: child.pid)


@pytest.fixture(scope="module", autouse=True)
def quiet() -> Iterator[None]:
    """Drafts cost nothing, so that every step has some; torch runs on one core, the worker on the
    other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepTimes, "observe", lambda *_: None)
        patch.setattr(ProposalAccount, "set_step_times", lambda *_: None)
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("target") / "model")


@pytest.fixture(scope="module")
def draft(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_draft(target, tmp_path_factory.mktemp("draft") / "model")


@pytest.fixture(scope="module")
def plain(target: Path) -> Served:
    """The outputs without drafts."""
    engine = build(target, BATCH, None, batch_invariant=True)
    return serve(engine, make_traffic(0, BATCH, EVERYTHING), aborting=False)


@pytest.fixture
def impatient(broken: Broken, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new worker starts at once, however many have died."""
    limits = WorkerLimits(back_off=0.0, max_deaths=1000)
    monkeypatch.setattr(broken.worker, "limits", limits)


@pytest.fixture(scope="module")
def broken(target: Path, draft: Path) -> Iterator[Broken]:
    engine = build(
        target, BATCH, None, batch_invariant=True, speculative_model=str(draft), **DRAFTS
    )
    yield Broken(engine)
    engine.shut_down()
    assert children() == []


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def kill(worker: DraftWorkerClient) -> None:
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGKILL)
    os.waitid(os.P_PID, worker.pid, os.WEXITED | os.WNOWAIT)


# -- rows 1 and 2 -------------------------------------------------------------------------------


def test_no_fault(broken: Broken, plain: Served) -> None:
    accepted = broken.metric("spec_decode_num_accepted_tokens")
    assert differing(plain, broken.serve(lambda _: broken.wait_for_drafts())) == []
    assert broken.metric("spec_decode_num_accepted_tokens") > accepted + 100
    assert broken.metric("draft_worker_up") == 1
    broken.check_nothing_is_held()


def test_killed_under_many_requests(broken: Broken, plain: Served, impatient: None) -> None:
    broken.wait_until_up()
    restarts, up = broken.metric("draft_restarts"), []

    def hurt(step: int) -> None:
        if len(up) == 5:
            kill(broken.worker)
        up.append(broken.metric("draft_worker_up"))

    assert differing(plain, broken.serve(hurt)) == []
    assert up[:6] == [1] * 6 and up[7] == 0
    broken.check_nothing_is_held()
    broken.wait_until_up()
    assert broken.metric("draft_restarts") == restarts + 1


@pytest.mark.parametrize("seed", range(2))
def test_killed_at_random_steps(broken: Broken, plain: Served, impatient: None, seed: int) -> None:
    """Also while it starts: whenever there is one, it has some steps to live. Drafts come from
    those in between."""
    rng, deaths = random.Random(seed), broken.worker.counters.deaths
    lives, waits = [rng.randrange(1, 30)], [3]

    def hurt(step: int) -> None:
        lives[0] -= 1
        if lives[0] <= 0 and broken.worker.pid is not None:
            kill(broken.worker)
            lives[0] = rng.randrange(1, 30)
        elif waits[0] and rng.random() < 0.05 and not broken.worker.is_up:
            waits[0] -= 1
            broken.wait_until_up()

    assert differing(plain, broken.serve(hurt)) == []
    assert broken.worker.counters.deaths >= deaths + 3
    broken.check_nothing_is_held()


def test_the_next_worker_takes_running_requests_up(
    broken: Broken, plain: Served, impatient: None
) -> None:
    broken.wait_until_up()
    engine = broken.engine
    params = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    for number in range(5):
        prompt = Prompt(None, [3 + number, 9, 27, 81])
        engine.add_request(engine.make_request(f"long {number}", prompt, params))
    for _ in range(4):
        engine.step()
    kill(broken.worker)
    for _ in range(3):
        engine.step()
    assert broken.metric("draft_worker_up") == 0
    broken.wait_until_up()
    accepted = broken.metric("spec_decode_num_accepted_tokens")
    while engine.has_unfinished:
        broken.wait_for_drafts()
        engine.step()
    assert broken.metric("spec_decode_num_accepted_tokens") > accepted + 20
    broken.check_nothing_is_held()


def test_stopped(
    broken: Broken, plain: Served, impatient: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Proposals wait for a stopped worker a few times, then no more; later it is replaced."""
    broken.wait_until_up()
    before = broken.engine.metrics()
    worker, clock = broken.worker, broken.worker.clock

    def hurt(step: int) -> None:
        if len(stopped) == 5:
            assert worker.pid is not None
            os.kill(worker.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, worker.pid, os.WSTOPPED | os.WNOWAIT)
        if len(stopped) == 40:
            monkeypatch.setattr(worker, "clock", lambda: clock() + 2 * worker_client.HANG_SECONDS)
        stopped.append(broken.metric("draft_worker_up"))

    stopped: list[float] = []
    hangs = worker.counters.hangs
    assert differing(plain, broken.serve(hurt)) == []
    assert stopped[39] == 1 and stopped[42] == 0
    assert worker.counters.hangs == hangs + 1
    timeouts = broken.metric("draft_timeouts") - before["draft_timeouts"]
    assert timeouts <= 50
    broken.check_nothing_is_held()
    broken.wait_until_up()


# -- rows 3 and 5 -------------------------------------------------------------------------------


def damage_unread(ring: Ring, rng: np.random.Generator) -> None:
    """Overwrites all messages that were pushed and not popped."""
    memory = np.frombuffer(ring.memory, np.uint8)
    head, tail = (int(memory[at : at + 4].view(np.uint32)[0]) for at in (HEAD, TAIL))
    places = np.arange(tail, head) % ring.slots
    slots = memory[SLOTS_AT:].reshape(ring.slots, SLOT_BYTES)
    slots[places] = rng.integers(0, 256, (len(places), SLOT_BYTES), np.uint8)


@pytest.mark.parametrize("which", [0, 1], ids=["requests", "answers"])
def test_garbage_in_a_ring(broken: Broken, plain: Served, impatient: None, which: int) -> None:
    """Sequences of which the worker lost a part are sent again."""
    broken.wait_until_up()
    rng = np.random.default_rng(which)
    rejected, worker = broken.metric("draft_rejected_messages"), broken.worker
    commits, deaths = [worker.counters.generations], worker.counters.deaths

    def hurt(step: int) -> None:
        if step % 5 == 0:
            assert worker.pid is not None
            os.kill(worker.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, worker.pid, os.WSTOPPED | os.WNOWAIT)
            if which == 1:  # before the engine receives it
                damage_unread(broken.rings[1], rng)
        elif step % 5 == 1 and worker.pid is not None:
            if which == 0:  # what the engine sent meanwhile
                damage_unread(broken.rings[0], rng)
            os.kill(worker.pid, signal.SIGCONT)

    assert differing(plain, broken.serve(hurt)) == []
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGCONT)
    broken.check_nothing_is_held()
    commits.append(worker.counters.generations)
    hits = broken.metric("draft_hits")
    assert differing(plain, broken.serve(lambda _: broken.wait_for_drafts())) == []
    assert broken.metric("draft_hits") > hits + 50  # as before
    commits.append(worker.counters.generations)
    assert worker.counters.deaths == deaths and broken.metric("draft_worker_up") == 1
    if which == 0:
        assert commits[1] - commits[0] > commits[2] - commits[1] + 10
    else:
        assert broken.metric("draft_rejected_messages") > rejected


def test_damaged_positions_of_a_ring(broken: Broken, plain: Served, impatient: None) -> None:
    """Each side restores the positions that it owns."""
    broken.wait_until_up()
    rng = np.random.default_rng(3)

    def hurt(step: int) -> None:
        if rng.random() < 0.3 and broken.worker.is_up:
            memory = np.frombuffer(broken.rings[step % 2].memory, np.uint8)
            memory[128:SLOTS_AT] = rng.integers(0, 256, SLOTS_AT - 128, np.uint8)

    assert differing(plain, broken.serve(hurt)) == []
    broken.check_nothing_is_held()
    broken.wait_until_up()
    assert differing(plain, broken.serve(lambda _: None)) == []


# -- row 4 --------------------------------------------------------------------------------------


def huge(draft: Path, folder: Path) -> Path:
    """Of a size that no machine has memory for."""
    folder.mkdir()
    for file in draft.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return rewrite_config(folder, intermediate_size=1 << 40)


def truncated(draft: Path, folder: Path) -> Path:
    folder.mkdir()
    for file in draft.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    return folder


def other_vocabulary(draft: Path, folder: Path) -> Path:
    return make_tiny_checkpoint(folder, "llama")


FAULTS: dict[str, tuple[Callable[[Path, Path], Path], str]] = {
    "huge": (huge, "intermediate_size=.*at most"),
    "truncated": (truncated, "model.safetensors"),
    "vocabulary": (other_vocabulary, "its vocabulary has 96 tokens, the target's 259"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_model_that_cannot_be_loaded(
    target: Path, draft: Path, tmp_path: Path, fault: str
) -> None:
    """An error of one line, or with draft_optional an engine that says it has no worker."""
    before = children()
    spoil, reason = FAULTS[fault]
    wrong = spoil(draft, tmp_path / "wrong")
    given = {
        "dtype": "float32", "device": "cpu", "batch_invariant": True, "max_num_seqs": 4,
        "num_gpu_blocks_override": 40, "disable_log_stats": True, "max_model_len": MAX_LEN,
    }  # fmt: skip
    wanted = {"speculative_model": str(wrong), **DRAFTS}
    with pytest.raises((ConfigError, ModelLoadError), match=reason) as caught:
        LLM(str(target), **given, **wanted)
    assert "\n" not in str(caught.value) and "Traceback" not in str(caught.value)
    assert children() == before
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    prompts = [[5, 6, 7], [8, 9]]
    found = []
    with LLM(str(target), **given) as llm:
        found.append(llm.generate(prompt_token_ids=prompts, sampling_params=params))
    for more in ({}, {"use_lookahead": True}):
        with LLM(str(target), **given, **wanted, draft_optional=True, **more) as llm:
            assert children() == before
            found.append(llm.generate(prompt_token_ids=prompts, sampling_params=params))
            assert llm.metrics()["draft_worker_up"] == 0
    tokens = [[output.outputs[0].token_ids for output in outputs] for outputs in found]
    assert tokens[0] == tokens[1] == tokens[2]


def test_a_server_with_another_vocabulary_ends_with_a_line(target: Path, tmp_path: Path) -> None:
    wrong = other_vocabulary(target, tmp_path / "wrong")
    command = [
        sys.executable, "-m", "hetero_llm.cli", "serve", str(target), "--device", "cpu", "--port",
        "0", "--speculative-model", str(wrong), "--num-speculative-tokens", "4",
        "--cpu-draft-worker",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
    assert done.returncode == 2
    (line,) = done.stderr.strip().splitlines()[-1:]
    assert "its vocabulary has 96 tokens, the target's 259" in line
    assert "Traceback" not in done.stderr


def test_a_ring_that_is_none(target: Path, draft: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker finds other memory than its settings name, as after a crash of its owner."""

    def stale(*slots: int) -> Ring:
        ring = create_ring(*slots)
        return replace(ring, stamp=ring.stamp ^ 1)

    monkeypatch.setattr(worker_client, "create_ring", stale)
    before = children()
    with pytest.raises(ConfigError, match="RingError: .* it is another ring than the handle") as e:
        build(target, 7, None, batch_invariant=True, speculative_model=str(draft), **DRAFTS)
    assert "\n" not in str(e.value)
    assert children() == before
