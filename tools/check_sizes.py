"""Fails if a large function or class does not say why it is one.

A function may have 80 lines, a class 25 methods and 15 attributes (fields, or names assigned to
`self`). A larger one carries its reason in a comment on the line above it, above its decorators:

    # large: one branch for each kind of message.
    def handle(message: Message) -> None:

Files have no limit: a file is one subject.
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tokenize
from pathlib import Path

MAX_FUNCTION_LINES = 80
MAX_METHODS = 25
MAX_ATTRIBUTES = 15
MARK = "# large: "

_Function = ast.FunctionDef | ast.AsyncFunctionDef


def too_large(name: str, source: str) -> list[str]:
    """One line for each function or class of `source` that is over a limit without a reason, and
    for each reason that stands above nothing of that size."""
    lines = source.splitlines()
    found = []
    used = set()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        above = min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1
        reason = lines[above - 1].strip() if above else ""
        excess = _excess(node)
        if reason.startswith(MARK) and len(reason) > len(MARK):
            if excess:
                used.add(above)
        elif excess:
            found.append(f"{name}:{node.lineno}: {node.name} has {excess}, without a reason above")
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        is_mark = token.type == tokenize.COMMENT and token.string.startswith(MARK.strip())
        if is_mark and token.start[0] not in used:
            found.append(f"{name}:{token.start[0]}: a reason above nothing large")
    return found


def _excess(node: _Function | ast.ClassDef) -> str:
    """What of the node is over its limit; empty if nothing is."""
    if not isinstance(node, ast.ClassDef):
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        return f"{length} lines (limit {MAX_FUNCTION_LINES})" * (length > MAX_FUNCTION_LINES)
    methods = [part for part in node.body if isinstance(part, _Function)]
    attributes = _attributes(node, methods)
    return " and ".join(
        f"{count} {what} (limit {limit})"
        for count, what, limit in (
            (len(methods), "methods", MAX_METHODS),
            (len(attributes), "attributes", MAX_ATTRIBUTES),
        )
        if count > limit
    )


def _attributes(node: ast.ClassDef, methods: list[_Function]) -> set[str]:
    """Annotated fields of the class body and names that methods assign to `self`."""
    names = {
        part.target.id
        for part in node.body
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
    }
    for method in methods:
        for part in ast.walk(method):
            if (
                isinstance(part, ast.Attribute)
                and isinstance(part.ctx, ast.Store)
                and isinstance(part.value, ast.Name)
                and part.value.id == "self"
            ):
                names.add(part.attr)
    return names


def main() -> int:
    listed = subprocess.run(
        ["git", "ls-files", "*.py"], capture_output=True, text=True, check=True
    ).stdout.split()
    problems = [
        problem for name in listed for problem in too_large(name, Path(name).read_text("utf-8"))
    ]
    print("\n".join(problems) or f"{len(listed)} files: whatever is large says why")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
