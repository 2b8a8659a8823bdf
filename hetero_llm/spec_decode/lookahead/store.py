"""What users do with the global cache of a running engine: warm up, save, load, read metrics."""

from __future__ import annotations

import logging

from hetero_llm.core.errors import SnapshotError
from hetero_llm.spec_decode.lookahead.global_cache import GlobalCache
from hetero_llm.spec_decode.lookahead.snapshot import (
    Header,
    SnapshotRequirements,
    read_snapshot,
    write_snapshot,
)
from hetero_llm.spec_decode.lookahead.warmup import Warmup

logger = logging.getLogger(__name__)


class Store:
    """See the module. To be called by the thread that steps the engine, between two steps.

    Args:
        requirements: what may be learned here; its capacity is the cache's.
    """

    def __init__(self, cache: GlobalCache, requirements: SnapshotRequirements) -> None:
        assert requirements.capacity == cache.capacity
        self._cache = cache
        self._requirements = requirements
        self._warmup: Warmup | None = None

    def warm_up(self, path: str, *, namespace: int, ignore_prompt: bool) -> None:
        """Starts to read a warm-up file, see `Warmup`.

        Raises:
            SnapshotError: the file is a snapshot that does not belong here.
        """
        self._warmup = Warmup(
            self._cache, path, self._requirements, namespace=namespace, ignore_prompt=ignore_prompt
        )

    def wait_for_warmup(self) -> None:
        if self._warmup is not None:
            self._warmup.join()

    def save(self, path: str) -> None:
        """Writes a snapshot of everything that the global cache knows.

        Raises:
            SnapshotError: it cannot be written; an older file of that name is still there.
        """
        if self._warmup is not None and not self._warmup.is_finished:
            logger.warning("%s: saved without the warm-up file, which is still being read", path)
        write_snapshot(path, self._cache.content(), self._requirements.tokenizer())

    def load(self, path: str) -> Header:
        """Replaces the global cache by a snapshot. A warm-up that is still running is stopped.

        Raises:
            SnapshotError: the snapshot is damaged or does not belong here; nothing has changed.
        """
        header, content = read_snapshot(path, self._requirements)
        if self._warmup is not None:
            self._warmup.stop()
        try:
            self._cache.restore(content)
        except MemoryError:
            raise SnapshotError(path, "there is not enough memory for it") from None
        return header

    def metrics(self) -> dict[str, float]:
        """Sizes of the global cache, and progress of the warm-up."""
        cache, warmup = self._cache, self._warmup
        figures = {
            "lookahead_cache_tokens": cache.num_tokens,
            "lookahead_cache_documents": cache.num_documents,
            "lookahead_cache_bytes": cache.num_bytes,
        }
        if warmup is not None:
            figures |= {
                "lookahead_warmup_tokens": warmup.num_tokens,
                "lookahead_warmup_records": warmup.num_records,
                "lookahead_warmup_records_left_out": warmup.num_left_out,
                "lookahead_warmup_is_over": int(warmup.is_finished),
            }
        return dict(figures)
