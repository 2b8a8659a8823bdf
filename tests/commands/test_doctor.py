"""The doctor's report, on this machine and on broken ones."""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import re
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hetero_llm import cli
from hetero_llm.commands import doctor
from hetero_llm.commands.doctor import Missing, Report
from hetero_llm.cpu import native
from hetero_llm.utils import cache_folder

ROOT = Path(__file__).parents[2]


def with_versions(monkeypatch: pytest.MonkeyPatch, **versions: str | None) -> None:
    """Make the named packages (`_` for `-`) look like these versions, None for not installed."""
    real = importlib.metadata.version
    faked = {name.replace("_", "-"): version for name, version in versions.items()}

    def version_of(name: str) -> str:
        if name not in faked:
            return real(name)
        version = faked[name]
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", version_of)


def without_topology(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where psutil is missing: hetero_llm.utils.topology cannot be imported."""
    monkeypatch.delattr("hetero_llm.utils.topology")
    monkeypatch.setitem(sys.modules, "hetero_llm.utils.topology", None)


def look(title: str) -> tuple[dict[str, Any], list[Missing]]:
    """The facts of one section of the report, and what it says is missing."""
    report = doctor.examine([title])
    return report.sections[title], list(report.missing)


def test_required_packages_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = {}
    for line in project["dependencies"]:
        name, lowest = re.match(r"([\w-]+)>=([\d.]+)", line).groups()  # type: ignore[union-attr]
        wanted[name] = lowest
    assert wanted == doctor.REQUIRED_PACKAGES
    low, high = doctor.SUPPORTED_PYTHON
    assert project["requires-python"] == f">={low[0]}.{low[1]},<{high[0]}.{high[1] + 1}"


@pytest.mark.parametrize("name", ["doctor", "collect-env"])
def test_this_machine(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([name]) == 0
    text = capsys.readouterr().out
    for heading in ("System", "CPU", "Memory", "GPU", "Prefix cache offload", "Packages",
                    "Demo models", "Tools"):  # fmt: skip
        assert f"{heading}\n  " in text
    assert "\nMissing\n" in text
    assert text.endswith("The engine can run here.\n")


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["can_run"] is True
    assert report["sections"]["CPU"]["usable cores"] >= 1
    assert all(set(thing) == {"what", "fix", "needed"} for thing in report["missing"])


def test_missing_and_old_packages(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_versions(monkeypatch, tqdm=None, numpy="1.9.5")
    assert cli.main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "tqdm 4.66 or later (needed)\n    -> pip install 'tqdm>=4.66'" in text
    assert "numpy 1.26 or later (needed)" in text
    assert text.endswith("The engine cannot run yet.\n")


def test_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    with_versions(monkeypatch, torch=None)
    monkeypatch.setitem(sys.modules, "torch", None)
    report = doctor.examine()
    assert not report.can_run
    assert [thing.what for thing in report.missing if thing.needed] == ["torch 2.8 or later"]
    assert "torch cannot be imported" in report.sections["GPU"]["devices"]


def test_broken_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with_versions(monkeypatch, torch="2.8.0")
    needed = [thing for thing in doctor.examine().missing if thing.needed]
    assert [thing.what for thing in needed] == ["a torch that can be imported"]


def test_ipex_and_its_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "intel-extension-for-pytorch"
    with_versions(monkeypatch, intel_extension_for_pytorch=None)
    assert look("Packages")[0][name] == "not installed"
    with_versions(monkeypatch, intel_extension_for_pytorch="2.8.0", torch="2.8.0+cu128")
    facts, missing = look("Packages")
    assert facts[name] == "2.8.0, fits torch 2.8.0+cu128"
    assert not any(name in thing.what for thing in missing)
    with_versions(monkeypatch, intel_extension_for_pytorch="2.8.0", torch="2.13.0")
    facts, missing = look("Packages")
    assert facts[name] == "2.8.0, not for torch 2.13.0"
    assert [(thing.what, thing.needed) for thing in missing if name in thing.what] == [
        (f"a torch for {name} 2.8.0, to use cpu_backend='ipex'", False)
    ]


def fake_torch(*names: str, cuda: str | None) -> SimpleNamespace:
    devices = [SimpleNamespace(name=name, total_memory=8 << 30) for name in names]
    return SimpleNamespace(
        version=SimpleNamespace(cuda=cuda),
        cuda=SimpleNamespace(
            is_available=lambda: bool(devices),
            device_count=lambda: len(devices),
            get_device_properties=lambda index: devices[index],
        ),
    )


def test_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", fake_torch("One", "Two", cuda="13.0"))
    facts, missing = look("GPU")
    assert facts["device 0"] == "One, 8.0 GiB"
    assert facts["device 1"] == "Two, 8.0 GiB"
    assert facts["torch built for"] == "CUDA 13.0"
    assert not missing


class FakePool:
    """Memory that is pinned, or not."""

    failure = ""
    placement = "NUMA node 1 preferred"
    closed = 0

    def __init__(self, row_bytes: int, num_rows: int) -> None:
        assert row_bytes * num_rows <= 64 << 20

    def close(self) -> None:
        type(self).closed += 1


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stands for torch with two GPUs; pool, NUMA node and calibration are stand-ins, too."""
    from hetero_llm.bridge.kv_offload import copy_calibration, pinned_pool
    from hetero_llm.utils import numa

    torch = fake_torch("One", "Two", cuda="13.0")
    torch.zeros = lambda size, device: None
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setattr(pinned_pool, "PinnedPool", FakePool)
    monkeypatch.setattr(FakePool, "closed", 0)
    monkeypatch.setattr(numa, "numa_node", lambda index: 1 if index == 0 else None)
    table = SimpleNamespace(table=lambda: "piece   64 KiB\nbatch     50.0")
    monkeypatch.setattr(copy_calibration, "calibrate_device", lambda: table)
    return torch


def test_offload(two_gpus: Any) -> None:
    facts, missing = look("Prefix cache offload")
    assert facts.pop("host memory").startswith("cpu_prefill_memory_utilization=0.3")
    assert facts == {
        "NUMA node of device 0": 1,
        "NUMA node of device 1": "not known",
        "pinned memory": "works, NUMA node 1 preferred",
        "copies": "piece   64 KiB\nbatch     50.0",
    }
    assert not missing and FakePool.closed == 1
    text = doctor.as_text(Report({"Offload": facts}, ()))
    assert (
        "  copies                 piece   64 KiB\n                         batch     50.0\n" in text
    )


def test_offload_that_would_not_work(two_gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("out of memory\nand more")

    monkeypatch.setattr("hetero_llm.bridge.kv_offload.copy_calibration.calibrate_device", fail)
    monkeypatch.setattr(FakePool, "failure", "refused; 0.00 GiB of 0.06 GiB can be used")
    facts, _ = look("Prefix cache offload")
    assert facts["pinned memory"] == "does not work: refused; 0.00 GiB of 0.06 GiB can be used"
    assert facts["copies"] == "cannot be measured: out of memory" and FakePool.closed == 1
    two_gpus.zeros = fail
    monkeypatch.setitem(sys.modules, "hetero_llm.bridge.kv_offload.copy_calibration", None)
    facts, _ = look("Prefix cache offload")
    assert facts["pinned memory"] == "does not work: out of memory" and FakePool.closed == 1
    assert facts["copies"].startswith("not available: ")


def test_offload_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    facts, missing = look("Prefix cache offload")
    assert list(facts) == ["host memory", "copies"] and not missing
    assert facts["copies"] == "none: without a GPU it has no effect"
    host = SimpleNamespace(total_memory=8 << 30, available_memory=1 << 20, memory_limit=None)
    monkeypatch.setattr("hetero_llm.utils.topology.read_topology", lambda: host)
    assert "room for 0 blocks" in look("Prefix cache offload")[0]["host memory"]
    without_topology(monkeypatch)
    assert look("Prefix cache offload")[0]["host memory"] == "unknown: psutil is missing"


class FakeDriver:
    """The driver's three calls; the one named `failing` returns an error."""

    def __init__(self, failing: str = "") -> None:
        self._failing = failing

    def cuInit(self, flags: int) -> int:
        return int(self._failing == "cuInit")

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:
        ctypes.cast(device, ctypes.POINTER(ctypes.c_int))[0] = 40 + ordinal
        return int(self._failing == "cuDeviceGet")

    def cuDeviceGetPCIBusId(self, address: Any, size: int, device: Any) -> int:
        assert size == len(address)
        address.value = f"0000:9C:00.{device.value - 40}".encode()
        return int(self._failing == "cuDeviceGetPCIBusId")


def test_where_a_gpu_sits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from hetero_llm.utils import numa

    monkeypatch.setattr(numa.ctypes, "CDLL", lambda name: FakeDriver())
    assert numa.pci_address(1) == "0000:9c:00.1"
    for call in ("cuInit", "cuDeviceGet", "cuDeviceGetPCIBusId"):
        monkeypatch.setattr(numa.ctypes, "CDLL", lambda name, call=call: FakeDriver(call))
        assert numa.pci_address(1) is None and numa.numa_node(1) is None

    def no_driver(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(numa.ctypes, "CDLL", no_driver)
    assert numa.pci_address(0) is None
    folder = tmp_path / "sys/bus/pci/devices/0000:9c:00.1"
    folder.mkdir(parents=True)
    for text, node in (("1\n", 1), ("0\n", 0), ("-1\n", None), ("", None)):
        (folder / "numa_node").write_text(text)
        assert numa.numa_node_at("0000:9c:00.1", tmp_path) == node
    assert numa.numa_node_at("0000:00:00.0", tmp_path) is None


def test_gpu_without_a_torch_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", fake_torch(cuda=None))
    monkeypatch.setattr(doctor, "driver_version", lambda text: "580.95.05")
    facts, missing = look("GPU")
    assert facts["torch built for"] == "CPU only"
    assert [(thing.what, thing.needed) for thing in missing] == [
        ("torch for CUDA, to use the GPU", False)
    ]


def test_no_psutil(monkeypatch: pytest.MonkeyPatch) -> None:
    with_versions(monkeypatch, psutil=None)
    without_topology(monkeypatch)
    report = doctor.examine()
    assert not report.can_run
    assert list(report.sections["CPU"]) == ["model"]
    assert "usable now" not in report.sections["Memory"]


def test_no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    native.build()
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    facts, missing = doctor.SECTIONS["Tools"]()
    assert not missing, "the library is there"
    assert facts["native CPU executor"].startswith("for ")
    assert facts["compiled code"].startswith(f"{cache_folder.write_folder()}, ")
    monkeypatch.setenv("HETERO_LLM_CACHE_DIR", str(tmp_path))
    report = doctor.examine()
    assert report.can_run
    assert report.sections["Tools"]["compiled code"] == f"{tmp_path}, 0 files, 0.0 MB"
    assert "a C++ compiler" in [thing.what for thing in report.missing]
    executor = report.sections["Tools"]["native CPU executor"]
    assert executor == "none, plain torch serves: no C++ compiler found"


def test_native_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    def executor() -> str:
        return str(look("Tools")[0]["native CPU executor"])

    pytest.importorskip("torch")
    monkeypatch.delenv("HETERO_LLM_CPU_ISA", raising=False)
    assert executor().startswith(("for ", "none, plain torch serves: "))
    monkeypatch.setenv("HETERO_LLM_CPU_ISA", "mmx")
    assert "HETERO_LLM_CPU_ISA='mmx': must be one of base" in executor()
    monkeypatch.setenv("HETERO_LLM_NATIVE", "0")
    assert executor() == "none, HETERO_LLM_NATIVE=0: plain torch serves"


def test_demo_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "DEMO_MODELS", (*doctor.DEMO_MODELS, "demo-huge"))
    facts, missing = look("Demo models")
    assert facts == {"demo": "present", "demo-draft": "present", "demo-huge": "not there"}
    assert [(thing.what, thing.needed) for thing in missing] == [
        ("embedded model 'demo-huge'", False)
    ]


def test_old_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.sys, "version_info", (3, 10, 1))
    _, missing = look("System")
    assert [thing.what for thing in missing] == ["Python 3.11 to 3.13"]


def test_text_without_anything_missing() -> None:
    text = doctor.as_text(Report({"System": {"OS": "x", "Python": "y"}}, ()))
    assert (
        text == "System\n  OS      x\n  Python  y\nMissing\n  nothing\nThe engine can run here.\n"
    )


def test_optional_things_do_not_stop_the_engine() -> None:
    assert Report({}, (Missing("a", "b", needed=False),)).can_run
    assert not Report({}, (Missing("a", "b", needed=True),)).can_run


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56\n"
            "GCC version:  gcc version 12.3.0\n",
            "550.54.15",
        ),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build\n",
            "580.95.05",
        ),
        ("", ""),
    ],
)
def test_driver_version(text: str, version: str) -> None:
    assert doctor.driver_version(text) == version


def test_huge_pages() -> None:
    assert doctor.transparent_huge_pages("always [madvise] never\n") == "madvise"
    assert doctor.transparent_huge_pages("") == "unknown"
    meminfo = "MemTotal: 9 kB\nHugePages_Total:      12\nHugepagesize:       2048 kB\n"
    assert doctor.reserved_huge_pages(meminfo) == "12 of 2 MiB"
    assert doctor.reserved_huge_pages("") == "unknown"


@pytest.mark.parametrize(
    ("version", "is_enough"),
    [
        ("2.13.0+cpu", True), ("2.8.0a0+git", True), ("2.8", True), ("2.7.9", False),
        ("dev", False),
    ],
)  # fmt: skip
def test_versions_of_packages(
    version: str, is_enough: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_versions(monkeypatch, torch=version, intel_extension_for_pytorch=None)
    facts, missing = look("Packages")
    assert facts["torch"] == version
    assert [thing.what for thing in missing] == ([] if is_enough else ["torch 2.8 or later"])
