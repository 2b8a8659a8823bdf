"""Injects faults that a signal from outside cannot cause; see `utils.env.faults`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import TypeVar

logger = logging.getLogger(__name__)
T = TypeVar("T")


def with_faults(step: Callable[[], T], faults: Mapping[str, float]) -> Callable[[], T]:
    """Returns a function that calls `step` and adds the faults; `step` itself if there are none.

    Args:
        faults: "slow_step_ms": milliseconds added to each step. "stall_step_after": number of
            normal steps; the next one is an endless loop.
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
    """Loops forever if `wanted`, keeping the interpreter busy, as a loop with a bug would."""
    while wanted:
        pass
