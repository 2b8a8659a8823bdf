"""Fails if a Python file has more than 600 lines or a function more than 80."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 80


def too_long(path: Path) -> list[str]:
    """One line per file or function of `path` that is over its limit."""
    source = path.read_text()
    found = []
    lines = len(source.splitlines())
    if lines > MAX_FILE_LINES:
        found.append(f"{path}: {lines} lines (limit {MAX_FILE_LINES})")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                found.append(
                    f"{path}:{node.lineno}: {node.name} has {length} lines "
                    f"(limit {MAX_FUNCTION_LINES})"
                )
    return found


def main() -> int:
    listed = subprocess.run(
        ["git", "ls-files", "*.py"], capture_output=True, text=True, check=True
    ).stdout.split()
    problems = [problem for name in listed for problem in too_long(Path(name))]
    print("\n".join(problems) or f"{len(listed)} files within the limits")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
