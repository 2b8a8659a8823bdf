"""What a team computes: every kind of weights, instruction set and activation, from no token to
many, and that no result depends on threads or on other tokens."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from functools import cache

import pytest
import torch
from torch import Tensor

from hetero_llm.bridge.expert_mailbox import (
    NO_PART,
    ON_DEVICE,
    ORDERS,
    ExpertMailbox,
    LinkPart,
    columns_in,
)
from hetero_llm.cpu import native
from hetero_llm.cpu.expert_team import ExpertTeam, post
from hetero_llm.models.config import ClampedSwish
from tests.cpu.expert_cases import KINDS, Mixture, expected, fill, mailbox_for, make_mixture

# A deadlock sits in C, where signals do not reach Python: the thread method ends the process.
pytestmark = pytest.mark.timeout(300, method="thread")

BF16, FLOAT = torch.bfloat16, torch.float32
K, EXPERTS = 3, 6
MOST_TOKENS = 64
# Sizes that leave rests of every vector, of a tile's step and of a strip; groups divide them.
SIZES = {"fp8_blocks": (320, 160), "int8_groups": (320, 160)}
PLAIN_SIZES = (200, 88)
GATES: tuple[str | ClampedSwish, ...] = (
    "silu", "gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh", "relu", "relu2",
    ClampedSwish(1.702, 1.0),
)  # fmt: skip


@cache
def mixture_of(name: str, **options: object) -> Mixture:
    """The same one for all tests, which only read it."""
    kind = KINDS[name]
    hidden, inner = SIZES.get(name, (320, 160) if kind.group else PLAIN_SIZES)
    sizes = {"experts": EXPERTS, "hidden": hidden, "inner": inner}
    return make_mixture(kind, **{**sizes, **options})  # type: ignore[arg-type]


def check(
    mixture: Mixture,
    mailbox: ExpertMailbox,
    tokens: int,
    *,
    layer: int = 0,
    part: LinkPart = NO_PART,
) -> None:
    """The last answer against torch: to 1e-5 in float; in bf16 a gate that is nearly between two
    numbers may round to the other one. Rows of no interest stay as `fill` left them."""
    asked = (mailbox.ids[:tokens] != ON_DEVICE).any(1)
    y = mailbox.sums[:tokens]
    assert y[~asked].isnan().all() and mailbox.sums[tokens:].isnan().all()
    if not asked.any():
        return
    wanted = expected(mixture, mailbox, layer, tokens, part=part)[asked]
    errors, size = (y[asked] - wanted).abs(), wanted.abs().max()
    if mailbox.x.dtype == BF16:
        assert errors.max() < 0.03 * size
        assert errors.square().mean().sqrt() < 0.002 * size
    else:
        assert errors.max() < 1e-5 * size


@pytest.mark.parametrize("dtype", [BF16, FLOAT], ids=["bf16", "float"])
@pytest.mark.parametrize("name", KINDS)
def test_one_to_many_tokens(library: ctypes.CDLL, isa: int, name: str, dtype: torch.dtype) -> None:
    mixture = mixture_of(name, layers=2)
    mailbox = mailbox_for(mixture, MOST_TOKENS, K, dtype)
    team = ExpertTeam(mixture.host, mailbox, library, threads=2, isa=isa)
    for tokens in (1, 2, 3, 5, 17, MOST_TOKENS):
        layer = tokens % 2
        fill(mailbox, tokens, EXPERTS, seed=tokens)
        post(mailbox, library, layer, tokens)
        check(mixture, mailbox, tokens, layer=layer)
    team.stop()


@pytest.mark.parametrize("dtype", [BF16, FLOAT], ids=["bf16", "float"])
@pytest.mark.parametrize("name", KINDS)
def test_inner_rows_that_the_device_computes_are_left_out(
    library: ctypes.CDLL, isa: int, name: str, dtype: torch.dtype
) -> None:
    """Requests of different shares follow each other."""
    mixture = mixture_of(name, hidden=320, inner=480, bias=dtype)
    mailbox = mailbox_for(mixture, MOST_TOKENS, K, dtype)
    team = ExpertTeam(mixture.host, mailbox, library, threads=2, isa=isa)
    for tokens, rows in ((1, 352), (20, 0), (3, 96), (MOST_TOKENS, 224), (5, 0)):
        part = LinkPart(rows)
        fill(mailbox, tokens, EXPERTS, seed=tokens)
        post(mailbox, library, 0, tokens, part=part)
        check(mixture, mailbox, tokens, part=part)
    team.stop()


@pytest.mark.parametrize("tokens", [1, 2, 7])
def test_experts_that_the_device_computes_are_left_out(library: ctypes.CDLL, tokens: int) -> None:
    """Those of the highest numbers, down to one of two; tokens that have no others get zeros."""
    mixture = mixture_of("float32", bias=FLOAT)
    mailbox = mailbox_for(mixture, tokens, K, FLOAT)
    team = ExpertTeam(mixture.host, mailbox, library, threads=2)
    for whole in (0, 85, 128, 255):
        fill(mailbox, tokens, EXPERTS, seed=tokens)
        part = LinkPart(whole=whole)
        post(mailbox, library, 0, tokens, part=part)
        check(mixture, mailbox, tokens, part=part)
    team.stop()


@pytest.mark.parametrize(
    "part", [*map(LinkPart, (-1, 1, 100, 320)), LinkPart(0, -1), LinkPart(0, 256), LinkPart(64, 9)]
)
def test_parts_that_no_kernel_leaves_out_end_the_team(library: ctypes.CDLL, part: LinkPart) -> None:
    """Without a word in y: 320 inner rows, of which the team's are a multiple of 128."""
    mixture = mixture_of("bf16", inner=320)
    mailbox = mailbox_for(mixture, 4, K)
    fill(mailbox, 4, EXPERTS, seed=1)
    team = ExpertTeam(mixture.host, mailbox, library, threads=1)
    with pytest.raises(RuntimeError, match="left a part of the experts to the device"):
        post(mailbox, library, 0, 4, part=part)
    assert team.stop_reason is not None and mailbox.sums.isnan().all()
    team.stop()


