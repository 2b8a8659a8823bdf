"""Write hetero_llm/config/engine_arg_types.py, the types of `LLM`'s arguments and of the fields of
`EngineArgs`, from the table.

python tools/gen_engine_arg_types.py            # write it
python tools/gen_engine_arg_types.py --check    # exit code 1 if it is out of date
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from hetero_llm.config.args import ENGINE_ARGS, SERVER_ARGS, ArgSpec, Kind

TARGET = Path(__file__).parents[1] / "hetero_llm" / "config" / "engine_arg_types.py"

HEAD = '''\
"""The types of `LLM`'s keyword arguments and of `EngineArgs`, for type checkers; docs/flags.md says
what they mean.

Generated from the argument table by tools/gen_engine_arg_types.py; do not edit it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, TypedDict


# large: one key for each engine argument.
class EngineArgTypes(TypedDict, total=False):
    """By name and by alias. `model` and `tokenizer` are parameters of their own."""

'''
FIELDS = '''

# large: one field for each engine argument.
class EngineArgFields:
    """What `EngineArgs` inherits: a field for each argument, by its name."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    model: str
    tokenizer: str | None
'''
_APART = ("model", "tokenizer")
_OF_THE_SERVER = ("served_model_name", "disable_log_requests")
"""Arguments of the server that vLLM's `EngineArgs` take."""
_TYPES = {
    Kind.BOOL: "bool",
    Kind.INT: "int",
    Kind.FLOAT: "float",
    Kind.STR: "str",
    Kind.PATH: "str | os.PathLike[str]",
    Kind.DTYPE: "Any",
    Kind.JSON: "Mapping[str, Any]",
    Kind.LIST: "str | Sequence[str]",
    Kind.COUNTS: "Mapping[str, int] | str",
    Kind.AUTO_FLOAT: "float | str",
    Kind.AUTO_INT: "int | str",
    Kind.PYTHON: "Any",
}


def render() -> str:
    """The whole module."""
    specs = [spec for spec in ENGINE_ARGS if spec.name not in _APART]
    specs += [spec for spec in SERVER_ARGS if spec.name in _OF_THE_SERVER]
    keys = [f"    {name}: {_type(spec)}\n" for spec in specs for name in (spec.name, *spec.aliases)]
    fields = [f"    {spec.name}: {_type(spec)}\n" for spec in specs]
    return "".join((HEAD, *keys, FIELDS, *fields))


def _type(spec: ArgSpec) -> str:
    name = _TYPES[spec.kind]
    return f"{name} | None" if spec.default is None and name != "Any" else name


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    if parser.parse_args().check:
        if TARGET.read_text(encoding="utf-8") == render():
            return 0
        print(f"{TARGET} is out of date: run python tools/gen_engine_arg_types.py")
        return 1
    TARGET.write_text(render(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
