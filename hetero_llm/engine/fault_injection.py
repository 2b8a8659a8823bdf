"""Faults on request, for what a signal from outside cannot produce; see `utils.env.faults`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

logger = logging.getLogger(__name__)
T = TypeVar("T")


def with_faults(step: Callable[[], T], faults: Mapping[str, float]) -> Callable[[], T]:
    """`step` itself without faults; else the same with them.

    Args:
        faults: "slow_step_ms": milliseconds that each step takes longer. "stall_step_after": steps
            that are as usual; the next one is an endless loop.
    """
    if not faults:
        return step
    logger.warning("faults were asked for: %s", dict(faults))
    seconds = faults.get("slow_step_ms", 0.0) / 1e3
    left = faults.get("stall_step_after")

    def faulty() -> T:
        nonlocal left
        if left is not None:
            stall_if(left == 0)
            left -= 1
        time.sleep(seconds)
        return step()

    return faulty


def stall_if(wanted: bool) -> None:
    """Never returns if wanted, and keeps the interpreter busy, as a wrong loop would."""
    while wanted:
        pass
