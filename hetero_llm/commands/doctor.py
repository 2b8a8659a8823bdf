"""`hetero-llm doctor`: shows what this machine offers, what is missing, and how to install it;
`hetero-llm doctor MODEL`: what a model would need here, and how fast it would be.

It must work on a broken installation: only the standard library is imported at the top, and each
use of a third-party package may fail.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetero_llm import __version__
from hetero_llm.commands.console import Finish, held_files, write
from hetero_llm.config.parallel_config import MAX_RANKS
from hetero_llm.core.errors import ConfigError
from hetero_llm.cpu import ipex_version

if TYPE_CHECKING:
    from hetero_llm.commands.machine_rates import Rates
    from hetero_llm.commands.predict import ModelSizes, Prediction

REQUIRED_PACKAGES = {
    "torch": "2.8",
    "transformers": "4.51",
    "tokenizers": "0.21",
    "safetensors": "0.4.5",
    "huggingface-hub": "0.30",
    "numba": "0.60",
    "numpy": "1.26",
    "psutil": "5.9",
    "tqdm": "4.66",
    "llguidance": "1.9",
}
"""Packages that pyproject.toml requires -> lowest version."""

OPTIONAL_PACKAGES = ("triton",)
DEMO_MODELS = ("demo", "demo-draft")
COMPILERS = ("c++", "g++", "clang++")
SUPPORTED_PYTHON = ((3, 11), (3, 13))

_PACKAGE_FOLDER = Path(__file__).parents[1]
_GIB = 1 << 30
_USUAL_BLOCK_BYTES = 2 << 20  # a KV block of 16 tokens of an 8B model
_PINNED_BLOCKS = 32

Facts = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Missing:
    """Something that is missing, and how to get it. `needed`: the engine cannot run without it."""

    what: str
    fix: str
    needed: bool


@dataclass(frozen=True, slots=True)
class Report:
    """Facts by section, in the order in which they are shown, and what is missing."""

    sections: dict[str, Facts]
    missing: tuple[Missing, ...]

    @property
    def can_run(self) -> bool:
        """Whether nothing that the engine needs is missing."""
        return not any(thing.needed for thing in self.missing)


def examine(titles: Iterable[str] | None = None) -> Report:
    """Examines the machine. Imports torch, if it is installed, to find the GPUs, and compiles the
    CPU library unless it is in the cache.

    Args:
        titles: of the sections to make, see `SECTIONS`; None: all.
    """
    sections: dict[str, Facts] = {}
    missing: list[Missing] = []
    for title in SECTIONS if titles is None else titles:
        sections[title], lacking = SECTIONS[title]()
        missing.extend(lacking)
    return Report(sections, tuple(dict.fromkeys(missing)))


def as_text(report: Report) -> str:
    """The report for people."""
    lines = [_section_text(report.sections) + "Missing"]
    for thing in report.missing:
        kind = "needed" if thing.needed else "optional"
        lines.append(f"  {thing.what} ({kind})\n    -> {thing.fix}")
    if not report.missing:
        lines.append("  nothing")
    verdict = "The engine can run here." if report.can_run else "The engine cannot run yet."
    return "\n".join([*lines, verdict]) + "\n"


def _section_text(sections: dict[str, Facts]) -> str:
    lines: list[str] = []
    for title, facts in sections.items():
        width = max((len(name) for name in facts), default=0)
        lines.append(title)
        behind = "\n" + " " * (width + 4)  # of a value's further lines
        lines.extend(
            f"  {name:<{width}}  {str(value).replace(chr(10), behind)}"
            for name, value in facts.items()
        )
    return "".join(f"{line}\n" for line in lines)


def as_json(report: Report) -> str:
    """The report for programs."""
    missing = [dataclasses.asdict(thing) for thing in report.missing]
    content = {"can_run": report.can_run, "sections": report.sections, "missing": missing}
    return json.dumps(content, indent=2) + "\n"


def _system() -> tuple[Facts, list[Missing]]:
    facts = {
        "hetero_llm": __version__,
        "Python": platform.python_version(),
        "OS": f"{platform.system()} {platform.release()} {platform.machine()}",
    }
    low, high = SUPPORTED_PYTHON
    if low <= sys.version_info[:2] <= high:
        return facts, []
    wanted = " to ".join(f"{major}.{minor}" for major, minor in SUPPORTED_PYTHON)
    return facts, [Missing(f"Python {wanted}", "python3.12 -m venv .venv", needed=True)]


def _cpu() -> tuple[Facts, list[Missing]]:
    topology = _import_topology()
    if topology is None:
        return {"model": platform.processor() or platform.machine()}, []
    host = topology.read_topology()
    quota = "no limit" if host.cpu_quota is None else f"{host.cpu_quota:g} CPUs"
    facts: Facts = {
        "model": host.model_name,
        "instruction sets": " ".join(host.isa) or "none of " + " ".join(topology.ISA_FLAGS),
        "cores": f"{host.physical_cores}, with {host.hyperthreads} thread(s) each",
        "allowed": f"{host.allowed_cores} cores, {len(host.allowed_cpus)} threads",
        "cgroup quota": quota,
        "usable cores": host.usable_cores,
        **_core_plans(topology),
    }
    for node in host.numa_nodes:
        memory = f"{node.memory_bytes / _GIB:.1f} GiB"
        facts[f"NUMA node {node.index}"] = f"{len(node.cpus)} threads, {memory}"
    return facts, []


def _core_plans(topology: Any) -> dict[str, str]:
    """The cores of engine, draft worker and KV copy thread, for each kind of target."""
    from hetero_llm.engine.core_plan import deal_cores, deal_to_engine

    cpus = topology.compute_cpus(reserve=0)

    def with_drafts(target: str, *, copies: bool = False) -> str:
        on_cpu = target == "CPU"
        return deal_cores(cpus, target_on_cpu=on_cpu, draft_threads=None, copies=copies).words()

    return {
        "drafts for a GPU": with_drafts("GPU"),
        "drafts for a CPU": with_drafts("CPU"),
        "offload for a GPU": deal_to_engine(cpus).words(),
        "drafts and offload": with_drafts("GPU", copies=True),
    }


def _memory() -> tuple[Facts, list[Missing]]:
    facts: Facts = {}
    topology = _import_topology()
    if topology is not None:
        host = topology.read_topology()
        limit = host.memory_limit
        facts["total"] = f"{host.total_memory / _GIB:.1f} GiB"
        facts["available"] = f"{host.available_memory / _GIB:.1f} GiB"
        facts["cgroup limit"] = "none" if limit is None else f"{limit.limit_bytes / _GIB:.1f} GiB"
        facts["usable now"] = f"{topology.usable_memory_bytes() / _GIB:.1f} GiB"
    facts["transparent huge pages"] = transparent_huge_pages(
        _read("/sys/kernel/mm/transparent_hugepage/enabled")
    )
    facts["reserved huge pages"] = reserved_huge_pages(_read("/proc/meminfo"))
    return facts, []


def _gpu() -> tuple[Facts, list[Missing]]:
    driver = driver_version(_read("/proc/driver/nvidia/version"))
    facts: Facts = {"driver": driver or "none"}
    try:
        import torch
    except Exception as error:  # a broken installation fails in many ways
        facts["devices"] = f"unknown: torch cannot be imported ({type(error).__name__}: {error})"
        if _version_of("torch") is None:
            return facts, []  # reported with the packages
        fix = "pip install --force-reinstall torch"
        return facts, [Missing("a torch that can be imported", fix, needed=True)]
    facts["torch built for"] = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU only"
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index in range(count):
        device = torch.cuda.get_device_properties(index)
        facts[f"device {index}"] = f"{device.name}, {device.total_memory / _GIB:.1f} GiB"
    if count == 0:
        facts["devices"] = "none that torch can use"
        if driver and not torch.version.cuda:
            fix = "pip install --force-reinstall torch  (a build for CUDA)"
            return facts, [Missing("torch for CUDA, to use the GPU", fix, needed=False)]
    return facts, []


def _offload() -> tuple[Facts, list[Missing]]:
    """What enable_prefix_cache_offload can use on this machine."""
    facts: Facts = {"host memory": _pool_words()}
    try:
        import torch

        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    except Exception:  # reported with the GPU
        count = 0
    if not count:
        facts["copies"] = "none: without a GPU it has no effect"
        return facts, []
    from hetero_llm.utils import numa

    for index in range(count):
        node = numa.numa_node(index)
        facts[f"NUMA node of device {index}"] = "not known" if node is None else node
    facts["pinned memory"] = _pinning()
    facts["copies"] = _calibration()
    return facts, []


def _pool_words() -> str:
    """Size of the host pool with the default arguments."""
    topology = _import_topology()
    if topology is None:
        return "unknown: psutil is missing"
    from hetero_llm.bridge.kv_offload.sizing import pool_size
    from hetero_llm.config.args import spec_of
    from hetero_llm.core.errors import ConfigError

    spec = spec_of("cpu_prefill_memory_utilization")
    assert spec is not None
    host = topology.read_topology()
    limit = host.memory_limit
    try:
        return pool_size(
            spec.default,
            total_bytes=host.total_memory,
            available_bytes=host.available_memory,
            headroom_bytes=None if limit is None else limit.headroom_bytes,
            row_bytes=_USUAL_BLOCK_BYTES,
        ).sentence
    except ConfigError as error:
        return str(error)


def _pinning() -> str:
    """Whether memory can be pinned for the first GPU; tries a small pool."""
    try:
        import torch

        from hetero_llm.bridge.kv_offload.pinned_pool import PinnedPool

        torch.zeros(1, device="cuda")  # memory is pinned for the current context
        pool = PinnedPool(_USUAL_BLOCK_BYTES, _PINNED_BLOCKS)
        try:
            failure = pool.failure
            return f"does not work: {failure}" if failure else f"works, {pool.placement}"
        finally:
            pool.close()
    except Exception as error:
        return f"does not work: {_first(error)}"


def _calibration() -> str:
    """Copy rates of the first GPU, measured now."""
    try:
        from hetero_llm.bridge.kv_offload.copy_calibration import calibrate_device
    except ImportError as error:
        return f"not available: {_first(error)}"
    try:
        return str(calibrate_device().table())
    except Exception as error:
        return f"cannot be measured: {_first(error)}"


def _packages() -> tuple[Facts, list[Missing]]:
    facts: Facts = {}
    missing = []
    for name, lowest in REQUIRED_PACKAGES.items():
        version = _version_of(name)
        facts[name] = version or "not installed"
        if version is None or _numbers(version) < _numbers(lowest):
            fix = f"pip install '{name}>={lowest}'  (in a checkout: make install)"
            missing.append(Missing(f"{name} {lowest} or later", fix, needed=True))
    for name in OPTIONAL_PACKAGES:
        facts[name] = _version_of(name) or "not installed"
    ipex, torch = _version_of(ipex_version.PACKAGE), _version_of("torch")
    facts[ipex_version.PACKAGE] = ipex or "not installed"
    if ipex is not None and torch is not None:
        problem = ipex_version.mismatch(ipex, torch)
        facts[ipex_version.PACKAGE] = (
            f"{ipex}, {'fits' if problem is None else 'not for'} torch {torch}"
        )
        if problem is not None:
            fix = f"in an environment of its own: {ipex_version.INSTALL}"
            what = f"a torch for {ipex_version.PACKAGE} {ipex}, to use cpu_backend='ipex'"
            missing.append(Missing(what, fix, needed=False))
    return facts, missing


def _demo_models() -> tuple[Facts, list[Missing]]:
    facts: Facts = {}
    missing = []
    for name in DEMO_MODELS:
        present = (_PACKAGE_FOLDER / "demo_models" / name / "config.json").is_file()
        facts[name] = "present" if present else "not there"
        if not present:
            fix = "in a checkout: python tools/train_demo_pair.py hetero_llm/demo_models"
            missing.append(Missing(f"embedded model {name!r}", fix, needed=False))
    return facts, missing


def _tools() -> tuple[Facts, list[Missing]]:
    path = next(filter(None, map(shutil.which, COMPILERS)), None)
    version = "none" if path is None else _first_line([path, "--version"]) or path
    executor = _native_executor()
    facts = {"C++ compiler": version, "native CPU executor": executor, **_compiled_code()}
    if path is not None or not executor.startswith("none"):
        return facts, []
    fix = "install a C++ compiler, e.g. apt-get install g++"
    return facts, [Missing("a C++ compiler", fix, needed=False)]


def _compiled_code() -> Facts:
    """Folders of compiled code: the one that is written to, and one that is only read."""
    from hetero_llm.utils import cache_folder
    from hetero_llm.utils.env import cache_dir

    written, chosen = cache_folder.write_folder(), cache_dir()
    folders = {"compiled code": written}
    if chosen is not None and chosen != written:
        folders["compiled code, read only"] = chosen
    if cache_folder.PREBUILT.is_dir():
        folders["prebuilt libraries"] = cache_folder.PREBUILT
    return {name: f"{folder}, {held_files(folder)}" for name, folder in folders.items()}


def _first(error: Exception) -> str:
    """The first line of the error's message, or the name of its class."""
    return str(error).partition("\n")[0] or type(error).__name__


