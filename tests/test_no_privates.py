"""Tests know a module as its callers know it: by public names alone.

A name with a leading underscore belongs to the class or module that defines it. The classes of a
test use their own such names through `self` and `cls`. Every other use is found here, however it is
written:

- `engine._queue`, also where another test file defines the class of `engine`;
- `self._queue` where no class of the tests defines `_queue`, or where the class inherits from one
  of hetero_llm and hetero_llm has a `_queue`, too;
- `from hetero_llm.engine import _queue`;
- `monkeypatch.setattr(engine, "_queue", ...)` and other calls that take an attribute's name;
- `"_queue"`, a string that is such a name of hetero_llm;
- any of these in a script that the test holds as a string and runs elsewhere.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Public by the documentation of Python, in spite of the underscore.
DOCUMENTED = {"_asdict", "_field_defaults", "_fields", "_make", "_replace", "_exit", "_getframe"}

# Names that a file may use nevertheless.
EXEMPT: dict[str, set[str]] = {
    # torch has no public call that keeps a stream busy for a number of cycles.
    "tests/gpu/scenarios/test_kv_load_cuda.py": {"_sleep"},
    "tests/gpu/scenarios/test_slot_loads_cuda.py": {"_sleep"},
    # transformers has no public name for the implementation that a configuration has chosen.
    "tests/models/test_experts_transformers.py": {"_experts_implementation"},
    "tests/models/test_transformers_backend.py": {"_attn_implementation"},
    # A module of the standard library, whose file stands for machine code.
    "tests/utils/test_triton_cache.py": {"_ctypes"},
    # Endings of Prometheus names.
    "tests/server/endpoints/test_info.py": {"_count", "_total"},
}

# Calls that may name an attribute in their first two arguments: `getattr(x, "_name")`.
_TAKE_NAMES = {
    "getattr", "setattr", "delattr", "hasattr", "attrgetter", "methodcaller",
    "__getattribute__", "__setattr__", "patch", "object", "import_module",
}  # fmt: skip


@dataclass(frozen=True)
class Use:
    """One use of a private name: its line, and the name."""

    line: int
    name: str


@dataclass(frozen=True)
class Defined:
    """Private names: those of the tests' classes, and those of hetero_llm's classes and modules."""

    tests: frozenset[str]
    package: frozenset[str]


def is_private(name: str) -> bool:
    """Whether the name belongs to whoever defined it: `_x` and `__x`, but not `_` or `__x__`."""
    if name in DOCUMENTED or (name.startswith("__") and name.endswith("__")):
        return False
    return name.startswith("_") and name.strip("_") != ""


def _nodes(source: str) -> tuple[ast.AST, ...]:
    """All nodes of a file, the module first."""
    return tuple(ast.walk(ast.parse(source)))


def private_names(source: str, *, of_module: bool) -> set[str]:
    """Private methods and attributes of a file's classes, those assigned to `self` included.

    Args:
        of_module: add functions and variables of the module itself.
    """
    names: set[str] = set()
    for node in _nodes(source):
        if isinstance(node, ast.ClassDef) or (of_module and isinstance(node, ast.Module)):
            for part in node.body:
                if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    names.add(part.name)
                elif isinstance(part, ast.Assign | ast.AnnAssign):
                    targets = part.targets if isinstance(part, ast.Assign) else [part.target]
                    names.update(target.id for target in targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node):
            names.add(node.attr)
    return {name for name in names if is_private(name)}


def uses_in(source: str, defined: Defined) -> Iterator[Use]:
    """Every use in a file's source of a private name that is not the test's own."""
    nodes = _nodes(source)
    inside = _of_package_subclasses(nodes)
    # A piece of an f-string is the end of another word: f"{name}_total".
    parts_of_names = {
        id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values
    }
    for node in nodes:
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            own = node.attr in defined.tests
            if id(node) in inside:
                own = own and node.attr not in defined.package
            if not (own and (_is_self(node) or _is_super(node))):
                yield Use(node.lineno, node.attr)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [one.name for one in node.names]
            if isinstance(node, ast.ImportFrom):
                names.append(node.module or "")
            yield from _private_parts(node.lineno, names)
        elif isinstance(node, ast.Call) and _called(node) in _TAKE_NAMES:
            yield from _private_parts(node.lineno, [_text(given) for given in node.args[:2]])
        elif isinstance(node, ast.Constant) and id(node) not in parts_of_names:
            if _text(node) in defined.package:
                yield Use(node.lineno, _text(node))
            elif "import " in _text(node):
                yield from _uses_in_script(node, defined)


def _is_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def _is_super(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Call) and _called(node.value) == "super"


def _called(call: ast.Call) -> str:
    """The last name of what is called: "patch" for `mock.patch(...)`."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def _text(node: ast.AST) -> str:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def _private_parts(line: int, dotted: list[str]) -> Iterator[Use]:
    for name in dotted:
        yield from (Use(line, part) for part in name.split(".") if is_private(part))


