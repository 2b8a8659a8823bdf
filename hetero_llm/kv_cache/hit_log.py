"""Counts where the blocks of block tables came from, and logs them in the format of TACO-LLM's
manual. As there, all blocks of a table count, those of generated tokens included.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

logger = logging.getLogger(__name__)

_INTERVAL = 100  # blocks between two log lines, as in the manual


@dataclass(slots=True)
class HitCounter:
    """Blocks assigned to block tables since start. Written by the block manager only.

    Attributes:
        gpu: found in the device's prefix cache.
        cpu: loaded from host memory.
        missed: to be computed.
    """

    gpu: int = 0
    cpu: int = 0
    missed: int = 0

    @property
    def total(self) -> int:
        return self.gpu + self.cpu + self.missed

    def add(self, gpu: int, cpu: int, missed: int) -> None:
        self.gpu += gpu
        self.cpu += cpu
        self.missed += missed


def hit_line(hits: HitCounter) -> str:
    """The manual's log line, such as
    `[HIT CNT] total: 132, gpu: 0 (0.00%) cpu: 10 (7.58%) not hit: 122 (92.42%)`."""
    whole = max(hits.total, 1)
    gpu, cpu, missed = (
        f"{count} ({count / whole:.2%})" for count in (hits.gpu, hits.cpu, hits.missed)
    )
    return f"[HIT CNT] total: {hits.total}, gpu: {gpu} cpu: {cpu} not hit: {missed}"


class HitLog:
    """Logs `hit_line` when the number of blocks has passed a multiple of 100, and at the end."""

    def __init__(self, hits: HitCounter) -> None:
        self._hits = hits
        self._next = _INTERVAL
        self._closed = False

    def note(self) -> None:
        """Called once a step; logs one line however many multiples were passed."""
        total = self._hits.total
        if total >= self._next:
            self._next = (total // _INTERVAL + 1) * _INTERVAL
            self._write()

    def close(self) -> None:
        """Logs the last line; further calls do nothing."""
        if not self._closed:
            self._closed = True
            self._write()

    def _write(self) -> None:
        logger.info("%s", hit_line(self._hits))
