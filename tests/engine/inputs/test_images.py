"""Prompts with images: the engine computes what the class of transformers does, however the rows
come, and mistakes are named."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from hetero_llm import LLM, ConfigError, ModelLoadError, RequestOutput, SamplingParams
from hetero_llm.config.args import resolve_engine_args
from hetero_llm.config.engine_config import EngineConfig
from hetero_llm.core.errors import PromptError, SamplingError
from hetero_llm.core.images import PromptImages
from hetero_llm.core.step_times import StepTimes
from hetero_llm.engine.inputs.images import open_images
from hetero_llm.engine.inputs.input_processor import parse_prompts
from hetero_llm.engine.resolve import find_model, open_model
from hetero_llm.models.image_tokens import best_pinpoint, mrope_table
from hetero_llm.models.read_config import load_model_config
from hetero_llm.spec_decode.proposal_account import ProposalAccount
from tests.models.tiny import rewrite_config
from tests.models.tiny_images import (
    CLASSES,
    IMAGE_TOKEN_ID,
    make_tiny_vision,
    picture,
    reference_logits,
)

GREEDY = SamplingParams(temperature=0, max_tokens=16, logprobs=0, ignore_eos=True)
ONE = {"prompt": "USER: <image>\nWhat?", "multi_modal_data": {"image": picture(0, 30, 22)}}
TWO = {
    "prompt": "Look: <image> and <image>, then tell",
    "multi_modal_data": {"image": [picture(1, 13, 33), picture(2, 40, 22)]},
}
TEXT = {"prompt": "USER: nothing to see here"}
COMMON: dict[str, Any] = {"dtype": "float32", "device": "cpu", "block_size": 8}
MORE: dict[str, Any] = {**COMMON, "limit_mm_per_prompt": "image=2"}


@dataclass
class Served:
    """A model in the engine, and the class of transformers with the same weights."""

    folder: Path
    llm: LLM
    model: Any

    def generate(self, prompts: Any, params: SamplingParams = GREEDY) -> list[RequestOutput]:
        return self.llm.generate(prompts, params, use_tqdm=False)

    def images(self, prompt: dict[str, Any]) -> PromptImages | None:
        (parsed,) = parse_prompts(prompt)
        if not parsed.images:
            return None
        inputs = self.llm.engine.input_processor
        return inputs.prepare_images(parsed).prepared

    def check(self, prompt: dict[str, Any], output: RequestOutput) -> None:
        """Log-probabilities are transformers', and each token is its most likely one."""
        (drawn,) = output.outputs
        ids = [*output.prompt_token_ids, *drawn.token_ids]
        first = len(output.prompt_token_ids)
        images = self.images(prompt)
        if images is None:
            with torch.no_grad():
                logits = self.model(input_ids=torch.tensor([ids])).logits[0]
        else:
            logits = reference_logits(self.model, ids, images)
        assert logits[first - 1 : -1].argmax(-1).tolist() == drawn.token_ids
        scores = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:]).unsqueeze(1))[:, 0]
        given = [place[i].logprob for i, place in zip(drawn.token_ids, drawn.logprobs)]
        torch.testing.assert_close(torch.tensor(given), scores[first - 1 :], rtol=0, atol=1e-4)
        if output.prompt_logprobs is not None:
            given = [p[i].logprob for i, p in zip(ids[1:first], output.prompt_logprobs[1:])]
            torch.testing.assert_close(torch.tensor(given), scores[: first - 1], rtol=0, atol=1e-4)

    def check_sums(self, prompt: dict[str, Any], output: RequestOutput) -> None:
        """The summed log-probabilities of several continuations are transformers'."""
        first = len(output.prompt_token_ids)
        for one in output.outputs:
            ids = [*output.prompt_token_ids, *one.token_ids]
            scores = reference_logits(self.model, ids, self.images(prompt)).log_softmax(-1)
            drawn = scores[first - 1 : -1].gather(1, torch.tensor(one.token_ids).unsqueeze(1))
            assert one.cumulative_logprob == pytest.approx(drawn.sum().item(), abs=1e-3)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=list(CLASSES))
