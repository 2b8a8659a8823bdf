"""`hetero-llm cache save | load | stats` with the embedded model's tokenizer, and no engine."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from hetero_llm import cli
from hetero_llm.config.lookahead_config import FILE_NAME
from hetero_llm.utils import cache_folder

TEXTS = ("def add(a, b):\n    return a + b\n", "import os\nimport sys\n" * 20)


@pytest.fixture
def texts(tmp_path: Path) -> list[str]:
    names = []
    for index, text in enumerate(TEXTS):
        file = tmp_path / f"text{index}.py"
        file.write_text(text)
        names.append(str(file))
    return names


@pytest.fixture
def snapshot(tmp_path: Path, texts: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    path = str(tmp_path / "cache.snapshot")
    assert cache("save", *texts, "--out", path) == 0
    capsys.readouterr()
    return path


def cache(*words: str) -> int:
    return cli.main(["cache", *words])


def config_folder(folder: Path, **keys: object) -> str:
    folder.mkdir()
    (folder / FILE_NAME).write_text(json.dumps(keys))
    return str(folder)


def test_save(tmp_path: Path, texts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / "a")
    assert cache("save", *texts, "--out", path) == 0
    captured = capsys.readouterr()
    size = os.path.getsize(path)
    assert captured.out.startswith(f"{path}: 2 texts, ") and captured.err == ""
    assert captured.out.endswith(f" tokens, {size} bytes\n")


def test_stats(snapshot: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cache("stats", snapshot, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["tokens"] + report["documents"] == report["cache_size"] > 50
    assert (report["documents"], report["namespaces"]) == (2, 1)
    assert 10 < report["bigrams"] < report["tokens"]
    assert report["file_bytes"] == os.path.getsize(snapshot) < report["memory_bytes"]
    assert cache("stats", snapshot) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[28:] for line in lines] == [str(value) for value in report.values()]


def test_load(snapshot: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cache("load", snapshot) == 0
    assert capsys.readouterr().out.startswith(f"{snapshot} fits: ")
    assert cache("load", snapshot, "--model", "demo-draft") == 0, "it has the same tokenizer"


def test_load_where_it_does_not_fit(
    snapshot: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], tiny_folder: Path
) -> None:
    small = config_folder(tmp_path / "small", cache_size=20)
    few = config_folder(tmp_path / "few", voc_size=10)
    off = config_folder(tmp_path / "off", global_cache_switch=False)
    for words, reason in (
        (("--lookahead-cache-config-dir", small), "needs a cache_size of at least"),
        (("--lookahead-cache-config-dir", off), "there is no global cache"),
        (("--lookahead-cache-config-dir", few), "beyond the vocabulary (10)"),
        (("--model", str(tiny_folder)), "is of another tokenizer"),
    ):
        assert cache("load", snapshot, *words) == 1
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.count("\n") == 1
        assert captured.err.startswith(f"hetero-llm: error: {snapshot}: ")
        assert reason in captured.err


def test_damaged_files(snapshot: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = Path(snapshot).read_bytes()
    bad = tmp_path / "bad"
    for wrong, reason in (
        (content[:-1], "is damaged"),
        (content[:-1] + b"\1", "its checksum is wrong"),
        (b"text", "is no snapshot"),
    ):
        bad.write_bytes(wrong)
        for command in ("load", "stats"):
            assert cache(command, str(bad)) == 1
            error = capsys.readouterr().err
            assert reason in error and error.count("\n") == 1


def test_a_place_that_cannot_be_written(
    texts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cache("save", *texts, "--out", str(tmp_path / "gone" / "a")) == 1
    assert "cannot be written: No such file or directory" in capsys.readouterr().err


def test_mistakes_are_one_line_and_code_2(
    texts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ("--out", str(tmp_path / "a"))
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff")
    small = config_folder(tmp_path / "small", cache_size=14)
    few = config_folder(tmp_path / "few", voc_size=10)
    for words, reason in (
        ((str(tmp_path / "nowhere"), *out), "No such file or directory"),
        ((str(binary), *out), "is not UTF-8 text"),
        ((texts[1], *out, "--lookahead-cache-config-dir", small), "cache_size=14: the texts need"),
        ((texts[1], *out, "--lookahead-cache-config-dir", few), "voc_size=10: "),
        ((texts[1], *out, "--model", str(tmp_path / "nowhere")), "nowhere"),
    ):
        assert cache("save", *words) == 2
        error = capsys.readouterr().err
        assert error.startswith("hetero-llm: error: ") and error.count("\n") == 1
        assert reason in error
    assert not os.path.exists(out[1])


def test_compiled_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "cache"
    monkeypatch.setenv("HETERO_LLM_CACHE_DIR", str(folder))
    cache_folder.write(folder / "numba" / "function", bytes(1_500_000))
    assert cache("compiled") == 0
    assert capsys.readouterr().out == f"{folder}: 1 files, 1.5 MB\n"
    monkeypatch.setattr(cache_folder, "PREBUILT", folder / "numba")
    assert cache("compiled") == 0
    assert capsys.readouterr().out.splitlines()[1] == f"{folder}/numba: 1 files, 1.5 MB, read only"
    assert cache("compiled", "--clear") == 0
    assert capsys.readouterr().out == f"{folder}: 0 files, 0.0 MB\n" and not list(folder.iterdir())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((), "required: COMMAND"),
        (("drop",), "invalid choice: 'drop'"),
        (("save", "x"), "required: --out"),
        (("stats",), "required: FILE"),
        (("load", "x", "--modle", "y"), "(did you mean --model?)"),
    ],
)
def test_usage(words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cache(*words)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.fixture(scope="module")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.models.tiny import make_tiny_checkpoint

    folder = tmp_path_factory.mktemp("tiny") / "llama"
    return make_tiny_checkpoint(folder, "llama", with_tokenizer=True)
