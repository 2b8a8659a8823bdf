"""What scripts for vLLM import besides its engines: services of `vllm.utils` and others."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import sys
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

from hetero_llm.core.errors import ConfigError
from hetero_llm.utils.dotted_flags import join_dotted_flags


class UsageContext(StrEnum):
    """Who starts an engine. Nothing is reported here, so it has no effect."""

    UNKNOWN_CONTEXT = "UNKNOWN_CONTEXT"
    LLM_CLASS = "LLM_CLASS"
    API_SERVER = "API_SERVER"
    OPENAI_API_SERVER = "OPENAI_API_SERVER"
    OPENAI_BATCH_RUNNER = "OPENAI_BATCH_RUNNER"
    ENGINE_CONTEXT = "ENGINE_CONTEXT"


class FlexibleArgumentParser(argparse.ArgumentParser):
    """Takes `--max_model_len` where `--max-model-len` is the flag, and the other way round, and
    `--flag.key value` for a key of a mapping."""

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        words = sys.argv[1:] if args is None else args
        try:
            words = join_dotted_flags(words)
        except ConfigError as error:
            self.error(str(error))
        return super().parse_known_args([self._known(word) for word in words], namespace)

    def _known(self, word: str) -> str:
        """The word with its flag in the spelling that the parser has."""
        flag, equals, value = word.partition("=")
        if not flag.startswith("--") or flag in self._option_string_actions:
            return word
        for spelling in (flag.replace("_", "-"), "--" + flag[2:].replace("-", "_")):
            if spelling in self._option_string_actions:
                return spelling + equals + value
        return word


def random_uuid() -> str:
    """32 random hexadecimal digits, for request ids."""
    return os.urandom(16).hex()


def init_logger(name: str) -> logging.Logger:
    """The logger of this name."""
    return logging.getLogger(name)


def cleanup_dist_env_and_memory() -> None:
    """Returns the memory of engines without references to the GPU. Processes and groups of an
    engine end with the engine itself."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
