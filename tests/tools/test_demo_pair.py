"""The shipped demo pair is what its card says, and the tools that make it work."""

from __future__ import annotations

import dataclasses
import email.message
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from demo_corpus import (
    SourceFile,
    clean,
    path_hash,
    permissive_licence,
    shingle,
    split,
    spread,
)
from demo_model import Llama, Shape
from safetensors.torch import load_file
from torch import Tensor
from train_demo_pair import SMOKE, Recipe, repeats, run
from transformers import AutoModelForCausalLM, AutoTokenizer

DEMO = Path(__file__).resolve().parents[2] / "hetero_llm" / "demo_models"
NAMES = ("demo", "demo-draft")
TEXT = "def f(x):\n    if x:\n        return 'é ☃'\n\n\nclass A:\n    pass\n"


@pytest.fixture(scope="module")
def log() -> dict:
    return json.loads((DEMO / "training_log.json").read_text())


@pytest.fixture(scope="module")
def held_out() -> dict[str, np.ndarray]:
    with np.load(DEMO / "heldout_prompts.npz", allow_pickle=False) as saved:
        return dict(saved)


def logits_of(model: torch.nn.Module, ids: Tensor) -> Tensor:
    with torch.no_grad():
        return model(ids).logits


def test_files_are_complete_and_small() -> None:
    files = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
    for name in NAMES:
        for file in (*files, "model.safetensors"):
            assert (DEMO / name / file).is_file()
    assert sum(f.stat().st_size for f in DEMO.rglob("*") if f.is_file()) <= 24_000_000


@pytest.mark.parametrize(
    ("name", "least", "most", "heads"),
    [("demo", 6_000_000, 10_000_000, (4, 1)), ("demo-draft", 1, 2_500_000, (2, 1))],
)
def test_models_have_their_sizes(
    name: str, least: int, most: int, heads: tuple[int, int], log: dict
) -> None:
    weights = load_file(DEMO / name / "model.safetensors")
    config = json.loads((DEMO / name / "config.json").read_text())
    count = sum(w.numel() for w in weights.values())
    assert least <= count <= most
    assert count == log["results"][f"{'target' if name == 'demo' else 'draft'}_parameters"]
    assert {w.dtype for w in weights.values()} == {torch.bfloat16}
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == heads
    assert config["head_dim"] == 128 and config["vocab_size"] == 4096
    assert config["tie_word_embeddings"] and "lm_head.weight" not in weights
    if name == "demo-draft":
        assert config["num_hidden_layers"] <= 2 and config["hidden_size"] <= 256


@pytest.mark.parametrize("name", NAMES)
def test_tokenizer(name: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(DEMO / name)
    assert len(tokenizer) == 4096
    ids = tokenizer(TEXT).input_ids
    assert tokenizer.decode(ids) == TEXT
    assert len(tokenizer("\n        return x").input_ids) == 3
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 0, 1)
    chat = [{"role": "user", "content": "hi"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "# user: hi\n# assistant:"


def test_held_out_prompts(held_out: dict[str, np.ndarray]) -> None:
    count = len(held_out["names"])
    assert count >= 256
    assert held_out["prompts"].shape == (count, 1024)
    assert held_out["continuations"].shape == (count, 300)
    for name in ("prompts", "continuations"):
        assert held_out[name].dtype == np.uint16
        assert held_out[name].max() < 4096 and held_out[name].min() > 1
    assert len(set(held_out["names"].tolist())) == count
    assert len(np.unique(held_out["prompts"], axis=0)) == count
    assert len(set(held_out["packages"].tolist())) >= 30
    assert all(path_hash(str(n)) % Recipe().holdout_modulus == 0 for n in held_out["names"])


def test_card_names_every_package_and_figure(log: dict) -> None:
    card = (DEMO / "MODEL_CARD.md").read_text()
    for package in log["packages"]:
        row = f"| {package['name']} | {package['version']} | {package['licence']} |"
        assert row in card
    for name in ("target_held_out_loss", "draft_held_out_loss", "held_out_agreement", "a1"):
        assert f"{log['results'][name]:.3f}" in card
    assert log["results"]["device"] in card and log["results"]["torch"] in card
    assert log["wall_seconds"] < 600


def test_goals_are_met(log: dict) -> None:
    assert log["results"]["target_held_out_loss"] <= 1.6
    assert log["results"]["a1"] >= 0.5


def test_figures_hold_here(held_out: dict[str, np.ndarray], log: dict) -> None:
    """A few held-out files through transformers: loss and agreement are near the whole set's."""
    both = np.concatenate([held_out["prompts"], held_out["continuations"]], 1)
    ids = torch.from_numpy(both[::58].astype(np.int64))
    target, draft = (
        logits_of(AutoModelForCausalLM.from_pretrained(DEMO / name, dtype=torch.float32), ids)
        for name in NAMES
    )
    loss = F.cross_entropy(target[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).item()
    same = (target.argmax(-1) == draft.argmax(-1)).float().mean().item()
    assert loss <= 1.6 + 0.3
    assert abs(same - log["results"]["held_out_agreement"]) < 0.05


@pytest.mark.parametrize(
    ("name", "shape"), [("demo", Recipe().target), ("demo-draft", Recipe().draft)]
)
def test_training_module_computes_what_transformers_does(
    name: str, shape: Shape, held_out: dict[str, np.ndarray]
) -> None:
    weights = load_file(DEMO / name / "model.safetensors")
    ours = Llama(shape)
    ours.load_state_dict({k.removeprefix("model."): w for k, w in weights.items()})
    ids = torch.from_numpy(held_out["prompts"][:1, :300].astype(np.int64))
    theirs = AutoModelForCausalLM.from_pretrained(DEMO / name, dtype=torch.float32)
    with torch.no_grad():
        assert torch.allclose(ours(ids), logits_of(theirs, ids), atol=1e-4, rtol=0)


def test_smoke_run(tmp_path: Path) -> None:
    tiny = {"target_minutes": 0.005, "draft_minutes": 0.005, "prompts": 1, "max_files": 80}
    results = run(tmp_path, dataclasses.replace(SMOKE, **tiny), torch.device("cpu"))
    assert 0 <= results["a1"] <= 1 and results["target_steps"] > 0
    for name in NAMES:
        assert AutoModelForCausalLM.from_pretrained(tmp_path / name).config.vocab_size == 4096
    assert "Python standard library" in (tmp_path / "MODEL_CARD.md").read_text()
    assert json.loads((tmp_path / "training_log.json").read_text())["curves"]["draft"]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"License-Expression": "MIT"}, "MIT"),
        ({"License-Expression": "MIT AND GPL-3.0-only"}, None),
        ({"License-Expression": "GPL-3.0-only OR BSD-3-Clause"}, "GPL-3.0-only OR BSD-3-Clause"),
        ({"License-Expression": "(MIT OR GPL-3.0-only) AND ISC"}, None),
        ({"License": "Apache 2.0"}, "Apache 2.0"),
        ({"License": "NVIDIA Proprietary; see the BSD notice"}, None),
        ({"Classifier": "License :: OSI Approved :: BSD License"}, "BSD License"),
        ({"Classifier": "License :: Other/Proprietary License", "License": "MIT"}, None),
        ({}, None),
    ],
)
def test_licences(fields: dict[str, str], expected: str | None) -> None:
    meta = email.message.Message()
    for name, value in fields.items():
        meta[name] = value
    assert permissive_licence(meta) == expected