def test_half_inputs(library: ctypes.CDLL, isa: int) -> None:
    for name in ("half", "int8"):
        mixture = mixture_of(name)
        mailbox = mailbox_for(mixture, 4, K, torch.float16)
        fill(mailbox, 4, EXPERTS, seed=1)
        mailbox.x[0, ::2] = 1e-6  # below the first exponent
        with_team(mixture, mailbox, library, 4, isa=isa)
        check(mixture, mailbox, 4)


def with_team(
    mixture: Mixture, mailbox: ExpertMailbox, library: ctypes.CDLL, tokens: int,
    *, threads: int = 2, isa: int | None = None,
) -> Tensor:  # fmt: skip
    """A copy of the answer of a team made for one request."""
    team = ExpertTeam(mixture.host, mailbox, library, threads=threads, isa=isa)
    post(mailbox, library, 0, tokens)
    team.stop()
    mailbox.answer[1] = 0  # for the next team
    return mailbox.sums[:tokens].clone()


@pytest.mark.parametrize("gate", GATES, ids=str)
@pytest.mark.parametrize("name", ["float32", "bf16"])
def test_activations(library: ctypes.CDLL, isa: int, name: str, gate: str | ClampedSwish) -> None:
    mixture = mixture_of(name, gate=gate)
    mailbox = mailbox_for(mixture, 4, K, FLOAT if name == "float32" else BF16)
    fill(mailbox, 4, EXPERTS, seed=2)
    mailbox.x.mul_(3)
    with_team(mixture, mailbox, library, 4, isa=isa)
    check(mixture, mailbox, 4)


@pytest.mark.parametrize("dtype", [BF16, FLOAT, torch.float16], ids=str)
def test_biases(library: ctypes.CDLL, isa: int, dtype: torch.dtype) -> None:
    """As gpt-oss has them."""
    mixture = mixture_of("fp4", gate=ClampedSwish(1.702, 7.0), bias=dtype)
    mailbox = mailbox_for(mixture, 9, K, dtype)
    fill(mailbox, 9, EXPERTS, seed=3)
    with_team(mixture, mailbox, library, 9, isa=isa)
    check(mixture, mailbox, 9)


