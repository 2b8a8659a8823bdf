"""The pool of host memory, with a driver that pins nothing but keeps books."""

from __future__ import annotations

import ctypes
import logging
import mmap
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hetero_llm.bridge.kv_offload import pinned_pool
from hetero_llm.bridge.kv_offload.pinned_pool import PinnedPool, PoolError
from hetero_llm.utils.native_build import PORTABLE, find_compiler

pytestmark = pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")

PAGE = mmap.PAGESIZE
OUT_OF_MEMORY = 2


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("fake") / "libfake.so"
    source = Path(__file__).with_name("fake_register.cpp")
    command = [str(find_compiler()), *PORTABLE, "-O1", "-shared", "-pthread", str(source)]
    subprocess.run([*command, "-o", str(path)], check=True)
    return str(path)


class Driver:
    def __init__(self, path: str) -> None:
        self.path = path
        self._calls = ctypes.CDLL(path)
        for name in ("pinned_ranges", "pinned_bytes", "contexts_seen"):
            getattr(self._calls, f"fake_{name}").restype = ctypes.c_int64

    def reset(self, refuse: int = -1, error: int = 0, allow: int = 1 << 30) -> None:
        numbers = (ctypes.c_int64(number) for number in (refuse, error, allow))
        self._calls.fake_reset(*numbers)

    def allow(self, calls: int) -> None:
        self._calls.fake_allow(ctypes.c_int64(calls))

    def wait_calls(self, count: int) -> None:
        self._calls.fake_wait_calls(ctypes.c_int64(count))

    def ask(self, name: str) -> int:
        return int(getattr(self._calls, f"fake_{name}")())


@pytest.fixture
def driver(library: str) -> Iterator[Driver]:
    fake = Driver(library)
    fake.reset()
    yield fake
    fake.allow(1 << 30)
    assert fake.ask("pinned_ranges") == 0, "memory stays pinned"


def rows_of(pool: PinnedPool) -> np.ndarray:
    """[ready rows, bytes] uint8."""
    shape = (pool.ready_rows, pool.row_bytes)
    memory = (ctypes.c_uint8 * (shape[0] * shape[1])).from_address(pool.address)
    return np.frombuffer(memory, np.uint8).reshape(shape)


def test_rows_can_be_used(driver: Driver) -> None:
    pool = PinnedPool(3 * PAGE, 100, chunk_bytes=31 * PAGE, threads=3, libcuda=driver.path)
    assert (pool.ready_rows, pool.failure, pool.chunk_rows) == (100, "", 10)
    assert pool.address % PAGE == 0
    assert driver.ask("pinned_ranges") == 10
    assert driver.ask("pinned_bytes") == 300 * PAGE
    rows = rows_of(pool)
    rows[:] = np.arange(100, dtype=np.uint8)[:, None]
    assert (rows.sum(axis=1, dtype=np.int64) == np.arange(100) * 3 * PAGE).all()
    assert pool.touch_seconds > 0 and pool.register_seconds > 0
    address = pool.address
    pool.close()
    pool.close()
    assert (pool.ready_rows, pool.failure, pool.address) == (0, "", address)
    assert pool.wait(0.0)
    assert driver.ask("contexts_seen") == 20, "the opener's context, in whatever thread"


