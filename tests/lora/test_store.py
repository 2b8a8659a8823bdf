"""Adapters of an engine in host memory: names, capacity, and files that change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from hetero_llm.core.errors import AdapterError
from hetero_llm.core.lora import LoRARequest
from hetero_llm.lora.no_adapters import NoAdapters
from hetero_llm.lora.store import AdapterStore
from hetero_llm.lora.targets import AdapterTargets, adapter_targets
from hetero_llm.models.loader import load_model
from hetero_llm.models.read_config import load_model_config
from tests.helpers.adapters import change_config, write_adapter


@pytest.fixture(scope="module")
def reference(tiny_folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def targets(tiny_folder: Path) -> AdapterTargets:
    config = load_model_config(tiny_folder)
    model = load_model(tiny_folder, config, dtype=torch.float32, device="cpu", show_progress=False)
    return adapter_targets(model, config)


@pytest.fixture
def requests(tmp_path: Path, reference: Any) -> list[LoRARequest]:
    """Four adapters."""
    made = []
    for number in range(1, 5):
        folder = tmp_path / f"a{number}"
        write_adapter(folder, reference, modules=".*q_proj", rank=2, seed=number)
        made.append(LoRARequest(f"a{number}", number, str(folder)))
    return made


def store_of(targets: AdapterTargets, capacity: int) -> AdapterStore:
    return AdapterStore(targets, capacity=capacity, max_rank=8, dtype=torch.float32)


def test_an_adapter_is_read_once(targets: AdapterTargets, requests: list[LoRARequest]) -> None:
    store = store_of(targets, 4)
    first = store.open(requests[0])
    assert store.open(requests[0]) == first
    assert store.num_reads == 1
    store.hold(first)
    assert store.held(first).ref.content_hash == first.content_hash
    assert store.num_reads == 1


class Ranks:
    """Notes what the other ranks are to do."""

    def __init__(self) -> None:
        self.made: list[LoRARequest | str] = []

    def open_adapter(self, request: LoRARequest) -> None:
        self.made.append(request)

    def forget_adapter(self, name: str) -> None:
        self.made.append(name)


def test_what_rank_0_opens_and_forgets_the_others_do_too(
    targets: AdapterTargets, requests: list[LoRARequest]
) -> None:
    store, request = store_of(targets, 4), requests[0]
    ranks = store.ranks = Ranks()
    assert store.open(request) == store.open(request)
    assert ranks.made == [request], "a known one is not read again"
    with pytest.raises(AdapterError):
        store.open(LoRARequest("b", request.lora_int_id, requests[1].lora_path))
    store.forget(request.lora_name)
    with pytest.raises(AdapterError):
        store.forget(request.lora_name)
    assert ranks.made == [request, request.lora_name]


def test_the_least_recently_used_adapter_leaves_unless_it_is_held(
    targets: AdapterTargets, requests: list[LoRARequest]
) -> None:
    store = store_of(targets, 2)
    refs = [store.open(request) for request in requests[:2]]
    store.hold(refs[0])
    refs += [store.open(request) for request in requests[2:]]
    assert store.num_loaded == 2
    assert store.num_reads == 4
    assert store.held(refs[0]).ref == refs[0]
    store.hold(refs[1])  # read again, in the place of one that is not held
    assert store.num_reads == 5
    assert store.num_loaded == 2
    store.release(refs[0])
    store.hold(refs[3])
    assert store.num_reads == 6
    with pytest.raises(KeyError):
        store.held(refs[0])


def test_names_and_numbers_are_of_one_adapter(
    targets: AdapterTargets, requests: list[LoRARequest]
) -> None:
    store = store_of(targets, 4)
    first, second = requests[:2]
    store.open(first)
    for changed, field in (
        (LoRARequest("a1", 1, second.lora_path), "lora_path"),
        (LoRARequest("a1", 9, first.lora_path), "lora_int_id"),
        (LoRARequest("b", 1, second.lora_path), "lora_int_id"),
    ):
        with pytest.raises(AdapterError) as caught:
            store.open(changed)
        assert caught.value.field == field
    replaced = store.open(LoRARequest("a1", 1, second.lora_path, load_inplace=True))
    assert store.names() == {"a1": replaced}
    assert store.name_of(1) == "a1" and store.name_of(2) is None


def test_a_forgotten_name_can_be_another_adapter(
    targets: AdapterTargets, requests: list[LoRARequest]
) -> None:
    store = store_of(targets, 1)
    before = store.open(requests[0])
    store.forget("a1")
    with pytest.raises(AdapterError, match=r"lora_name='a1': no adapter"):
        store.forget("a1")
    store.open(LoRARequest("a1", 1, requests[1].lora_path))
    store.check(before)  # its requests may go on
    store.hold(before)
    assert store.held(before).ref.content_hash == before.content_hash


def test_files_that_change_or_go(targets: AdapterTargets, requests: list[LoRARequest]) -> None:
    store = store_of(targets, 1)
    refs = [store.open(request) for request in requests[:2]]
    path = Path(requests[0].lora_path)
    config = (path / "adapter_config.json").read_text()
    (path / "adapter_config.json").write_text(
        config.replace('"lora_alpha": 8.0', '"lora_alpha": 4')
    )
    with pytest.raises(AdapterError, match="'a1' have changed since it was loaded"):
        store.hold(refs[0])
    (path / "adapter_config.json").unlink()
    with pytest.raises(AdapterError, match="no such file"):
        store.hold(refs[0])
    (path / "adapter_config.json").write_text(config)
    store.hold(refs[0])


def test_a_bad_adapter_leaves_nothing_behind(
    targets: AdapterTargets, requests: list[LoRARequest], reference: Any
) -> None:
    store = store_of(targets, 2)
    good = store.open(requests[0])
    adapter = write_adapter(Path(requests[1].lora_path), reference, modules=".*q_proj", rank=2)
    change_config(adapter, use_dora=True)
    with pytest.raises(AdapterError, match="DoRA is not available yet"):
        store.open(requests[1])
    assert store.names() == {"a1": good}
    assert store.num_loaded == 1
    change_config(adapter, use_dora=False)
    store.open(requests[1])


def test_hundreds_of_names_of_one_content(
    targets: AdapterTargets, requests: list[LoRARequest]
) -> None:
    store = store_of(targets, 2)
    folder = requests[0].lora_path
    refs = [store.open(LoRARequest(f"n{i}", i, folder)) for i in range(1, 301)]
    assert store.num_loaded == 1, "all have the same content"
    assert len({ref.content_hash for ref in refs}) == 1
    assert len(store.names()) == 300


def test_records_of_removed_adapters_are_bounded(
    targets: AdapterTargets, requests: list[LoRARequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last ones are kept for requests that wait, and those that are held."""
    monkeypatch.setattr("hetero_llm.lora.store.FORGOTTEN", 1)
    store = store_of(targets, 1)
    refs = []
    for request in requests[:2]:
        refs.append(store.open(request))
        store.forget(request.lora_name)
        store.hold(refs[0])
    assert store.num_sources == 2, "one is held"
    refs.append(store.open(requests[2]))
    store.forget("a3")
    assert store.num_sources == 2
    store.check(refs[0])
    for call in (store.check, store.hold):
        with pytest.raises(AdapterError, match="lora_request='a2': .* was removed long ago"):
            call(refs[1])
    again = LoRARequest("b", 9, requests[2].lora_path)
    store.open(again)  # a name more, so it is not forgotten any more
    assert store.open(requests[1]) == refs[1]
    store.forget("a2")
    store.release(refs[0])
    store.release(refs[0])
    store.open(requests[3])
    store.forget("a4")
    store.check(refs[2])
    assert store.num_sources == 2 and store.num_loaded <= 1


def test_without_adapters_each_call_says_how_to_get_them(requests: list[LoRARequest]) -> None:
    store = NoAdapters()
    with pytest.raises(AdapterError, match="enable_lora=True"):
        store.open(requests[0])
    assert store.names() == {} and store.name_of(1) is None
