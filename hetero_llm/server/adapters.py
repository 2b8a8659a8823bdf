"""The adapters that a server knows: those of its start, and LoRA adapters that clients add.

A client names an adapter where it would name the model. Adding and removing them over HTTP needs
`lora_root`, and reads folders inside it only.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from hetero_llm.core.errors import AdapterError, ConfigError, RequestError
from hetero_llm.core.lora import LoRARequest
from hetero_llm.core.prompt_adapter import PromptAdapterRequest
from hetero_llm.engine.engine_client import EngineClient

_KEYS = ("name", "path", "base_model_name")
_TAKEN = "is a name of the model or of a prompt adapter"


@dataclass(frozen=True, slots=True)
class LoraModule:
    """One value of `lora_modules`."""

    name: str
    path: str
    base_model_name: str | None = None


def lora_modules_of(words: Iterable[str]) -> tuple[LoraModule, ...]:
    """Reads values such as `sql=/adapters/sql` and `{"name": "sql", "path": "/adapters/sql"}`.

    Raises:
        ConfigError: one is neither, or a name is given twice.
    """
    found: dict[str, LoraModule] = {}
    for word in words:
        module = _module_of(word)
        if module.name in found:
            raise ConfigError("lora_modules", word, f"{module.name!r} is given twice")
        found[module.name] = module
    return tuple(found.values())


def _module_of(word: str) -> LoraModule:
    if not word.lstrip().startswith("{"):
        name, equals, path = word.partition("=")
        if not (name and equals and path):
            raise ConfigError("lora_modules", word, "must be name=path or a JSON object")
        return LoraModule(name, path)
    try:
        pairs = json.loads(word, object_pairs_hook=list)
    except (ValueError, RecursionError) as error:
        raise ConfigError("lora_modules", word, f"is not JSON: {error}") from None
    value: dict[str, Any] = dict(pairs)
    for key in value:
        if key not in _KEYS:
            reason = f"has the unknown key {key!r}; the keys are {', '.join(_KEYS)}"
            raise ConfigError("lora_modules", word, reason)
    if len(value) < len(pairs):
        raise ConfigError("lora_modules", word, "has a key twice")
    texts: list[Any] = [value.get(key) for key in _KEYS]
    if not all(isinstance(text, str) and text for text in texts[:2]):
        raise ConfigError("lora_modules", word, "needs the keys name and path with a string each")
    if texts[2] is not None and not isinstance(texts[2], str):
        raise ConfigError("lora_modules", word, "base_model_name must be a string")
    return LoraModule(*texts)


class ServedAdapters:
    """Adapters by the name that clients use; one event loop. Changes come one after the other.

    Args:
        client: of an engine with `enable_lora`.
        modules: opened by `open_all`.
        root: clients may add folders inside it; None: they may add none.
        taken: names of the base model and of prompt adapters.

    Raises:
        ConfigError: a module has one of these names.
    """

    def __init__(
        self,
        client: EngineClient,
        modules: Iterable[LoraModule],
        root: str | None,
        taken: Iterable[str],
    ) -> None:
        self._client = client
        self._modules = tuple(modules)
        self._root = None if root is None else Path(os.path.realpath(root))
        self._taken = frozenset(taken)
        self._adapters: dict[str, LoRARequest] = {}
        self._changing = asyncio.Lock()
        self._next_number = count(1)
        # Of every name ever opened: a request that began before its adapter was removed makes the
        # engine open it once more, under the number that it had.
        self._numbers: dict[str, int] = {}
        for module in self._modules:
            if module.name in self._taken:
                raise ConfigError("lora_modules", module.name, _TAKEN)

    @property
    def may_change(self) -> bool:
        """Whether clients may add and remove adapters."""
        return self._root is not None

    def names(self) -> list[str]:
        return list(self._adapters)

    def find(self, name: str | None) -> LoRARequest | None:
        """The adapter of this name; None: it is not one."""
        return None if name is None else self._adapters.get(name)

    async def open_all(self) -> None:
        """Opens the modules of the start.

        Raises:
            ConfigError: one cannot be served.
        """
        for module in self._modules:
            try:
                await self._open(module.name, module.path, module.base_model_name)
            except RequestError as error:
                raise ConfigError("lora_modules", f"{module.name}={module.path}", str(error)) from (
                    error
                )

    async def add(
        self, name: str, path: str, base_model_name: str | None, *, replaces: bool
    ) -> None:
        """Opens an adapter that a client names. A path that is not absolute begins at the root.

        Raises:
            AdapterError: the name is taken, the folder is not inside the root, or the adapter
                cannot be served.
        """
        assert self._root is not None, "the route exists with a root only"
        if name in self._taken:
            raise AdapterError("lora_name", name, _TAKEN)
        if "\0" in path:
            raise AdapterError("lora_path", path, "must be the path of a folder")
        folder = os.path.realpath(self._root / path)
        if not Path(folder).is_relative_to(self._root):
            raise AdapterError("lora_path", path, "is not inside the folder of lora_root")
        async with self._changing:
            if name in self._adapters and not replaces:
                reason = "is loaded already; with load_inplace it is replaced"
                raise AdapterError("lora_name", name, reason)
            await self._open(name, folder, base_model_name)

    async def remove(self, name: str) -> bool:
        """Forgets an adapter; its running requests go on. False: there is none of this name."""
        async with self._changing:
            request = self._adapters.pop(name, None)
            if request is not None:
                await self._client.remove_lora(request.lora_int_id)
        return request is not None

    async def _open(self, name: str, path: str, base_model_name: str | None) -> None:
        number = self._numbers.get(name) or next(self._next_number)
        request = LoRARequest(name, number, path, base_model_name=base_model_name)
        await self._client.add_lora(replace(request, load_inplace=True))
        self._numbers[name] = number
        self._adapters[name] = request


def prompt_adapters_of(words: Iterable[str]) -> tuple[tuple[str, str], ...]:
    """Reads values such as `polite=/adapters/polite`: names and paths.

    Raises:
        ConfigError: one has another form, or a name is given twice.
    """
    found: dict[str, str] = {}
    for word in words:
        name, equals, path = word.partition("=")
        if not (name and equals and path):
            raise ConfigError("prompt_adapters", word, "must be name=path")
        if name in found:
            raise ConfigError("prompt_adapters", word, f"{name!r} is given twice")
        found[name] = path
    return tuple(found.items())


class ServedPromptAdapters:
    """Prompt adapters by the name that clients use: those of the server's start.

    Args:
        client: of an engine with `enable_prompt_adapter`.
        given: names and paths, opened by `open_all`.
        model_names: taken by the base model.

    Raises:
        ConfigError: an adapter has a name of the model.
    """

    def __init__(
        self, client: EngineClient, given: Iterable[tuple[str, str]], model_names: Iterable[str]
    ) -> None:
        self._client = client
        self._given = tuple(given)
        self._adapters: dict[str, PromptAdapterRequest] = {}
        names = frozenset(model_names)
        for name, _ in self._given:
            if name in names:
                raise ConfigError("prompt_adapters", name, "is a name of the model")

    def names(self) -> list[str]:
        return list(self._adapters)

    def find(self, name: str | None) -> PromptAdapterRequest | None:
        """The prompt adapter of this name; None: it is not one."""
        return None if name is None else self._adapters.get(name)

    async def open_all(self) -> None:
        """Opens all of them, with as many virtual tokens as adapter_config.json says.

        Raises:
            ConfigError: one cannot be served.
        """
        for number, (name, path) in enumerate(self._given, 1):
            try:
                tokens = await self._client.num_virtual_tokens(path)
                request = PromptAdapterRequest(name, number, path, tokens)
                await self._client.add_prompt_adapter(request)
            except RequestError as error:
                given = f"{name}={path}"
                raise ConfigError("prompt_adapters", given, str(error)) from error
            self._adapters[name] = request
