from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hetero_llm.bench_client.datasets import DEFAULT_OUTPUT_LEN, DatasetOptions, load_samples
from hetero_llm.bench_client.wire_format import Sample
from hetero_llm.core.errors import ConfigError
from hetero_llm.demo_models import heldout_prompts


def words(text: str) -> int:
    return len(text.split())


def ids_of(sample: Sample) -> tuple[int, ...]:
    assert isinstance(sample.prompt, tuple)
    return sample.prompt


def test_random_ids() -> None:
    options = DatasetOptions(input_len=6, output_len=3, vocab_size=50, seed=1)
    samples = load_samples(options, 40)
    assert {len(ids_of(sample)) for sample in samples} == {6}
    assert {sample.output_len for sample in samples} == {3}
    drawn = {token for sample in samples for token in ids_of(sample)}
    assert min(drawn) >= 0 and max(drawn) < 50 and len(drawn) > 40
    assert len(set(samples)) == 40
    assert samples == load_samples(options, 40)
    assert samples != load_samples(DatasetOptions(input_len=6, output_len=3, seed=2), 40)


def test_random_lengths_vary_around_the_given_ones() -> None:
    options = DatasetOptions(input_len=100, output_len=10, range_ratio=0.5)
    samples = load_samples(options, 400)
    inputs = [len(ids_of(sample)) for sample in samples]
    outputs = [sample.output_len or 0 for sample in samples]
    assert (min(inputs), max(inputs)) == (50, 150)
    assert (min(outputs), max(outputs)) == (5, 15)
    assert sum(inputs) / 400 == pytest.approx(100, abs=5)


def test_random_lengths_are_at_least_one() -> None:
    samples = load_samples(DatasetOptions(input_len=1, output_len=1, range_ratio=1.0), 50)
    assert {len(ids_of(sample)) for sample in samples} == {1, 2}


def test_random_prompts_share_their_prefix() -> None:
    samples = load_samples(DatasetOptions(input_len=4, prefix_len=8), 3)
    assert len({ids_of(sample)[:8] for sample in samples}) == 1
    assert len({ids_of(sample)[8:] for sample in samples}) == 3
    assert {len(ids_of(sample)) for sample in samples} == {12}


def test_random_prompts_take_prefixes_in_turns() -> None:
    options = DatasetOptions("prefix_repetition", input_len=3, prefix_len=5, num_prefixes=2)
    samples = load_samples(options, 7)
    assert {len(sample.prompt or ()) for sample in samples} == {8}
    beginnings = [tuple((sample.prompt or ())[:5]) for sample in samples]
    assert beginnings == [beginnings[0], beginnings[1]] * 3 + [beginnings[0]]
    assert len(set(beginnings)) == 2 and len({sample.prompt for sample in samples}) == 7


def test_random_text() -> None:
    samples = load_samples(DatasetOptions(prompt_as="text", input_len=20, prefix_len=2), 5)
    assert all(isinstance(sample.prompt, str) for sample in samples)
    assert {words(str(sample.prompt)) for sample in samples} == {22}
    assert len({sample.prompt for sample in samples}) == 5


def test_heldout_ids_are_the_packages() -> None:
    samples = load_samples(DatasetOptions("heldout", input_len=16, seed=4), 10)
    known = {tuple(row[:16].tolist()) for row in heldout_prompts().prompts}
    assert {ids_of(sample) for sample in samples} <= known
    assert {sample.output_len for sample in samples} == {DEFAULT_OUTPUT_LEN}


def test_heldout_text_is_what_the_ids_stand_for() -> None:
    from hetero_llm.demo_models import demo_folder
    from hetero_llm.engine.text.tokenizer import load_tokenizer

    ids, text = (
        load_samples(DatasetOptions("heldout", input_len=64, prompt_as=form), 3)
        for form in ("ids", "text")
    )
    tokenizer = load_tokenizer(demo_folder("demo"), mode="auto", trust_remote_code=False)
    for sample, decoded in zip(ids, text):
        expected = tokenizer.decode(list(ids_of(sample)), skip_special_tokens=False)
        assert decoded.prompt == expected


def test_heldout_has_its_limits() -> None:
    with pytest.raises(ConfigError, match="input_len=1025: held-out prompts have 1024 tokens"):
        load_samples(DatasetOptions("heldout", input_len=1025), 1)
    with pytest.raises(ConfigError, match="300 are needed .* there are 288"):
        load_samples(DatasetOptions("heldout", input_len=8), 300)


def jsonl(folder: Path, *rows: Any) -> DatasetOptions:
    path = folder / "prompts.jsonl"
    text = "\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows)
    path.write_text(text + "\n\n", encoding="utf-8")
    return DatasetOptions("jsonl", path=str(path))


