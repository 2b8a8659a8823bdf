"""What requests say about LoRA adapters: the adapter that a user names, and the one that was read.

LoRA: "LoRA: Low-Rank Adaptation of Large Language Models" (Hu et al. 2021).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from hetero_llm.core.errors import AdapterError, RequestError

R = TypeVar("R")

NO_ADAPTER = -1
"""In the place of an adapter slot: the base model alone."""
_LONGEST_NAME = 256


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """An adapter of a request, with the fields and the order of vLLM's class.

    Attributes:
        lora_name: what clients call it.
        lora_int_id: its number, from 1 on; an engine knows one adapter by one name and number.
        lora_path: folder with adapter_config.json and the weights, as PEFT saves them.
        base_model_name: of the model that it was trained on; shown as its parent by a server.
        load_inplace: the folder is read again though the engine knows the adapter.

    Raises:
        AdapterError: a field has a value that no adapter has.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str
    long_lora_max_len: None = None
    base_model_name: str | None = None
    load_inplace: bool = False

    def __post_init__(self) -> None:
        check_adapter_fields(self, "lora_name", "lora_int_id", "lora_path")
        if self.long_lora_max_len is not None:
            reason = "adapters with a longer context than their base are not available yet"
            raise AdapterError("long_lora_max_len", self.long_lora_max_len, reason)
        base = self.base_model_name
        if base is not None and not isinstance(base, str):
            raise AdapterError("base_model_name", base, "must be a string")
        if not isinstance(self.load_inplace, bool):
            raise AdapterError("load_inplace", self.load_inplace, "must be True or False")

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id

    @property
    def path(self) -> str:
        return self.lora_path


@dataclass(frozen=True, slots=True)
class AdapterRef:
    """An adapter that was read and checked: what requests, prefixes and slots know it by.

    Attributes:
        request: that named it.
        content_hash: SHA-256 over its tensors and scales, in hexadecimal; adapters with the same
            hash give the same tokens and share slots and cached prefixes.
        rank: of the `Linear` where it is largest.
    """

    request: LoRARequest
    content_hash: str
    rank: int

    @property
    def name(self) -> str:
        return self.request.lora_name


@dataclass(frozen=True, slots=True)
class AdapterLoad:
    """The adapter that a slot holds from a step on; it replaces what was there."""

    slot: int
    adapter: AdapterRef


class AdapterMemory(Protocol):
    """The host memory that adapter slots are filled from."""

    def hold(self, adapter: AdapterRef) -> None:
        """Keeps an adapter in host memory until `release`, read again if it is not there.

        Raises:
            AdapterError: its files have gone or changed.
        """

    def release(self, adapter: AdapterRef) -> None:
        """Ends a `hold`."""


def check_adapter_fields(
    request: object, name_field: str, number_field: str, path_field: str
) -> None:
    """Raises AdapterError: one of these fields of a request has a value that no adapter has."""
    name, number, path = (getattr(request, one) for one in (name_field, number_field, path_field))
    if not isinstance(name, str) or not 0 < len(name) <= _LONGEST_NAME:
        reason = f"must be a string of 1 to {_LONGEST_NAME} characters"
        raise AdapterError(name_field, name, reason)
    if not name.isprintable():
        raise AdapterError(name_field, name, "holds a character that cannot be printed")
    if type(number) is not int or not 1 <= number < 1 << 31:
        raise AdapterError(number_field, number, "must be an integer of at least 1")
    if not isinstance(path, str) or not path or "\0" in path:
        raise AdapterError(path_field, path, "must be the path of a folder")


def check_request(value: Any, kind: type[R], field: str) -> R:
    """Returns the value.

    Raises:
        AdapterError: it is no `kind`.
    """
    if not isinstance(value, kind):
        raise AdapterError(field, value, f"must be a {kind.__name__}")
    return value


def pair_requests(given: Any, count: int, kind: type[R], field: str) -> list[R | None]:
    """One request of an adapter (or none) for all prompts, or a list with one or None for each.

    Raises:
        RequestError: it is neither.
    """
    if given is None or isinstance(given, kind):
        return [given] * count
    if not isinstance(given, Sequence) or isinstance(given, str) or len(given) != count:
        raise RequestError(field, given, f"must be one {kind.__name__} or a list of {count}")
    return [None if one is None else check_request(one, kind, field) for one in given]


def check_lora_request(value: Any) -> LoRARequest:
    """See `check_request`."""
    return check_request(value, LoRARequest, "lora_request")
