"""Starts the configured draft worker and checks that its model fits the target."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hetero_llm.config.draft_model_config import DraftModelConfig
from hetero_llm.config.engine_config import EngineConfig, SpeculationConfig
from hetero_llm.core.draft_tree import MAX_NODES
from hetero_llm.core.drafter import BackgroundDrafter, Drafter
from hetero_llm.core.errors import ConfigError, ModelLoadError
from hetero_llm.engine.core_plan import CorePlan, plan_cores
from hetero_llm.engine.resolve import resolve_alias
from hetero_llm.engine.text.tokenizer import Tokenizer, load_tokenizer
from hetero_llm.models.config import ModelConfig
from hetero_llm.models.folders import resolve_model_folder
from hetero_llm.models.quantization_config import with_plain_weights
from hetero_llm.models.read_config import load_model_config

if TYPE_CHECKING:
    from hetero_llm.spec_decode.draft_model.proposer import DraftModelProposer
    from hetero_llm.spec_decode.draft_model.worker_client import DraftWorkerClient

logger = logging.getLogger(__name__)

_WINDOW = 512
"""Number of tokens at the end of a long sequence that the draft model sees. More improve drafts
little, and the worker must compute them while the target computes the prompt."""
_NODES_EACH = 4  # nodes for each level of a tree that does not grow ahead


@dataclass(frozen=True, slots=True)
class StartingDraftWorker:
    """A starting worker and what it was started for."""

    worker: DraftWorkerClient
    config: DraftModelConfig
    slots: int
    vocab_size: int
    max_positions: int

    def proposer(self) -> DraftModelProposer | None:
        """Wait for the worker and return its proposer; None if it failed and is optional.

        Raises:
            ConfigError: the worker does not fit the target, or could not load its model.
        """
        from hetero_llm.spec_decode.draft_model.proposer import DraftModelProposer

        try:
            self.worker.wait_ready()
        except ConfigError as error:
            self.worker.close()
            if not self.config.optional:
                raise
            logger.warning("serving without the draft model: %s", error)
            return None
        return DraftModelProposer(
            self.worker, self.config, slots=self.slots, vocab_size=self.vocab_size,
            max_positions=self.max_positions,
        )  # fmt: skip


class MissingWorker:
    """Reports metrics in place of an optional worker that could not be started."""

    def metrics(self) -> dict[str, float]:
        return {"draft_worker_up": 0.0}

    def shut_down(self) -> None:
        pass


def background_drafter_of(
    drafter: Drafter | None, speculation: SpeculationConfig | None
) -> BackgroundDrafter | None:
    """The background drafter that the engine reports and shuts down: its drafter, if part of that
    runs in another process."""
    found = drafter if isinstance(drafter, BackgroundDrafter) else None
    wanted = None if speculation is None else speculation.draft
    if wanted is None or not wanted.on_cpu:
        return found
    if found is None or "draft_worker_up" not in found.metrics():
        return MissingWorker()
    return found


def check_draft_length(speculation: SpeculationConfig | None, max_model_len: int) -> None:
    """Raises ConfigError if sequences are to have drafts beyond the target's context length."""
    draft = None if speculation is None else speculation.draft
    longest = None if draft is None else draft.max_model_len
    if longest is not None and longest > max_model_len:
        reason = f"exceeds max_model_len ({max_model_len})"
        raise ConfigError("speculative_max_model_len", longest, reason)


def prepare_draft_model(
    config: EngineConfig,
    target: ModelConfig,
    tokenizer: Tokenizer | None,
    *,
    target_on_cpu: bool,
    max_model_len: int,
) -> tuple[EngineConfig, StartingDraftWorker | None]:
    """Start the worker of the configured draft model, if there is one. Returns the configuration,
    with the threads left to a target on the CPU filled in, and the starting worker.

    Raises:
        ConfigError, ModelLoadError: see `start_draft_model`.
    """
    wanted = None if config.speculation is None else config.speculation.draft
    if wanted is None or not wanted.on_cpu:
        return config, None
    plan = plan_cores(config, target_on_cpu=target_on_cpu)
    assert plan is not None
    try:
        model = start_draft_model(
            wanted, target, tokenizer, plan=plan, slots=config.max_num_seqs,
            max_model_len=max_model_len, load_format=own_load_format(config.load.load_format),
            allow_pickle=config.load.allow_pickle_weights,
        )  # fmt: skip
    except (ConfigError, ModelLoadError) as error:
        if not wanted.optional:
            raise
        logger.warning("serving without the draft model: %s", error)
        return config, None
    if target_on_cpu and config.cpu.threads is None:
        config = replace(config, cpu=replace(config.cpu, threads=len(plan.engine)))
    return config, model


