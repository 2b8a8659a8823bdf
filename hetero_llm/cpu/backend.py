"""Chooses what runs a model on this machine's CPU: the native executor where it can, else torch, or
torch with IPEX's products where the arguments ask for it."""

from __future__ import annotations

import ctypes
import logging
from dataclasses import dataclass

import torch

from hetero_llm.config.engine_config import CpuConfig
from hetero_llm.core.errors import ConfigError
from hetero_llm.cpu import native
from hetero_llm.cpu.executor import Executor, native_format, unsupported_reason
from hetero_llm.cpu.ipex import require_ipex
from hetero_llm.models.config import ModelConfig
from hetero_llm.models.layers import CausalLM
from hetero_llm.runner.kv_cache import PagedKVCache
from hetero_llm.utils.topology import compute_cpus

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NativeBackend:
    """The arguments of `Executor` that depend on the machine."""

    library: ctypes.CDLL
    cpus: tuple[int, ...]
    weight_format: str
    isa: int

    def executor(self, model: CausalLM, config: ModelConfig, cache: PagedKVCache) -> Executor:
        """Builds an executor, which empties the model's tensors."""
        return Executor(
            model,
            config,
            cache,
            library=self.library,
            threads=len(self.cpus),
            cpus=self.cpus,
            weight_format=self.weight_format,
            isa=self.isa,
        )


def choose_backend(
    wanted: CpuConfig,
    config: ModelConfig,
    dtype: torch.dtype,
    *,
    batch_invariant: bool,
    prompt_adapters: bool = False,
    expert_adapters: bool = False,
) -> NativeBackend | None:
    """Checks the CPU's arguments and chooses.

    Args:
        prompt_adapters: prompts may begin with the virtual tokens of prompt adapters.
        expert_adapters: adapters may name experts of mixtures.

    Returns:
        None if torch serves; the log says why if the arguments do not ask for it. IPEX is loaded
        now where they ask for IPEX.

    Raises:
        ConfigError: this machine, model or backend cannot do what an argument asks for.
    """
    cpus = _check_threads(wanted.threads)
    if wanted.backend == "ipex":
        _prepare_ipex(wanted, dtype, batch_invariant=batch_invariant)
        return None
    reason = _why_torch(wanted, config, dtype, batch_invariant=batch_invariant)
    if reason is None and prompt_adapters:
        logger.info("enable_prompt_adapter: torch serves instead of the native executor")
        reason = "prompt adapters are served by torch"
    if reason is None and expert_adapters:
        logger.info("lora_experts: torch serves instead of the native executor")
        reason = "adapters of experts are served by torch"
    library = native.load() if reason is None else None
    if library is None:
        reason = reason or "the compiled library is not available"
        if wanted.weight_dtype != "auto":
            raise ConfigError(
                "cpu_weight_dtype", wanted.weight_dtype, f"needs the native backend: {reason}"
            )
        if wanted.threads is not None:
            torch.set_num_threads(wanted.threads)
        return None
    isa = native.isa_level()
    weight_format = native_format(dtype, wanted.weight_dtype)
    logger.info(
        "native executor: %s, %d threads, %s weights",
        native.ISA_NAMES[isa],
        len(cpus),
        weight_format,
    )
    return NativeBackend(library, cpus, weight_format, isa)


def use_torch_threads(wanted: int | None) -> None:
    """Sets the number of torch's threads; None leaves it.

    Raises:
        ConfigError: there are not as many cores.
    """
    _check_threads(wanted)
    if wanted is not None:
        torch.set_num_threads(wanted)


def _why_torch(
    wanted: CpuConfig, config: ModelConfig, dtype: torch.dtype, *, batch_invariant: bool
) -> str | None:
    """Why torch runs the model on any machine; None if the executor can."""
    if wanted.backend == "torch":
        return "cpu_backend is 'torch'"
    if batch_invariant:
        logger.info("batch_invariant: torch serves instead of the native executor")
        return "batch_invariant is served by torch"
    reason = unsupported_reason(config, dtype)
    if reason is not None:
        logger.warning("torch serves, the native executor cannot run this model: %s", reason)
    return reason


def _check_threads(wanted: int | None) -> tuple[int, ...]:
    """The CPUs to pin threads to, one each."""
    cpus = compute_cpus(reserve=0)
    if wanted is None:
        return cpus
    if wanted > len(cpus):
        raise ConfigError(
            "cpu_threads", wanted, f"this process may use {len(cpus)} cores; ask for as many"
        )
    return cpus[:wanted]


def _prepare_ipex(wanted: CpuConfig, dtype: torch.dtype, *, batch_invariant: bool) -> None:
    if batch_invariant:
        reason = "its products may depend on the batch; batch_invariant needs 'torch' or 'native'"
        raise ConfigError("cpu_backend", wanted.backend, reason)
    if wanted.weight_dtype != "auto":
        raise ConfigError(
            "cpu_weight_dtype", wanted.weight_dtype, "needs cpu_backend='native', not 'ipex'"
        )
    version = require_ipex(dtype)
    if wanted.threads is not None:
        torch.set_num_threads(wanted.threads)
    logger.info("ipex serves: IPEX %s, %d threads", version, torch.get_num_threads())
