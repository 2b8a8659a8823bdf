"""Who may import whom, and what a plain import may load.

The rule: core imports nothing of ours; every other package only those listed here; cpu and gpu
never each other; `engine/factory.py` alone joins engine and runners, `engine/drafters.py` engine
and lookahead cache, `engine/draft_model.py` engine and draft worker; the scheduler's modules never
load torch; importing `hetero_llm` loads nothing heavy.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "hetero_llm"

SCHEDULING = tuple(
    f"engine.{name}"
    for name in (
        "scheduler",
        "scheduler_beams",
        "scheduler_stats",
        "drafting",
        "in_flight",
        "new_tokens",
        "block_manager",
        "prefix_cache",
        "upkeep",
        "admission",
        "request_queue",
        "beam",
        "offload_log",
        "block_moves",
        "table_changes",
        "scheduler_loads",
        "scheduler_rows",
        "slots",
        "waiting",
        "integrity",
    )
)

_ABOVE_MODELS = ("core", "sampling", "quantization", "models", "bridge", "runner")

# A module's own rule is the one with the longest matching name. `core` means `core` and all that
# is in it. A package may always import itself unless `STRICT` lists the module.
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "core": (),
    "sampling": ("core",),
    "bridge": ("core",),
    "quantization": ("core",),
    "distributed": ("core",),
    "models": ("core", "quantization"),
    "runner": ("core", "models", "sampling"),
    "cpu": _ABOVE_MODELS,
    "gpu": _ABOVE_MODELS,
    "cpu.lookahead": ("core", "cpu.topology"),
    "engine": ("core", "sampling", "models", "bridge"),
    "demo_models": (),
    "engine.draft_cores": ("core", "cpu.core_plan", "cpu.topology"),
    "engine.draft_model": ("core", "models", "cpu.draft", "cpu.core_plan", "demo_models"),
    "engine.offload": ("engine", "core", "models", "bridge", "runner", "cpu.topology"),
    "engine.resolve": ("engine", "core", "models", "demo_models"),
    "engine.drafters": ("engine", "core", "models", "cpu.lookahead", "cpu.draft"),
    "engine.factory": (
        "engine",
        "core",
        "sampling",
        "models",
        "bridge",
        "runner",
        "cpu",
        "gpu",
        "demo_models",
    ),
    "engine.runners": (
        "engine",
        "core",
        "sampling",
        "models",
        "bridge",
        "runner",
        "cpu",
        "gpu",
        "demo_models",
    ),
    "server": ("engine", "core", "__version__"),
    "bench_client": ("core", "demo_models", "engine.tokenizer"),
} | {module: ("core", *SCHEDULING) for module in SCHEDULING}

STRICT = SCHEDULING
HEAVY_FOR_SCHEDULING = ("torch", "transformers", "triton", "numba")
HEAVY = (*HEAVY_FOR_SCHEDULING, "fastapi", "uvicorn", "tokenizers", "safetensors")

# Modules that anyone can import before knowing what the machine has: heavy imports in functions.
LIGHT_AT_THE_TOP = ("", "core", "cli", "commands", "doctor", *SCHEDULING)


@dataclass(frozen=True)
class Import:
    """One import statement: who, whom (full dotted name), and whether it runs at import time."""

    importer: str
    target: str
    line: int
    at_top: bool


def modules() -> dict[str, Path]:
    """Every module of the package by its name without the leading `hetero_llm.`."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = list(path.relative_to(PACKAGE).with_suffix("").parts)
        if parts[-1] == "__init__":
            parts.pop()
        found[".".join(parts)] = path
    return found


def imports_of(module: str, source: str, *, is_package: bool = False) -> list[Import]:
    """The imports in `source`; those under `if TYPE_CHECKING:` are not run and not counted."""
    return list(_walk(ast.parse(source), module, is_package=is_package, at_top=True))


