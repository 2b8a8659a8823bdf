"""What scripts for vLLM import from `vllm.utils`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any


class FlexibleArgumentParser(argparse.ArgumentParser):
    """Takes `--max_model_len` where `--max-model-len` is the flag, and the other way round."""

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        words = sys.argv[1:] if args is None else args
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
