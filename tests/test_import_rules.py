"""Who may import whom, and what a plain import may load.

- A module may import its own folder, and what the rule with the longest matching name lists for it.
  A sub-package has a rule of its own or that of its parent; a rule never adds to another.
- Every module has a rule, and every rule names something that exists.
- Neither packages nor files import each other in a circle; imports for type checkers count.
- `cpu` and `gpu` never meet but in `engine/factory.py`, `engine/builders` and the ranks' process.
- Modules that decide what runs load no torch; `import hetero_llm` loads nothing heavy.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "hetero_llm"

_OF_DRAFTS = ("spec_decode.acceptance_stats", "spec_decode.array_table", "spec_decode.proposals")
_DEVICE = (
    "core", "config", "utils", "sampling", "quantization", "models", "runner", "spec_decode.verify",
)  # fmt: skip
_ENGINE = (
    "core", "config", "utils", "scheduler", "kv_cache", "spec_decode", "sampling", "models",
    "pooling",
    "structured_output", "lora", "distributed", "expert_offload",
)  # fmt: skip
_BUILDER = (*_ENGINE, "bridge", "runner", "cpu", "gpu", "demo_models")

# By module or package, without the leading `hetero_llm.`. The empty name is `hetero_llm` itself.
MAY_IMPORT: dict[str, tuple[str, ...]] = {
    "": ("core", "engine"),  # for type checkers alone
    "core": (),
    "utils": ("core",),
    "config": ("core",),
    "config.lookahead_config": ("core", "utils.files"),
    "sampling": ("core",),
    "structured_output": ("core",),
    "kv_cache": ("core", "config"),
    "scheduler": ("core", "config", "kv_cache"),
    "expert_offload": ("core", "config"),
    "expert_offload.profile": ("core", "utils.files"),
    "bridge": ("core", "utils"),
    "bridge.ipc": ("core", "utils"),
    "bridge.kv_offload": ("core", "utils", "bridge.ipc", "kv_cache.host_tier"),
    "bridge.build": ("utils", "bridge.ipc", "bridge.kv_offload"),
    "distributed": ("core", "utils", "bridge.ipc", "models.collectives"),
    "spec_decode": ("core", "config", "utils.jit", "utils.topology"),
    "spec_decode.verify": ("core", "utils.jit"),
    "spec_decode.lookahead": ("core", "config", "utils.files", "utils.jit", *_OF_DRAFTS),
    "spec_decode.ngram": (
        "core", "utils.jit", "spec_decode.budget", "spec_decode.lookahead.sequence_state",
        "spec_decode.proposal_account", *_OF_DRAFTS,
    ),
    "spec_decode.draft_model": ("core", "config", "utils.jit", "bridge.ipc", *_OF_DRAFTS),
    # A draft model on the target's device has block tables of its own.
    "spec_decode.draft_model.on_device": ("core", "config", "kv_cache"),
    "models": ("core", "config", "utils", "quantization"),
    "quantization": ("core",),
    "models.configs": (
        "core", "models.config", "models.config_reader", "models.rope_config", "models.registry",
    ),
    "lora": ("core", "models"),
    "runner": ("core", "lora", "models", "sampling", "spec_decode.verify"),
    "pooling": ("core", "config", "utils", "models", "runner"),
    "cpu": (*_DEVICE, "lora"),
    "cpu.expert_team": (*_DEVICE, "bridge.expert_mailbox", "bridge.host_experts"),
    "cpu.draft_worker": (*_DEVICE, "cpu", "spec_decode", "bridge.ipc"),
    "gpu": (*_DEVICE, "bridge.kv_offload", "bridge.expert_mailbox", "bridge.host_experts", "lora"),
    "gpu.kernels": ("models", "quantization.matrix", "sampling", "bridge.expert_mailbox"),
    "engine": _ENGINE,
    "engine.builders": (*_BUILDER, "engine", "quantization.matrix"),
    "engine.factory": _BUILDER,
    "engine.inputs": (*_ENGINE, "engine.text"),
    "engine.pooling": (*_ENGINE, "engine.engine", "engine.inputs", "engine.text"),
    "engine.processes": (*_ENGINE, "engine"),
    "engine.processes.rank_process": (*_BUILDER, "engine"),
    "engine.resolve": (*_ENGINE, "demo_models"),
    "engine.text": _ENGINE,
    "server": ("core", "config", "utils", "engine"),
    "bench_client": ("core", "utils.files", "demo_models", "engine.text.tokenizer"),
    "commands": (
        "core", "config", "utils", "engine", "models", "server", "bench_client", "spec_decode",
        "kv_cache", "pooling",
    ),
    "commands.machine_rates": ("utils", "bridge.kv_offload"),
    "commands.predict": ("core", "config", "models", "expert_offload"),
    "commands.doctor": (
        "core", "config", "utils", "bridge.kv_offload", "cpu", "engine.core_plan",
    ),
    "commands.warmup": (
        "core", "config", "utils", "bridge.build", "cpu.native",
    ),
    "cli": ("core", "config", "utils.dotted_flags", "commands"),
    "demo_models": ("core",),
    # vLLM's import paths.
    "sampling_params": ("core",),
    "inputs": ("core",),
    "outputs": ("core",),
    "beam_search": ("core",),
    "logprobs": ("core",),
    "sequence": ("core",),
    "logger": ("utils",),
    "usage": ("utils",),
    "version": (),
    "tokenizers": ("engine.resolve",),
    "transformers_utils": ("engine.resolve",),
    "pooling_params": ("core",),
    "lora.request": ("core",),
    "prompt_adapter": ("core",),
    "v1": ("core",),
    "v1.engine": ("core", "engine.async_engine", "engine.llm_engine"),
    "entrypoints": ("engine.llm", "cli"),
}  # fmt: skip

# These decide what runs and where its KV lies: no torch, not even by way of others.
SCHEDULING = ("scheduler", "kv_cache", "expert_offload")
HEAVY = (
    "torch", "transformers", "triton", "numba", "fastapi", "uvicorn", "tokenizers", "safetensors",
)  # fmt: skip

# Modules that anyone can import before knowing what the machine has: heavy imports in functions.
LIGHT_AT_THE_TOP = ("", "core", "config", "cli", "commands", *SCHEDULING)


@dataclass(frozen=True)
class Import:
    """One import statement: who, whom (full dotted name), and whether it runs at import time."""

    importer: str
    target: str
    line: int
    at_top: bool


@cache
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
    """The imports in `source`; those under `if TYPE_CHECKING:` do not run, but they count."""
    found = []
    waiting: list[tuple[ast.AST, bool]] = [(ast.parse(source), True)]
    while waiting:
        node, at_top = waiting.pop()
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                found += [Import(module, one.name, child.lineno, at_top) for one in child.names]
            elif isinstance(child, ast.ImportFrom):
                base = _base(child, module, is_package=is_package)
                found += [
                    Import(module, f"{base}.{one.name}", child.lineno, at_top)
                    for one in child.names
                ]
            runs_later = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) or (
                isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            )
            if not isinstance(child, ast.expr):  # which holds no statement
                waiting.append((child, at_top and not runs_later))
    return sorted(found, key=lambda item: item.line)


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
    if target in ("hetero_llm", "hetero_llm.__version__", "hetero_llm.__version_tuple__"):
        return ""
    return target.removeprefix("hetero_llm.") if target.startswith("hetero_llm.") else None


def rule_of(module: str, rules: Iterable[str]) -> str | None:
    """The longest rule that covers the module."""
    return max((name for name in rules if covers(name, module)), key=len, default=None)


def offences(imports: list[Import]) -> list[str]:
    """What breaks the rules, one line each. Everybody may import the package's own top."""
    found = []
    for item in imports:
        target = ours(item.target)
        rule = rule_of(item.importer, MAY_IMPORT)
        if not target or rule is None:
            continue
        folder = rule if modules().get(rule, Path()).name == "__init__.py" else ""
        allowed = (*MAY_IMPORT[rule], folder or rule.rpartition(".")[0])
        if not any(name and covers(name, target) for name in allowed):
            found.append(f"{item.importer}:{item.line} imports {target}")
    return found