def lines(first: int, count: int = 300) -> str:
    return "".join(
        f"value_{chr(97 + i % 26)} = compute(name, {i})\n" for i in range(first, first + count)
    )


def test_clean() -> None:
    body = "def f(name):\n    return name.strip().lower()\n\n\n" * 12
    assert clean(f"# Copyright the authors.\n# MIT License\n\n{body}") == body.rstrip() + "\n"
    assert clean(f"# Helpers.\n{body}").startswith("# Helpers.")
    for bad in (
        "x = 1\n",
        f"# DO NOT EDIT\n{body}",
        f"{body}'<|endoftext|>'\n",
        "x" * 900,
        f"{body}{'é' * 80}\n",
    ):
        assert clean(bad) is None


def source(key: str, text: str, package: str = "p") -> SourceFile:
    return SourceFile(key, package, text, text.encode(), shingle(text))


HELD_KEY = next(k for i in range(99) if path_hash(k := f"p/{i}.py") % 8 == 0)
TRAIN_KEYS = [k for i in range(99) if path_hash(k := f"p/{i}.py") % 8]


def test_split_keeps_held_out_text_out_of_training() -> None:
    files = [
        source(HELD_KEY, lines(0)),
        source(TRAIN_KEYS[0], lines(0, 200) + lines(1000)),
        source(TRAIN_KEYS[1], lines(2000)),
    ]
    corpus = split(files, [], modulus=8, package_cap=1_000_000)
    assert [f.key for f in corpus.held_out] == [HELD_KEY]
    assert [f.key for f in corpus.train] == [TRAIN_KEYS[1]]
    assert corpus.dropped["repeats held-out text"] == 1


def test_split_drops_copies_and_caps_packages() -> None:
    files = [source(key, lines(0)) for key in TRAIN_KEYS[:2]]
    files += [source(TRAIN_KEYS[2], lines(0, 290)), source(TRAIN_KEYS[3], lines(2000))]
    files += [source(key, lines(4000 + 1000 * i), "q") for i, key in enumerate(TRAIN_KEYS[4:6])]
    corpus = split(files, [], modulus=8, package_cap=3 * len(lines(4000)) // 2)
    dropped = corpus.dropped
    assert dropped["exact duplicate"] == 1
    assert dropped.get("near duplicate", 0) + dropped["over the package's share"] == 3
    assert sorted(f.package for f in corpus.train) == ["p", "q"]


def test_spread_takes_packages_in_turn() -> None:
    files = [source(f"{p}/{i}", lines(i), p) for p in "aab" for i in range(2)]
    assert [f.package for f in spread(files, 3)] == ["a", "b", "a"]


def test_repeats() -> None:
    row = torch.tensor([[1, 2, 3, 1, 2, 3, 1, 9]])
    assert repeats(row, 3).tolist() == [[False] * 5 + [True, True, False]]