@pytest.mark.parametrize("row_bytes", [1, 96, 1000, PAGE // 2, PAGE + 1, 5 * PAGE // 4, 7 * PAGE])
@pytest.mark.parametrize("num_rows", [1, 3, 257])
def test_chunks_end_where_rows_and_pages_do(driver: Driver, row_bytes: int, num_rows: int) -> None:
    """No page is pinned twice, none is left out."""
    pool = PinnedPool(row_bytes, num_rows, chunk_bytes=2 * PAGE, threads=2, libcuda=driver.path)
    assert (pool.ready_rows, pool.failure) == (num_rows, "")
    assert pool.chunk_rows * row_bytes % PAGE == 0
    assert driver.ask("pinned_bytes") == -(-row_bytes * num_rows // PAGE) * PAGE
    assert driver.ask("pinned_ranges") == -(-num_rows // pool.chunk_rows)
    pool.close()


@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("refused", [0, 3, 9])
def test_what_was_pinned_before_a_refusal_stays(
    driver: Driver, caplog: pytest.LogCaptureFixture, refused: int, background: bool
) -> None:
    driver.reset(refused, OUT_OF_MEMORY)
    pool = PinnedPool(
        PAGE, 100, chunk_bytes=10 * PAGE, threads=2, background=background, libcuda=driver.path
    )
    assert pool.wait(60.0)
    with caplog.at_level(logging.WARNING):
        assert pool.ready_rows == pool.ready_rows == 10 * refused
    assert len(caplog.records) == 1, "said once"
    assert pool.failure.startswith(
        f"cuMemHostRegister refused chunk {refused + 1} of 10: "
        "CUDA error 2 (CUDA_ERROR_OUT_OF_MEMORY); 0.00 GiB of 0.00 GiB can be used"
    )
    assert pool.failure in caplog.text
    assert driver.ask("pinned_ranges") == refused
    rows_of(pool)[:] = 9
    pool.close()


def test_an_error_without_a_name(driver: Driver) -> None:
    driver.reset(0, 201)
    pool = PinnedPool(PAGE, 1, libcuda=driver.path)
    assert "CUDA error 201; 0.00 GiB" in pool.failure
    pool.close()


def test_grows_in_the_background(driver: Driver) -> None:
    driver.reset(allow=2)
    pool = PinnedPool(
        PAGE, 45, chunk_bytes=10 * PAGE, threads=2, background=True, libcuda=driver.path
    )
    driver.wait_calls(3)
    assert (pool.ready_rows, pool.wait(0.0), pool.failure) == (20, False, "")
    rows_of(pool)[:] = 1
    driver.allow(4)
    driver.wait_calls(5)
    assert pool.ready_rows == 40
    driver.allow(5)
    assert pool.wait(60.0) and pool.ready_rows == 45
    pool.close()


def test_closed_while_it_grows(driver: Driver) -> None:
    driver.reset(allow=2)
    pool = PinnedPool(
        PAGE, 45, chunk_bytes=10 * PAGE, threads=2, background=True, libcuda=driver.path
    )
    driver.wait_calls(3)
    driver.allow(3)  # the one at hand ends, no other begins
    pool.close()
    assert pool.ready_rows == 0


def test_without_pinning() -> None:
    pool = PinnedPool(PAGE, 7, libcuda=None)
    assert (pool.ready_rows, pool.failure) == (7, "")
    assert not rows_of(pool).any()
    pool.close()


def test_no_driver(caplog: pytest.LogCaptureFixture) -> None:
    pool = PinnedPool(PAGE, 7, libcuda="/nowhere/libcuda.so")
    assert pool.ready_rows == 0
    assert "the driver library /nowhere/libcuda.so cannot be used" in caplog.text
    pool.close()


def test_more_memory_than_there_is() -> None:
    with pytest.raises(PoolError, match="no 1073741824.00 GiB of host memory for the pool: "):
        PinnedPool(1 << 40, 1 << 20, libcuda=None)


def test_where_the_memory_is() -> None:
    pool = PinnedPool(PAGE, 7, libcuda=None)
    assert pool.placement == "any NUMA node"
    pool.close()
    pool = PinnedPool(PAGE, 7, libcuda=None, node=1023)  # there is none
    assert pool.ready_rows == 7, "it is only a preference"
    assert pool.placement.startswith("any NUMA node (1023 cannot be preferred: ")
    pool.close()


def test_without_a_compiled_library(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned_pool.load.cache_clear()
    monkeypatch.setenv("HETERO_LLM_NATIVE", "0")
    with pytest.raises(PoolError, match="HETERO_LLM_NATIVE=0"):
        PinnedPool(PAGE, 7, libcuda=None)
    monkeypatch.delenv("HETERO_LLM_NATIVE")
    pinned_pool.load.cache_clear()
    PinnedPool(PAGE, 7, libcuda=None).close()
