"""CPU threads that compute experts for the steps of another device.

C++: `csrc/experts/`. The protocol is that of `bridge.expert_mailbox`, the weights are those of
`bridge.host_experts`, read where they lie: row-major, each kind as it is. bfloat16 inputs meet
weights as bfloat16 numbers, which hold int8, fp8, int4 and fp4 exactly, and sums are float32; other
inputs are multiplied in float32. Bench: `bench/kernels/expert_team.py`.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hetero_llm.bridge.expert_mailbox import (
    NO_PART,
    ORDERS,
    ROW_UNIT,
    STOPPED,
    ExpertMailbox,
    LinkPart,
)
from hetero_llm.bridge.host_experts import HostExperts, HostMatrices
from hetero_llm.core.errors import ConfigError
from hetero_llm.cpu import native

FIELD = "moe_cpu_experts"
"""The argument of the engine that asks for experts on the CPU."""

SPIN_US = 2000
"""Microseconds for which threads wait awake for a request: longer than a device needs between two
layers, or between two steps that follow each other at once."""

TILE_TOKENS = {"bfloat16": 6, "int8": 5, "fp8": 5, "int4": 6, "fp4": 6}
"""Tokens of an expert from which on AMX tiles multiply, by the weights' kind: where straight lines
between 4 and 16 tokens meet, with 15 threads of an Emerald Rapids Xeon (measured by
`bench.kernels.expert_team`). Below, memory gives the pace, and a tile's results depend on the
number of tokens."""

_KINDS = {
    "float32": 0, "bfloat16": 1, "float16": 2, "int8": 3, "fp8": 4, "int4": 5, "fp4": 6,
}  # fmt: skip
_NUMBERS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_GATES = {
    "silu": 0, "gelu_new": 1, "gelu_fast": 1, "gelu_pytorch_tanh": 1, "gelu": 2, "relu": 3,
    "relu2": 4, "clamped": 5,
}  # fmt: skip
_NO_ZEROS, _POINTS, _OFFSETS = range(3)
_REASONS = {
    1: "it was stopped",
    2: "a request named a layer that has no experts",
    3: "a request had more tokens than the mailbox",
    4: "a request named an expert that there is not",
    5: "a request named an expert that host memory does not hold",
    6: "a request left a part of the experts to the device that no kernel leaves out",
}
_LONG, _DOUBLE, _POINTER = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p


class _Form(ctypes.Structure):
    """`Form` of csrc/experts/matrix.h."""

    _fields_ = [
        (name, _LONG)
        for name in ("kind", "scale", "group", "scale_rows", "rows", "depth", "zeros", "stored")
    ]


class _Setting(ctypes.Structure):
    """`Setting` of csrc/experts/exchange.h."""

    _fields_ = [
        *((name, _LONG) for name in ("layers", "experts", "hidden", "inner")),
        *((name, _LONG) for name in ("max_tokens", "experts_per_token")),
        ("gate_up", _Form),
        ("down", _Form),
        ("gate", _LONG),
        ("alpha", _DOUBLE),
        ("limit", _DOUBLE),
        *((name, _LONG) for name in ("input", "order", "tile_tokens")),
        ("isa", ctypes.c_int),
        *((name, _POINTER) for name in ("addresses", "ids", "weights", "x", "y")),
        *((name, _POINTER) for name in ("request", "answer")),
    ]


@dataclass(frozen=True, slots=True)
class TeamStats:
    """What a team has done since it was made.

    Attributes:
        exchanges: requests answered.
        busy_s: seconds from a request seen to its answer, all together.
        naps: times that the polling thread went to sleep.
        slept_s: seconds that all threads together slept while they waited for each other, because
            one of them had lost its core.
    """

    exchanges: int
    busy_s: float
    naps: int
    slept_s: float


class ExpertTeam:
    """Answers the requests of one mailbox until `stop` is called or a request is malformed.

    One thread of the library polls the mailbox, on cpus[0]; with the others it computes. Without a
    request they spin for `spin_us`, then sleep: see `wake`. A process that forks keeps the threads;
    the child has none.

    Args:
        experts: tensors must not move while the team runs; experts may change places
            (`HostPlaces`), and in memory between exchanges.
        mailbox: likewise; only this team answers it.
        library: of `native.load`.
        threads: as many cores are busy while a request is computed, and for `spin_us` after it.
        cpus: the logical CPU of each thread, distinct from that of the engine's thread; None: the
            system places them.
        isa: index of `native.ISA_NAMES`; None: `native.isa_level`.
        tile_tokens: replaces `TILE_TOKENS`; 0: tiles never serve.

    Raises:
        ConfigError: no kernel serves the weights' form, or there are no threads.
    """

    def __init__(
        self,
        experts: HostExperts,
        mailbox: ExpertMailbox,
        library: ctypes.CDLL,
        *,
        threads: int,
        cpus: Sequence[int] | None = None,
        spin_us: int = SPIN_US,
        isa: int | None = None,
        tile_tokens: int | None = None,
    ) -> None:
        assert threads >= 1 and (cpus is None or len(cpus) == threads)
        declare(library)
        setting, kept = _setting(experts, mailbox, library)
        setting.isa = native.isa_level(library) if isa is None else isa
        kind = experts.layers[0].gate_up.kind
        setting.tile_tokens = TILE_TOKENS.get(kind, 0) if tile_tokens is None else tile_tokens
        self._library, self._answer = library, mailbox.answer
        # Memory that the threads use: it has to outlive them.
        self._kept = (experts, mailbox, kept)
        places = None if cpus is None else (ctypes.c_int32 * threads)(*cpus)
        self._team = library.hetero_experts_new(ctypes.byref(setting), threads, places, spin_us)
        if not self._team:
            raise ConfigError(FIELD, threads, "the system refuses to make threads")
        self._end = weakref.finalize(self, _free, library, self._team, self._kept)

    @property
    def threads(self) -> int:
        """Fewer than asked for if the system refused some."""
        return int(self._library.hetero_experts_size(self._team))

    @property
    def stop_reason(self) -> str | None:
        """Why no request is answered any more; None while the team runs."""
        word = int(self._answer[STOPPED])
        return _REASONS[word] if word else None

    def wake(self) -> None:
        """A request will come soon: ends sleep. Takes a microsecond if no thread sleeps.

        A request that finds the threads asleep is seen up to 1 ms late (50 us at first, then each
        nap doubles), and the threads need up to 50 us more to come back.
        """
        self._library.hetero_experts_wake(self._team)

    def stats(self) -> TeamStats:
        """Counters; callable from any thread."""
        found = (ctypes.c_int64 * 4)()
        self._library.hetero_experts_running(self._team, found)
        exchanges, busy, naps, slept = found
        return TeamStats(exchanges, busy / 1e9, naps, slept / 1e9)

    def stop(self) -> None:
        """Answers an exchange under way, writes STOPPED and ends the threads; returns when they are
        gone. May be called again."""
        self._library.hetero_experts_stop(self._team)


def serves(matrices: HostMatrices, library: ctypes.CDLL) -> bool:
    """Whether a team can multiply with these."""
    declare(library)
    form = _form(matrices)
    return form is not None and bool(library.hetero_experts_fit(ctypes.byref(form)))


def declare(library: ctypes.CDLL) -> None:
    """Sets argument and result types of the functions used here."""
    native.declare_functions(
        library,
        "hetero_experts_",
        {
            "fit": (_LONG, [_POINTER]),
            "new": (_POINTER, [_POINTER, _LONG, _POINTER, _LONG]),
            "size": (_LONG, [_POINTER]),
            "wake": (None, [_POINTER]),
            "stop": (None, [_POINTER]),
            "free": (None, [_POINTER]),
            "running": (None, [_POINTER, _POINTER]),
            "post": (_LONG, [_POINTER] * 2 + [_LONG] * 6 + [_POINTER]),
        },
    )


def post(
    mailbox: ExpertMailbox,
    library: ctypes.CDLL,
    layer: int,
    tokens: int,
    *,
    part: LinkPart = NO_PART,
    count: int = 1,
    gap_us: float = 0.0,
) -> np.ndarray:
    """Asks as a device does, and waits for the answers; for tests and benches.

    Args:
        tokens: of `ids`, `weights` and `x`, which the caller has written.
        part: that the device computes itself.
        count: equal requests, one after the other.
        gap_us: spins for so long before each.

    Returns:
        [count] float64 seconds from a request's release to its answer.

    Raises:
        RuntimeError: the team has stopped.
    """
    declare(library)
    nanoseconds = np.zeros(count, np.int64)
    stopped = library.hetero_experts_post(
        mailbox.request.data_ptr(), mailbox.answer.data_ptr(), layer, tokens, part.rows,
        part.whole, count, int(gap_us * 1e3), nanoseconds.ctypes.data,
    )  # fmt: skip
    if stopped:
        raise RuntimeError(f"the threads that compute experts have ended: {_REASONS[stopped]}")
    return nanoseconds / 1e9


def _free(library: ctypes.CDLL, team: int, kept: object) -> None:
    library.hetero_experts_free(team)


def _setting(
    experts: HostExperts, mailbox: ExpertMailbox, library: ctypes.CDLL
) -> tuple[_Setting, np.ndarray]:
    """The setting without `isa` and `tile_tokens`, and the table of addresses that it names."""
    first = experts.layers[0]
    max_tokens, k = mailbox.ids.shape
    assert mailbox.y.shape == (max_tokens, experts.hidden, 2)
    assert mailbox.x.shape == (max_tokens, -(-experts.hidden // ROW_UNIT) * ROW_UNIT)
    assert mailbox.ids.dtype == torch.int32 and mailbox.y.dtype == torch.int32
    forms = []
    for name in ("gate_up", "down"):
        matrices = [getattr(layer, name) for layer in experts.layers]
        for other in matrices:
            _check_alike(matrices[0], other, mailbox.x.dtype)
        form = _form(matrices[0])
        if form is None or not library.hetero_experts_fit(ctypes.byref(form)):
            raise ConfigError(
                FIELD, describe(matrices[0]), "the CPU has no kernel for such weights"
            )
        forms.append(form)
    if mailbox.x.dtype not in _NUMBERS:
        raise ConfigError(FIELD, mailbox.x.dtype, "the CPU computes experts in no such type")
    if experts.activation not in _GATES:
        raise ConfigError(FIELD, experts.activation, "the CPU has no such activation of experts")
    assert first.gate_up.rows == 2 * experts.inner and first.down.rows == experts.hidden
    addresses = experts.pointers()
    assert addresses.flags.c_contiguous  # changes of `HostExperts.places` reach it
    setting = _Setting(
        layers=experts.num_layers, experts=experts.num_experts, hidden=experts.hidden,
        inner=experts.inner, max_tokens=max_tokens, experts_per_token=k, gate_up=forms[0],
        down=forms[1], gate=_GATES[experts.activation], alpha=experts.alpha, limit=experts.limit,
        input=_NUMBERS[mailbox.x.dtype], order=ORDERS.index(mailbox.order),
        addresses=addresses.ctypes.data,
        ids=mailbox.ids.data_ptr(), weights=mailbox.weights.data_ptr(), x=mailbox.x.data_ptr(),
        y=mailbox.y.data_ptr(), request=mailbox.request.data_ptr(),
        answer=mailbox.answer.data_ptr(),
    )  # fmt: skip
    return setting, addresses


def _check_alike(first: HostMatrices, other: HostMatrices, dtype: torch.dtype) -> None:
    """Layers share one form: whatever the kernels are chosen by."""
    types = [{n: (t.dtype, t.shape) for n, t in m.tensors()} for m in (first, other)]
    same = types[0] == types[1] and (first.group, first.scale_rows) == (
        other.group, other.scale_rows
    )  # fmt: skip
    if not same:
        reason = f"layers with other experts ({describe(other)}) beside them are not supported"
        raise ConfigError(FIELD, describe(first), reason)
    if first.bias is not None and first.bias.dtype != dtype:
        raise ConfigError(FIELD, first.bias.dtype, f"biases must be {dtype}, as the model is")


def _form(matrices: HostMatrices) -> _Form | None:
    """None: no kernel has the kind, or the scales' type."""
    if matrices.kind not in _KINDS:
        return None
    form = _Form(
        kind=_KINDS[matrices.kind], scale=0, group=1, scale_rows=1, rows=matrices.rows,
        depth=matrices.columns, zeros=_NO_ZEROS, stored=matrices.columns,
    )  # fmt: skip
    if matrices.scale is None:
        return form
    if matrices.scale.dtype not in _NUMBERS:
        return None
    form.scale = _NUMBERS[matrices.scale.dtype]
    form.group = min(matrices.group, matrices.columns)
    form.scale_rows = matrices.scale_rows
    if matrices.zero is not None:
        form.zeros = _POINTS
    elif matrices.offset is not None:
        form.zeros = _OFFSETS
    return form


def describe(matrices: HostMatrices) -> str:
    """Kind and scales, for messages."""
    if matrices.scale is None:
        return matrices.kind
    scales = str(matrices.scale.dtype).removeprefix("torch.")
    return f"{matrices.kind} in groups of {matrices.group} with {scales} scales"