def without_rule(names: Iterable[str], rules: Iterable[str]) -> list[str]:
    """Modules that no rule covers, and rules (or what they list) that name nothing."""
    known = set(names)
    rules = list(rules)
    return [name for name in known if rule_of(name, rules) is None] + [
        name for name in rules if name not in known
    ]


def file_graph(imports: Iterable[Import], names: Iterable[str]) -> dict[str, set[str]]:
    """Which module imports which; a name inside a module counts as that module."""
    known = set(names)
    graph: dict[str, set[str]] = {name: set() for name in known}
    for item in imports:
        target = ours(item.target)
        while target and target not in known:
            target = target.rpartition(".")[0]
        if target and target != item.importer:
            graph[item.importer].add(target)
    return graph


def package_graph(graph: Mapping[str, set[str]], depth: int) -> dict[str, set[str]]:
    """The same between names cut to `depth` parts: packages, sub-packages, files beside them."""
    cut: dict[str, set[str]] = {}
    for name, targets in graph.items():
        own = ".".join(name.split(".")[:depth])
        cut.setdefault(own, set()).update(".".join(t.split(".")[:depth]) for t in targets)
    return {name: targets - {name} for name, targets in cut.items()}


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups of names that reach each other, sorted."""
    reach = {name: set(targets) for name, targets in graph.items()}
    changed = True
    while changed:
        changed = False
        for targets in reach.values():
            more = set().union(*(reach.get(t, set()) for t in targets)) - targets
            targets |= more
            changed = changed or bool(more)
    groups = {
        tuple(sorted(other for other in reach[name] if name in reach.get(other, ())))
        for name in reach
        if name in reach[name]
    }
    return sorted(map(list, groups))


@cache
def all_imports() -> list[Import]:
    return [
        item
        for name, path in modules().items()
        for item in imports_of(
            name, path.read_text(encoding="utf-8"), is_package=path.name == "__init__.py"
        )
    ]


@cache
def graph() -> dict[str, set[str]]:
    return file_graph(all_imports(), modules())


def test_packages_import_only_what_they_may() -> None:
    assert offences(all_imports()) == []


def test_every_module_has_a_rule_and_every_rule_a_module() -> None:
    assert without_rule(modules(), MAY_IMPORT) == []
    listed = {name for names in MAY_IMPORT.values() for name in names}
    assert listed - set(modules()) == set()
    assert set(LIGHT_AT_THE_TOP) - set(modules()) == set()


def test_no_circle_of_files() -> None:
    assert circles(graph()) == []


def test_no_circle_of_packages() -> None:
    assert circles(package_graph(graph(), 1)) == []


def test_no_circle_of_sub_packages() -> None:
    assert circles(package_graph(graph(), 2)) == []


def test_light_modules_import_nothing_heavy_at_the_top() -> None:
    heavy = [
        f"{item.importer}:{item.line} imports {item.target}"
        for item in all_imports()
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
        ("core.a", "from hetero_llm import __version__", None),
        ("core.a", "def f():\n    import hetero_llm.models.config", "models.config"),
        ("core.a", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n"
         "    from hetero_llm.engine.llm import LLM", "engine.llm.LLM"),
        ("models.a", "from hetero_llm.sampling import sampler", "sampling.sampler"),
        ("runner.a", "from hetero_llm import models", None),
        ("runner.a", "from hetero_llm.cpu import executor", "cpu.executor"),
        ("runner.a", "from hetero_llm.spec_decode import budget", "spec_decode.budget"),
        ("cpu.a", "from hetero_llm.runner import step", None),
        ("cpu.a", "from hetero_llm.gpu import graph_set", "gpu.graph_set"),
        ("cpu.a", "from ..gpu import graph_set", "gpu.graph_set"),
        ("cpu.a", "from hetero_llm.spec_decode import budget", "spec_decode.budget"),
        ("cpu.draft_worker.a", "from hetero_llm.spec_decode import budget", None),
        ("gpu.a", "import hetero_llm.cpu.executor", "cpu.executor"),
        ("gpu.kernels.a", "from hetero_llm.gpu import graph_set", "gpu.graph_set"),
        ("spec_decode.a", "from hetero_llm.kv_cache import prefix_cache", "kv_cache.prefix_cache"),
        ("spec_decode.lookahead.a", "from hetero_llm.cpu import executor", "cpu.executor"),
        ("spec_decode.lookahead.a", "from hetero_llm.bridge import build", "bridge.build"),
        ("spec_decode.lookahead.a", "from hetero_llm.spec_decode.draft_model import proposer",
         "spec_decode.draft_model.proposer"),
        ("spec_decode.draft_model.on_device", "from hetero_llm.kv_cache import prefix_cache", None),
        ("scheduler.a", "from hetero_llm.kv_cache.block_manager import BlockManager", None),
        ("scheduler.a", "from hetero_llm.spec_decode import budget", "spec_decode.budget"),
        ("kv_cache.a", "from hetero_llm.scheduler import scheduler", "scheduler.scheduler"),
        ("engine.llm", "from hetero_llm.scheduler.scheduler import Scheduler", None),
        ("engine.llm", "from hetero_llm.cpu import executor", "cpu.executor"),
        ("engine.llm", "from hetero_llm.engine.factory import make", None),
        ("engine.factory", "from hetero_llm.gpu import model_runner", None),
        ("engine.factory", "from hetero_llm.engine.llm import LLM", None),
        ("server.app", "from hetero_llm.cpu import executor", "cpu.executor"),
        ("cli", "from hetero_llm.cpu import executor", "cpu.executor"),
    ],
)  # fmt: skip
def test_the_rule_itself(module: str, source: str, offence: str | None) -> None:
    found = offences(imports_of(module, source))
    assert [line.rpartition(" ")[2] for line in found] == ([offence] if offence else [])


def test_a_module_without_a_rule_and_a_rule_without_a_module_are_found() -> None:
    assert without_rule(["core", "core.a", "new.b"], ["core", "gone"]) == ["new.b", "gone"]


@pytest.mark.parametrize(
    ("sources", "depth", "expected"),
    [
        ({"a.x": "a.y", "a.y": ""}, 9, []),
        ({"a.x": "a.y", "a.y": "a.x"}, 9, [["a.x", "a.y"]]),
        ({"a.x": "b.x", "b.x": "", "b.y": "a.x"}, 9, []),
        ({"a.x": "b.x", "b.x": "", "b.y": "a.x"}, 1, [["a", "b"]]),
        ({"a.b.x": "a.c.x", "a.c.x": "", "a.c.y": "a.b.x"}, 1, []),
        ({"a.b.x": "a.c.x", "a.c.x": "", "a.c.y": "a.b.x"}, 2, [["a.b", "a.c"]]),
        ({"a.x": "a.y", "a.y": "a.z", "a.z": "a.x", "a.w": "a.x"}, 9, [["a.x", "a.y", "a.z"]]),
    ],
)
def test_circles_are_found(sources: dict[str, str], depth: int, expected: list[list[str]]) -> None:
    under = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import hetero_llm."
    imports = [
        item
        for name, target in sources.items()
        for item in imports_of(name, under + target if target else "")
    ]
    assert circles(package_graph(file_graph(imports, sources), depth)) == expected


def _loaded(code: str, names: tuple[str, ...]) -> set[str]:
    """Which of `names` are loaded after running `code` in a fresh interpreter."""
    script = f"{code}\nimport sys\nprint(*sorted(set({names!r}) & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return set(done.stdout.split())


def test_importing_the_package_loads_nothing_heavy() -> None:
    assert _loaded("import hetero_llm", HEAVY) == set()


def test_importing_vllms_paths_loads_nothing_heavy() -> None:
    paths = "sampling_params inputs outputs beam_search pooling_params lora.request"
    names = [*paths.split(), "prompt_adapter.request", "engine.arg_utils", "v1.metrics.reader"]
    code = "\n".join(f"import hetero_llm.{name}" for name in names)
    assert _loaded(f"{code}\nfrom hetero_llm import EngineArgs, SamplingParams", HEAVY) == set()


def test_importing_the_command_line_loads_nothing_heavy() -> None:
    code = "import hetero_llm.cli, hetero_llm.commands.doctor"
    assert _loaded(code, (*HEAVY, "numpy")) == set()


def test_scheduling_modules_load_no_torch() -> None:
    names = [name for name in modules() if any(covers(part, name) for part in SCHEDULING)]
    assert names
    code = "\n".join(f"import hetero_llm.{name}" for name in names)
    assert _loaded(code, HEAVY) == set()