def start_draft_model(
    config: DraftModelConfig,
    target: ModelConfig,
    tokenizer: Tokenizer | None,
    *,
    plan: CorePlan,
    slots: int,
    max_model_len: int,
    load_format: str,
    allow_pickle: bool = False,
) -> StartingDraftWorker:
    """Start a worker process, which begins to load the draft model.

    Args:
        tokenizer: the target's; None: compare only vocabulary sizes.
        slots: maximum number of concurrent requests.
        load_format: result of `own_load_format`.
        allow_pickle: whether pickled weight files may be read.

    Raises:
        ConfigError: the models do not fit each other, or no worker can be started.
        ModelLoadError: there is no such model.
    """
    from hetero_llm.spec_decode.draft_model.worker_client import DraftWorkerClient
    from hetero_llm.spec_decode.draft_model.worker_settings import WorkerSettings

    folder, model = find_draft_model(
        config, target, tokenizer, load_format=load_format, allow_pickle=allow_pickle
    )
    longest = min(model.max_model_len, max_model_len, config.max_model_len or max_model_len)
    settings = WorkerSettings(
        folder=str(folder),
        load_format=load_format,
        allow_pickle=allow_pickle,
        dtype="float32" if config.weight_dtype == "float32" else "bfloat16",
        weight_format={"bfloat16": "bf16", "float32": "float"}.get(
            config.weight_dtype, config.weight_dtype
        ),
        slots=slots,
        max_model_len=longest,
        window=_WINDOW,
        max_depth=min(2 * config.num_tokens + 2, MAX_NODES),
        threads=len(plan.draft),
        cpus=() if plan.shared else plan.draft,
        ahead=config.overlap != "off",
        most_nodes=min(_NODES_EACH * config.num_tokens, MAX_NODES),
    )
    logger.info("cores: %s", plan.words())
    worker = DraftWorkerClient(settings, vocab_size=target.vocab_size)
    return StartingDraftWorker(worker, config, slots, target.vocab_size, longest)


def own_load_format(target: str) -> str:
    """A draft model's load format: "dummy" for a dummy target, else "auto", since it may be stored
    in another format than the target."""
    return "dummy" if target == "dummy" else "auto"


def find_draft_model(
    config: DraftModelConfig,
    target: ModelConfig,
    tokenizer: Tokenizer | None,
    *,
    load_format: str,
    allow_pickle: bool,
) -> tuple[Path, ModelConfig]:
    """Folder and configuration of the draft model's checkpoint.

    Args:
        tokenizer: the target's; None: compare only vocabulary sizes.
        load_format, allow_pickle: as `start_draft_model`.

    Raises:
        ConfigError: its vocabulary or tokenizer differs from the target's, or it is to draft beyond
            its context.
        ModelLoadError: there is no such model.
    """
    name = resolve_alias(config.model)
    folder = resolve_model_folder(
        name, revision=config.revision, load_format=load_format, allow_pickle=allow_pickle
    )
    model = with_plain_weights(load_model_config(folder))
    longest = config.max_model_len
    if longest is not None and longest > model.max_model_len:
        reason = f"exceeds the draft model's context length ({model.max_model_len})"
        raise ConfigError("speculative_max_model_len", longest, reason)
    _check_vocabulary(config.model, folder, model, target, tokenizer)
    return folder, model


def _check_vocabulary(
    name: str, folder: Path, model: ModelConfig, target: ModelConfig, tokenizer: Tokenizer | None
) -> None:
    if model.vocab_size != target.vocab_size:
        raise ConfigError(
            "speculative_model", name,
            f"its vocabulary has {model.vocab_size} tokens, the target's {target.vocab_size}: a "
            "draft model must share the target's tokenizer",
        )  # fmt: skip
    if tokenizer is None:
        return
    try:
        own = load_tokenizer(folder, mode="auto", trust_remote_code=False)
    except ModelLoadError:
        return  # draft models may come without a tokenizer
    if own.fingerprint() != tokenizer.fingerprint():
        reason = "its tokenizer is another one than the target's: its tokens mean something else"
        raise ConfigError("speculative_model", name, reason)
