"""Reading ahead: bounds, order, interruption, and the memory that loading takes."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from hetero_llm.core.errors import ModelLoadError
from hetero_llm.models.weight_reader import Piece, ReadAhead, copy_pieces, pieces_of
from hetero_llm.utils.gc_control import prompt_wakeups
from tests.models.weights_in_memory import MemoryFile

FP32, BF16 = torch.float32, torch.bfloat16
AHEAD = ReadAhead(bytes=4096, piece_bytes=512)


def read(file: MemoryFile, targets: dict[str, Tensor], ahead: ReadAhead = AHEAD) -> list[str]:
    return copy_pieces(
        (
            piece
            for stored in file.tensors
            for piece in pieces_of(
                file, stored, targets[stored.name],
                dtype=targets[stored.name].dtype, piece_bytes=ahead.piece_bytes,
            )
        ),
        ahead,
        file.copied,
    )  # fmt: skip


def every_other(x: Tensor) -> Tensor:
    """A copy whose elements are not next to each other."""
    return torch.stack((x, x), dim=-1)[..., 0]


SHAPES = [(), (1,), (300,), (7, 33), (64, 64), (3, 5, 40)]


@pytest.mark.parametrize("stored", [FP32, BF16, torch.float16, torch.float64])
@pytest.mark.parametrize("kept", [FP32, BF16])
@pytest.mark.parametrize("strided", [False, True])
def test_every_way_into_place(stored: torch.dtype, kept: torch.dtype, strided: bool) -> None:
    tensors = {str(shape): torch.randn(shape).to(stored) for shape in SHAPES}
    targets = {name: torch.zeros(x.shape, dtype=kept) for name, x in tensors.items()}
    if strided:
        targets = {name: every_other(x) for name, x in targets.items()}
    assert read(MemoryFile(tensors), targets) == []
    for name, x in tensors.items():
        assert torch.equal(targets[name], x.to(kept))


@pytest.mark.parametrize("kept", [FP32, BF16])
def test_bytes_ahead_are_bounded(kept: torch.dtype) -> None:
    file = MemoryFile({str(i): torch.randn(50 * i) for i in range(1, 20)})
    read(file, {name: torch.empty(x.shape, dtype=kept) for name, x in file.content.items()})
    assert 0 < file.most_ahead <= AHEAD.bytes
    assert file.ahead == 0


def test_a_large_piece_goes_alone() -> None:
    """Rows of a strided target that are larger than the bound."""
    x = torch.randn(3, 40, 50)
    file = MemoryFile({"small": torch.randn(8), "x": x})
    targets = {"small": torch.empty(8), "x": torch.empty(3, 50, 40).mT}
    read(file, targets)
    assert torch.equal(targets["x"], x)
    assert file.most_ahead == x[0].nbytes > AHEAD.bytes


def test_weights_that_are_not_finite() -> None:
    tensors = {str(i): torch.randn(1000) for i in range(6)}
    tensors["1"][999] = torch.nan
    tensors["3"][0] = -torch.inf
    tensors["4"][:] = 1e6
    targets = {name: torch.empty(1000) for name in tensors}
    targets["4"] = torch.empty(1000, dtype=torch.float16)
    assert read(MemoryFile(tensors), targets) == ["1", "3", "4"]


@pytest.mark.parametrize("handed_bytes", [0, 32])
def test_pieces_end_in_order_and_the_first_error_is_told(handed_bytes: int) -> None:
    """The second tensor fails before the first one does, in a thread or in the calling one."""
    failed = threading.Event()

    def before(name: str) -> None:
        if name == "b":
            failed.set()
            raise ModelLoadError("b")
        if name == "a":
            assert failed.wait(60)
            raise ModelLoadError("a")

    sizes = {"ok": 16, "a": 16, "b": 4, "c": 16}
    file = MemoryFile({name: torch.randn(size) for name, size in sizes.items()}, before)
    done: list[str] = []
    targets = {name: torch.empty(size) for name, size in sizes.items()}
    ahead = ReadAhead(4096, 512, handed_bytes)
    pieces = (
        piece
        for stored in file.tensors
        for piece in pieces_of(file, stored, targets[stored.name], dtype=FP32, piece_bytes=512)
    )
    with pytest.raises(ModelLoadError, match="^a$"):
        copy_pieces(pieces, ahead, lambda piece: done.append(piece.tensor.name))
    assert done == ["ok"]
    assert file.closed == 1


def test_the_calling_thread_reads_small_pieces() -> None:
    """To hand one over takes longer than to read it."""
    by: dict[str, str] = {}
    sizes = {"small": 100, "large": 100_000}
    file = MemoryFile({name: torch.randn(size) for name, size in sizes.items()})
    file.before = lambda name: by.update({name: threading.current_thread().name})
    targets = {name: torch.empty(size) for name, size in sizes.items()}
    assert read(file, targets, ReadAhead.of(16 << 30)) == []
    assert by["small"] == threading.current_thread().name
    assert by["large"].startswith("weights")
    assert all(torch.equal(targets[name], x) for name, x in file.content.items())


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux's timer slack")
def test_reading_threads_wait_for_the_interpreter_as_usual() -> None:
    """A thread has the timer slack of the one that starts it; with an engine's of 1 us, eight of
    them spend most of their time on asking for the interpreter."""
    slack: list[int] = []
    file = MemoryFile({"x": torch.randn(4)})
    get = ctypes.PyDLL(None).prctl
    file.before = lambda _: slack.append(get(30, 0, 0, 0, 0))  # PR_GET_TIMERSLACK
    with prompt_wakeups():
        read(file, {"x": torch.empty(4)})
        assert get(30, 0, 0, 0, 0) == 1000
    assert slack == [50_000]


def test_an_interrupt_leaves_nothing_behind() -> None:
    threads = torch.get_num_threads()
    file = MemoryFile({str(i): torch.randn(512) for i in range(100)})
    read_before: list[str] = []
    file.before = read_before.append

    def interrupted(_: Piece) -> None:
        raise KeyboardInterrupt

    file.copied = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        read(file, {name: torch.empty(512) for name in file.content})
    assert not [thread for thread in threading.enumerate() if "weights" in thread.name]
    assert len(read_before) < 100
    assert (file.opened, file.closed) == (1, 1)
    assert torch.get_num_threads() == threads


def test_files_are_closed_as_soon_as_they_are_done() -> None:
    files = [MemoryFile({"x": torch.randn(2048)}) for _ in range(4)]
    targets = [torch.empty(2048) for _ in files]
    pieces = (
        piece
        for file, target in zip(files, targets, strict=True)
        for piece in pieces_of(file, file.tensors[0], target, dtype=FP32, piece_bytes=512)
    )
    open_at_once: list[int] = []
    copy_pieces(
        pieces, AHEAD, lambda _: open_at_once.append(sum(f.opened - f.closed for f in files))
    )
    assert [file.closed for file in files] == [1] * 4
    assert max(open_at_once) <= 2
    assert all(map(torch.equal, targets, (file.content["x"] for file in files)))


def test_how_far_ahead() -> None:
    mib = 1 << 20
    assert ReadAhead.of(0).bytes == 8 * mib
    assert ReadAhead.of(400 * mib).bytes == 20 * mib
    assert ReadAhead.of(16 << 30) == ReadAhead(128 * mib, 8 * mib, 32 << 10)


CHILD = """
import sys, torch
import concurrent.futures.thread, hetero_llm.models.llama
from hetero_llm.models.read_config import load_model_config
from hetero_llm.models.loader import load_model

