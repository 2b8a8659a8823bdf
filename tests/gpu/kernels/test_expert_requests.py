"""Requests for experts on the host: what reaches the mailbox, and what is added when."""

from __future__ import annotations

import dataclasses
import re
import threading
import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from hetero_llm.bridge.expert_mailbox import (
    COMING,
    LAYER,
    LINKED,
    ON_DEVICE,
    SEQUENCE,
    STOPPED,
    TOKENS,
    WHOLE,
    ExpertMailbox,
    LinkPart,
    Order,
    inputs_of,
    open_mailbox,
)
from hetero_llm.gpu.kernels.expert_requests import (
    ASKED,
    GAVE_UP,
    NOWHERE,
    NUMBER,
    ON_HOST,
    STATE_WORDS,
    Exchange,
    Places,
    post,
    post_kernel,
    post_reference,
    rows_of_mail,
    wait_add,
    wait_add_kernel,
    wait_add_reference,
)
from tests.helpers.compiled import printed_kernels
from tests.helpers.expert_team import PythonTeam

EXPERTS = 6
LOOKS = 5
HIGHEST = 2**31 - 1


def exchange_on(
    device: torch.device, rows: int, hidden: int, k: int, *, dtype: torch.dtype = torch.float32,
    most_looks: int = LOOKS, order: Order = "natural",
) -> Exchange:  # fmt: skip
    pin = device.type == "cuda"
    box = open_mailbox(rows, hidden, k, dtype, pin=pin, order=order)
    box.x.fill_(-7)
    box.weights.fill_(-7)
    state = torch.zeros(STATE_WORDS, dtype=torch.int32, device=device)
    return Exchange(box, state, torch.zeros(1, dtype=torch.int32, pin_memory=pin), most_looks)


def answer(box: ExpertMailbox, sums: Tensor) -> None:
    """As the team answers the last request; `sums`: [rows of the mailbox, hidden]."""
    box.sums.copy_(sums)
    box.numbers.copy_(box.request[SEQUENCE])
    box.answer[COMING] = box.request[SEQUENCE]