def _of_package_subclasses(nodes: tuple[ast.AST, ...]) -> set[int]:
    """Ids of all nodes inside classes that inherit from something imported from hetero_llm."""
    imported = set()
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            for one in node.names:
                source = node.module if isinstance(node, ast.ImportFrom) else one.name
                if (source or "").split(".")[0] == "hetero_llm":
                    imported.add((one.asname or one.name).split(".")[0])
    return {
        id(inner)
        for node in nodes
        if isinstance(node, ast.ClassDef)
        and any(
            isinstance(part, ast.Name) and part.id in imported
            for base in node.bases
            for part in ast.walk(base)
        )
        for inner in ast.walk(node)
    }


def _uses_in_script(node: ast.Constant, defined: Defined) -> Iterator[Use]:
    """Uses inside a string that is Python source; none if it is not."""
    try:
        inner = list(uses_in(textwrap.dedent(_text(node)), defined))
    except SyntaxError:
        return
    yield from (Use(node.lineno, use.name) for use in inner)


@cache
def _defined() -> Defined:
    def names(folder: str, of_module: bool) -> frozenset[str]:
        sources = (path.read_text() for path in (ROOT / folder).rglob("*.py"))
        return frozenset().union(*(private_names(one, of_module=of_module) for one in sources))

    return Defined(names("tests", False), names("hetero_llm", True))


def test_no_test_uses_a_private_name_that_it_did_not_define() -> None:
    found = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        if path == Path(__file__):  # the cases below are such uses
            continue
        name = path.relative_to(ROOT).as_posix()
        uses = set(uses_in(path.read_text(), _defined()))
        found += [
            f"{name}:{use.line} {use.name}"
            for use in sorted(uses, key=lambda use: use.line)
            if use.name not in EXEMPT.get(name, set())
        ]
    assert found == []


def test_every_exemption_is_in_use() -> None:
    unused = [
        (name, private)
        for name, privates in EXEMPT.items()
        for private in privates
        if all(use.name != private for use in uses_in((ROOT / name).read_text(), _defined()))
    ]
    assert unused == []


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("engine._queue.clear()", ["_queue"]),
        ("engine._queue._head", ["_head", "_queue"]),
        ("class Fake:\n    def put(self):\n        self._mine = 1", []),
        ("class Fake:\n    def put(self):\n        self._mine._queue = 1", ["_queue"]),
        ("class Fake:\n    def put(self):\n        self._theirs", ["_theirs"]),
        ("class Fake:\n    def put(self):\n        super()._mine()", []),
        ("def other(fake):\n    fake._mine()", ["_mine"]),
        (
            "from hetero_llm.engine import Engine\n"
            "class Fake(Engine):\n    def put(self):\n        self._mine = self._both",
            ["_both"],
        ),
        ("from hetero_llm.engine import _queue", ["_queue"]),
        ("import hetero_llm._engine", ["_engine"]),
        ("monkeypatch.setattr(engine, '_LIMIT', 1)", ["_LIMIT"]),
        ("monkeypatch.setattr('hetero_llm.engine._LIMIT', 1)", ["_LIMIT"]),
        ("getattr(engine, '_queue')", ["_queue"]),
        ("for name in ('_queue', '_total'):\n    getattr(engine, name)", ["_queue"]),
        ("run('''\n  import engine\n  engine.step()\n  engine._queue\n''')", ["_queue"]),
        ("row._replace(a=1)._asdict(), os._exit(1), x.__dict__, [_ for _ in x]", []),
    ],
)
def test_what_counts_as_a_use(source: str, names: list[str]) -> None:
    defined = Defined(frozenset({"_mine", "_both"}), frozenset({"_both", "_queue"}))
    assert sorted({use.name for use in uses_in(source, defined)}) == names
