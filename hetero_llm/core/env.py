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