def resident(kind):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(kind + ":"))

folder = sys.argv[1]
config = load_model_config(folder)
for dtype in (torch.float16, torch.bfloat16):
    model = None
    open("/proc/self/clear_refs", "w").write("5")  # the peak starts anew
    before = resident("VmRSS")
    model = load_model(folder, config, dtype=dtype, device="cpu", show_progress=False)
    print(resident("VmHWM") - before, sum(p.nbytes for p in model.parameters()))
"""


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's /proc")
def test_loading_takes_little_more_than_the_weights(tmp_path: Path) -> None:
    """Peak of resident memory, pages of mapped files included, of a process that loads 200 MB: as
    they are stored, then converted."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 8192,
        "hidden_size": 1024, "num_hidden_layers": 7, "num_attention_heads": 8,
        "intermediate_size": 3072, "max_position_embeddings": 64, "dtype": "float16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_zeros(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    for line in done.stdout.splitlines():
        peak, weights = map(int, line.split())
        assert weights > 200e6
        assert weights < peak <= 1.1 * weights


def write_zeros(folder: Path) -> None:
    """A safetensors file of float16 with a hole for its data."""
    from hetero_llm.models.read_config import load_model_config
    from hetero_llm.models.registry import model_class

    config = load_model_config(folder)
    with torch.device("meta"):
        targets = model_class(config.architecture)(config).checkpoint_tensors()
    header, end = {}, 0
    for name, target in targets.items():
        begin, end, shape = end, end + 2 * int(np.prod(target.shape)), list(target.shape)
        header[name] = {"dtype": "F16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