@dataclass
class Layer:
    """Tokens of one layer, and a table in which every other expert is on the host."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    table: Tensor

    @classmethod
    def of(
        cls, device: torch.device, rows: int, hidden: int, k: int,
        dtype: torch.dtype = torch.float32, on_host: tuple[int, ...] = (1, 3, 5),
    ) -> Layer:  # fmt: skip
        generator = torch.Generator().manual_seed(rows * 31 + hidden)
        x = torch.randn(rows, hidden, generator=generator).to(dtype)
        ids = torch.stack([torch.randperm(EXPERTS, generator=generator)[:k] for _ in range(rows)])
        weights = torch.rand(rows, k, generator=generator)
        slots = torch.arange(EXPERTS, dtype=torch.int32) * 3 + 2
        slots[list(on_host)] = ON_HOST
        ids = ids.to(torch.int32)
        return cls(x.to(device), ids.to(device), weights.to(device), slots.to(device))

    def hits(self) -> Tensor:
        return torch.zeros(EXPERTS, dtype=torch.int32, device=self.table.device)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


@pytest.mark.parametrize(
    "rows, hidden, k, dtype, order",
    [
        (1, 40, 2, torch.float32, "natural"),
        (1, 3000, 4, torch.bfloat16, "bytes"),
        (2, 2900, 4, torch.bfloat16, "nibbles"),
        (5, 40, 3, torch.float16, "natural"),
        (19, 64, 1, torch.float32, "natural"),
        (35, 24, 2, torch.bfloat16, "bytes"),
        (7, 250, 2, torch.bfloat16, "nibbles"),
    ],
)
@pytest.mark.parametrize("padding", [False, True])
def test_tokens_with_experts_on_the_host_reach_the_mailbox(
    device: torch.device, rows: int, hidden: int, k: int, dtype: torch.dtype, order: Order,
    padding: bool,
) -> None:  # fmt: skip
    layer = Layer.of(device, rows, hidden, k, dtype)
    kv_slots = None
    if padding:
        kv_slots = torch.arange(rows, dtype=torch.int32, device=device)
        kv_slots[rows // 2 :: 2] = -1
    results = []
    for function in (post, post_reference):
        exchange = exchange_on(device, rows + 2, hidden, k, dtype=dtype, order=order)
        hits = layer.hits()
        for _ in range(2):  # numbers count on
            places = function(
                layer.x, layer.ids, layer.weights, table=layer.table, hits=hits, layer=4,
                exchange=exchange, kv_slots=kv_slots,
            )  # fmt: skip
        synchronize(device)
        results.append((places, hits, exchange))
    (ours, our_hits, found), (theirs, their_hits, expected) = results
    assert torch.equal(ours.slots, theirs.slots) and torch.equal(ours.experts, theirs.experts)
    assert torch.equal(our_hits, their_hits)
    assert torch.equal(found.state, expected.state)
    assert torch.equal(found.mailbox.request, expected.mailbox.request)
    assert torch.equal(found.mailbox.x, expected.mailbox.x)
    assert torch.equal(found.mailbox.ids[:rows], expected.mailbox.ids[:rows])
    asked = (expected.mailbox.ids[:rows] != ON_DEVICE).any(1)
    assert bool(asked.any()) == bool(found.state[ASKED])
    assert torch.equal(found.mailbox.weights[:rows][asked], expected.mailbox.weights[:rows][asked])
    assert torch.equal(inputs_of(found.mailbox)[:rows][asked], layer.x.cpu()[asked])


def test_tokens_of_a_long_step_that_ask_share_the_mailbox(device: torch.device) -> None:
    """Their rows follow each other, and the answers find their tokens."""
    rows, hidden, k = 35, 40, 2
    layer = Layer.of(device, rows, hidden, k, on_host=(1,))
    kv_slots = torch.arange(rows, dtype=torch.int32, device=device)
    kv_slots[::5] = -1
    mail_rows = rows_of_mail(layer.ids, layer.table, kv_slots)
    asking = int(mail_rows[-1])
    assert 0 < asking < rows - 8
    results = []
    for ask, add in ((post, wait_add), (post_reference, wait_add_reference)):
        exchange = dataclasses.replace(exchange_on(device, asking, hidden, k), rows=mail_rows)
        places = ask(
            layer.x, layer.ids, layer.weights, table=layer.table, hits=layer.hits(), layer=2,
            exchange=exchange, kv_slots=kv_slots,
        )  # fmt: skip
        synchronize(device)
        box = exchange.mailbox
        answer(box, torch.arange(asking * hidden).view(asking, hidden))
        parts = torch.zeros(rows * k, hidden, device=device)
        y = add(parts, layer.weights, places, dtype=torch.float32, exchange=exchange)
        synchronize(device)
        results.append((box, y))
    (ours, y), (theirs, expected) = results
    for name in ("request", "ids", "x", "weights"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name
    assert torch.equal(y, expected) and int(ours.request[TOKENS]) == asking
    tokens = (mail_rows[:-1] >= 0).nonzero().flatten()
    assert torch.equal(y[tokens].cpu(), ours.sums) and torch.equal(
        inputs_of(ours), layer.x[tokens].cpu()
    )
    assert not y[mail_rows[:-1] < 0].any()


def test_a_layer_with_all_experts_in_the_bank_exchanges_nothing(device: torch.device) -> None:
    layer = Layer.of(device, 3, 40, 2, on_host=())
    exchange = exchange_on(device, 3, 40, 2)
    exchange.state[NUMBER], exchange.state[ASKED] = 17, 1
    hits = layer.hits()
    places = post(
        layer.x, layer.ids, layer.weights, table=layer.table, hits=hits, layer=0, exchange=exchange
    )
    parts = torch.randn(6, 40, device=device)
    y = wait_add(parts, layer.weights, places, dtype=torch.float32, exchange=exchange)
    synchronize(device)
    assert not exchange.mailbox.request.any() and (exchange.mailbox.x == -7).all()
    assert exchange.state.tolist()[:4] == [17, 0, 0, 0] and int(hits.sum()) == 6
    assert not exchange.errors.any()  # nothing answers number 17, and nothing waits for it
    expected = (parts.view(3, 2, 40) * layer.weights.unsqueeze(2)).sum(1)
    torch.testing.assert_close(y, expected)


def test_padding_alone_asks_for_nothing(device: torch.device) -> None:
    layer = Layer.of(device, 4, 40, 3)
    exchange = exchange_on(device, 4, 40, 3)
    hits = layer.hits()
    none = torch.full((4,), -1, dtype=torch.int32, device=device)
    places = post(
        layer.x, layer.ids, layer.weights, table=layer.table, hits=hits, layer=0,
        exchange=exchange, kv_slots=none,
    )  # fmt: skip
    synchronize(device)
    assert (places.slots == NOWHERE).all() and (places.experts == -1).all() and not hits.any()
    assert not exchange.state.any() and not exchange.mailbox.request.any()


@pytest.mark.parametrize(
    "rows, hidden, k, splits, dtype",
    [
        (1, 40, 2, 1, torch.float32),
        (1, 1500, 3, 2, torch.bfloat16),
        (7, 40, 3, 1, torch.float16),
        (70, 2048, 2, 1, torch.float32),
    ],
)
@pytest.mark.parametrize("summed", [False, True])
def test_answers_are_added_before_the_one_rounding(
    device: torch.device, rows: int, hidden: int, k: int, splits: int, dtype: torch.dtype,
    summed: bool,
) -> None:  # fmt: skip
    layer = Layer.of(device, rows, hidden, k, dtype, on_host=(1, 2, 3, 4, 5))
    results = []
    for ask, add in ((post, wait_add), (post_reference, wait_add_reference)):
        exchange = exchange_on(device, rows, hidden, k, dtype=dtype)
        exchange.state[NUMBER] = HIGHEST  # numbers wrap
        places = ask(
            layer.x, layer.ids, layer.weights, table=layer.table, hits=layer.hits(), layer=1,
            exchange=exchange,
        )  # fmt: skip
        torch.manual_seed(1)
        shape = (rows, hidden) if summed else (splits, rows * k, hidden)
        parts = torch.randn(shape).to(torch.float32 if summed or splits > 1 else dtype).to(device)
        if not summed:  # what no kernel has written
            parts[:, (places.slots < 0).flatten()] = float("nan")
        sums = torch.randn(rows, hidden)
        synchronize(device)
        sums[(exchange.mailbox.ids == ON_DEVICE).all(1)] = float("nan")
        answer(exchange.mailbox, sums)
        assert int(exchange.mailbox.request[SEQUENCE]) == -HIGHEST - 1
        results.append(add(parts, layer.weights, places, dtype=dtype, exchange=exchange))
        synchronize(device)
        assert not exchange.errors.any() and not exchange.state[GAVE_UP]
    assert results[0].dtype == dtype
    torch.testing.assert_close(*results, atol=3e-2 if dtype != torch.float32 else 1e-5, rtol=2e-2)


def wait_for_nothing(
    device: torch.device, exchange: Exchange, add: object = wait_add
) -> tuple[Tensor, Places]:
    layer = Layer.of(device, 2, 40, 2, on_host=tuple(range(EXPERTS)))
    places = post(
        layer.x, layer.ids, layer.weights, table=layer.table, hits=layer.hits(), layer=0,
        exchange=exchange,
    )  # fmt: skip
    parts = torch.zeros(4, 40, device=device)
    assert callable(add)
    y = add(parts, layer.weights, places, dtype=torch.float32, exchange=exchange)
    synchronize(device)
    return y, places


@pytest.mark.parametrize("add", [wait_add, wait_add_reference])
def test_an_answer_that_does_not_come_is_an_error(device: torch.device, add: object) -> None:
    exchange = exchange_on(device, 2, 40, 2)
    y, places = wait_for_nothing(device, exchange, add)
    assert (places.slots == ON_HOST).all() and not y.any()
    assert exchange.errors.tolist() == [1] and exchange.state.tolist()[:4] == [1, 1, 0, 1]
    # The layers after it ask for nothing more.
    wait_for_nothing(device, exchange, add)
    assert exchange.state.tolist()[:4] == [1, 0, 0, 1]
    assert int(exchange.mailbox.request[SEQUENCE]) == 1


@pytest.mark.parametrize("add", [wait_add, wait_add_reference])
def test_a_team_that_has_stopped_is_not_waited_for(device: torch.device, add: object) -> None:
    """The readings are no small number here: the test would not end."""
    exchange = exchange_on(device, 2, 40, 2, most_looks=HIGHEST)
    exchange.mailbox.answer[STOPPED] = 1
    wait_for_nothing(device, exchange, add)
    assert exchange.errors.tolist() == [1]


@pytest.mark.parametrize("ask, add", [(post, wait_add), (post_reference, wait_add_reference)])
def test_the_part_of_the_device_is_posted_and_added(
    device: torch.device, ask: Any, add: Any
) -> None:
    """To tokens that have asked alone: rows of the others are undefined."""
    rows, hidden, k = 5, 40, 2
    layer = Layer.of(device, rows, hidden, k, on_host=(1,))
    exchange = dataclasses.replace(exchange_on(device, rows, hidden, k), part=LinkPart(384, 7))
    places = ask(
        layer.x, layer.ids, layer.weights, table=layer.table, hits=layer.hits(), layer=2,
        exchange=exchange,
    )  # fmt: skip
    synchronize(device)
    box = exchange.mailbox
    assert (int(box.request[LINKED]), int(box.request[WHOLE])) == (384, 7)
    answer(box, torch.full((rows, hidden), 2.0))
    asked = (places.slots == ON_HOST).any(1)
    assert asked.any() and not asked.all()
    linked = torch.full((rows, hidden), float("nan"), device=device)
    linked[asked] = 0.5
    parts = torch.zeros(rows * k, hidden, device=device)
    y = add(parts, layer.weights, places, dtype=torch.float32, exchange=exchange, linked=linked)
    assert (y[asked] == 2.5).all() and (y[~asked] == 0).all()


def test_an_older_answer_is_not_taken(device: torch.device) -> None:
    exchange = exchange_on(device, 2, 40, 2)
    exchange.state[NUMBER] = 5
    exchange.mailbox.answer[COMING] = 5
    exchange.mailbox.numbers.fill_(6)  # those alone say nothing
    wait_for_nothing(device, exchange)
    assert exchange.errors.tolist() == [1]


@pytest.mark.parametrize("add", [wait_add, wait_add_reference])
def test_sums_that_come_late_and_out_of_order_are_waited_for(
    device: torch.device, add: Any
) -> None:
    """A thread announces each answer first, then writes the sums piece by piece from behind, while
    old sums still bear the numbers of the exchange before."""
    rows, hidden, k, layers = 3, 1500, 2, 6
    exchange = exchange_on(device, rows, hidden, k, most_looks=20 << 20)
    box = exchange.mailbox
    wanted = [torch.randn(rows, hidden) for _ in range(layers)]

    def serve() -> None:
        for number, sums in enumerate(wanted, 1):
            while int(box.request[SEQUENCE]) != number:
                time.sleep(0)
            box.answer[COMING] = number
            for begin in reversed(range(0, hidden, 300)):
                part = slice(begin, begin + 300)
                box.sums[:, part] = float("nan")  # with an old number: no one may take it
                time.sleep(0)
                box.sums[:, part] = sums[:, part]
                box.numbers[:, part] = number

    server = threading.Thread(target=serve)
    server.start()
    for sums in wanted:
        layer = Layer.of(device, rows, hidden, k, on_host=tuple(range(EXPERTS)))
        places = post(
            layer.x, layer.ids, layer.weights, table=layer.table, hits=layer.hits(), layer=0,
            exchange=exchange,
        )  # fmt: skip
        parts = torch.zeros(rows * k, hidden, device=device)
        y = add(parts, layer.weights, places, dtype=torch.float32, exchange=exchange)
        synchronize(device)
        assert torch.equal(y.cpu(), sums)
    server.join()
    assert not exchange.errors.any()


@pytest.mark.parametrize("add", [wait_add, wait_add_reference])
@pytest.mark.parametrize("other", [0, 2])
def test_a_sum_that_does_not_come_is_an_error(device: torch.device, add: Any, other: int) -> None:
    """The answer is announced, and complete but for one number: another exchange's."""
    exchange = exchange_on(device, 2, 40, 2)
    exchange.mailbox.answer[COMING] = 1
    exchange.mailbox.sums.fill_(1.0)
    exchange.mailbox.numbers.fill_(1)
    exchange.mailbox.numbers[1, 7] = other
    y, _ = wait_for_nothing(device, exchange, add)
    assert exchange.errors.tolist() == [1] and exchange.state.tolist()[:4] == [1, 1, 0, 1]
    assert not y[1].any()


