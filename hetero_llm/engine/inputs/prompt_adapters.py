"""The prompt adapters that a process has read: those of its requests, which travel with them."""

from __future__ import annotations

import threading

from hetero_llm.config.engine_config import EngineConfig
from hetero_llm.config.prompt_adapter_config import PromptAdapterConfig
from hetero_llm.core.errors import AdapterError, ConfigError
from hetero_llm.core.prompt_adapter import (
    PromptAdapterRequest,
    VirtualPrompt,
    check_prompt_adapter_request,
)
from hetero_llm.models.config import ModelConfig
from hetero_llm.models.configs.transformers_vision import ImageModelConfig


def open_prompt_adapters(config: EngineConfig, model: ModelConfig) -> PromptAdapters:
    """The prompt adapters of one process.

    Raises:
        ConfigError: the model is of a kind that takes none.
    """
    if config.prompt_adapters.enabled and isinstance(model, ImageModelConfig):
        reason = "a model with images takes no prompt adapters yet"
        raise ConfigError("enable_prompt_adapter", True, reason)
    return PromptAdapters(
        config.prompt_adapters, size=model.word_embed_size, download_dir=config.load.download_dir
    )


class PromptAdapters:
    """Prompt adapters by name. The `max_adapters` used last stay in memory, the others are read
    again when they are needed; requests keep theirs until they end. Safe in several threads.

    Args:
        size: of the model's embeddings.
        download_dir: cache folder of adapters from the hub; None: huggingface_hub's own.
    """

    def __init__(
        self, config: PromptAdapterConfig, *, size: int, download_dir: str | None = None
    ) -> None:
        self._config = config
        self._size = size
        self._download_dir = download_dir
        self._lock = threading.Lock()
        self._known: dict[str, tuple[PromptAdapterRequest, str]] = {}  # and its content, by name
        self._loaded: dict[str, VirtualPrompt] = {}  # by name, the least recently used first
        self.num_reads = 0

    @property
    def num_loaded(self) -> int:
        return len(self._loaded)

    def is_loaded(self, request: PromptAdapterRequest) -> bool:
        """Whether `open` reads no file."""
        return request.prompt_adapter_name in self._loaded

    def open(self, request: PromptAdapterRequest) -> VirtualPrompt:
        """The adapter of a request, read and checked unless it is in memory.

        Raises:
            AdapterError: it cannot be served, its name or number is that of another adapter, or its
                files have changed since it was read.
        """
        check_prompt_adapter_request(request)
        name = request.prompt_adapter_name
        if not self._config.enabled:
            reason = "prompt adapters are not served: start with enable_prompt_adapter=True"
            raise AdapterError("prompt_adapter_request", name, reason)
        with self._lock:
            self._check_known(request)
            found = self._loaded.get(name)
        if found is None:
            found = self._read(request)  # meanwhile other threads open other adapters
        with self._lock:
            self._check_known(request)
            self._note(request, found)
            self._loaded.pop(name, None)
            self._loaded[name] = found
            while len(self._loaded) > self._config.max_adapters:
                del self._loaded[next(iter(self._loaded))]
        return found

    def _check_known(self, request: PromptAdapterRequest) -> None:
        name = request.prompt_adapter_name
        if name in self._known:
            first, _ = self._known[name]
            for field in (
                "prompt_adapter_id",
                "prompt_adapter_local_path",
                "prompt_adapter_num_virtual_tokens",
            ):
                if getattr(request, field) != getattr(first, field):
                    reason = f"prompt adapter {name!r} is known with {getattr(first, field)!r}"
                    raise AdapterError(field, getattr(request, field), reason)
            return
        for other, (first, _) in self._known.items():
            if first.prompt_adapter_id == request.prompt_adapter_id:
                reason = f"is that of prompt adapter {other!r}"
                raise AdapterError("prompt_adapter_id", request.prompt_adapter_id, reason)

    def _read(self, request: PromptAdapterRequest) -> VirtualPrompt:
        from hetero_llm.lora.prompt_tuning import read_virtual_prompt

        self.num_reads += 1
        path = request.prompt_adapter_local_path
        found = read_virtual_prompt(
            path,
            size=self._size,
            max_tokens=self._config.max_tokens,
            download_dir=self._download_dir,
        )
        count = request.prompt_adapter_num_virtual_tokens
        if count != found.num_tokens:
            reason = f"the adapter at {path} has {found.num_tokens}"
            raise AdapterError("prompt_adapter_num_virtual_tokens", count, reason)
        return found

    def _note(self, request: PromptAdapterRequest, found: VirtualPrompt) -> None:
        """Raises AdapterError: the adapter of this name was another one before."""
        name, path = request.prompt_adapter_name, request.prompt_adapter_local_path
        _, content = self._known.setdefault(name, (request, found.content_hash))
        if content != found.content_hash:
            reason = f"the files of prompt adapter {name!r} have changed since it was read"
            raise AdapterError("prompt_adapter_local_path", path, reason)