def served(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = make_tiny_vision(tmp_path_factory.mktemp("images") / request.param, request.param)
    model = getattr(transformers, CLASSES[request.param]).from_pretrained(folder).eval()
    chunks = {"max_num_batched_tokens": 12, "max_num_seqs": 4}
    with LLM(str(folder), limit_mm_per_prompt={"image": 2}, **chunks, **COMMON) as llm:
        yield Served(folder, llm, model)


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_vision(tmp_path_factory.mktemp("images") / "llava", "llava")


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_vision(tmp_path_factory.mktemp("images") / "qwen2_vl", "qwen2_vl")


def with_one(folder: Path, prompt: dict[str, Any], params: SamplingParams, **args: Any) -> Any:
    with LLM(str(folder), **MORE, **args) as llm:
        outputs = llm.generate(prompt, params, use_tqdm=False)
        return outputs, llm.metrics()


def test_chunked_with_prompt_logprobs(served: Served) -> None:
    """12 rows a step: pieces begin and end inside images."""
    params = SamplingParams(
        temperature=0, max_tokens=16, logprobs=0, prompt_logprobs=0, ignore_eos=True
    )
    prompts = [ONE, TWO, TEXT]
    outputs = served.generate(prompts, params)
    for prompt, output in zip(prompts, outputs):
        served.check(prompt, output)
        assert len(output.prompt_logprobs) == len(output.prompt_token_ids)


def test_prefix_hits_are_of_the_same_images_alone(served: Served) -> None:
    other = {**ONE, "multi_modal_data": {"image": picture(7, 30, 22)}}
    served.llm.reset_prefix_cache()
    (first,) = served.generate(ONE)
    assert first.num_cached_tokens == 0
    (hit,) = served.generate({**ONE, "prompt": ONE["prompt"] + " And?"})
    assert hit.num_cached_tokens > 0
    served.check(ONE, hit)
    (miss,) = served.generate(other)
    assert miss.num_cached_tokens == 0
    served.check(other, miss)
    assert miss.prompt_token_ids == first.prompt_token_ids
    assert miss.outputs[0].logprobs[0] != first.outputs[0].logprobs[0]


def test_token_ids_with_one_token_or_all_of_them(served: Served) -> None:
    tokenizer = served.llm.get_tokenizer()
    short = {**ONE, "prompt_token_ids": tokenizer.encode(ONE["prompt"])}
    (expected,) = served.generate(ONE)
    full = {**ONE, "prompt_token_ids": expected.prompt_token_ids}
    for output in served.generate([short, full]):
        assert output.prompt_token_ids == expected.prompt_token_ids
        assert output.outputs[0].token_ids == expected.outputs[0].token_ids


def test_chat(served: Served) -> None:
    pixels = np.asarray(ONE["multi_modal_data"]["image"])
    parts = [{"type": "image", "image": pixels}, {"type": "text", "text": "What?"}]
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": parts}]
    (output,) = served.llm.chat(messages, GREEDY, use_tqdm=False)
    prompt = {**ONE, "prompt": "system: Be kind.\nuser: <image>What?\n"}
    (expected,) = served.generate(prompt)
    assert output.prompt_token_ids == expected.prompt_token_ids
    assert output.outputs[0].token_ids == expected.outputs[0].token_ids
    with pytest.raises(PromptError, match=r"image_url='https://x/y.png': must be a data URI"):
        parts[0] = {"type": "image_url", "image_url": {"url": "https://x/y.png"}}
        served.llm.chat(messages, GREEDY)


@pytest.mark.parametrize(
    "changes",
    [{"strategy": "full"}, {"strategy": "full", "tower": "siglip"}, {"tower": "siglip"}],
    ids=["class token", "siglip", "siglip less one"],
)
def test_towers(tmp_path: Path, changes: dict[str, str]) -> None:
    """The number of embeddings, which `encode` compares with the class's own."""
    folder = make_tiny_vision(tmp_path, "llava", **changes)
    with LLM(str(folder), **COMMON) as llm:
        (output,) = llm.generate(ONE, GREEDY, use_tqdm=False)
        model = transformers.LlavaForConditionalGeneration.from_pretrained(folder).eval()
        Served(folder, llm, model).check(ONE, output)


LONG = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)


def tokens(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[one.token_ids for one in output.outputs] for output in outputs]


