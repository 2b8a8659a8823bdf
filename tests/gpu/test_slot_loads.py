"""Adapters that reach their slots while steps run, in Triton's interpreter. On a GPU:
`tests/gpu/scenarios/test_slot_loads_cuda.py`."""

from __future__ import annotations

import ctypes
import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from hetero_llm.bridge.kv_offload.copier_protocol import LayerReadyFlag
from hetero_llm.core.draft_tree import DraftBatch
from hetero_llm.core.lora import NO_ADAPTER, LoRARequest
from hetero_llm.core.sampling_params import SamplingParams
from hetero_llm.core.step import AdmittedSequence, SchedulerOutput
from hetero_llm.gpu.adapters import GpuAdapters
from hetero_llm.gpu.fused import speed_up
from hetero_llm.gpu.kernels.lora import LoraSlots, lora_reference
from hetero_llm.gpu.kernels.lora_product import StepRows
from hetero_llm.gpu.layer_ready import DeviceLayerReadyFlags
from hetero_llm.gpu.model_runner import GpuModelRunner
from hetero_llm.gpu.slot_loads import Copies, CudaLoadStream, HostLoadStream, LoadStream, SlotLoads
from hetero_llm.lora.adapter import Adapter, read_adapter
from hetero_llm.lora.slot_layout import SlotLayout
from hetero_llm.lora.targets import AdapterTargets, adapter_targets
from hetero_llm.models.layers import Product
from tests.gpu.test_adapters import Memory, with_adapters
from tests.gpu.test_layer_ready_steps import CalledGraphs
from tests.gpu.test_model_runner import build, step_of
from tests.helpers.adapters import write_adapter
from tests.models.tiny import make_tiny_checkpoint

RANK, NUM_SLOTS, SEQUENCES, MAX_LEN = 16, 2, 4, 64
PIECES = (64, 128, 192)
CPU = torch.device("cpu")
on_cpu = pytest.mark.skipif(
    torch.cuda.is_available(), reason="test_slot_loads_cuda delays the copies on their stream"
)


# -- loads alone ----------------------------------------------------------------------------------


def packed(seed: int, device: torch.device) -> Tensor:
    """A slot's content in host memory."""
    values = np.random.default_rng(seed).integers(0, 255, sum(PIECES), np.uint8)
    found = torch.from_numpy(values)
    return found.pin_memory() if device.type == "cuda" else found


class HeldStream:
    """Notes what it is to load; `bring` loads the next pieces, at once."""

    def __init__(self, flag: Tensor) -> None:
        self.stream = HostLoadStream(flag)
        self.waiting: list[tuple[Copies, int]] = []

    def load(self, pieces: Iterable[Copies], count: int) -> None:
        self.waiting += [(list(copies), count + at) for at, copies in enumerate(pieces)]

    def bring(self, count: int) -> None:
        for copies, before in self.waiting[:count]:
            self.stream.load([copies], before)
        del self.waiting[:count]


def test_slots_are_filled_behind_the_flag(device: torch.device) -> None:
    slots = torch.full((3, sum(PIECES)), 255, dtype=torch.uint8, device=device)
    loads = SlotLoads(slots, PIECES)
    for first in (0, 7, 9):  # one load behind the other, without waiting in between
        wanted = {2: packed(first, device), 0: packed(first + 1, device)}
        loads.start(wanted)
        assert loads.pending
    loads.wait(len(PIECES) - 1)
    for slot, content in wanted.items():
        assert torch.equal(slots[slot].cpu(), content)
    assert (slots[1] == 255).all() and not loads.timed_out(loads.turn)


