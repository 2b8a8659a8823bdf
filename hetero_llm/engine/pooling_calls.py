"""`LLM.embed`, `encode`, `classify` and `score`: from a user's inputs to vLLM's outputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from typing import Any, TypeVar

import numpy as np
from tqdm import tqdm

from hetero_llm.core.errors import HeteroLLMError, PoolingError, PromptError
from hetero_llm.core.pooling import Finish, PoolingInput, PoolingRequest
from hetero_llm.core.pooling_outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from hetero_llm.core.pooling_params import CLASSIFY, EMBED, SCORE, PoolingParams
from hetero_llm.engine.builders.build_pooling import BuiltPooling
from hetero_llm.engine.inputs.input_processor import Prompt, is_one_prompt, parse_prompts
from hetero_llm.engine.interrupts import interrupt_between_steps
from hetero_llm.engine.pooling.pooling_inputs import PoolingInputs
from hetero_llm.engine.pooling.score_pairs import pair_up, score_of_vectors
from hetero_llm.utils.gc_control import prompt_wakeups

R = TypeVar("R")
Progress = bool | Callable[..., Any]
Params = PoolingParams | Sequence[PoolingParams] | None


class PoolingCalls:
    """The calls of one `LLM`."""

    def __init__(self, built: BuiltPooling) -> None:
        self._built = built
        self.inputs = PoolingInputs(built.tokenizer, built.model)
        self._numbers = count()

    def pool(
        self, prompts: Any, params: Params, task: str, options: Mapping[str, Any], shown: Progress
    ) -> tuple[list[PoolingInput], list[np.ndarray]]:
        """The inputs and pooled values of prompts in any form of `LLM.generate`.

        Args:
            options: fields of `PoolingParams` that come before those of `params`, unless None.
        """
        parsed = parse_prompts(prompts)
        named = not is_one_prompt(prompts)
        each = _params_of(params, len(parsed), options)
        finishes = [self.inputs.finish_of(one, task) for one in each]
        with prompt_wakeups():
            inputs = self.inputs.prompts(parsed, each, name_index=named)
        return inputs, self._run(inputs, finishes, shown)

    def embed(
        self, prompts: Any, params: Params, options: Mapping[str, Any], shown: Progress
    ) -> list[EmbeddingRequestOutput]:
        inputs, values = self.pool(prompts, params, EMBED, options, shown)
        outputs = (EmbeddingOutput(one.tolist()) for one in values)
        return _wrapped(EmbeddingRequestOutput, outputs, inputs)

    def classify(
        self, prompts: Any, params: Params, options: Mapping[str, Any], shown: Progress
    ) -> list[ClassificationRequestOutput]:
        inputs, values = self.pool(prompts, params, CLASSIFY, options, shown)
        outputs = (ClassificationOutput(one.tolist()) for one in values)
        return _wrapped(ClassificationRequestOutput, outputs, inputs)

    def encode(
        self, prompts: Any, params: Params, task: str | None, shown: Progress
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        import torch

        wanted = {one.task for one in _params_of(params, 1, {})} if task is None else {task}
        known = PoolingParams(task=next(iter(wanted))).task or self._built.model.tasks[0]
        inputs, values = self.pool(prompts, params, known, {}, shown)
        outputs = (PoolingOutput(torch.from_numpy(one.copy())) for one in values)
        return _wrapped(PoolingRequestOutput, outputs, inputs)

    def score(
        self, data_1: Any, data_2: Any, params: Params, options: Mapping[str, Any], shown: Progress
    ) -> list[ScoringRequestOutput]:
        first, second = _score_side("data_1", data_1), _score_side("data_2", data_2)
        pairs = pair_up(len(first), len(second), "data_1", "data_2")
        if not isinstance(params, PoolingParams | None):
            raise PoolingError("pooling_params", params, "must be one PoolingParams for all pairs")
        (own,) = _params_of(params, 1, options)
        if not self._built.model.is_classifier:
            finish = self.inputs.finish_of(own, SCORE)
            with prompt_wakeups():
                inputs = []
                for name, side in (("data_1", first), ("data_2", second)):
                    inputs += self.inputs.prompts(
                        side, [own] * len(side), name_index=True, field=name
                    )
            values = self._run(inputs, [finish] * len(inputs), shown)
            return [
                ScoringRequestOutput(str(i), ScoringOutput(score), tokens)
                for i, (score, tokens) in enumerate(
                    score_of_vectors(inputs, values, pairs, len(first))
                )
            ]
        texts = [(_text_of(first[one]), _text_of(second[other])) for one, other in pairs]
        finish = self.inputs.finish_of(own, SCORE)
        with prompt_wakeups():
            inputs = self.inputs.pairs(texts, own, name_index=True, field="data_2")
        values = self._run(inputs, [finish] * len(inputs), shown)
        outputs = (ScoringOutput(float(one[0])) for one in values)
        return _wrapped(ScoringRequestOutput, outputs, inputs)

    def _run(
        self, inputs: Sequence[PoolingInput], finishes: Sequence[Finish], shown: Progress
    ) -> list[np.ndarray]:
        """Computes inputs; a request each, so that the progress shows every one."""
        engine = self._built.engine
        places: dict[str, int] = {}
        values: list[np.ndarray] = [np.empty(0, np.float32)] * len(inputs)
        make_bar = shown if callable(shown) else tqdm
        bar = make_bar(
            total=len(inputs), desc="Processed prompts", dynamic_ncols=True, disable=not shown
        )
        try:
            for place, (one, finish) in enumerate(zip(inputs, finishes, strict=True)):
                key = str(next(self._numbers))
                places[key] = place
                engine.add_request(PoolingRequest(key, [one], finish))
            with interrupt_between_steps() as interrupted:
                while places and not interrupted:
                    with prompt_wakeups():
                        results = engine.step()
                    for result in results:
                        place = places.pop(result.key)
                        if result.error is not None:
                            raise HeteroLLMError(f"prompt {place}: {result.error}")
                        values[place] = result.values[0]
                        bar.update(1)
            if interrupted:
                raise KeyboardInterrupt
        finally:
            bar.close()
            for key in places:
                engine.abort(key)
        return values


def _wrapped(
    kind: Callable[..., R], outputs: Iterable[Any], inputs: Sequence[PoolingInput]
) -> list[R]:
    """The output of each input as a user gets it."""
    pairs = enumerate(zip(outputs, inputs, strict=True))
    return [kind(str(index), output, made.token_ids.tolist()) for index, (output, made) in pairs]


def _params_of(params: Params, size: int, options: Mapping[str, Any]) -> list[PoolingParams]:
    """One for each of `size` inputs, with `options` in place of their fields."""
    given: list[Any]
    if params is None or isinstance(params, PoolingParams):
        given = [params or PoolingParams()] * size
    elif isinstance(params, Sequence) and len(params) == size:
        given = list(params)
    else:
        reason = f"must be one PoolingParams or a list of {size}"
        raise PoolingError("pooling_params", params, reason)
    chosen = {name: value for name, value in options.items() if value is not None}
    made: dict[int, PoolingParams] = {}
    for one in given:
        if not isinstance(one, PoolingParams):
            raise PoolingError("pooling_params", one, "must be a PoolingParams")
        if id(one) not in made:
            made[id(one)] = one.clone()
            for name, value in chosen.items():
                setattr(made[id(one)], name, value)
    return [made[id(one)] for one in given]


def _score_side(name: str, data: Any) -> list[Prompt]:
    if isinstance(data, Mapping) and "content" in data:
        raise PromptError(name, data, "input other than text is not available yet")
    try:
        return parse_prompts(data)
    except PromptError as error:
        raise PromptError(
            name, error.value, error.reason, prompt_index=error.prompt_index
        ) from None


def _text_of(prompt: Prompt) -> str:
    if prompt.text is None:
        raise PromptError("prompt_token_ids", prompt.token_ids, "a cross-encoder needs texts")
    return prompt.text
