"""The adapters of one engine: which names are known, and which adapters are in host memory.

The adapters that slots on the device hold stay in host memory (`hold`); the others leave it when
`capacity` is reached, the least recently used one first, and are read again when they are needed.
A file that has changed by then is an error: requests were made for the adapter as it was.

Of every content that has a name a small record says where it was read, and of the `FORGOTTEN` last
ones whose names were removed, for requests that still wait.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

from hetero_llm.core.errors import AdapterError
from hetero_llm.core.lora import AdapterRef, LoRARequest
from hetero_llm.core.null_objects import do_nothing
from hetero_llm.lora.adapter import Adapter, read_adapter
from hetero_llm.lora.targets import AdapterTargets

logger = logging.getLogger(__name__)

FORGOTTEN = 1024
"""Contents without a name whose requests are still served."""


class RankStores(Protocol):
    """The other ranks, whose stores open and forget the adapters that this one does."""

    def open_adapter(self, request: LoRARequest) -> None: ...

    def forget_adapter(self, name: str) -> None: ...


class NoRankStores:
    """In the place of `RankStores` where one process runs the model."""

    open_adapter = forget_adapter = staticmethod(do_nothing)


class AdapterStore:
    """Adapters by name and, in host memory, by content. One thread at a time.

    Args:
        targets: the modules of the model.
        place: makes of an adapter what is kept in host memory; None: it is kept as it is.
        capacity: most adapters in host memory; more than are held at the same time.
        max_rank, dtype, download_dir: see `read_adapter`.

    Attributes:
        ranks: the other ranks of the model, set in rank 0 before the first `open`.
        num_reads: files read so far.
    """

    def __init__(
        self,
        targets: AdapterTargets,
        *,
        capacity: int,
        max_rank: int,
        dtype: torch.dtype,
        place: Callable[[Adapter], Any] | None = None,
        download_dir: str | None = None,
    ) -> None:
        self._targets = targets
        self._place = place
        self._capacity = capacity
        self._max_rank = max_rank
        self.dtype = dtype
        self._download_dir = download_dir
        self._known: dict[str, tuple[LoRARequest, AdapterRef]] = {}  # by name
        self._sources: dict[str, LoRARequest] = {}  # by content
        self._names_of: Counter[str] = Counter()  # names of each content
        self._forgotten: dict[str, None] = {}  # contents without a name, the oldest first
        self._loaded: dict[str, Any] = {}  # by content, the least recently used first
        self._held: Counter[str] = Counter()
        self.num_reads = 0
        self.ranks: RankStores = NoRankStores()

    def linears(self) -> set[str]:
        """See `AdapterTargets.linears`."""
        return self._targets.linears()

    @property
    def num_loaded(self) -> int:
        """Adapters in host memory."""
        return len(self._loaded)

    @property
    def num_sources(self) -> int:
        """Contents of which the store knows where they were read."""
        return len(self._sources)

    def open(self, request: LoRARequest) -> AdapterRef:
        """The adapter of a request, read and checked if its name is new or `load_inplace` is set.

        Raises:
            AdapterError: it cannot be served, or its name or number is that of another adapter.
        """
        name, number = request.lora_name, request.lora_int_id
        known = self._known.get(name)
        if known is not None and not request.load_inplace:
            first, ref = known
            for field in ("lora_path", "lora_int_id"):
                if getattr(request, field) != getattr(first, field):
                    reason = f"adapter {name!r} is known with {getattr(first, field)!r}"
                    raise AdapterError(field, getattr(request, field), reason)
            return ref
        for other, (first, _) in self._known.items():
            if other != name and first.lora_int_id == number:
                raise AdapterError("lora_int_id", number, f"is that of adapter {other!r}")
        adapter = self._read(request)
        if known is not None:
            self._unname(known[1])
        key = adapter.ref.content_hash
        self._known[name] = (request, adapter.ref)
        self._sources[key] = request
        self._names_of[key] += 1
        self._forgotten.pop(key, None)
        self._keep(adapter)
        self.ranks.open_adapter(request)
        return adapter.ref

    def forget(self, name: str) -> None:
        """Removes a name. Requests that have the adapter keep it until they end.

        Raises:
            AdapterError: the name is unknown.
        """
        known = self._known.pop(name, None)
        if known is None:
            raise AdapterError("lora_name", name, "no adapter of this name is known")
        self._unname(known[1])
        self.ranks.forget_adapter(name)

    def _unname(self, adapter: AdapterRef) -> None:
        """A name does not mean this content any more."""
        key = adapter.content_hash
        self._names_of[key] -= 1
        if self._names_of[key]:
            return
        del self._names_of[key]
        self._forgotten[key] = None
        if len(self._forgotten) > FORGOTTEN:
            unheld = [one for one in self._forgotten if not self._held[one]]
            for one in unheld[: max(len(unheld) - FORGOTTEN, 0)]:
                del self._forgotten[one], self._sources[one]
                self._loaded.pop(one, None)

    def check(self, adapter: AdapterRef) -> None:
        """Raises AdapterError: this store does not know where the adapter was read."""
        if adapter.content_hash not in self._sources:
            reason = "was not loaded by this engine, or was removed long ago"
            raise AdapterError("lora_request", adapter.name, reason)

    def names(self) -> Mapping[str, AdapterRef]:
        """The adapters by their names."""
        return {name: ref for name, (_, ref) in self._known.items()}

    def name_of(self, number: int) -> str | None:
        """The name of the adapter with this number; None if there is none."""
        known = self._known.items()
        return next((name for name, (one, _) in known if one.lora_int_id == number), None)

    def hold(self, adapter: AdapterRef) -> None:
        """See `AdapterMemory`."""
        key = adapter.content_hash
        if key not in self._loaded:
            self._read_again(adapter)
        self._loaded[key] = self._loaded.pop(key)
        self._held[key] += 1

    def release(self, adapter: AdapterRef) -> None:
        """See `AdapterMemory`."""
        key = adapter.content_hash
        self._held[key] -= 1
        assert self._held[key] >= 0, "an adapter was released once too often"
        if not self._held[key]:
            del self._held[key]
            self._drop_unused(self._capacity)

    def held(self, adapter: AdapterRef) -> Any:
        """What host memory has of an adapter that is held."""
        return self._loaded[adapter.content_hash]

    def _read(self, request: LoRARequest) -> Adapter:
        self.num_reads += 1
        return read_adapter(
            request,
            self._targets,
            max_rank=self._max_rank,
            dtype=self.dtype,
            download_dir=self._download_dir,
        )

    def _read_again(self, adapter: AdapterRef) -> None:
        self.check(adapter)
        request = self._sources[adapter.content_hash]
        found = self._read(request)
        if found.ref.content_hash != adapter.content_hash:
            reason = f"the files of adapter {adapter.name!r} have changed since it was loaded"
            raise AdapterError("lora_path", request.lora_path, reason)
        self._keep(found)

    def _keep(self, adapter: Adapter) -> None:
        """Adds an adapter to host memory, as the one used last."""
        self._loaded.pop(adapter.ref.content_hash, None)
        self._drop_unused(self._capacity - 1)
        placed = adapter if self._place is None else self._place(adapter)
        self._loaded[adapter.ref.content_hash] = placed
        logger.debug("adapter %r: %.1f MiB", adapter.ref.name, adapter.num_bytes / 2**20)

    def _drop_unused(self, most: int) -> None:
        """Drops adapters that are not held, the least recently used ones first, down to `most`.
        Right after a read there may be one too many: all others are held."""
        unused = [key for key in self._loaded if not self._held[key]]
        for key in unused[: max(len(self._loaded) - most, 0)]:
            del self._loaded[key]