def test_jsonl(tmp_path: Path) -> None:
    user = {"role": "user", "content": "hi"}
    # A line separator of Unicode is no end of a line.
    row = '{"prompt": "a\u2028b", "output_len": 7, "comment": "kept out"}'
    options = jsonl(tmp_path, row, {"prompt": [1, 2], "output_len": None}, {"messages": [user]})
    assert load_samples(options, 3) == [
        Sample("a\u2028b", 7),
        Sample((1, 2), DEFAULT_OUTPUT_LEN),
        Sample(None, DEFAULT_OUTPUT_LEN, (user,)),
    ]
    shorter = DatasetOptions("jsonl", path=options.path, output_len=2)
    assert [sample.output_len for sample in load_samples(shorter, 3)] == [2, 2, 2]


def test_vllms_key_of_a_length(tmp_path: Path) -> None:
    rows = ({"prompt": "a", "output_tokens": 5}, {"prompt": "b", "output_len": 4})
    assert [one.output_len for one in load_samples(jsonl(tmp_path, *rows), 2)] == [5, 4]


def test_a_file_of_as_many_prompts_as_requests(tmp_path: Path) -> None:
    options = jsonl(tmp_path, {"prompt": "a"}, {"prompt": "b"}, {"prompt": "c"})
    warm, *rest = load_samples(options, 3, warmups=1)
    assert [one.prompt for one in rest] == ["a", "b", "c"]
    assert isinstance(warm.prompt, str) and warm.prompt not in "abc"
    assert [one.prompt for one in load_samples(options, 2, warmups=1)] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{", "jsonl:2.*is not valid JSON"),
        ([1], "jsonl:2.*is not a JSON object"),
        ({"prompt": ""}, 'jsonl:2.*needs "prompt"'),
        ({"prompt": [1, True]}, 'needs "prompt"'),
        ({"text": "a"}, 'needs "prompt"'),
        ({"messages": []}, 'needs "prompt"'),
        ({"prompt": "a", "output_len": 0}, "output_len=0 is no length"),
        ({"prompt": "a", "output_len": "9"}, "output_len='9' is no length"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, row: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_samples(jsonl(tmp_path, {"prompt": "fine"}, row), 1)


def test_files_that_cannot_serve(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="dataset_path=None: the data set 'jsonl' is a file"):
        load_samples(DatasetOptions("jsonl"), 1)
    with pytest.raises(ConfigError, match="No such file"):
        load_samples(DatasetOptions("jsonl", path=str(tmp_path / "none")), 1)
    with pytest.raises(ConfigError, match="2 prompts are needed .* it has 1"):
        load_samples(jsonl(tmp_path, {"prompt": "only"}), 2)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not UTF-8 text"):
        load_samples(DatasetOptions("jsonl", path=str(tmp_path / "binary")), 1)


def sharegpt(folder: Path, content: Any, **options: Any) -> DatasetOptions:
    path = folder / "sharegpt.json"
    path.write_text(json.dumps(content), encoding="utf-8")
    return DatasetOptions("sharegpt", path=str(path), **options)


def turns(*pairs: tuple[str, str]) -> dict[str, Any]:
    return {"conversations": [{"from": name, "value": text} for name, text in pairs]}


LONG = " ".join(["w"] * 2000)
CONVERSATIONS = [
    turns(("human", "what is the best answer"), ("gpt", "it is the one you know"), ("human", "?")),
    turns(("human", "another one of four words"), ("gpt", "this has exactly five words")),
    turns(("human", "too short"), ("gpt", "this has exactly five words")),
    turns(("human", LONG), ("gpt", "this has exactly five words")),
    turns(("human", "what is the best answer"), ("gpt", LONG + LONG)),
    turns(("gpt", "it answers before it is asked"), ("human", "what is the best answer")),
    turns(("human", "nobody will ever answer")),
    {"conversations": "no list"},
    "no object",
]


def test_sharegpt(tmp_path: Path) -> None:
    samples = load_samples(sharegpt(tmp_path, CONVERSATIONS), 2, words)
    assert {(sample.prompt, sample.output_len) for sample in samples} == {
        ("what is the best answer", 6),
        ("another one of four words", 5),
    }
    with pytest.raises(ConfigError, match="3 prompts are needed .* it has 2"):
        load_samples(sharegpt(tmp_path, CONVERSATIONS), 3, words)


def test_sharegpt_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="need --tokenizer to be measured"):
        load_samples(sharegpt(tmp_path, CONVERSATIONS), 1)
    samples = load_samples(sharegpt(tmp_path, CONVERSATIONS, output_len=9), 5)
    assert {sample.output_len for sample in samples} == {9}


def test_sharegpt_is_shuffled_by_the_seed(tmp_path: Path) -> None:
    many = [turns(("human", f"question {i}"), ("gpt", "yes")) for i in range(50)]
    orders = [
        [s.prompt for s in load_samples(sharegpt(tmp_path, many, output_len=1, seed=seed), 50)]
        for seed in (1, 1, 2)
    ]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(map(str, orders[0])) == sorted(map(str, orders[2]))


def test_sharegpt_that_is_something_else(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a JSON list of conversations"):
        load_samples(sharegpt(tmp_path, {"a": 1}, output_len=1), 1)
