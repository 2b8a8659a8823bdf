"""`EngineArgs` and `AsyncEngineArgs`: the engine arguments as an object, as vLLM has them."""

from __future__ import annotations

import argparse
import dataclasses
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from hetero_llm.config.args import (
    ENGINE_ARGS,
    LOG_SWITCH,
    SERVER_ARGS,
    ArgSpec,
    Status,
    add_engine_arguments,
    engine_args_from_namespace,
    nearest,
    resolve_engine_args,
    resolve_server_args,
    spec_of,
)
from hetero_llm.config.args_spec import Kind
from hetero_llm.core.errors import ConfigError
from hetero_llm.utils.env import vllm_batch_invariant

if TYPE_CHECKING:
    from typing import Self, Unpack

    from hetero_llm.config.engine_arg_types import EngineArgFields as _Fields
    from hetero_llm.config.engine_arg_types import EngineArgTypes

logger = logging.getLogger(__name__)

P = TypeVar("P", argparse.ArgumentParser, argparse._ArgumentGroup)

_FRONT_END = tuple(
    spec for spec in SERVER_ARGS if spec.name in ("served_model_name", "disable_log_requests")
)
"""Arguments of vLLM's `EngineArgs` that concern who uses the engine, not the engine."""


def _field(spec: ArgSpec) -> tuple[str, Any, Any]:
    if spec.default.__hash__ is None:
        return spec.name, Any, dataclasses.field(default_factory=lambda: spec.default)
    return spec.name, Any, dataclasses.field(default=spec.default)


if not TYPE_CHECKING:
    _Fields = dataclasses.make_dataclass(
        "_Fields", map(_field, (*ENGINE_ARGS, *_FRONT_END)), init=False, repr=False
    )


class EngineArgs(_Fields):
    """The engine arguments of `LLM`: `EngineArgs("demo", max_num_seqs=64)`.

    A dataclass with a field for each argument: `dataclasses.asdict` works, and fields can be
    assigned until an engine is made, which checks them again.

    Raises:
        ConfigError: an argument is unknown or wrong.
    """

    def __init__(
        self,
        model: str | None = None,
        tokenizer: str | None = None,
        **engine_args: Unpack[EngineArgTypes],
    ) -> None:
        given: dict[str, Any] = {"model": model, "tokenizer": tokenizer, **engine_args}
        given = {name: value for name, value in given.items() if not _is_default(name, value)}
        front_end = {spec.name: given.pop(spec.name) for spec in _FRONT_END if spec.name in given}
        if LOG_SWITCH in given:
            front_end[LOG_SWITCH] = given.pop(LOG_SWITCH)
        if "batch_invariant" not in engine_args and vllm_batch_invariant():
            logger.warning("batch_invariant is on: VLLM_BATCH_INVARIANT says so")
            given["batch_invariant"] = True
        values = resolve_engine_args(given)
        served = resolve_server_args(front_end)
        values |= {spec.name: served[spec.name] for spec in _FRONT_END}
        for name, value in values.items():
            setattr(self, name, value)

    if not TYPE_CHECKING:  # which would take every name for known

        def __setattr__(self, name: str, value: Any) -> None:
            known = [field.name for field in dataclasses.fields(self)]
            if name not in known:
                guess = nearest(name, known)
                hint = f"; did you mean {guess!r}?" if guess else ""
                raise ConfigError(name, value, f"unknown argument{hint}")
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.changed().items())
        return f"{type(self).__name__}({given})"

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """The arguments that a parser of `add_cli_args` found; other attributes are left alone."""
        given = engine_args_from_namespace(args)
        found = vars(args)
        names = (*(spec.name for spec in _FRONT_END), LOG_SWITCH)
        given |= {name: found[name] for name in names if name in found}
        return cls(**given)

    @staticmethod
    def add_cli_args(parser: P) -> P:
        """Adds a flag for each argument, to a parser or to a group of one. One that is not given
        has its default, or that of an earlier `set_defaults`."""
        specs = (*ENGINE_ARGS, *_FRONT_END)
        earlier = {spec.name: parser.get_default(spec.name) for spec in specs}
        add_engine_arguments(parser, specs)
        for spec in specs:  # argparse would append to the default of a list
            default = None if spec.kind is Kind.LIST else spec.default
            before = earlier[spec.name]
            parser.set_defaults(**{spec.name: default if before is None else before})
        return parser

    def changed(self) -> dict[str, Any]:
        """The effective engine arguments that differ from their defaults, not checked."""
        return {
            spec.name: getattr(self, spec.name)
            for spec in ENGINE_ARGS
            if spec.status is not Status.OBSOLETE and getattr(self, spec.name) != spec.default
        }

    def resolved(self) -> Mapping[str, Any]:
        """The value of every engine argument, checked as it is now.

        Raises:
            ConfigError: a field that was assigned is wrong.
        """
        return resolve_engine_args(self.changed())


class AsyncEngineArgs(EngineArgs):
    """The arguments of `AsyncLLMEngine`: those of `EngineArgs`."""


def _is_default(name: str, value: Any) -> bool:
    """Whether the value can be left out, which also spares obsolete arguments their notice."""
    spec = spec_of(name)
    if spec is not None and spec.kind is Kind.LIST and value is None:
        return True
    if spec is None or type(value) is not type(spec.default):
        return False
    return bool(value == spec.default)