def test_a_wait_ends_with_its_piece_of_all_slots(device: torch.device) -> None:
    slots = torch.full((2, sum(PIECES)), 255, dtype=torch.uint8, device=device)
    streams: list[HeldStream] = []

    def open_stream(flag: Tensor) -> HeldStream:
        streams.append(HeldStream(flag))
        return streams[0]

    loads = SlotLoads(slots, PIECES, open_stream=open_stream, most_looks=3)
    contents = [packed(seed, device) for seed in range(4)]

    def missing(piece: int) -> bool:
        loads.wait(piece)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return loads.timed_out(loads.turn)

    assert not missing(2)  # before the first load there is nothing to wait for
    loads.start({0: contents[0]})
    streams[0].bring(2)
    loads.start({0: contents[1], 1: contents[2]})
    assert missing(0)  # pieces of the load before do not count
    streams[0].bring(1)
    loads.start({1: contents[3]})
    streams[0].bring(4)  # of the second load, and the first of the third
    assert not missing(0) and slots[0].cpu().equal(contents[1])
    assert slots[1, : PIECES[0]].cpu().equal(contents[3][: PIECES[0]])
    assert slots[1, PIECES[0] :].cpu().equal(contents[2][PIECES[0] :])
    assert missing(1)
    streams[0].bring(2)
    assert not missing(2) and slots[1].cpu().equal(contents[3])


class Driver:
    """In the place of a device's streams and driver: notes what goes to which stream."""

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.streams = ["steps"]
        self.error = 0

    def __call__(self, stream: int, address: int, value: int, flags: int) -> int:
        """`cuStreamWriteValue32`."""
        self.log.append(("write", stream, address, value, flags))
        return self.error

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        self.streams.append(stream.name)
        yield
        self.streams.pop()

    def note(self, what: str) -> None:
        self.log.append((what, self.streams[-1]))


