"""Which files are read, pickled ones behind their flag, and positioned reads."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from hetero_llm.core.errors import ConfigError, ModelLoadError
from hetero_llm.models import weight_files
from hetero_llm.models.weight_files import PickledFile, SafetensorsFile, find_weight_files
from tests.models.loading import load, same_parameters
from tests.models.tiny import make_tiny_checkpoint


def to_pickled(folder: Path, *, shards: int = 1, zipped: bool = True) -> None:
    """Replaces model.safetensors by what torch.save writes."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    path.unlink()
    names = [f"pytorch_model-{i}.bin" for i in range(shards)]
    if shards == 1:
        names = ["pytorch_model.bin"]
    place = {name: names[i % shards] for i, name in enumerate(tensors)}
    for file in names:
        part = {name: x for name, x in tensors.items() if place[name] == file}
        torch.save(part, folder / file, _use_new_zipfile_serialization=zipped)
    if shards > 1:
        index = json.dumps({"metadata": {}, "weight_map": place})
        (folder / "pytorch_model.bin.index.json").write_text(index)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_checkpoint(tmp_path / "model", "llama")


class TestPickled:
    @pytest.mark.parametrize("shards", [1, 3])
    @pytest.mark.parametrize("zipped", [True, False])
    @pytest.mark.parametrize("load_format", ["auto", "pt"])
    def test_same_weights(self, folder: Path, shards: int, zipped: bool, load_format: str) -> None:
        expected = load(folder)
        to_pickled(folder, shards=shards, zipped=zipped)
        found = load(folder, load_format=load_format, allow_pickle=True)
        assert same_parameters(found, expected)

    def test_tensors_that_are_views_and_parameters(self, tmp_path: Path) -> None:
        folder = make_tiny_checkpoint(tmp_path, "gpt2")
        expected = load(folder)
        tensors = load_file(folder / "model.safetensors")
        (folder / "model.safetensors").unlink()
        views = {
            name: torch.nn.Parameter(x.t().contiguous().t() if x.dim() == 2 else x)
            for name, x in tensors.items()
        }
        torch.save(views, folder / "weights.pt")
        assert same_parameters(load(folder, allow_pickle=True), expected)

    def test_the_flag_is_named(self, folder: Path) -> None:
        to_pickled(folder)
        with pytest.raises(ModelLoadError, match="--allow-pickle-weights") as caught:
            load(folder)
        assert "safetensors files are needed" in str(caught.value)
        with pytest.raises(ConfigError, match="load_format='pt': .*--allow-pickle-weights"):
            load(folder, load_format="pt")

    def test_load_format_safetensors_takes_no_others(self, folder: Path) -> None:
        to_pickled(folder)
        with pytest.raises(ModelLoadError, match=r"no .*safetensors file, only pytorch_model.bin"):
            load(folder, load_format="safetensors", allow_pickle=True)

    def test_safetensors_come_first(self, folder: Path) -> None:
        (folder / "pytorch_model.bin").write_bytes(b"never read")
        load(folder, allow_pickle=True)
        with pytest.raises(ModelLoadError, match=r"pytorch_model\.bin: not a readable"):
            load(folder, load_format="pt", allow_pickle=True)

    def test_code_does_not_run(self, folder: Path, tmp_path: Path) -> None:
        to_pickled(folder)
        trace = tmp_path / "trace"

        class Evil:
            def __reduce__(self) -> tuple[object, ...]:
                return os.mkdir, (str(trace),)

        torch.save({"model.norm.weight": Evil()}, folder / "pytorch_model.bin")
        with pytest.raises(ModelLoadError, match=r"holds more than tensors.*mkdir") as caught:
            load(folder, allow_pickle=True)
        assert not trace.exists()
        assert "\n" not in str(caught.value) and "weights_only" not in str(caught.value)

    @pytest.mark.parametrize("keep", [0, 100, -100])
    def test_truncated(self, folder: Path, keep: int) -> None:
        to_pickled(folder)
        path = folder / "pytorch_model.bin"
        path.write_bytes(path.read_bytes()[:keep])
        with pytest.raises(ModelLoadError, match=r"pytorch_model\.bin: not a readable"):
            load(folder, allow_pickle=True)

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ([1, 2], "holds list, not tensors by name"),
            ({"state_dict": {}}, "'state_dict' is dict, where tensors are needed"),
            ({5: torch.ones(1)}, "5 is Tensor"),
        ],
    )
    def test_other_content(self, folder: Path, content: object, message: str) -> None:
        to_pickled(folder)
        torch.save(content, folder / "pytorch_model.bin")
        with pytest.raises(ModelLoadError, match=message):
            load(folder, allow_pickle=True)

    def test_a_missing_shard(self, folder: Path) -> None:
        to_pickled(folder, shards=3)
        (folder / "pytorch_model-1.bin").unlink()
        with pytest.raises(ModelLoadError, match=r"names the shard pytorch_model-1\.bin"):
            load(folder, allow_pickle=True)

    def test_integers_are_no_weights(self, folder: Path) -> None:
        to_pickled(folder)
        path = folder / "pytorch_model.bin"
        tensors = torch.load(path, weights_only=True)
        torch.save({k: v.to(torch.int8) for k, v in tensors.items()}, path)
        with pytest.raises(ModelLoadError, match=r"cannot be loaded: .*\(I8\)"):
            load(folder, allow_pickle=True)


