"""The arguments that say what runs a model on a CPU: what they choose, and every refusal."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hetero_llm import LLM, ConfigError, SamplingParams
from hetero_llm.config.args import resolve_engine_args
from hetero_llm.config.engine_config import CpuConfig, EngineConfig
from hetero_llm.cpu import backend, ipex, native
from hetero_llm.cpu.model_runner import NativeModelRunner
from hetero_llm.engine import factory
from hetero_llm.models.read_config import load_model_config
from hetero_llm.runner.model_runner import TorchModelRunner
from hetero_llm.utils.topology import compute_cpus
from tests.models.tiny import make_tiny_checkpoint

GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, detokenize=False)
DEFAULT = CpuConfig("native", "auto", None)

needs_library = pytest.mark.skipif(native.load() is None, reason="needs the compiled library")


def start(folder: Path, **engine_args: Any) -> LLM:
    return LLM(
        str(folder),
        device="cpu",
        max_num_seqs=4,
        num_gpu_blocks_override=32,
        skip_tokenizer_init=True,
        disable_log_stats=True,
        **engine_args,
    )


def runner_of(llm: LLM) -> Any:
    return llm.engine.runner


def refusal(folder: Path, **engine_args: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        start(folder, **engine_args)
    return str(caught.value)


def test_defaults_and_values() -> None:
    config = EngineConfig.from_args(resolve_engine_args({"model": "x"}))
    assert config.cpu == DEFAULT
    given = {"cpu_backend": "torch", "cpu_weight_dtype": "int8", "cpu_threads": 3}
    config = EngineConfig.from_args(resolve_engine_args({"model": "x", **given}))
    assert config.cpu == CpuConfig("torch", "int8", 3)


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("cpu_backend", "openvino", "'native', 'torch' or 'ipex'"),
        ("cpu_weight_dtype", "int2", "'auto', 'int8' or 'int4'"),
        ("cpu_threads", 0, "at least 1"),
        ("cpu_threads", 1.5, "an integer"),
    ],
)
def test_wrong_values(name: str, value: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}={value!r}: must be {reason}"):
        resolve_engine_args({"model": "x", name: value})


@needs_library
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_native_is_the_default(tiny_folder: Path, dtype: str) -> None:
    with start(tiny_folder, dtype=dtype) as llm:
        assert isinstance(runner_of(llm), NativeModelRunner)
        (output,) = llm.generate(prompt_token_ids=[5, 6], sampling_params=GREEDY, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 3


@pytest.mark.parametrize("changes", [{"cpu_backend": "torch"}, {"batch_invariant": True}])
def test_torch_where_it_is_wanted(
    tiny_folder: Path, changes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="hetero_llm.cpu.backend")
    with start(tiny_folder, **changes) as llm:
        assert isinstance(runner_of(llm), TorchModelRunner)
    lines = [r.message for r in caplog.records if r.name == "hetero_llm.cpu.backend"]
    assert len(lines) == ("batch_invariant" in changes)


def test_a_model_for_torch_says_so_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = make_tiny_checkpoint(tmp_path / "model", "opt")
    with start(folder) as llm:
        assert isinstance(runner_of(llm), TorchModelRunner)
    lines = [r.message for r in caplog.records if r.name == "hetero_llm.cpu.backend"]
    assert lines == [
        "torch serves, the native executor cannot run this model: "
        "OPTForCausalLM is not one of its families"
    ]
    assert refusal(folder, cpu_weight_dtype="int8") == (
        "cpu_weight_dtype='int8': needs the native backend: "
        "OPTForCausalLM is not one of its families"
    )


def test_without_the_library_torch_serves(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "load", lambda: None)
    with start(tiny_folder) as llm:
        assert isinstance(runner_of(llm), TorchModelRunner)
    assert refusal(tiny_folder, cpu_weight_dtype="int8").endswith(
        "needs the native backend: the compiled library is not available"
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"cpu_backend": "torch"}, "cpu_backend is 'torch'"),
        ({"batch_invariant": True}, "batch_invariant is served by torch"),
        ({"dtype": "float16"}, "float16 is not one of its types"),
    ],
)
@pytest.mark.parametrize("weights", ["int8", "int4"])
def test_rounded_weights_need_the_executor(
    tiny_folder: Path, weights: str, changes: dict[str, Any], reason: str
) -> None:
    assert refusal(tiny_folder, cpu_weight_dtype=weights, **changes) == (
        f"cpu_weight_dtype={weights!r}: needs the native backend: {reason}"
    )


def test_threads(tiny_folder: Path) -> None:
    most = len(compute_cpus(0))
    assert refusal(tiny_folder, cpu_threads=most + 1) == (
        f"cpu_threads={most + 1}: this process may use {most} cores; ask for as many"
    )
    config = load_model_config(tiny_folder)
    chosen = backend.choose_backend(
        CpuConfig("native", "auto", 1), config, torch.bfloat16, batch_invariant=False
    )
    assert chosen is None or chosen.cpus == compute_cpus(0)[:1]
    with start(tiny_folder, cpu_backend="torch", cpu_threads=1):
        assert torch.get_num_threads() == 1


@needs_library
def test_weight_formats(tiny_folder: Path) -> None:
    config = load_model_config(tiny_folder)
    formats = []
    for wanted in ("auto", "int8", "int4"):
        for dtype in (torch.float32, torch.bfloat16):
            chosen = backend.choose_backend(
                CpuConfig("native", wanted, None), config, dtype, batch_invariant=False
            )
            assert chosen is not None
            formats.append(chosen.weight_format)
    assert formats == ["float", "bf16", "int8", "int8", "int4", "int4"]


def test_ipex_that_is_not_there_or_does_not_fit(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tests/cpu/test_ipex.py runs the one that fits."""
    install = "pip install torch==2.8.0 transformers==4.51.3 intel-extension-for-pytorch==2.8.0"
    monkeypatch.setattr(ipex, "installed_version", lambda: None)
    assert refusal(tiny_folder, cpu_backend="ipex") == (
        f"cpu_backend='ipex': needs intel-extension-for-pytorch, which is not installed: {install}"
    )
    monkeypatch.setattr(ipex, "installed_version", lambda: "1.13.0+cpu")
    assert refusal(tiny_folder, cpu_backend="ipex") == (
        "cpu_backend='ipex': intel-extension-for-pytorch 1.13.0+cpu needs torch 1.13, and "
        f"{torch.__version__} is installed: {install}"
    )
    monkeypatch.setattr(ipex, "installed_version", lambda: torch.__version__)
    monkeypatch.setattr(ipex, "MODULE", "no_such_extension")
    assert refusal(tiny_folder, cpu_backend="ipex", dtype="float32") == (
        "cpu_backend='ipex': no_such_extension cannot be imported: "
        "ModuleNotFoundError: No module named 'no_such_extension'"
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"batch_invariant": True},
            "cpu_backend='ipex': its products may depend on the batch; "
            "batch_invariant needs 'torch' or 'native'",
        ),
        (
            {"cpu_weight_dtype": "int8"},
            "cpu_weight_dtype='int8': needs cpu_backend='native', not 'ipex'",
        ),
        (
            {"dtype": "float16"},
            "cpu_backend='ipex': float16 is not one of its types; "
            "use dtype='bfloat16' or 'float32'",
        ),
        ({"cpu_threads": 10**6}, f"cpu_threads={10**6}: this process may use"),
    ],
)
def test_what_ipex_does_not_do(
    tiny_folder: Path, changes: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ipex, "installed_version", lambda: torch.__version__)
    assert refusal(tiny_folder, cpu_backend="ipex", **changes).startswith(reason)