@pytest.mark.parametrize("count", [0, 2**31 - 2, 2**32 - 2])
def test_copies_wait_for_steps_and_flags_for_copies(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order of what a stream gets, and a flag that passes the largest number."""
    driver = Driver()
    event = SimpleNamespace(
        record=partial(driver.note, "record"), wait=partial(driver.note, "wait")
    )
    stream = SimpleNamespace(name="loads", cuda_stream=77)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    monkeypatch.setattr(torch.cuda, "stream", driver.on)
    monkeypatch.setattr(
        ctypes, "CDLL", lambda name: SimpleNamespace(cuStreamWriteValue32_v2=driver)
    )
    flag = torch.zeros(1, dtype=torch.int32)

    def copy(source: str, *, non_blocking: bool) -> None:
        assert non_blocking
        driver.note(f"copy {source}")

    slot = SimpleNamespace(copy_=copy)
    pieces: Any = [[(slot, "a0"), (slot, "b0")], [(slot, "a1")]]
    loading = CudaLoadStream(flag)
    loading.load(pieces, count)
    wrapped = [(count + at) % 2**32 for at in (1, 2)]
    address = flag.data_ptr()
    assert driver.log == [
        ("record", "steps"), ("wait", "loads"), ("copy a0", "loads"), ("copy b0", "loads"),
        ("write", 77, address, wrapped[0], 0), ("copy a1", "loads"),
        ("write", 77, address, wrapped[1], 0),
    ]  # fmt: skip
    driver.error = 700
    with pytest.raises(RuntimeError, match="cuStreamWriteValue32 for an adapter: error 700"):
        loading.load(pieces, count)


# -- steps behind them ----------------------------------------------------------------------------


class LateStream:
    """A thread that brings a piece only once a step has begun to wait for it. Before, slots hold
    numbers that are none."""

    def __init__(self, flag: Tensor) -> None:
        self._stream = HostLoadStream(flag)
        self._changed = threading.Condition()
        self._asked = 0
        self._last: threading.Thread | None = None

    def ask(self, count: int) -> None:
        """A step waits for the first `count` pieces of all loads."""
        with self._changed:
            self._asked = max(self._asked, count)
            self._changed.notify_all()

    def load(self, pieces: Iterable[Copies], count: int) -> None:
        before, work = self._last, [list(copies) for copies in pieces]

        def bring() -> None:
            if before is not None:
                before.join()
            for copies in work:
                for target, _ in copies:
                    target.fill_(255)
            for at, copies in enumerate(work):
                with self._changed:
                    self._changed.wait_for(lambda at=at: self._asked > count + at)  # type: ignore[misc]
                self._stream.load([copies], count + at)

        self._last = threading.Thread(target=bring, daemon=True)
        self._last.start()

    def join(self) -> None:
        if self._last is not None:
            self._last.join()


class AskedLoads(SlotLoads):
    """Loads of a `LateStream`, which is told of waits."""

    def __init__(self, slots: Tensor, pieces: Sequence[int], *, blind: bool = False) -> None:
        self.blind = blind
        self.count = self.waits = 0
        super().__init__(slots, pieces, open_stream=self.open)

    def open(self, flag: Tensor) -> LoadStream:
        self.late = LateStream(flag)
        return self.late

    def start(self, contents: Any) -> None:
        super().start(contents)
        self.count += self.num_pieces

    def wait(self, piece: int) -> None:
        self.waits += 1
        if not self.blind:
            self.late.ask(self.count - self.num_pieces + piece + 1)
            super().wait(piece)

    def finish(self) -> None:
        self.late.ask(self.count)
        self.late.join()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of two layers, so that slots have two pieces."""
    changes = {"hidden_size": 16, "num_attention_heads": 1, "ffn_dim": 32}
    changes |= {"word_embed_proj_dim": 16}
    folder = tmp_path_factory.mktemp("opt")
    return make_tiny_checkpoint(folder, "opt", "heads_of_16", layers=2, changes=changes)


@pytest.fixture(scope="module")
def adapters(
    checkpoint: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[AdapterTargets, list[Adapter]]:
    return make_adapters(checkpoint, tmp_path_factory.mktemp("adapters"))


def make_adapters(checkpoint: Path, parent: Path) -> tuple[AdapterTargets, list[Adapter]]:
    """Three of all layers."""
    config, model, _ = build(checkpoint, CPU)
    targets = adapter_targets(model, config)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    found = []
    for number in (1, 2, 3):
        folder = parent / f"a{number}"
        write_adapter(folder, theirs, rank=4, seed=number, strength=1.0)
        wanted = LoRARequest(f"a{number}", number, str(folder))
        found.append(read_adapter(wanted, targets, max_rank=RANK, dtype=torch.float32))
    return targets, found


@dataclasses.dataclass
class Arm:
    """A runner, its loads, and the kinds of the graphs that it has replayed, heads aside."""

    runner: GpuModelRunner
    loads: Any
    kinds: list[str]

    @classmethod
    def of(
        cls,
        checkpoint: Path,
        held: tuple[AdapterTargets, list[Adapter]],
        open_loads: Callable[[Tensor, Sequence[int]], SlotLoads],
        *,
        device: torch.device = CPU,
        graphs: bool = True,
        drafts: bool = False,
        layer_ready: DeviceLayerReadyFlags | None = None,
    ) -> Arm:
        targets, found = held
        config, model, cache = build(checkpoint, device)
        if device.type == "cuda":  # in the interpreter torch is quicker
            speed_up(model)
        layout = SlotLayout.of(targets, RANK, torch.float32)
        assert len(layout.pieces) > 1
        opened: list[SlotLoads] = []

        def opening(slots: Tensor, pieces: Sequence[int]) -> SlotLoads:
            opened.append(open_loads(slots, pieces))
            return opened[0]

        memory = Memory(found, layout, pin=device.type == "cuda")
        served = GpuAdapters(
            model, layout, memory, num_slots=NUM_SLOTS, max_num_seqs=SEQUENCES,
            device=device, open_loads=opening, overlap_loads=True,
        )  # fmt: skip
        runner = GpuModelRunner(
            model, config, cache, max_num_seqs=SEQUENCES, max_model_len=MAX_LEN,
            max_num_batched_tokens=8, graphs=graphs, layer_ready=layer_ready,
            most_drafted_tokens=8 if drafts else 0,
            adapters=served,
        )  # fmt: skip
        kinds: list[str] = []
        if runner.graphs is not None:
            captured: Any = runner.graphs.captured
            replay = captured.replay

            def noted(key: tuple[str, int]) -> None:
                if key[0] != "head":
                    kinds.append(key[0])
                replay(key)

            captured.replay = noted
        return cls(runner, opened[0], kinds)

    def run(self, work: list[SchedulerOutput]) -> tuple[list[list[int]], list[str]]:
        """Tokens of each step, the first two under way at once, and what it replayed."""
        launched = [self.runner.launch(step) for step in work[:2]]
        outputs = [self.runner.finish(one) for one in launched]
        outputs += [self.runner.finish(self.runner.launch(step)) for step in work[2:]]
        kinds = self.kinds.copy()
        self.kinds.clear()
        return [list(output.token_ids) for output in outputs], kinds


@pytest.fixture(autouse=True)
def quick_and_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """No graphs, and adapters by torch, since the interpreter takes seconds for those."""
    if torch.cuda.is_available():
        return

    def multiply(
        product: Product, x: Tensor, weight: Tensor, bias: Tensor | None,
        *, rows: StepRows, weights: LoraSlots,
    ) -> Tensor:  # fmt: skip
        return lora_reference(product(x, weight, bias), x, rows.slots, weights)

    monkeypatch.setattr("hetero_llm.gpu.adapters.product_with_adapters", multiply)
    monkeypatch.setattr("hetero_llm.gpu.model_runner.GraphSet", CalledGraphs)
    monkeypatch.setattr(
        "hetero_llm.gpu.graph_set.replay_seconds", lambda _, keys: [1e-3] * len(keys)
    )
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)


FIRST, SECOND = [5, 6, 7, 8, 9], [11, 12, 13, 14, 15, 16, 17]


def admitted(slot: int, prompt: list[int]) -> AdmittedSequence:
    params = SamplingParams(temperature=0.0)
    return AdmittedSequence(slot, tuple(prompt), len(prompt), params, 0, 0)


def joining(adapters: list[Adapter]) -> list[SchedulerOutput]:
    """A prompt with a cold adapter; beside its decoding another one in two chunks, whose adapter is
    cold, too; both decode; then a third sequence, of one token, has an adapter that takes the first
    one's slot; all decode."""
    first = step_of([(0, 0, FIRST, 1)], (admitted(0, FIRST),), [(0, 0, 3)])
    chunk = [(0, 5, [-1], 1), (1, 0, SECOND[:4], 0)]
    second = step_of(chunk, (admitted(1, SECOND),), [(1, 0, 1)])
    rest = step_of([(0, 6, [-1], 1), (1, 4, SECOND[4:], 1)])
    third = step_of([(1, 7, [-1], 1), (2, 0, [21], 1)], (admitted(2, [21]),), [(2, 0, 8)])
    return [
        with_adapters(first, [1], [(1, adapters[0])]),
        with_adapters(second, [0], [(0, adapters[2]), (0, adapters[1])]),
        rest,
        with_adapters(third, [1], [(1, adapters[2])]),
        step_of([(1, 8, [-1], 1), (2, 1, [-1], 1)]),
    ]


def drafted(last: int, loads: list[tuple[int, Adapter]]) -> SchedulerOutput:
    """Behind the first of `joining`: a draft for its sequence, whose last token this is, beside a
    prompt whose adapter is in slot 0."""
    work = [(0, 5, [last, 4], 1), (1, 0, [9, 8], 1)]
    step = step_of(work, (admitted(1, [9, 8]),), [(1, 0, 1)])
    drafts = DraftBatch(*(np.array(values, np.int32) for values in ([1, 0], [4], [-1])))
    ids = np.array([last, 9, 8], np.int32)
    return with_adapters(dataclasses.replace(step, token_ids=ids, drafts=drafts), [0], loads)


WAITING, MODEL, DECODE = (
    f"{kind} with adapters" for kind in ("waiting model", "model", "short decode")
)


@on_cpu
def test_steps_see_adapters_that_come_while_they_run(checkpoint: Path, adapters: Any) -> None:
    work = joining(adapters[1])
    kinds = [WAITING, WAITING, MODEL, WAITING, DECODE]
    expected = Arm.of(checkpoint, adapters, SlotLoads).run(work)
    assert expected[1] == kinds
    arm = Arm.of(checkpoint, adapters, AskedLoads)
    assert arm.run(work) == expected
    assert arm.loads.waits == 3 * arm.loads.num_pieces  # of three steps, none of the others
    arm.loads.finish()
    blind = Arm.of(checkpoint, adapters, partial(AskedLoads, blind=True))
    assert blind.run(work[:2])[0] != expected[0][:2]  # so this test can fail
    blind.loads.finish()


@on_cpu
def test_a_load_of_a_step_without_adapters_is_waited_for_later(
    checkpoint: Path, adapters: Any
) -> None:
    """The sequence whose adapter it is joins later, as one does whose prefix is loading. Before,
    the slot goes to another adapter, as if that sequence had been aborted, and back."""
    one, two, _ = adapters[1]
    base = step_of([(0, 0, FIRST, 1)], (admitted(0, FIRST),), [(0, 0, 3)])
    decode = [step_of([(0, 5 + at, [-1], 1)]) for at in range(2)]
    late = step_of([(0, 7, [-1], 1), (1, 0, [9], 1)], (admitted(1, [9]),), [(1, 0, 1)])
    work = [
        with_adapters(base, [NO_ADAPTER], [(0, one)]),
        with_adapters(decode[0], [], [(0, two)]),
        with_adapters(decode[1], [], [(0, one)]),
        with_adapters(late, [0], []),
        step_of([(0, 8, [-1], 1), (1, 1, [-1], 1)]),
    ]
    expected = Arm.of(checkpoint, adapters, SlotLoads).run(work)
    assert expected[1] == ["model", "short decode", "short decode", WAITING, DECODE]
    arm = Arm.of(checkpoint, adapters, AskedLoads)
    assert arm.run(work) == expected
    assert arm.loads.waits == arm.loads.num_pieces
    arm.loads.finish()


@on_cpu
def test_a_step_with_drafts_waits_for_the_adapter_of_another_sequence(
    checkpoint: Path, adapters: Any
) -> None:
    results = []
    for open_loads in (SlotLoads, AskedLoads):
        arm = Arm.of(checkpoint, adapters, open_loads, drafts=True)
        ((token,),), _ = arm.run(joining(adapters[1])[:1])
        results.append(arm.run([drafted(token, [(0, adapters[1][1])])]))
        results.append(arm.run([drafted(token, [])]))  # whose slot is filled: without waiting
        if isinstance(arm.loads, AskedLoads):
            assert arm.loads.waits == 2 * arm.loads.num_pieces
            arm.loads.finish()
    assert results[:2] == results[2:] and results[0][0] == results[1][0]
    kinds = [kinds for _, kinds in results[:2]]
    assert kinds == [["waiting verify with adapters"], ["short verify with adapters"]]


@on_cpu
def test_kv_and_adapters_are_waited_for_apart(checkpoint: Path, adapters: Any) -> None:
    """Waiting graphs wait for both: for what a step has no loads of, they do not."""
    one, two, _ = adapters[1]
    landed = {1: 2, 2: 1}  # layers of the loads, of two
    ready = DeviceLayerReadyFlags(CPU, lambda load: LayerReadyFlag(load, 0), most_looks=3)
    for place, layers in landed.items():
        ready.flags[place] = layers
    arm = Arm.of(checkpoint, adapters, AskedLoads, layer_ready=ready)
    first = step_of([(0, 0, FIRST, 1)], (admitted(0, FIRST),), [(0, 0, 3)])
    second = step_of([(0, 5, [-1], 1), (1, 0, [9, 8], 1)], (admitted(1, [9, 8]),), [(1, 0, 1)])
    work = [
        dataclasses.replace(with_adapters(first, [1], [(1, one)]), kv_loads=(1,)),
        with_adapters(second, [0], [(0, two)]),
        dataclasses.replace(step_of([(0, 6, [-1], 1)]), kv_loads=(2,)),
        with_adapters(step_of([(0, 7, [-1], 1)]), [], [(0, one)]),
    ]
    timed_out = []
    for step in work:
        timed_out.append(arm.runner.finish(arm.runner.launch(step)).kv_loads_timed_out)
    assert timed_out == [False, False, True, False]
    assert not ready.take_error(ready.turn)  # the last step has not waited for load 2
    assert set(arm.kinds) == {WAITING}
    arm.loads.finish()


@on_cpu
def test_an_adapter_that_never_comes_ends_the_step_with_an_error(
    checkpoint: Path, adapters: Any
) -> None:
    open_loads = partial(SlotLoads, open_stream=HeldStream, most_looks=3)
    for drafts in (False, True):
        arm = Arm.of(checkpoint, adapters, open_loads, drafts=drafts)
        launched = [arm.runner.launch(step) for step in joining(adapters[1])[:1]]
        with pytest.raises(RuntimeError, match="adapters have not reached the GPU"):
            arm.runner.finish(launched[0])