def test_words_of_the_host_are_read_at_once_and_from_its_memory() -> None:
    """As compiled for Hopper: sums and numbers in loads of 8 bytes that no cache answers, and no
    fence but that of `post`."""
    asks, adds = printed_kernels(__name__)
    assert len(re.findall(r"fence\.acq_rel\.sys", asks)) == 1 and "st.relaxed.sys" in asks
    assert "fence" not in adds and "acquire" not in adds
    volatile = re.findall(r"ld\.volatile\.global\.(\S+)", adds)
    assert volatile and set(volatile) <= {"b64", "v2.b64"}
    assert "ld.relaxed.sys.global.b64" in adds


def print_ptx() -> None:
    """`post` and `wait_add` as compiled for Hopper, in a process without the interpreter."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    constants: dict[str, object] = {
        "K": 8, "K_LANES": 8, "TILE": 1024, "PROGRAMS": 4, "ORDER": 1, "ASK": True, "ON_GPU": True,
        "PDL": True, "SPLIT_K": 1, "SUMMED": False,
    }  # fmt: skip
    types = {"x": "*bf16", "mail_x": "*bf16", "parts": "*bf16", "y": "*bf16", "answers": "*i64"}
    types |= dict.fromkeys(("weights", "mail_weights", "shares"), "*fp32")
    none = ("kv_slots", "mail_rows", "linked")
    numbers = ("num_rows", "hidden", "width", "x_stride", "layer", "whole", "n", "most_looks")
    for kernel in (post_kernel, wait_add_kernel):
        signature: dict[str, str] = {}
        fixed: dict[str, object] = {}
        aligned: dict[tuple[int, ...], list[list[object]]] = {}
        for i, name in enumerate(kernel.arg_names):
            is_none = name in none and not (name == "linked" and kernel is post_kernel)
            if name in constants or is_none:
                signature[name], fixed[name] = "constexpr", constants.get(name)
                continue
            is_number = name in numbers or name == "linked"
            signature[name] = "i32" if is_number else types.get(name, "*i32")
            if name not in ("num_rows", "layer", "linked", "whole", "most_looks"):
                aligned[(i,)] = [["tt.divisibility", 16]]
        source = ASTSource(kernel, signature, fixed, aligned)
        options = {"launch_pdl": True, "num_warps": 4}
        print(compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"])


def test_layers_in_turn_with_a_thread_that_answers(device: torch.device) -> None:
    """Twelve layers after each other; a thread computes x * (expert + 1) for what is asked."""
    layers, rows, hidden, k = 12, 9, 48, 3
    exchange = exchange_on(device, rows, hidden, k, most_looks=20 << 20)
    team = PythonTeam(exchange.mailbox, lambda layer, expert, x, _: x * (expert + 1 + layer))
    with team:
        for number in range(layers):
            on_host = () if number % 4 == 3 else (number % EXPERTS, (number + 2) % EXPERTS)
            layer = Layer.of(device, rows, hidden, k, on_host=on_host)
            hits = layer.hits()
            places = post(
                layer.x, layer.ids, layer.weights, table=layer.table, hits=hits, layer=number,
                exchange=exchange,
            )  # fmt: skip
            scale = (layer.ids + 1 + number).float()
            parts = (layer.x.unsqueeze(1) * scale.unsqueeze(2)).flatten(0, 1).contiguous()
            parts[(places.slots < 0).flatten()] = float("nan")
            y = wait_add(parts, layer.weights, places, dtype=torch.float32, exchange=exchange)
            synchronize(device)
            expected = layer.x * (layer.weights * scale).sum(1, keepdim=True)
            torch.testing.assert_close(y, expected, atol=1e-4, rtol=1e-5)
    assert team.error is None and not exchange.errors.any()
    assert {layer for layer, _ in team.requests} == {n for n in range(layers) if n % 4 != 3}
    assert all(tokens == rows for _, tokens in team.requests)
    assert int(exchange.mailbox.request[LAYER]) == layers - 2
    assert int(exchange.mailbox.request[TOKENS]) == rows
