"""Where blocks were found, in TACO-LLM's terms: its hit line, for users and for the log.

The basis is the manual's: all blocks that tables were given, those of generated tokens included.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

logger = logging.getLogger(__name__)

_INTERVAL = 100  # blocks between two lines, as in the manual


@dataclass(slots=True)
class HitCounter:
    """Blocks that tables were given since the start. Written by the block manager alone.

    Attributes:
        gpu: found in the device's prefix cache.
        cpu: found in host memory.
        missed: empty ones, to be computed.
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
    """The manual's line, such as
    `[HIT CNT] total: 132, gpu: 0 (0.00%) cpu: 10 (7.58%) not hit: 122 (92.42%)`."""
    whole = max(hits.total, 1)
    gpu, cpu, missed = (
        f"{count} ({count / whole:.2%})" for count in (hits.gpu, hits.cpu, hits.missed)
    )
    return f"[HIT CNT] total: {hits.total}, gpu: {gpu} cpu: {cpu} not hit: {missed}"


class HitLog:
    """Writes the line when the blocks' number has passed a multiple of 100, and at the end."""

    def __init__(self, hits: HitCounter) -> None:
        self._hits = hits
        self._next = _INTERVAL
        self._closed = False

    def note(self) -> None:
        """To be called once a step: however many multiples were passed, there is one line."""
        total = self._hits.total
        if total >= self._next:
            self._next = (total // _INTERVAL + 1) * _INTERVAL
            self._write()

    def close(self) -> None:
        """The last line; a second call does nothing."""
        if not self._closed:
            self._closed = True
            self._write()

    def _write(self) -> None:
        logger.info("%s", hit_line(self._hits))
