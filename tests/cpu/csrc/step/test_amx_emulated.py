"""The tests of products, attention and adapters on AMX tiles, by an emulation where there are none.

The two sources that use tiles are compiled once more with `amx_emulation.h` ahead of them. A copy
of the library then finds their functions instead of its own, because globally loaded symbols
come first.
"""

# ruff: noqa: F401, tests of other files run here with the fixtures below

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetero_llm.cpu import native
from tests.cpu.csrc.step.test_adapters import (
    test_a_tokens_result_does_not_depend_on_its_neighbours as test_adapters_of_neighbours,
)
from tests.cpu.csrc.step.test_adapters import (
    test_many_columns_are_shared_and_summed_in_one_order,
    test_merged_weights,
    written,
)
from tests.cpu.csrc.step.test_attention import (
    test_a_long_chunk,
    test_a_rows_result_does_not_depend_on_threads_or_neighbours,
    test_a_window_hides_tokens_and_ancestors,
    test_all_kinds_of_rows_in_one_step,
    test_contexts_are_cut_where_threads_want_work,
    test_scores_far_apart_neither_overflow_nor_vanish,
)
from tests.cpu.csrc.step.test_matmul import (
    test_integers_give_the_same_on_every_instruction_set,
    test_nan_reaches_the_result,
    test_products_equal_their_reference,
    test_results_do_not_depend_on_how_strips_and_rows_are_shared,
)
from tests.cpu.csrc.step.test_matmul_groups import (
    test_nan_reaches_the_result as test_nan_reaches_the_result_of_groups,
)
from tests.cpu.csrc.step.test_matmul_groups import (
    test_products_equal_their_reference as test_products_of_groups_equal_their_reference,
)
from tests.cpu.csrc.step.test_matmul_groups import (
    test_results_do_not_depend_on_how_strips_and_rows_are_shared as test_groups_shared,
)
from tests.cpu.csrc.step.test_matmul_groups import (
    test_the_same_on_every_instruction_set as test_groups_are_the_same_on_every_instruction_set,
)
from tests.cpu.csrc.step.test_mixture import (
    folders,
    test_chunks_trees_and_single_tokens,
)
from tests.cpu.csrc.step.test_mixture import (
    test_a_tokens_result_does_not_depend_on_threads_or_neighbours as test_mixtures_of_neighbours,
)

AMX = native.ISA_NAMES.index("amx")
STEP = Path(native.__file__).parent / "csrc" / "step"
SOURCES = ("matmul_amx.cpp", "attention_amx.cpp")
HEADER = Path(__file__).with_name("amx_emulation.h")


def compile_emulation(folder: Path) -> Path:
    compiler = shutil.which("g++") or shutil.which("c++")
    assert compiler is not None
    built = folder / "emulated.so"
    flags = ["-O2", "-std=c++17", "-w", "-fPIC", "-shared", "-include", str(HEADER)]
    subprocess.run(
        [compiler, *flags, *(str(STEP / name) for name in SOURCES), "-o", str(built)], check=True
    )
    return built


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ctypes.CDLL]:
    real = native.load()
    if real is None:
        pytest.skip("there is no compiler")
    if real.hetero_isa_best() == AMX:
        pytest.skip("the other files run the real tiles")
    if native.native_choice() == "sanitized":
        pytest.skip("the emulation is not a part of the sanitized library")
    if real.hetero_isa_best() < native.ISA_NAMES.index("avx512_bf16"):
        pytest.skip("what surrounds the tiles needs AVX-512 with bfloat16")
    folder = tmp_path_factory.mktemp("amx")
    ctypes.CDLL(str(compile_emulation(folder)), mode=ctypes.RTLD_GLOBAL)
    copy = shutil.copy(native.build(), folder / "kernels.so")
    loaded = ctypes.CDLL(str(copy))
    native.declare(loaded)
    yield loaded


@pytest.fixture
def isa() -> int:
    return AMX
