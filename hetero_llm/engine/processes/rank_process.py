"""A rank of a model of several processes: `python -m hetero_llm.engine.processes.rank_process`.

It builds its part of the model as the engine's process builds rank 0, and then makes the same calls
of its runner in the same order, step after step. It sends nothing back.

Signals to the whole process group are ignored: the engine ends its ranks. When the engine has gone,
a thread outside of Python ends this process at once.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetero_llm.bridge.ipc.broadcast import ChannelClosedError
from hetero_llm.bridge.kv_offload.rank_copies import NoRankCopies, RankCopies
from hetero_llm.core.errors import HeteroLLMError, RankDeadError
from hetero_llm.core.model_runner import ModelRunner
from hetero_llm.core.null_objects import do_nothing
from hetero_llm.core.promotion import promotions_from_rows
from hetero_llm.distributed.control_socket import ControlSocket, RankFailed, RankReached
from hetero_llm.distributed.parallel_runner import GAVE_UP
from hetero_llm.distributed.rank_processes import RankArguments
from hetero_llm.distributed.rank_share import RankShare
from hetero_llm.distributed.step_channel import StepReader
from hetero_llm.distributed.step_codec import (
    StepMessage,
    message_kind,
    moves_from_words,
    promotions_from_words,
    step_from_words,
    transfer_from_words,
    value_from_words,
)
from hetero_llm.engine.builders.build_host_tier import (
    HostShare,
    host_platform,
    open_host_memory,
)
from hetero_llm.engine.builders.build_ranks import (
    IMPORTED,
    LOADED,
    RankSettings,
    join_group,
    read_settings,
)
from hetero_llm.engine.processes import child_process
from hetero_llm.utils.gc_control import collect_if_due, prompt_wakeups

if TYPE_CHECKING:
    import numpy as np

    from hetero_llm.config.engine_config import EngineConfig
    from hetero_llm.gpu.hybrid_experts import HybridExperts
    from hetero_llm.lora.rank_adapters import NoRankAdapters, RankAdapters
    from hetero_llm.models.config import ModelConfig
    from hetero_llm.structured_output.compiler import GrammarCompiler

logger = logging.getLogger(__name__)

EXIT_FAILED = 1
_WAIT_US = 1_000_000  # of a read of the channel, before the next one
_SPIN_US = {"cpu": 0, "cuda": 2000}
"""How long a rank spins for its next message: beside a GPU it has a core to itself, and a step
follows the one before within milliseconds."""


class RankLoop:
    """Makes the calls that the engine announces.

    Args:
        steps: the channel.
        runner: of this rank.
        grammars: compiles grammars ahead of the steps that need them; None without a tokenizer, and
            in a stage that does not sample.
        adapters: in the host memory of this rank.
        gave_up: see `RankShare`.
        copies: between this rank's part of the KV cache and host memory; None: there are none.
        move_kv: moves the KV of accepted draft nodes, given KV slots to read and to write; a stage
            that verifies drafts has moved its own.
        promote: promotes experts to this rank's bank, given rows of `promotions_to_rows`.
    """

    def __init__(
        self,
        steps: StepReader,
        runner: ModelRunner[Any],
        grammars: GrammarCompiler | None,
        adapters: RankAdapters | NoRankAdapters,
        gave_up: Callable[[], bool],
        *,
        copies: RankCopies | None = None,
        move_kv: Callable[[np.ndarray, np.ndarray], None] = do_nothing,
        promote: Callable[[np.ndarray], None] = do_nothing,
    ) -> None:
        self._promote = promote
        self._move_kv = move_kv
        self._adapters = adapters
        self._gave_up = gave_up
        self._steps = steps
        self._runner = runner
        self._grammars = grammars
        self._copies = NoRankCopies() if copies is None else copies
        self._launched: deque[tuple[Any, bool]] = deque()  # with whether it waits for KV

    def run(self) -> None:
        """Runs until the engine closes the channel."""
        with suppress(ChannelClosedError):
            while True:
                self.run_once(_WAIT_US)
        self._copies.close()

    def run_once(self, timeout_us: int) -> None:
        """Waits for one message and does what it says; nothing if none comes in time.

        Raises:
            ChannelClosedError: none will come.
            RankDeadError: another rank did not come to a collective.
            AdapterError: this rank cannot read an adapter that rank 0 has read.
        """
        words = self._steps.read(timeout_us)
        self._copies.observe()
        if words is None:
            return
        kind = message_kind(words)
        if kind == StepMessage.LAUNCH:
            step = step_from_words(words)
            self._adapters.begin(step)
            self._launched.append((self._runner.launch(step), bool(step.kv_loads)))
            self._copies.step_launched()
            collect_if_due(calm=not step.has_chunks)
        elif kind == StepMessage.FINISH:
            launched, waits = self._launched.popleft()
            output = self._runner.finish(launched)
            if self._gave_up():
                raise RankDeadError(GAVE_UP)
            if waits:
                self._copies.step_finished(timed_out=output.kv_loads_timed_out)
            self._adapters.end()
        elif kind == StepMessage.ADAPTER:
            self._adapters.open(value_from_words(words))
        elif kind == StepMessage.FORGET_ADAPTER:
            self._adapters.forget(value_from_words(words))
        elif kind == StepMessage.LOAD_BLOCKS:
            self._copies.load(transfer_from_words(words))
        elif kind == StepMessage.STORE_BLOCKS:
            self._copies.store(transfer_from_words(words))
        elif kind == StepMessage.ABORT_LOAD:
            self._copies.abort(transfer_from_words(words).transfer_id)
        elif kind == StepMessage.MOVE_KV:
            self._move_kv(*moves_from_words(words))
            self._copies.kv_moved()
        elif kind == StepMessage.PROMOTE:
            self._promote(promotions_from_words(words))
        elif self._grammars is not None:
            assert kind == StepMessage.GRAMMAR, kind
            arguments = (value_from_words(words),)
            threading.Thread(target=self._grammars.prepare, args=arguments, daemon=True).start()


def main(words: list[str]) -> int:
    """Runs a rank; the words are those of `RankArguments`. Returns the exit code."""
    arguments = RankArguments.of(words)
    for fd in (arguments.control, arguments.channel, arguments.store):
        os.set_inheritable(fd, False)
    steps = StepReader(str(arguments.channel), arguments.rank)
    steps.live(arguments.parent)
    if arguments.dies_with_thread:
        child_process.die_with_parent_thread()
    child_process.begin(f"rank {arguments.rank}")
    control = ControlSocket(socket.socket(fileno=arguments.control))
    try:
        import torch  # noqa: F401  # while the engine resolves its arguments

        settings = read_settings(control.receive_bytes())
    except EOFError:
        return EXIT_FAILED
    child_process.open_log(f"rank {arguments.rank}", settings.log_format, settings.log_level)
    try:
        with prompt_wakeups():
            _run(arguments, settings, control, steps)
    except Exception as error:
        if not isinstance(error, HeteroLLMError):
            logger.exception("the rank has failed")
        control.send(RankFailed.of(error))
        return EXIT_FAILED
    return 0


def _run(
    arguments: RankArguments, settings: RankSettings, control: ControlSocket, steps: StepReader
) -> None:
    import torch

    from hetero_llm.models.collectives import Rank

    torch.set_num_threads(settings.threads)
    control.send(RankReached(IMPORTED))
    rank = Rank(arguments.rank, arguments.size)
    device = torch.device(settings.device)
    share = join_group(
        rank, arguments.store, device,
        row_bytes=settings.row_bytes, parallel=settings.config.parallel,
    )  # fmt: skip
    share = dataclasses.replace(share, faults=settings.faults)
    loop = _build(settings, share, control, steps, number=arguments.rank)
    child_process.freeze_objects()
    steps.set_spin(_SPIN_US[settings.device])
    share.serves()
    loop.run()


# large: each part of a rank is named once.
def _build(
    settings: RankSettings,
    share: RankShare,
    control: ControlSocket,
    steps: StepReader,
    *,
    number: int,
) -> RankLoop:
    """Builds the runner of rank `number`, and what its steps need, as the engine builds those of
    rank 0."""
    import torch
    from tqdm import tqdm

    from hetero_llm.engine.builders.build_experts import (
        choose_experts,
        open_experts,
        open_memory_near,
        own_cores,
    )
    from hetero_llm.engine.builders.build_model import backend_name, find_served_model, load_weights
    from hetero_llm.engine.builders.build_runner import RunnerInputs, build_runner, cache_shape
    from hetero_llm.lora.rank_adapters import NoRankAdapters, RankAdapters
    from hetero_llm.models.sharding import sharded_config

    tqdm.monitor_interval = 0  # else each progress bar leaves a thread behind
    config = settings.config
    device, dtype = torch.device(settings.device), getattr(torch, settings.dtype)
    folder, model_config = find_served_model(config, device)
    model_config = dataclasses.replace(model_config, max_model_len=settings.scheduler.max_model_len)
    backend = backend_name(config, device, native=False)
    rank = share.collectives.rank
    chosen = choose_experts(
        config, folder, model_config, settings.scheduler, dtype=dtype, device=device, share=share
    )
    opened = None if chosen is None else open_memory_near(chosen, rank, dtype=dtype, device=device)
    model, adapters = load_weights(
        config, folder, model_config,
        dtype=dtype, device=device, show_progress=False, backend=backend, share=share,
        expert_memory=None if opened is None else opened.memory,
    )  # fmt: skip
    control.send(RankReached(LOADED))
    experts = None
    if chosen is not None and opened is not None:
        experts = open_experts(
            config=config, choice=chosen, model=model, scheduler=settings.scheduler,
            opened=opened, dtype=dtype, device=device, share=share,
        )  # fmt: skip
    own_config = sharded_config(model_config, rank)
    host = open_host_memory(
        config.offload, host_platform(config, device, number),
        cache_shape(config, own_config, dtype, device), settings.scheduler,
        own=HostShare(share, number, board=settings.board),
    )  # fmt: skip
    made = build_runner(
        RunnerInputs(
            *(config, settings.scheduler, model, own_config, dtype, device),
            most_drafted_tokens=settings.most_drafted_tokens,
            layer_ready=None if host is None else host.layer_ready,
            adapters=adapters,
            share=share,
            experts=experts,
        )
    )
    runner = made.runner
    if experts is not None:
        own_cores(experts, config, rank)
    copies = None if host is None else host.join_rank(made.cache)
    samples = rank.is_last
    grammars = _open_grammars(config, folder, model_config) if samples else None
    if grammars is not None:
        runner.set_open_matcher(grammars.open)
    served_adapters = NoRankAdapters() if adapters is None else RankAdapters(adapters.store)
    return RankLoop(
        steps,
        runner,
        grammars,
        served_adapters,
        share.gave_up,
        copies=copies,
        move_kv=do_nothing if samples else made.cache.move_tokens,
        promote=do_nothing if experts is None else partial(_order, experts),
    )


def _open_grammars(
    config: EngineConfig, folder: Path, model_config: ModelConfig
) -> GrammarCompiler | None:
    """Compiles grammars, which a thread has begun to prepare; None without a tokenizer."""
    from hetero_llm.engine.resolve import open_tokenizer
    from hetero_llm.engine.text.tokenizer import open_grammars

    tokenizer = open_tokenizer(config, folder)
    grammars = open_grammars(tokenizer, model_config.vocab_size, model_config.eos_token_ids)
    if grammars is not None:
        grammars.warm_up_beside()
    return grammars


def _order(experts: HybridExperts, rows: np.ndarray) -> None:
    """Promotes what rank 0 has chosen."""
    experts.moves.order(promotions_from_rows(rows))


if __name__ == "__main__":
    child_process.end(main(sys.argv[1:]))
