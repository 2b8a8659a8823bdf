"""The fields of `SamplingParams` as `ArgSpec`s, for flags and documentation.

Names, defaults and help are read from the class and its docstring.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import MISSING, fields

from hetero_llm.config.args_spec import ArgSpec, Kind, effective
from hetero_llm.core.sampling_params import SamplingParams

_KINDS = {
    "bool": Kind.BOOL,
    "int": Kind.INT,
    "int | None": Kind.INT,
    "float": Kind.FLOAT,
    "bool | str": Kind.STR,
    "str": Kind.STR,
    "str | Sequence[str] | None": Kind.LIST,
    "Sequence[str] | None": Kind.LIST,
    "Sequence[int] | None": Kind.JSON,
    "Mapping[int, float] | None": Kind.JSON,
}
"""Annotations of fields that have a flag -> kind of the flag's value."""


def _documented_fields() -> dict[str, str]:
    """Each field's text in the class's docstring, on one line."""
    doc = inspect.cleandoc(SamplingParams.__doc__ or "")  # stripped under python -OO
    args = doc.partition("Args:\n")[2].partition("\nRaises:")[0]
    entries = re.findall(r"^    (\w+): (.*(?:\n {6,}.*)*)", args, flags=re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}


def _rows() -> tuple[ArgSpec, ...]:
    texts = _documented_fields()
    return tuple(
        effective(
            field.name,
            _KINDS.get(str(field.type), Kind.PYTHON),
            None if field.default is MISSING else field.default,
            texts.get(field.name, ""),
            group="Sampling",
        )
        for field in fields(SamplingParams)
    )


SAMPLING_ARGS: tuple[ArgSpec, ...] = _rows()