def _native_executor() -> str:
    """Instruction set of the native executor, which is compiled unless it is in the cache; or why
    there is none."""
    try:
        from hetero_llm.cpu import native
        from hetero_llm.utils.env import native_choice

        if native_choice() == "0":
            return "none, HETERO_LLM_NATIVE=0: plain torch serves"
        level = native.isa_level(native.open_library())
        return f"for {native.ISA_NAMES[level]}"
    except Exception as error:  # without psutil, torch, a compiler, a writable cache ...
        return f"none, plain torch serves: {_first(error)}"


def transparent_huge_pages(text: str) -> str:
    """The chosen word of `always [madvise] never`."""
    chosen = re.search(r"\[(\w+)\]", text)
    return chosen.group(1) if chosen else "unknown"


def reserved_huge_pages(meminfo: str) -> str:
    """How many explicit huge pages the kernel holds, from the text of /proc/meminfo."""
    count = re.search(r"^HugePages_Total:\s+(\d+)", meminfo, re.MULTILINE)
    size = re.search(r"^Hugepagesize:\s+(\d+) kB", meminfo, re.MULTILINE)
    if not count or not size:
        return "unknown"
    return f"{count.group(1)} of {int(size.group(1)) // 1024} MiB"


def driver_version(text: str) -> str:
    """The NVIDIA driver's version, from the text of /proc/driver/nvidia/version."""
    found = re.search(r"Kernel Module\D*?\s(\d+\.\d+(?:\.\d+)?)\s", text.replace("x86_64", ""))
    return found.group(1) if found else ""


