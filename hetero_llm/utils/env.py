"""The only file that reads environment variables. Each is listed in docs/env.md."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hetero_llm.core.errors import ConfigError


def cache_dir() -> Path | None:
    """Folder of compiled code: HETERO_LLM_CACHE_DIR, else the user's cache folder; None for a user
    without a home folder. `cache_folder` says where else code is kept if this cannot be written."""
    chosen = os.environ.get("HETERO_LLM_CACHE_DIR")
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(chosen).expanduser() if chosen else Path(base).expanduser() / "hetero_llm"
    except RuntimeError:  # neither HOME nor an entry in the list of users
        return None


def cpu_isa() -> str | None:
    """HETERO_LLM_CPU_ISA: instruction set of the step executor; None: the machine's best."""
    return os.environ.get("HETERO_LLM_CPU_ISA") or None


def native_choice() -> str:
    """HETERO_LLM_NATIVE: "0": plain torch on the CPU, "1": our library, or "sanitized"."""
    value = os.environ.get("HETERO_LLM_NATIVE", "1")
    if value not in ("0", "1", "sanitized"):
        raise ConfigError("HETERO_LLM_NATIVE", value, "must be 0, 1 or sanitized")
    return value


FAULTS = ("slow_step_ms", "stall_step_after")
"""Faults that can be injected, for tests of how the engine handles them."""


def faults() -> dict[str, float]:
    """HETERO_LLM_FAULTS, such as "slow_step_ms=50,stall_step_after=5": name -> value.

    Raises:
        ConfigError: a name is not in `FAULTS`, or its value is not a whole number.
    """
    text = os.environ.get("HETERO_LLM_FAULTS", "")
    found: dict[str, float] = {}
    for one in filter(None, text.split(",")):
        name, _, value = one.partition("=")
        if name not in FAULTS or not value.isdecimal():
            reason = f"must be name=number with commas between; names: {', '.join(FAULTS)}"
            raise ConfigError("HETERO_LLM_FAULTS", text, reason)
        found[name] = float(value)
    return found


def draft_trace() -> Path | None:
    """HETERO_LLM_DRAFT_TRACE: file into which the draft worker, when it ends, writes the times of
    its steps; None: no trace."""
    chosen = os.environ.get("HETERO_LLM_DRAFT_TRACE")
    return Path(chosen) if chosen else None


def traces_protocol() -> str:
    """Protocol of traces, "grpc" or "http/protobuf": OTEL_EXPORTER_OTLP_TRACES_PROTOCOL, else
    OTEL_EXPORTER_OTLP_PROTOCOL, else "grpc"."""
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        value = os.environ.get(name)
        if value:
            if value not in ("grpc", "http/protobuf"):
                raise ConfigError(name, value, "must be grpc or http/protobuf")
            return value
    return "grpc"


_PREFIX = "HETERO_LLM_"
OWN_NAMES = ("CACHE_DIR", "CPU_ISA", "DRAFT_TRACE", "FAULTS", "NATIVE", "SYSTEM_TORCH")
"""What follows HETERO_LLM_ in the names of variables that are no flags."""


def flag_variables() -> dict[str, str]:
    """HETERO_LLM_<FLAG> of every flag that is set: Python name -> text. Empty text counts as not
    set."""
    return {
        name.removeprefix(_PREFIX).lower(): text
        for name, text in os.environ.items()
        if name.startswith(_PREFIX) and name.removeprefix(_PREFIX) not in OWN_NAMES and text
    }


_VLLM_KEY = "VLLM_API_KEY"
_VLLM_DEV_MODE = "VLLM_SERVER_DEV_MODE"
_VLLM_INVARIANT = "VLLM_BATCH_INVARIANT"


def vllm_variables() -> dict[str, str]:
    """vLLM's variables that stand for a flag, if they are set: Python name -> text."""
    names = {_VLLM_KEY: "api_key", _VLLM_DEV_MODE: "server_dev_mode"}
    return {ours: os.environ[name] for name, ours in names.items() if os.environ.get(name)}


def vllm_batch_invariant() -> bool:
    """VLLM_BATCH_INVARIANT: whether engines are batch-invariant that do not say.

    Raises:
        ConfigError: it is not 0 or 1.
    """
    text = os.environ.get(_VLLM_INVARIANT) or "0"
    if text not in ("0", "1"):
        raise ConfigError(_VLLM_INVARIANT, text, "must be 0 or 1")
    return text == "1"


def other_vllm_variables() -> list[str]:
    """Names of vLLM's variables that are set and have no effect here."""
    return sorted(
        name
        for name, text in os.environ.items()
        if name.startswith("VLLM_")
        and name not in (_VLLM_KEY, _VLLM_DEV_MODE, _VLLM_INVARIANT)
        and text
    )


ANGEL_NAMES = {
    "MODEL": "model",
    "TP": "tensor_parallel_size",
    "QUANTIZATION": "quantization",
    "USE_LOOKAHEAD": "use_lookahead",
    "NUM_SPECULATIVE_TOKENS": "num_speculative_tokens",
    "MAX_MODEL_LEN": "max_model_len",
    "DTYPE": "dtype",
    "ENABLE_PREFIX_CACHING": "enable_prefix_caching",
    "GPU_MEMORY_UTILIZATION": "gpu_memory_utilization",
    "ENFORCE_EAGER": "enforce_eager",
    "TRUST_REMOTE_CODE": "trust_remote_code",
    "ENABLE_CACHE_OFFLOAD": "enable_prefix_cache_offload",
    "ENABLE_HIT_CNT": "apc_offload_enable_hit_cnt",
}
"""Environment variables of Angel-vLLM's `run`, and two of TACO-LLM's bench script -> our
arguments."""


def angel_variables() -> dict[str, str]:
    """The variables of `ANGEL_NAMES` that are set: Python name -> text."""
    return {ours: os.environ[name] for name, ours in ANGEL_NAMES.items() if os.environ.get(name)}


@dataclass(frozen=True, slots=True)
class AngelNames:
    """Variables of Angel-vLLM's `run` that are no flags: MODEL_ID, CONV_TEMPLATE and
    DISABLE_MEM_CACHE; None: not set."""

    model_id: str | None = None
    conv_template: str | None = None
    disable_mem_cache: str | None = None


def angel_names() -> AngelNames:
    """The variables of `AngelNames`; empty text counts as not set."""
    read = [os.environ.get(n) or None for n in ("MODEL_ID", "CONV_TEMPLATE", "DISABLE_MEM_CACHE")]
    return AngelNames(*read)


_OF_GROUPS = {
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NVLS_ENABLE": "0",  # multicast of NVLink, which no collective of ours uses
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    # A dead rank ends the engine with its own message, and not torch the process with SIGABRT.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}


@contextmanager
def group_environment() -> Iterator[None]:
    """Lets torch.distributed connect the processes of this host over the loopback interface, and
    leave the watch of them to us, in groups that are made while the context is open."""
    before = {name: os.environ.get(name) for name in _OF_GROUPS}
    os.environ.update(_OF_GROUPS)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def child_environment() -> dict[str, str]:
    """The environment of this process; PYTHONPATH gets this package's folder if not installed."""
    environment = dict(os.environ)
    home = Path(__file__).resolve().parents[2]
    if home.name not in ("site-packages", "dist-packages"):
        before = environment.get("PYTHONPATH")
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [before, str(home)]))
    return environment