def test_the_hubs_pickled_files_were_not_fetched(tmp_path: Path) -> None:
    folder = tmp_path / "snapshots" / "0123"
    folder.mkdir(parents=True)
    with pytest.raises(ModelLoadError, match="--allow-pickle-weights .* fetches them"):
        find_weight_files(folder, "auto", allow_pickle=False)
    with pytest.raises(ModelLoadError, match=r"no \*\.bin file$"):
        find_weight_files(folder, "pt", allow_pickle=True)


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/passwd", "a/b.safetensors", 5])
def test_an_index_that_names_a_path(folder: Path, name: object) -> None:
    index = json.dumps({"weight_map": {"model.norm.weight": name}})
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelLoadError, match="is not a file name"):
        load(folder)


class TestReads:
    @pytest.fixture(params=["safetensors", "bin", "old bin"])
    def opened(self, folder: Path, request: pytest.FixtureRequest) -> weight_files.WeightFile:
        path = folder / "model.safetensors"
        self.expected = load_file(path)
        if request.param == "safetensors":
            return SafetensorsFile(path)
        to_pickled(folder, zipped=request.param == "bin")
        return PickledFile(folder / "pytorch_model.bin")

    def test_bytes_from_any_place(self, opened: weight_files.WeightFile) -> None:
        assert {tensor.name for tensor in opened.tensors} == set(self.expected)
        starts = [tensor.start for tensor in opened.tensors]
        assert starts == sorted(starts)
        opened.open()
        for tensor in opened.tensors:
            wanted = self.expected[tensor.name]
            assert (tensor.dtype, tensor.shape) == (wanted.dtype, tuple(wanted.shape))
            data = wanted.numpy().tobytes()
            assert tensor.nbytes == len(data)
            for offset, size in ((0, len(data)), (4, 8), (len(data) - 3, 3)):
                out = np.zeros(size, np.uint8)
                opened.read(tensor, offset, out)
                assert out.tobytes() == data[offset : offset + size]
        opened.close()
        opened.close()

    def test_short_reads_go_on(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        expected, preadv = load(folder), os.preadv

        def stingy(descriptor: int, buffers: list[memoryview], at: int) -> int:
            return preadv(descriptor, [buffers[0][:100]], at)

        monkeypatch.setattr(os, "preadv", stingy)
        assert same_parameters(load(folder), expected)

    def test_a_failing_disk(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def fails(*_: object) -> int:
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(os, "preadv", fails)
        with pytest.raises(ModelLoadError, match=r"model\.safetensors: .*Input/output error"):
            load(folder)

    def test_a_file_that_shrinks(self, folder: Path) -> None:
        file = SafetensorsFile(folder / "model.safetensors")
        os.truncate(file.path, file.path.stat().st_size - 1)
        file.open()
        last = file.tensors[-1]
        with pytest.raises(ModelLoadError, match=f"{last.name}: the file ends inside of it"):
            file.read(last, 0, np.zeros(last.nbytes, np.uint8))
        file.close()

    def test_a_file_that_goes_away(self, folder: Path) -> None:
        file = SafetensorsFile(folder / "model.safetensors")
        file.path.unlink()
        with pytest.raises(ModelLoadError, match="cannot be read: No such file"):
            file.open()