def check_threads(library: ctypes.CDLL, isa: int, name: str) -> None:
    """The same to the bit, with more threads than there are strips as well."""
    mixture = mixture_of(name, inner=640 if KINDS[name].group else 600)
    mailbox = mailbox_for(mixture, 20, K)
    for tokens in (1, 20):
        fill(mailbox, tokens, EXPERTS, seed=4)
        answers = [
            with_team(mixture, mailbox, library, tokens, threads=threads, isa=isa)
            for threads in (1, 2, 5)
        ]
        for other in answers[1:]:
            torch.testing.assert_close(other, answers[0], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", KINDS)
def test_results_do_not_depend_on_threads(library: ctypes.CDLL, name: str) -> None:
    check_threads(library, native.isa_level(library), name)


@pytest.mark.parametrize("name", ["bf16", "fp8_blocks", "int4_128_points"])
def test_they_do_so_on_no_instruction_set(library: ctypes.CDLL, isa: int, name: str) -> None:
    """One kind of each way to read scales: strips are shared before kinds part."""
    check_threads(library, isa, name)


@pytest.mark.parametrize("dtype", [BF16, FLOAT], ids=["bf16", "float"])
@pytest.mark.parametrize("name", KINDS)
def test_a_tokens_result_does_not_depend_on_its_neighbours(
    library: ctypes.CDLL, isa: int, name: str, dtype: torch.dtype
) -> None:
    """To the bit, for as many tokens as dot products serve."""
    mixture = mixture_of(name)
    tokens = 70  # more than are computed at once, with every expert
    mailbox = mailbox_for(mixture, tokens, K, dtype)
    fill(mailbox, tokens, EXPERTS, seed=5, on_device=0.1)
    team = ExpertTeam(mixture.host, mailbox, library, threads=2, isa=isa, tile_tokens=0)
    post(mailbox, library, 0, tokens)
    together = mailbox.sums.clone()
    state = [tensor.clone() for tensor in (mailbox.x, mailbox.ids, mailbox.weights)]
    for token in (0, 1, 2, 35, 68, 69):
        for tensor, before in zip((mailbox.x, mailbox.ids, mailbox.weights), state, strict=True):
            tensor[0] = before[token]
        post(mailbox, library, 0, 1)
        torch.testing.assert_close(mailbox.sums[0], together[token], rtol=0, atol=0, equal_nan=True)
    assert team.stop_reason is None


@pytest.mark.parametrize("name", ["bf16", "half", "int8", "fp8_blocks", "int4_32_points", "fp4"])
def test_inputs_in_any_order(library: ctypes.CDLL, isa: int, name: str) -> None:
    """To the bit, for few tokens and for as many as tiles take."""
    mixture = mixture_of(name)
    answers = []
    for order in ORDERS:
        mailbox = mailbox_for(mixture, MOST_TOKENS, K, order=order)
        fill(mailbox, MOST_TOKENS, EXPERTS, seed=3)
        found = [with_team(mixture, mailbox, library, n, isa=isa) for n in (2, MOST_TOKENS)]
        answers.append(torch.cat(found))
    for other in answers[1:]:
        torch.testing.assert_close(other, answers[0], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", KINDS)
def test_nan_stays_in_its_token(library: ctypes.CDLL, isa: int, name: str) -> None:
    mixture = mixture_of(name)
    mailbox = mailbox_for(mixture, 9, K)
    fill(mailbox, 9, EXPERTS, seed=6, on_device=0.0)
    without = with_team(mixture, mailbox, library, 9, isa=isa)
    last = columns_in(mailbox.order, mailbox.x.shape[1]) == mixture.host.hidden - 1
    mailbox.x[4, last] = float("nan")
    found = with_team(mixture, mailbox, library, 9, isa=isa)
    assert found[4].isnan().all()
    others = [token for token in range(9) if token != 4]
    assert torch.equal(found[others], without[others])


def test_nan_of_fp8_weights_reaches_the_result(library: ctypes.CDLL, isa: int) -> None:
    hidden, inner = PLAIN_SIZES
    mixture = make_mixture(KINDS["fp8"], experts=EXPERTS, hidden=hidden, inner=inner)
    mixture.host.layers[0].down.data.view(torch.uint8)[2, 5, 7] = 0xFF
    mailbox = mailbox_for(mixture, 2, 1)
    fill(mailbox, 2, EXPERTS, seed=7, on_device=0.0)
    mailbox.ids[:, 0] = torch.tensor([2, 3], dtype=torch.int32)
    found = with_team(mixture, mailbox, library, 2, isa=isa)
    assert found[0].isnan().nonzero().tolist() == [[5]] and found[1].isfinite().all()


@pytest.mark.parametrize("choices", [[[0, 1, 2]] * 7, [[3, -1, -1]] * 7, [[-1, 5, 5]] * 7])
def test_tokens_that_share_experts(
    library: ctypes.CDLL, isa: int, choices: Iterable[list[int]]
) -> None:
    """All of them, and an expert twice: its output counts twice."""
    mixture = mixture_of("bf16")
    mailbox = mailbox_for(mixture, 7, K)
    fill(mailbox, 7, EXPERTS, seed=8)
    mailbox.ids[:] = torch.tensor(choices, dtype=torch.int32)
    with_team(mixture, mailbox, library, 7, isa=isa)
    check(mixture, mailbox, 7)


def test_many_experts_with_few_tokens_each(library: ctypes.CDLL) -> None:
    mixture = mixture_of("bf16", experts=70, hidden=64, inner=32)
    mailbox = mailbox_for(mixture, MOST_TOKENS, 8)
    fill(mailbox, MOST_TOKENS, 70, seed=9)
    with_team(mixture, mailbox, library, MOST_TOKENS, isa=native.isa_level(library))
    check(mixture, mailbox, MOST_TOKENS)
