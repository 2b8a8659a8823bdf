"""Tests know a module as its callers know it: by public names alone.

A name with a leading underscore belongs to the class or module that defines it. The classes of a
test use their own such names through `self` and `cls`. Every other use is found here, however it is
written:

- `engine._queue`, also where another test file defines the class of `engine`;
- `self._queue` where no class of the tests defines `_queue`, or where the class inherits from one
  of hetero_llm and hetero_llm has a `_queue`, too;
- `from hetero_llm.engine import _queue`;
- `monkeypatch.setattr(engine, "_queue", ...)` and other calls that take an attribute's name;
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

# Names that a file may use nevertheless, with the reason.
EXEMPT: dict[str, set[str]] = {
    "tests/bench_client/test_client.py": {"_LONGEST_ANSWER"},
    "tests/bench_client/virtual_time.py": {"_selector"},
    "tests/bridge/ipc/test_messages.py": {"_fresh", "_handle", "_library"},
    "tests/bridge/ipc/test_rings.py": {"_MAX_SHAPES", "_handle", "_popped"},
    "tests/bridge/kv_offload/conftest.py": {"_bases", "_free_flags"},
    "tests/bridge/kv_offload/test_copier.py": {"_bases"},
    "tests/bridge/kv_offload/test_copier_failures.py": {"_free_flags"},
    "tests/bridge/kv_offload/test_pinned_host_tier.py": {
        "_FAILURES_IN_A_ROW",
        "_PATIENCE_S",
        "_loads",
        "_pins",
        "_refused",
        "_stores",
    },
    "tests/bridge/kv_offload/test_pinned_pool.py": {"_load"},
    "tests/clients/scripts/drive_langchain.py": {"_convert_input"},
    "tests/commands/test_bench.py": {"_health"},
    "tests/commands/test_chat.py": {"_read_line"},
    "tests/commands/test_doctor.py": {
        "_DRIVER",
        "_PACKAGE_FOLDER",
        "_demo_models",
        "_gpu",
        "_import_topology",
        "_native_executor",
        "_numbers",
        "_obj",
        "_offload",
        "_packages",
        "_system",
        "_version_of",
    },
    "tests/cpu/test_ipex.py": {"_engine_parts", "_model", "_runner"},
    "tests/cpu/test_model_runner.py": {"_engine_parts", "_load_weights", "_runner"},
    "tests/cpu/test_native.py": {"_SOURCES"},
    "tests/cpu/test_step_profile.py": {"_drafter", "_engine_parts", "_runner", "_scheduler"},
    "tests/engine/test_async_engine.py": {"_finish_times", "_streams"},
    "tests/engine/test_engine_process.py": {"_MOST_UNSENT"},
    "tests/engine/test_factory_memory.py": {"_check_offload"},
    "tests/engine/test_images.py": {"_built", "_input_processor", "_model", "_runner"},
    "tests/engine/test_llm.py": {"_built", "_runner"},
    "tests/engine/test_tokenizer.py": {"_fast"},
    "tests/faults/test_draft_faults.py": {
        "_BACK_OFF",
        "_MAX_DEATHS",
        "_clock",
        "_generation",
        "_generations",
        "_model",
        "_process",
        "_receive",
        "_replica",
        "_worker",
    },
    "tests/faults/test_engine_faults.py": {"_streams"},
    "tests/gpu/kernels/test_experts.py": {"_CHUNK"},
    "tests/gpu/kernels/test_skinny_gemm.py": {"_counters"},
    "tests/gpu/scenarios/serving.py": {"_engine_parts", "_runner"},
    "tests/gpu/scenarios/test_chain_drafter_cuda.py": {
        "_blocks",
        "_drafter",
        "_engine_parts",
        "_runner",
        "_scheduler",
    },
    "tests/gpu/scenarios/test_doctor_cuda.py": {"_offload"},
    "tests/gpu/scenarios/test_graphs_and_stepping.py": {
        "_asynchronous",
        "_cache",
        "_engine_parts",
        "_input_processor",
        "_output_processor",
        "_pending",
        "_runner",
        "_scheduler",
    },
    "tests/gpu/scenarios/test_kv_load_cuda.py": {"_sleep", "_write"},
    "tests/gpu/scenarios/test_loading_cuda.py": {"_Match", "_pieces"},
    "tests/gpu/scenarios/test_lookahead_cuda.py": {"_drafter", "_engine_parts", "_scheduler"},
    "tests/gpu/scenarios/test_mistakes_cuda.py": {
        "_asynchronous",
        "_engine_parts",
        "_num_synchronous",
        "_scheduler",
    },
    "tests/gpu/scenarios/test_offload_cuda.py": {
        "_blocks",
        "_cache",
        "_copier",
        "_engine_parts",
        "_layer_ready",
        "_scheduler",
    },
    "tests/gpu/scenarios/test_precision.py": {"_cache", "_model"},
    "tests/gpu/scenarios/test_transformers_backend_cuda.py": {"_mlps_of_experts"},
    "tests/gpu/test_memory_cuda.py": {"_engine_parts"},
    "tests/gpu/test_model_runner_chain_steps.py": {"_blocks", "_runner"},
    "tests/helpers/beside.py": {"_scheduler"},
    "tests/helpers/offload_traffic.py": {"_blocks", "_copier", "_index", "_scheduler"},
    "tests/helpers/verifier_mutants.py": {"_accept", "_drop_tokens", "_num_before_end"},
    "tests/kv_cache/test_hit_log.py": {"_write"},
    "tests/models/test_experts_transformers.py": {"_experts_implementation"},
    "tests/models/test_loader_checks.py": {"_Match", "_pieces"},
    "tests/models/test_transformers_backend.py": {"_attn_implementation", "_mlps_of_experts"},
    "tests/runner/test_attention.py": {"_SCORES_AT_ONCE"},
    "tests/runner/test_verify.py": {"_history"},
    "tests/scenarios/test_async_stepping.py": {
        "_built",
        "_input_processor",
        "_output_processor",
        "_preempt",
        "_runner",
        "_scheduler",
    },
    "tests/scenarios/test_cpu_backend.py": {"_engine_parts", "_native_backend", "_runner"},
    "tests/scenarios/test_draft_worker.py": {"_model"},
    "tests/scenarios/test_drafts_beside.py": {"_runner"},
    "tests/scenarios/test_lookahead_store.py": {"_built"},
    "tests/scenarios/test_offload_closed.py": {
        "_FIRST_PART",
        "_LARGER",
        "_LONG_PREFIX",
        "_add_duplicate",
        "_by_lookup_key",
        "_drop_descendants",
        "_dropped",
        "_hash",
        "_hash_of",
        "_index",
        "_prefix",
        "_refs",
        "_scheduler",
        "_state",
    },
    "tests/scenarios/test_offload_invariants.py": {"_drafter", "_limits", "_rng", "_scheduler"},
    "tests/scenarios/test_offload_scheduling.py": {"_FIRST_PART", "_LARGER", "_LONG_PREFIX"},
    "tests/scenarios/test_offload_times.py": {"_FUNCTIONS", "_handle", "_set"},
    "tests/server/endpoints/test_page.py": {
        "_CHILDREN_SECONDS",
        "_KEPT_SECONDS",
        "_driver",
        "_obj",
    },
    "tests/server/fake_engine.py": {"_find_stop"},
    "tests/server/test_connection.py": {"_SPARE_CONNECTIONS"},
    "tests/server/test_templates.py": {"_MOST_WORKERS", "_PATIENCE", "_QUEUE_SECONDS"},
    "tests/server/test_tracing.py": {"_SECONDS_TO_SEND"},
    "tests/spec_decode/draft_model/test_on_device.py": {"_drafter", "_runner", "_scheduler"},
    "tests/spec_decode/draft_model/test_proposer.py": {
        "_FIRST_CHOICES",
        "_MAX_SENDS",
        "_NUM_EXTENDED_LEAVES",
        "_clock",
        "_commit",
        "_counts",
        "_generation",
        "_generations",
        "_open_leaves",
        "_stats",
    },
    "tests/spec_decode/draft_model/test_tree_replica.py": {"_add_messages"},
    "tests/spec_decode/draft_model/test_worker_client.py": {
        "_MAX_WAITING",
        "_STOP_SECONDS",
        "_generation",
        "_process",
    },
    "tests/spec_decode/lookahead/test_snapshot.py": {"_open_temporary"},
    "tests/spec_decode/lookahead/test_warmup.py": {"_BATCH", "_CHUNK", "_MARGIN"},
    "tests/spec_decode/test_hybrid_drafter.py": {"_num_threads", "_step", "_turn"},
    "tests/test_no_privates.py": {"_both", "_engine", "_mine", "_queue"},
    "tests/utils/test_gc_control.py": {"_YOUNG_COLLECTIONS"},
    "tests/utils/test_topology.py": {"_allowed_cpus"},
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
    """Private names of classes: those that the tests define, and those that hetero_llm defines."""

    tests: frozenset[str]
    package: frozenset[str]


def is_private(name: str) -> bool:
    """Whether the name belongs to whoever defined it: `_x` and `__x`, but not `_` or `__x__`."""
    if name in DOCUMENTED or (name.startswith("__") and name.endswith("__")):
        return False
    return name.startswith("_") and name.strip("_") != ""


def names_of_classes(tree: ast.AST) -> set[str]:
    """Private methods and attributes of a file's classes, those assigned to `self` included."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for part in node.body:
                if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
                    names.add(part.name)
                elif isinstance(part, ast.Assign | ast.AnnAssign):
                    targets = part.targets if isinstance(part, ast.Assign) else [part.target]
                    names.update(target.id for target in targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node):
            names.add(node.attr)
    return {name for name in names if is_private(name)}