def test_ipex_needs_the_cpus_instructions(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ipex, "installed_version", lambda: torch.__version__)
    for isa, dtype, needed in (((), "float32", "avx2"), (("avx2",), "bfloat16", "avx512f")):
        monkeypatch.setattr(ipex, "read_topology", lambda isa=isa: SimpleNamespace(isa=isa))
        assert refusal(tiny_folder, cpu_backend="ipex", dtype=dtype) == (
            f"cpu_backend='ipex': {dtype} needs a CPU with {needed}; use 'native' or 'torch'"
        )


def test_a_gpu_takes_no_notice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_tiny_checkpoint(tmp_path, "llama", "heads_of_16")

    class NoGPUError(Exception):
        """Ends the start where weights would go to the GPU."""

    def load_weights(*_: Any) -> None:
        raise NoGPUError

    monkeypatch.setattr(factory, "resolve_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(factory, "free_unreachable", lambda device: None)
    monkeypatch.setattr("hetero_llm.gpu.memory.load_weights", load_weights)
    properties = SimpleNamespace(total_memory=1 << 37, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    given = {"cpu_backend": "torch", "cpu_weight_dtype": "int8", "cpu_threads": 99}
    for arguments in ({}, given):
        common = {"model": str(folder), "dtype": "float32", "skip_tokenizer_init": True}
        config = EngineConfig.from_args(resolve_engine_args({**common, **arguments}))
        with pytest.raises(NoGPUError):
            factory.build_engine(config, show_progress=False)
    assert [record.message for record in caplog.records] == [
        f"{name} has no effect on a GPU" for name in given
    ]