def _walk(node: ast.AST, module: str, *, is_package: bool, at_top: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(module, alias.name, child.lineno, at_top)
        elif isinstance(child, ast.ImportFrom):
            base = _base(child, module, is_package=is_package)
            for alias in child.names:
                yield Import(module, f"{base}.{alias.name}", child.lineno, at_top)
        deeper = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        yield from _walk(child, module, is_package=is_package, at_top=at_top and not deeper)


def _base(node: ast.ImportFrom, module: str, *, is_package: bool) -> str:
    """The absolute module that `from ... import` names."""
    if node.level == 0:
        return node.module or ""
    parts = ["hetero_llm", *filter(None, module.split("."))]
    parts = parts[: len(parts) - node.level + is_package]
    return ".".join([*parts, node.module] if node.module else parts)


def covers(package: str, name: str) -> bool:
    """Whether `name` is `package` or inside it; the empty package covers itself only."""
    return name == package or (package != "" and name.startswith(package + "."))


def ours(target: str) -> str | None:
    """A target's name inside the package, None for other people's."""
    return target.removeprefix("hetero_llm.") if target.startswith("hetero_llm.") else None


def offences(imports: list[Import]) -> list[str]:
    """What breaks the rule, one line each."""
    found = []
    for item in imports:
        target = ours(item.target)
        rules = [name for name in MAY_IMPORT if covers(name, item.importer)]
        if target is None or not rules:
            continue
        rule = max(rules, key=len)
        allowed = MAY_IMPORT[rule]
        if item.importer not in STRICT:
            allowed = (*allowed, rule.partition(".")[0])
        if not any(covers(name, target) for name in allowed):
            found.append(f"{item.importer}:{item.line} imports {target}")
    return found


ALL_IMPORTS = [
    item
    for name, path in modules().items()
    for item in imports_of(
        name, path.read_text(encoding="utf-8"), is_package=path.name == "__init__.py"
    )
]


def test_packages_import_only_what_they_may() -> None:
    assert offences(ALL_IMPORTS) == []


def test_light_modules_import_nothing_heavy_at_the_top() -> None:
    heavy = [
        f"{item.importer}:{item.line} imports {item.target}"
        for item in ALL_IMPORTS
        if item.at_top
        and any(covers(light, item.importer) for light in LIGHT_AT_THE_TOP)
        and item.target.partition(".")[0] in HEAVY
    ]
    assert heavy == []


@pytest.mark.parametrize(
    ("module", "source", "offence"),
    [
        ("core.a", "from hetero_llm.engine import llm", "engine.llm"),
        ("core.a", "from hetero_llm.core.errors import ConfigError", None),
        ("core.a", "def f():\n    import hetero_llm.models.config", "models.config"),
        ("core.a", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n"
         "    from hetero_llm.engine.llm import LLM", None),
        ("models.a", "from hetero_llm.quantization import base", None),
        ("models.a", "from hetero_llm.sampling import sampler", "sampling.sampler"),
        ("runner.a", "from hetero_llm import models", None),
        ("runner.a", "from hetero_llm.cpu import topology", "cpu.topology"),
        ("cpu.a", "from hetero_llm.runner import step", None),
        ("cpu.a", "from hetero_llm.gpu import graphs", "gpu.graphs"),
        ("cpu.a", "from ..gpu import graphs", "gpu.graphs"),
        ("gpu.a", "import hetero_llm.cpu.topology", "cpu.topology"),
        ("engine.llm", "from hetero_llm.engine.scheduler import Scheduler", None),
        ("engine.llm", "from hetero_llm.cpu import topology", "cpu.topology"),
        ("engine.llm", "from hetero_llm.engine.factory import make", None),
        ("engine.factory", "from hetero_llm.gpu import model_runner", None),
        ("engine.scheduler", "from hetero_llm.engine.block_manager import BlockManager", None),
        ("engine.scheduler", "from hetero_llm.engine.llm import LLM", "engine.llm.LLM"),
        ("engine.scheduler", "from hetero_llm.models import config", "models.config"),
        ("server.app", "from hetero_llm.cpu import topology", "cpu.topology"),
        ("cli", "from hetero_llm.cpu import topology", None),
    ],
)  # fmt: skip
def test_the_rule_itself(module: str, source: str, offence: str | None) -> None:
    found = offences(imports_of(module, source))
    assert [line.rpartition(" ")[2] for line in found] == ([offence] if offence else [])


def _loaded(code: str, names: tuple[str, ...]) -> set[str]:
    """Which of `names` are loaded after running `code` in a fresh interpreter."""
    script = f"{code}\nimport sys\nprint(*sorted(set({names!r}) & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return set(done.stdout.split())


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert _loaded("import hetero_llm", HEAVY) == set()


def test_importing_the_command_line_loads_nothing_heavy() -> None:
    assert _loaded("import hetero_llm.cli, hetero_llm.doctor", (*HEAVY, "numpy")) == set()


def test_scheduling_modules_load_no_torch() -> None:
    names = [name for name in SCHEDULING if name in modules()]
    code = "\n".join(f"import hetero_llm.{name}" for name in names)
    assert _loaded(code, HEAVY) == set()
