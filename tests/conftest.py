"""Set before anything imports Triton: without a CUDA device its kernels run in the interpreter.

Hypothesis has no deadlines here and does not mind how long examples take to make: a busy machine
would fail tests, as other wall-clock limits do. Its examples are the same in every run, but for
`--hypothesis-profile random`, which looks for new ones.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from tests.helpers.forks import Forks

settings.register_profile(
    "steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("random", settings.get_profile("steady"), derandomize=False)
settings.load_profile("steady")

_FIRST = (
    "scenarios/test_hybrid_experts.py", "scenarios/test_families.py",
    "scenarios/test_first_start.py", "scenarios/test_drafter_invariance.py",
    "scenarios/test_offload_ranks.py", "scenarios/test_pipeline_parallel.py",
    "scenarios/test_demo_text.py", "scenarios/test_lookahead.py",
    "scenarios/test_tensor_parallel.py", "gpu/kernels/test_linked_experts.py",
    "scenarios/test_hybrid_ranks.py",
    "scenarios/test_engine_fuzz.py", "scenarios/test_drafts_beside.py",
    "gpu/kernels/test_collectives.py", "cpu/csrc/experts/test_exchange.py",
    "spec_decode/draft_model/test_worker_client.py", "spec_decode/draft_model/test_on_device.py",
    "server/test_serving.py", "server/test_logs.py", "scenarios/test_batch_invariance.py",
    "cpu/csrc/experts/test_tiles_emulated.py", "cpu/csrc/step/test_amx_emulated.py",
    "scenarios/test_lora.py", "scenarios/test_offload_closed.py", "tools/test_demo_pair.py",
    "scenarios/test_random_schemas.py", "bench/engine/test_cpu_offline.py",
    "scenarios/test_user_types.py", "scenarios/test_prompt_adapters.py", "test_no_privates.py",
    "bridge/kv_offload/test_copier_sanitizers.py", "bridge/ipc/test_rings_sanitizers.py",
)  # fmt: skip
"""Files that take many seconds, longest first. Workers take whole files: one that begins late
leaves the other workers with nothing to do in the end."""

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {f"tests/{file}": place for place, file in enumerate(_FIRST)}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(places)))


def pytest_collection_finish() -> None:
    """Where a collected file has imported Triton, which takes a second."""
    if "triton" in sys.modules and not torch.cuda.is_available():
        from tests.helpers import fast_interpreter

        fast_interpreter.install()


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C interrupts this process and those that it starts, also where it was started in the
    background by a shell, which lets such processes ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def free_drafts() -> Iterator[None]:
    """Drafters of this process learn of no times, so that they draft as if that cost nothing: what
    they draft would depend on how busy the machine is."""
    from hetero_llm.core.step_times import StepTimes
    from hetero_llm.spec_decode.proposal_account import ProposalAccount

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepTimes, "observe", lambda *_: None)
        patch.setattr(ProposalAccount, "set_step_times", lambda *_: None)
        yield


@pytest.fixture(scope="session")
def engine_forks() -> Iterator[Forks]:
    from tests.helpers.forks import Forks, engines

    with Forks(engines) as forks:
        yield forks


@pytest.fixture(scope="module")
def forked_engines(engine_forks: Forks) -> Iterator[None]:
    """Engines, ranks and draft workers of these tests are forked from a process that has imported
    what they need."""
    from hetero_llm.distributed import rank_processes
    from hetero_llm.engine.processes import engine_launcher
    from hetero_llm.spec_decode.draft_model import worker_client

    with pytest.MonkeyPatch.context() as patch:
        for module in (engine_launcher, rank_processes, worker_client):
            patch.setattr(module, "subprocess", engine_forks)
        yield
