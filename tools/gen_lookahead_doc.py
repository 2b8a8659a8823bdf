"""Writes the table of keys in docs/lookahead_cache.md from `LookaheadConfig`, or checks it."""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from dataclasses import fields
from pathlib import Path

from hetero_llm.config.lookahead_config import SPECS, LookaheadConfig

TARGET = Path(__file__).parents[1] / "docs" / "lookahead_cache.md"
BEGIN, END = "<!-- keys: written by tools/gen_lookahead_doc.py -->\n", "<!-- end of keys -->\n"

_TYPES = {
    "int": "integer",
    "float": "number",
    "bool": "true or false",
    "str": "string",
    "tuple[int, ...]": "integer or list of those",
}


def render() -> str:
    """The table."""
    meanings = _meanings()
    lines = ["| Key | Type | Default | Meaning |\n", "|---|---|---|---|\n"]
    for field in fields(LookaheadConfig):
        kind = _TYPES[str(field.type).removesuffix(" | None")] + _range(field.name)
        default = "" if field.default is None else f"`{_as_json(field.default)}`"
        lines.append(f"| `{field.name}` | {kind} | {default} | {meanings[field.name]} |\n")
    return "".join(lines)


def _meanings() -> dict[str, str]:
    """What the class's docstring says of each key, on one line."""
    text = inspect.getdoc(LookaheadConfig) or ""
    arguments = text.split("Args:\n")[1].split("\n\nRaises:")[0]
    entries = re.findall(r"^    (\w+): (.*?)(?=^    \w|\Z)", arguments, re.MULTILINE | re.DOTALL)
    return {name: " ".join(meaning.split()).replace("|", "\\|") for name, meaning in entries}


def _range(key: str) -> str:
    spec = SPECS.get(key)
    if spec is None or (spec.minimum is None and spec.above is None):
        return ""
    if key == "decay":
        return ", above 0 and below 1"
    low = f"{spec.minimum:g}" if spec.above is None else f"above {spec.above:g}"
    return f", {low} to {spec.maximum:,.0f}"


def _as_json(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def updated(document: str) -> str:
    """The document with the table of today."""
    before, rest = document.split(BEGIN)
    return before + BEGIN + render() + END + rest.split(END)[1]


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the keys into docs/lookahead_cache.md.")
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    document = TARGET.read_text(encoding="utf-8")
    text = updated(document)
    if not parser.parse_args().check:
        TARGET.write_text(text, encoding="utf-8")
        return 0
    if document == text:
        return 0
    print(f"{TARGET.name} is out of date: run python {Path(__file__).name}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