@pytest.mark.parametrize("kind", ["llava", "qwen2_vl"])
def test_preemption_and_drafts(
    kind: str, llava: Path, qwen: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images are encoded again, and positions go on behind them, whatever rows a step has."""
    monkeypatch.setattr(StepTimes, "observe", lambda *_: None)  # all drafts are verified
    monkeypatch.setattr(ProposalAccount, "set_step_times", lambda *_: None)
    folder = {"llava": llava, "qwen2_vl": qwen}[kind]
    prompts = [ONE, TWO, TEXT]
    expected, calm = with_one(folder, prompts, LONG)
    assert calm["num_preemptions"] == 0
    tight = {"max_model_len": 72, "num_gpu_blocks_override": 11, "enable_prefix_caching": False}
    outputs, metrics = with_one(folder, prompts, LONG, **tight)
    assert metrics["num_preemptions"] > 0
    assert tokens(outputs) == tokens(expected)
    lookahead = {"method": "lookahead", "cache_mode": 3}
    with LLM(str(folder), speculative_config=lookahead, **MORE) as llm:
        for _ in range(2):  # the second time from what was learned the first time
            assert tokens(llm.generate(prompts, LONG, use_tqdm=False)) == tokens(expected)
        assert llm.metrics()["spec_decode_num_accepted_tokens"] > 10


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(n=2, temperature=1.0, seed=3, max_tokens=6, logprobs=0, ignore_eos=True),
        SamplingParams(
            n=2, best_of=2, use_beam_search=True, temperature=0, max_tokens=6, ignore_eos=True
        ),
    ],
    ids=["samples", "beams"],
)
def test_forks(served: Served, params: SamplingParams) -> None:
    together = served.generate([ONE, TWO], params)
    apart = [served.generate(prompt, params)[0] for prompt in (ONE, TWO)]
    assert tokens(together) == tokens(apart)
    assert together[0].outputs[0].token_ids != together[0].outputs[1].token_ids
    for prompt, output in zip((ONE, TWO), together):
        served.check_sums(prompt, output)


def test_batch_invariant(qwen: Path) -> None:
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=0)
    together, _ = with_one(qwen, [ONE, TWO, TEXT], params, batch_invariant=True)
    alone, _ = with_one(qwen, [TWO], params, batch_invariant=True, max_num_batched_tokens=256)
    assert together[1].outputs[0].token_ids == alone[0].outputs[0].token_ids
    assert together[1].outputs[0].logprobs == alone[0].outputs[0].logprobs


@pytest.mark.parametrize("size", [(8, 8), (100, 9), (9, 100), (17, 16), (15, 16), (64, 31)])
def test_any_shape_has_as_many_tokens_as_embeddings(served: Served, size: tuple[int, int]) -> None:
    prompt = {"prompt": "a<image>b", "multi_modal_data": {"image": picture(3, *size)}}
    images = served.images(prompt)
    runner = served.llm.engine.runner
    encoded = runner.model.encode(images.items[0])  # compares the two numbers itself
    assert len(encoded) == images.items[0].count > 0


def test_positions_are_those_of_the_class(qwen: Path) -> None:
    config = load_model_config(qwen)
    inputs = open_images(qwen, config, 3)
    prompt = [5, IMAGE_TOKEN_ID, 6, 7, IMAGE_TOKEN_ID, 8, IMAGE_TOKEN_ID, 9, 9]
    ids, images = inputs.prepare(prompt, [picture(0, 50, 20), picture(1, 9, 90), picture(2)])
    model = transformers.Qwen2VLForConditionalGeneration.from_pretrained(qwen).model
    tokens = torch.tensor([ids])
    grids = torch.cat([torch.from_numpy(i.arrays["image_grid_thw"]) for i in images.items])
    theirs, shift = model.get_rope_index(
        tokens, (tokens == IMAGE_TOKEN_ID).int(), image_grid_thw=grids
    )
    table, delta = mrope_table(len(ids), images.items)
    assert table.tolist() == theirs[:, 0].tolist() and delta == shift.item()


def test_pinpoints_are_chosen_as_transformers_does() -> None:
    from transformers.image_processing_utils import select_best_resolution

    points = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
    for height in range(10, 1500, 93):
        for width in range(10, 1500, 97):
            chosen = best_pinpoint([tuple(p) for p in points], height, width)
            assert chosen == tuple(select_best_resolution((height, width), points))


IMAGE = picture(0)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"prompt": "<image>" * 2, "multi_modal_data": {"image": [IMAGE] * 2}}, "at most 1"),
        ({"prompt": "none", "multi_modal_data": {"image": IMAGE}}, "1 images need one place each"),
        ({"prompt": "<image><image>", "multi_modal_data": {"image": IMAGE}}, "'2 image tokens'"),
        ({"prompt": "see <image>"}, "its images have 0"),
        ({"prompt": "<image>", "multi_modal_data": {"video": [IMAGE]}}, "only images"),
        ({"prompt": "<image>", "multi_modal_data": IMAGE}, "must be a dict"),
        ({"prompt": "<image>", "multi_modal_data": {"image": "a.png"}}, "must be a PIL image"),
        (
            {"prompt": "<image>", "multi_modal_data": {"image": np.zeros((4, 4), np.uint8)}},
            r"uint8 array of shape \(4, 4\)",
        ),
        (
            {"prompt": "<image>", "multi_modal_data": {"image": np.zeros((4, 4, 3))}},
            "float64 array",
        ),
        ({"prompt": "x" * 254 + "<image>", "multi_modal_data": {"image": IMAGE}}, "max_model_len"),
        (
            {"prompt_token_ids": [3, 259, 4, 259, 259, 259], "multi_modal_data": {"image": IMAGE}},
            "image 0 needs 4 of them in a row",
        ),
    ],
)
def test_mistakes_are_named(llava: Path, prompt: dict[str, Any], message: str, one: LLM) -> None:
    with pytest.raises(PromptError, match=message):
        one.generate(prompt, GREEDY, use_tqdm=False)
    with pytest.raises(PromptError, match=f"prompt 1: .*{message}"):
        one.generate([{"prompt": "fine"}, prompt], GREEDY, use_tqdm=False)


@pytest.fixture(scope="module")
def one(llava: Path) -> Iterator[LLM]:
    with LLM(str(llava), **COMMON) as llm:
        yield llm


def test_a_prompt_with_images_is_not_cut(one: LLM) -> None:
    with pytest.raises(SamplingError, match="cannot be cut"):
        one.generate(ONE, SamplingParams(truncate_prompt_tokens=5), use_tqdm=False)


def test_transparent_pictures_are_on_white(one: LLM) -> None:
    clear = picture(0).copy()
    clear.putalpha(0)
    white = np.full((10, 13, 3), 255, np.uint8)
    prompts = [{"prompt": "<image>", "multi_modal_data": {"image": i}} for i in (clear, white)]
    inputs = one.engine.input_processor
    keys = {inputs.prepare_images(parse_prompts(p)[0]).prepared.key for p in prompts}
    assert len(keys) == 1


def test_models_without_images_say_so(tiny: LLM, tiny_folder: Path) -> None:
    with pytest.raises(PromptError, match="takes no images"):
        tiny.generate(ONE, GREEDY, use_tqdm=False)
    with pytest.raises(ConfigError, match="LlamaForCausalLM takes no images"):
        LLM(str(tiny_folder), limit_mm_per_prompt={"image": 2}, **COMMON)
    with pytest.raises(ConfigError, match="limit_mm_per_prompt='video'"):
        LLM(str(tiny_folder), limit_mm_per_prompt={"video": 2}, **COMMON)
    with pytest.raises(ConfigError, match="counts by name"):
        LLM(str(tiny_folder), limit_mm_per_prompt="image", **COMMON)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image_token_index": 9999}, "outside of the text model's vocabulary"),
        ({"vision_feature_select_strategy": "some"}, "vision_feature_select_strategy"),
        ({"vision_config": {"model_type": "pixtral"}}, "'pixtral' is not supported with LLaVA"),
        ({"vision_config": {"model_type": "clip_vision_model", "image_size": 16}}, r"\(8, 8\)"),
    ],
)
def test_models_that_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    folder = make_tiny_vision(tmp_path, "llava")
    remove = ("image_token_id",) if "image_token_index" in changes else ()
    rewrite_config(folder, remove=remove, **changes)
    with pytest.raises(ModelLoadError, match=message):
        LLM(str(folder), **COMMON)


def test_without_a_processor_or_pillow(
    llava: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_model_config(llava)
    with pytest.raises(ModelLoadError, match="no usable image processor"):
        open_images(tmp_path, config, None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    inputs = open_images(llava, config, None)
    with pytest.raises(PromptError, match=r"pip install 'hetero-llm\[images\]'"):
        inputs.prepare([IMAGE_TOKEN_ID], [IMAGE])


def test_domains_of_images_by_url(llava: Path, tiny_folder: Path) -> None:
    def opened(folder: Path, *domains: str) -> Any:
        given = {"model": str(folder), "allowed_media_domains": domains}
        return open_model(EngineConfig.from_args(resolve_engine_args(given))).images

    where = "here"
    with pytest.raises(PromptError, match="nothing is fetched without allowed_media_domains"):
        opened(llava).fetcher.fetch("https://b.com/x", where, 1)
    with pytest.raises(PromptError, match="'b.com', which is not one of allowed_media_domains"):
        opened(llava, "a.com").fetcher.fetch("https://b.com/x", where, 1)
    with pytest.raises(ConfigError, match="allowed_media_domains=.*takes no images"):
        opened(tiny_folder, "a.com")
    with pytest.raises(ConfigError, match="must be hosts"):
        opened(llava, "https://a.com")


def test_arguments_of_native_models_are_refused(llava: Path) -> None:
    with pytest.raises(ConfigError, match="rope_theta=.*runs on transformers"):
        LLM(str(llava), rope_theta=5e5, **COMMON)
    args = resolve_engine_args({"model": str(llava), "cpu_offload_gb": 1.0})
    with pytest.raises(ConfigError, match="cpu_offload_gb=1.0: .*runs on transformers"):
        find_model(EngineConfig.from_args(args).load)
    args = resolve_engine_args({"model": str(llava), "model_impl": "native"})
    with pytest.raises(ConfigError, match="model_impl='native': Llava.*no native implementation"):
        find_model(EngineConfig.from_args(args).load)