def uses_in(source: str, defined: Defined) -> Iterator[Use]:
    """Every use in a file's source of a private name that is not the test's own."""
    tree = ast.parse(source)
    inside = _of_package_subclasses(tree)
    for node in ast.walk(tree):
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
        elif isinstance(node, ast.Constant) and "import " in _text(node):
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


def _of_package_subclasses(tree: ast.AST) -> set[int]:
    """Ids of all nodes inside classes that inherit from something imported from hetero_llm."""
    imported = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for one in node.names:
                source = node.module if isinstance(node, ast.ImportFrom) else one.name
                if (source or "").split(".")[0] == "hetero_llm":
                    imported.add((one.asname or one.name).split(".")[0])
    return {
        id(inner)
        for node in ast.walk(tree)
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
    def names(folder: str) -> frozenset[str]:
        files = (ROOT / folder).rglob("*.py")
        return frozenset().union(*(names_of_classes(ast.parse(path.read_text())) for path in files))

    return Defined(names("tests"), names("hetero_llm"))


def test_no_test_uses_a_private_name_that_it_did_not_define() -> None:
    found = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
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
        ("run('''\n  import engine\n  engine.step()\n  engine._queue\n''')", ["_queue"]),
        ("row._replace(a=1)._asdict(), os._exit(1), x.__dict__, [_ for _ in x]", []),
    ],
)
def test_what_counts_as_a_use(source: str, names: list[str]) -> None:
    defined = Defined(frozenset({"_mine", "_both"}), frozenset({"_both", "_queue"}))
    assert sorted(use.name for use in uses_in(source, defined)) == names