def _import_topology() -> Any:
    try:
        from hetero_llm.utils import topology
    except ImportError:  # psutil is missing: reported with the packages
        return None
    return topology


def _version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version: enough to compare a release with a lower bound."""
    release = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, release.group().split("."))) if release else ()


def _first_line(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.partition("\n")[0].strip()


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


SECTIONS: dict[str, Callable[[], tuple[Facts, list[Missing]]]] = {
    "System": _system,
    "CPU": _cpu,
    "Memory": _memory,
    "GPU": _gpu,
    "Prefix cache offload": _offload,
    "Packages": _packages,
    "Demo models": _demo_models,
    "Tools": _tools,
}
"""Titles in the order in which the sections are shown, and what makes each."""


def add_doctor(parser: argparse.ArgumentParser, finish: Finish) -> None:
    """Fills the parser of `doctor`."""
    parser.add_argument(
        "model",
        nargs="?",
        help="predict instead what this model needs and how fast it would be: a folder, a "
        "config.json or a hub id, of which that file alone is fetched",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    assumed = parser.add_argument_group(
        "Of a prediction", "what is given is not measured: for machines that are not this one"
    )
    for flag, text in (
        ("--gpu-memory", "memory of the GPU in GiB; 0: none"),
        ("--gpu-rate", "GB/s that it reads from its memory"),
        ("--link-rate", "GB/s from host memory to the GPU"),
        ("--dram-rate", "GB/s that all cores read from host memory"),
        ("--host-memory", "host memory for weights in GiB"),
    ):
        assumed.add_argument(flag, type=_number, help=text)
    assumed.add_argument("--quantization", "-q", help="as the engine's argument of this name")
    assumed.add_argument(
        "--tensor-parallel-size", "-tp", type=_count, help="as many of these GPUs share each layer"
    )
    finish(parser, run_doctor)


def _number(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1e9:
        raise argparse.ArgumentTypeError(f"{text}: a number from 0 on is needed")
    return value


def _count(text: str) -> int:
    value = int(text)
    if not 1 <= value <= MAX_RANKS:
        raise argparse.ArgumentTypeError(f"{text}: a number from 1 to {MAX_RANKS} is needed")
    return value


def run_doctor(options: argparse.Namespace) -> int:
    """Print the report; 0 if the engine can run on this machine, or the model, else 1."""
    if options.model is not None:
        return _predict(options)
    for name in (*_RATES, *_SIZES, "quantization", "tensor_parallel_size"):
        if getattr(options, name) is not None:
            raise ConfigError(name, getattr(options, name), "is for a prediction: name a model")
    report = examine()
    write(as_json(report) if options.json else as_text(report))
    return 0 if report.can_run else 1


_RATES = {"gpu_rate": "gpu", "link_rate": "link", "dram_rate": "dram"}
_SIZES = {"gpu_memory": "gpu_bytes", "host_memory": "host_bytes"}


def _predict(options: argparse.Namespace) -> int:
    from hetero_llm.commands import machine_rates, predict

    for name in _RATES:
        if getattr(options, name) == 0:
            raise ConfigError(name, 0, "must be more than 0")
    ranks = options.tensor_parallel_size or 1
    sizes = predict.read_sizes(options.model, quantization=options.quantization, ranks=ranks)
    given: dict[str, Any] = {
        name: None if (value := getattr(options, flag)) is None else value * 1e9
        for flag, name in _RATES.items()
    }
    for flag, name in _SIZES.items():
        value = getattr(options, flag)
        given[name] = None if value is None else int(value * _GIB)
    rates = machine_rates.measure_rates(machine_rates.GivenRates(**given))
    found = predict.predict(sizes, rates)
    warnings = machine_rates.warnings_here(with_gpu=rates.gpu_bytes > 0)
    report = Report(_prediction_sections(options.model, sizes, rates, found, warnings), ())
    if options.json:
        content = {
            "fits": not found.problem,
            "model": {**dataclasses.asdict(sizes), "weights": sizes.weights},
            "machine": dataclasses.asdict(rates),
            "prediction": dataclasses.asdict(found),
            "assumptions": predict.assumptions(),
            "warnings": warnings,
        }
        write(json.dumps(content, indent=2) + "\n")
    else:
        verdict = f"It does not fit: {found.problem}" if found.problem else "It fits."
        write(_section_text(report.sections) + verdict + "\n")
    return 1 if found.problem else 0


def _prediction_sections(
    model: str, sizes: ModelSizes, rates: Rates, found: Prediction, warnings: list[str]
) -> dict[str, Facts]:
    from hetero_llm.commands import predict

    gib = predict.gib
    of_model: Facts = {"model": model, "weights": f"{gib(sizes.weights)}, {sizes.note}"}
    if sizes.experts is not None:
        shape = sizes.experts
        of_model["experts"] = (
            f"{shape.num_layers} layers of {shape.num_experts}, {sizes.per_token} a token, "
            f"{shape.expert_bytes / 1e6:.2f} MB each, {gib(shape.total_bytes)} in all"
        )
    of_model["read by each step"] = f"{gib(sizes.read)} besides"
    if sizes.ranks > 1:
        of_model["these sizes"] = f"of the part of each of {sizes.ranks} GPUs"
    of_model["KV cache"] = f"{sizes.kv_token / 1024:.0f} KiB a token"
    rows = [
        ("GPU memory", "gpu_bytes", gib(rates.gpu_bytes)),
        ("GPU reads", "gpu", f"{rates.gpu / 1e9:.0f} GB/s"),
        ("host to GPU", "link", f"{rates.link / 1e9:.1f} GB/s"),
        ("host memory", "host_bytes", gib(rates.host_bytes)),
        ("cores read", "dram", f"{rates.dram / 1e9:.1f} GB/s"),
    ]
    machine: Facts = {
        name: f"{value} ({rates.sources[source]})"
        for name, source, value in rows
        if rates.gpu_bytes or source not in ("gpu", "link")
    }
    prediction: Facts = {"placement": found.where}
    if found.plan is not None:
        prediction["experts"] = str(found.plan)
    for speed in found.speeds:
        tokens = f"{speed.local:.1f} tokens/s"
        if abs(speed.local - speed.uniform) > 0.01 * speed.local:
            tokens = f"{speed.uniform:.1f} to {speed.local:.1f} tokens/s, uniform to local use"
        prediction[f"batch {speed.batch}"] = tokens
    sections = {"Model": of_model, "Machine": machine, "Prediction": prediction}
    sections["Assumptions"] = {str(i): one for i, one in enumerate(predict.assumptions(), 1)}
    if warnings:
        sections["Warnings"] = {str(i): one for i, one in enumerate(warnings, 1)}
    return sections
