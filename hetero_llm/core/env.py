"""The only file that reads environment variables. Each is listed in docs/env.md."""

from __future__ import annotations

import os
from pathlib import Path

from hetero_llm.core.errors import ConfigError


def cache_dir() -> Path:
    """Where compiled libraries are kept: HETERO_LLM_CACHE_DIR, else the user's cache folder."""
    chosen = os.environ.get("HETERO_LLM_CACHE_DIR")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "hetero_llm"


def cpu_isa() -> str | None:
    """HETERO_LLM_CPU_ISA: the instruction set for the step executor; None: the machine's best."""
    return os.environ.get("HETERO_LLM_CPU_ISA") or None


def native_choice() -> str:
    """HETERO_LLM_NATIVE: "0": plain torch on the CPU, "1": our library, or "sanitized"."""
    value = os.environ.get("HETERO_LLM_NATIVE", "1")
    if value not in ("0", "1", "sanitized"):
        raise ConfigError("HETERO_LLM_NATIVE", value, "must be 0, 1 or sanitized")
    return value


_PREFIX = "HETERO_LLM_"
_OWN_NAMES = ("CACHE_DIR", "CPU_ISA", "NATIVE", "SYSTEM_TORCH")


def flag_variables() -> dict[str, str]:
    """HETERO_LLM_<FLAG> of every flag that is set: Python name -> text. Empty text counts as not
    set."""
    return {
        name.removeprefix(_PREFIX).lower(): text
        for name, text in os.environ.items()
        if name.startswith(_PREFIX) and name.removeprefix(_PREFIX) not in _OWN_NAMES and text
    }


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
}
"""Variables of Angel-vLLM's `run`, and the arguments that they stand for."""


def angel_variables() -> dict[str, str]:
    """Those of `ANGEL_NAMES` that are set: Python name -> text."""
    return {ours: os.environ[name] for name, ours in ANGEL_NAMES.items() if os.environ.get(name)}
