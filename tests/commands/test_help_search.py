"""Parts of a long help."""

from __future__ import annotations

import pydoc

import pytest

from hetero_llm import cli

HEADINGS = "Server:", "Model:", "Adapters:", "Scheduling and execution:"


def helped(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(words)
    out, err = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, out, err


@pytest.mark.parametrize("group", ["adapters", "Adapters", "LoRAConfig"])
def test_one_group(capsys: pytest.CaptureFixture[str], group: str) -> None:
    code, out, _ = helped(capsys, "serve", "demo", f"--help={group}")
    assert code == 0 and "--max-loras" in out and "--max-num-seqs" not in out
    assert [heading for heading in HEADINGS if heading in out] == ["Adapters:"]


def test_flags(capsys: pytest.CaptureFixture[str]) -> None:
    for wanted, shown, hidden in (
        ("max-num-seqs", "--max-num-seqs", "--max-num-batched-tokens"),
        ("--max_num_seqs", "--max-num-seqs", "--max-num-batched-tokens"),
        ("max-num", "--max-num-batched-tokens", "--max-model-len"),
    ):
        code, out, _ = helped(capsys, "serve", f"--help={wanted}")
        assert code == 0 and shown in out and hidden not in out
    assert "--request-rate" in helped(capsys, "bench", "serve", "--help=request-rate")[1]
    code, out, err = helped(capsys, "serve", "--help=nonsense")
    assert code == 2 and "--help=listgroup" in err and not out


def test_groups_and_everything(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = helped(capsys, "serve", "--help=listgroup")[1].splitlines()
    assert {heading[:-1] for heading in HEADINGS} <= set(names)
    _, everything, _ = helped(capsys, "serve", "--help")
    assert helped(capsys, "serve", "--help=all")[1] == everything
    paged: list[str] = []
    monkeypatch.setattr(pydoc, "pager", paged.append)
    assert helped(capsys, "serve", "--help=page")[0] == 0 and paged == [everything]
