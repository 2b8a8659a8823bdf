"""Products of experts on AMX tiles, by an emulation where there are none.

The source that uses tiles is compiled once more with `amx_emulation.h` ahead of it. A copy of the
library then finds its functions instead of its own, because globally loaded symbols come first.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hetero_llm.cpu import native
from hetero_llm.cpu.expert_team import ExpertTeam, post
from tests.cpu.csrc.experts.test_exchange import EXPERTS, check
from tests.cpu.csrc.step.test_amx_emulated import HEADER
from tests.cpu.expert_cases import KINDS, fill, mailbox_for, make_mixture

AMX = native.ISA_NAMES.index("amx")
SOURCE = Path(native.__file__).parent / "csrc" / "experts" / "tiles.cpp"
# Two blocks of what is unpacked at a time and a rest; tails of a step; a strip that is no tile.
SIZES = {True: ((576, 96), (1184, 160)), False: ((576, 96), (1090, 72))}  # by groups
# With 170 tokens every expert has more than any limit here, and more than four blocks.
TOKENS = {1: (1, 170), 9: (17,)}  # by tokens from which on an expert is computed on tiles
# Biases are added in one place for all forms.
CASES = [*((name, None) for name in KINDS), ("bf16", torch.bfloat16), ("int4_64", torch.bfloat16)]

pytestmark = pytest.mark.timeout(300, method="thread")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ctypes.CDLL]:
    """With real tiles where there are some."""
    real = native.load()
    if real is None:
        pytest.skip("there is no compiler")
    if real.hetero_isa_best() == AMX:
        yield real
        return
    if native.native_choice() == "sanitized":
        pytest.skip("the emulation is not a part of the sanitized library")
    if real.hetero_isa_best() < native.ISA_NAMES.index("avx512_bf16") or not real.hetero_isa_vbmi():
        pytest.skip("what surrounds the tiles needs AVX-512 with bfloat16 and VBMI")
    compiler = shutil.which("g++") or shutil.which("c++")
    assert compiler is not None
    folder = tmp_path_factory.mktemp("amx")
    built = folder / "emulated.so"
    flags = ["-O2", "-std=c++17", "-w", "-fPIC", "-shared", "-include", str(HEADER)]
    subprocess.run([compiler, *flags, str(SOURCE), "-o", str(built)], check=True)
    ctypes.CDLL(str(built), mode=ctypes.RTLD_GLOBAL)
    loaded = ctypes.CDLL(str(shutil.copy(native.build(), folder / "kernels.so")))
    native.declare(loaded)
    yield loaded


@pytest.mark.parametrize(("name", "bias"), CASES)
def test_one_to_many_tokens(library: ctypes.CDLL, name: str, bias: torch.dtype | None) -> None:
    """Tiles alone, and beside experts of few tokens; more than four blocks of one expert."""
    for hidden, inner in SIZES[KINDS[name].group > 0]:
        mixture = make_mixture(KINDS[name], experts=EXPERTS, hidden=hidden, inner=inner, bias=bias)
        for tile_tokens in TOKENS:
            mailbox = mailbox_for(mixture, 170, 3)
            team = ExpertTeam(
                mixture.host, mailbox, library, threads=2, isa=AMX, tile_tokens=tile_tokens
            )
            for tokens in TOKENS[tile_tokens]:
                fill(mailbox, tokens, EXPERTS, seed=tokens)
                post(mailbox, library, 0, tokens)
                check(mixture, mailbox, tokens)
            team.stop()


@pytest.mark.parametrize("name", ["bf16", "fp8_blocks", "int4_32_points"])
def test_results_do_not_depend_on_threads(library: ctypes.CDLL, name: str) -> None:
    mixture = make_mixture(KINDS[name], experts=EXPERTS, hidden=640, inner=320)
    mailbox = mailbox_for(mixture, 40, 3)
    fill(mailbox, 40, EXPERTS, seed=3, on_device=0.0)
    answers = []
    for threads in (1, 2, 5):
        team = ExpertTeam(mixture.host, mailbox, library, threads=threads, isa=AMX, tile_tokens=8)
        post(mailbox, library, 0, 40)
        team.stop()
        mailbox.answer[1] = 0
        answers.append(mailbox.sums.clone())
    assert all(torch.equal(other, answers[0]) for other in answers[1:])
