"""A team of one Python thread that computes the experts which a mailbox asks for, in torch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType

import torch
from torch import Tensor

from hetero_llm.bridge.expert_mailbox import (
    ANSWERED,
    COMING,
    LAYER,
    LINKED,
    ON_DEVICE,
    SEQUENCE,
    STOPPED,
    TOKENS,
    WHOLE,
    WHOLES,
    ExpertMailbox,
    LinkPart,
    inputs_of,
)
from hetero_llm.bridge.host_experts import HostExperts, HostMatrices
from hetero_llm.models.config import ClampedSwish
from hetero_llm.models.layers import GatedActivation
from hetero_llm.quantization.matrix import QuantizedMatrix, dequantize

Compute = Callable[[int, int, Tensor, int], Tensor]
"""(layer, expert, x [N, hidden] float32, inner rows left out) -> [N, hidden] float32."""


def dense(matrices: HostMatrices, expert: int) -> Tensor:
    """[N, K] float32 of one expert."""
    place = expert if matrices.places is None else int(matrices.places[expert])
    assert place >= 0, "the host does not hold it"
    data = matrices.data[place]
    if matrices.scale is None:
        return data.float()

    def own(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[expert].contiguous()

    scale = own(matrices.scale)
    assert scale is not None and matrices.kind in ("fp8", "int8", "int4", "fp4", "nf4")
    matrix = QuantizedMatrix(
        matrices.kind, data.contiguous(), scale, matrices.group, matrices.scale_rows,
        own(matrices.zero), own(matrices.offset), own(matrices.row_scale),
    )  # fmt: skip
    return dequantize(matrix, torch.float32)


def expert_outputs(host: HostExperts) -> Compute:
    """The experts in host memory, in float32."""
    clamped = ClampedSwish(host.alpha, host.limit)
    gate = GatedActivation(clamped if host.activation == "clamped" else host.activation)

    def compute(layer: int, expert: int, x: Tensor, linked: int) -> Tensor:
        parts = host.layers[layer]
        first, second = (
            None if part.bias is None else part.bias[expert].float()
            for part in (parts.gate_up, parts.down)
        )
        middle = gate(torch.nn.functional.linear(x, dense(parts.gate_up, expert), first))
        middle[:, host.inner - linked :] = 0
        return torch.nn.functional.linear(middle, dense(parts.down, expert), second)

    return compute


class PythonTeam:
    """Answers until it is closed.

    Attributes:
        requests: layer and number of tokens of each exchange so far.
        parts: that each of them leaves out.
        error: what ended the thread; None: nothing has.
    """

    def __init__(self, mailbox: ExpertMailbox, compute: Compute) -> None:
        self.requests: list[tuple[int, int]] = []
        self.parts: list[LinkPart] = []
        self.error: BaseException | None = None
        self._mailbox = mailbox
        self._compute = compute
        self._ends = threading.Event()
        self._dies = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def die(self) -> None:
        """Ends without another word, as a killed thread does."""
        self._dies.set()
        self.close()

    def close(self) -> None:
        """Says that it ends, and ends."""
        self._ends.set()
        self._thread.join()

    def __enter__(self) -> PythonTeam:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self.close()

    def _serve(self) -> None:
        box = self._mailbox
        request, answer = box.request.numpy(), box.answer.numpy()
        with torch.inference_mode():
            while not self._ends.is_set():
                number = int(request[SEQUENCE])
                if number == int(answer[ANSWERED]):
                    self._ends.wait(1e-4)
                    continue
                try:
                    part = LinkPart(int(request[LINKED]), int(request[WHOLE]))
                    self._answer(number, int(request[LAYER]), int(request[TOKENS]), part)
                except BaseException as error:
                    self.error = error
                    break
                answer[COMING] = answer[ANSWERED] = number
        if not self._dies.is_set():
            answer[STOPPED] = 1

    def _answer(self, number: int, layer: int, tokens: int, part: LinkPart) -> None:
        box = self._mailbox
        self.requests.append((layer, tokens))
        self.parts.append(part)
        ids = box.ids[:tokens]
        different = ids[ids != ON_DEVICE].unique().tolist()
        inputs = inputs_of(box)
        own = different[: len(different) - len(different) * part.whole // WHOLES]
        for token in range(tokens):
            asked = ids[token] != ON_DEVICE
            if not bool(asked.any()):
                box.sums[token] = float("nan")
                continue
            x, total = inputs[token].float().unsqueeze(0), 0.0
            for place in asked.nonzero().flatten().tolist():
                if int(ids[token, place]) not in own:
                    continue
                outputs = self._compute(layer, int(ids[token, place]), x, part.rows)
                total = total + float(box.weights[token, place]) * outputs[0]
            box.sums[token] = total
            box.numbers[token] = number  # behind the sums: x86 keeps the order of stores
