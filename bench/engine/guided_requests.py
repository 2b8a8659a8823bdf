"""Requests that follow a JSON schema: their first token, and the extraction of fifty fields.

    python -m bench.engine.guided_requests --model FOLDER --device cuda --parts fields --batches 1,8
    python -m bench.engine.guided_requests --shape llama-3.1-8b --device cuda --parts first,pieces

Greedy, no detokenization, prompts that share nothing, one request at a time but for "fields". The
model is a folder with its tokenizer (a scale-up of the demo model, or "demo"), or a shape with
random weights and the made-up vocabulary of `guided_decode`. Parts:

- first: ms until `AsyncLLMEngine` has the first token of a prompt of `--prompt` tokens: without a
  schema, with one of 10 KB that the engine has seen, and with one that it has not. The three take
  turns; differences are medians over the rounds of a round's difference.
- fields: through `LLM.generate`, tokens a second behind the first one of an object with fifty
  fields of short strings, numbers, dates and enumerations, whose names are forced: without a schema
  and without drafts ("plain", as many tokens), with the schema and without drafts, and with forced
  tokens as drafts, which is the default. `--batches`: requests at once; a batch that is slower with
  drafts stops to draft. Medians of the rounds, and of a round's ratio to "plain".
- pieces: what makes up "first", without a model, in ms of the calling thread's CPU time. "request":
  the server's process makes a request; a new schema is read, checked and written as a grammar.
  "message": the request is encoded for the engine's process and decoded there. A first token waits
  for these two, for the others only if they take longer than the prompt: "check", whether the
  grammar can be followed; "compile", in the engine's thread for grammars; "mask", a sequence's
  first one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from bench.common import (
    Rows,
    bench_parser,
    machine_of,
    median_ratio,
    names_of,
    numbers,
    print_table,
    settings_of,
    write_results,
)
from bench.engine.guided_decode import write_tokenizer
from bench.generation import greedy
from bench.shapes import CPU_SHAPES, SHAPES, Prompts, write_config
from hetero_llm import LLM, SamplingParams, StructuredOutputsParams
from hetero_llm.demo_models import ALIASES, demo_folder
from hetero_llm.engine.inputs.input_processor import InputProcessor, Prompt
from hetero_llm.engine.text.tokenizer import load_tokenizer
from hetero_llm.models.read_config import load_model_config
from hetero_llm.structured_output.compiler import GrammarCompiler

if TYPE_CHECKING:  # what it imports is not on every machine
    from hetero_llm import AsyncLLMEngine

R = TypeVar("R")
PARTS = ("first", "fields", "pieces")
SUBJECTS = ("customer", "supplier", "invoice", "order", "payment")
FIELDS: dict[str, dict[str, Any]] = {
    "name": {"type": "string", "maxLength": 20},
    "number": {"type": "integer", "minimum": 0, "maximum": 999999},
    "date": {"type": "string", "pattern": r"^\d{4}-\d{2}-\d{2}$"},
    "city": {"type": "string", "maxLength": 16},
    "amount": {"type": "number", "minimum": 0, "maximum": 9999},
    "currency": {"enum": ["EUR", "USD", "GBP", "JPY"]},
    "status": {"enum": ["open", "paid", "late", "cancelled"]},
    "street": {"type": "string", "maxLength": 24},
    "country": {"type": "string", "minLength": 2, "maxLength": 2},
    "email": {"type": "string", "maxLength": 24},
}
SCHEMA_BYTES = 10 * 1024
_EOS = 2
MOST_TOKENS = 1400


def schema(number: int = 0, *, at_least: int = 0) -> dict[str, Any]:
    """An object of fifty fields.

    Args:
        number: another number gives other names, 0 the plain ones.
        at_least: bytes; fields have descriptions of the length that it takes.
    """
    suffix = f"_{number}" if number else ""
    properties = {
        f"{subject}_{field}{suffix}": dict(kind)
        for subject in SUBJECTS
        for field, kind in FIELDS.items()
    }
    wanted = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    missing = at_least - len(json.dumps(wanted))
    if missing > 0:
        words = "as it is written in the document, without what surrounds it, "
        each = -(-missing // len(properties))
        for kind in properties.values():
            kind["description"] = (words * each)[:each]
    return wanted


def guided(wanted: dict[str, Any]) -> StructuredOutputsParams:
    return StructuredOutputsParams(json=wanted, disable_any_whitespace=True)


def schemas_of(turn: int) -> dict[str, dict[str, Any] | None]:
    """What a round's three requests follow: "new" is another one in each round."""
    seen, new = (schema(number, at_least=SCHEMA_BYTES) for number in (0, turn + 1))
    return {"unguided": None, "seen": seen, "new": new}


def one_token(own: dict[str, Any] | None) -> SamplingParams:
    return greedy(1, structured_outputs=None if own is None else guided(own))


async def first(engine: AsyncLLMEngine, prompts: Prompts, length: int, rounds: int) -> Rows:
    times: dict[str, list[float]] = {"unguided": [], "seen": [], "new": []}
    for turn in range(rounds + 2):
        for arm, own in schemas_of(turn).items():
            prompt = Prompt(token_ids=prompts.one(length))
            params = one_token(own)
            begin = time.perf_counter()
            async for output in engine.generate(prompt, params, f"{turn} {arm}"):
                if turn > 1:
                    times[arm].append((time.perf_counter() - begin) * 1e3)
                assert len(output.outputs[0].token_ids) == 1 and not output.num_cached_tokens
    size = len(json.dumps(schema(at_least=SCHEMA_BYTES)))
    row: dict[str, Any] = {"prompt": length, "schema_bytes": size}
    for arm, values in times.items():
        row[f"{arm}_ms"] = median(values)
    for arm in ("seen", "new"):
        pairs = zip(times[arm], times["unguided"], strict=True)
        row[f"{arm}_adds_ms"] = median(a - b for a, b in pairs)
    return [row]


async def first_of_an_engine(arguments: dict[str, Any], *given: Any) -> Rows:
    from hetero_llm import AsyncLLMEngine

    engine = await asyncio.to_thread(AsyncLLMEngine, arguments)
    try:
        return await first(engine, *given)
    finally:
        await engine.shutdown(0)


def pieces(folder: Path, vocab: int, prompts: Prompts, length: int, rounds: int) -> Rows:
    """Medians of each piece, a row for each kind of request; 0 for pieces that it does not have."""
    from hetero_llm.engine.processes import messages

    tokenizer = load_tokenizer(folder, mode="auto", trust_remote_code=False)
    server, engine = (GrammarCompiler(tokenizer.vocabulary(vocab, (_EOS,))) for _ in range(2))
    server.warm_up()
    engine.warm_up()
    inputs = InputProcessor(
        tokenizer, vocab_size=vocab, max_model_len=length + 16, eos_ids=(_EOS,), max_logprobs=0,
        seed=0, grammars=server,
    )  # fmt: skip
    mask = np.zeros(-(-vocab // 32), np.int32)
    names = ("request", "message", "check", "compile", "mask")
    times: dict[str, dict[str, list[float]]] = {
        arm: {name: [] for name in names} for arm in schemas_of(0)
    }

    def timed(arm: str, name: str, work: Callable[[], R]) -> R:
        begin = time.thread_time()
        result = work()
        times[arm][name].append((time.thread_time() - begin) * 1e3)
        return result

    def sent(request: Any) -> Any:
        data = messages.encode(messages.request_to_wire("1", request))
        return messages.request_from_wire(messages.decode_to_engine(data))

    for turn in range(rounds + 1):
        for arm, own in schemas_of(turn).items():
            prompt, params = Prompt(token_ids=prompts.one(length)), one_token(own)
            make = partial(inputs.make_request, "", prompt, params, check_grammar=False)
            request = timed(arm, "request", make)
            grammar = timed(arm, "message", partial(sent, request)).grammar
            if grammar is not None:
                timed(arm, "check", partial(inputs.check_grammar, request))
                timed(arm, "compile", partial(engine.prepare, grammar))
                opened = partial(engine.open, grammar, [])
                timed(arm, "mask", lambda opened=opened: opened().fill_mask(mask))
    return [
        {"arm": arm, **{name: median(found[name][1:] or [0.0]) for name in names}}
        for arm, found in times.items()
    ]


def fields(llm: LLM, prompts: Prompts, length: int, rounds: int, *, batch: int) -> dict[str, Any]:
    """The row of one batch; tokens and steps are those of a request."""
    ends = {"ignore_eos": False, "structured_outputs": guided(schema())}
    params = {
        "drafts": greedy(MOST_TOKENS, **ends),
        "no drafts": greedy(MOST_TOKENS, **ends, num_speculative_tokens=0),
    }
    found: dict[str, list[float]] = {"plain": [], **{arm: [] for arm in params}}
    tokens, steps = [], []
    for turn in range(rounds + 1):
        asked = [prompts.one(length) for _ in range(batch)]
        before = llm.metrics()
        rates = {}
        for arm in ("drafts", "no drafts"):
            counts, rates[arm] = _rate(llm, asked, [params[arm]] * batch)
            if arm == "drafts":
                after, number = llm.metrics(), sum(counts)
                name = "spec_decode_num_accepted_tokens"
                steps.append(number / max(1, number - after[name] + before[name]))
                tokens.append(number / batch)
                plain = [greedy(count, num_speculative_tokens=0) for count in counts]
        _, rates["plain"] = _rate(llm, asked, plain)
        if turn:
            for arm, rate in rates.items():
                found[arm].append(rate)
    row: dict[str, Any] = {"batch": batch, "tokens": median(tokens[1:])}
    row["tokens/step"] = median(steps[1:])
    row |= {f"{arm} tok/s": median(values) for arm, values in found.items()}
    row |= {f"{arm}/plain": median_ratio(found[arm], found["plain"]) for arm in params}
    row["drafts/no drafts"] = median_ratio(found["drafts"], found["no drafts"])
    return row


def _rate(
    llm: LLM, prompts: list[list[int]], params: list[SamplingParams]
) -> tuple[list[int], float]:
    """Tokens of each answer, and of all answers together tokens a second behind the first ones."""

    def took(wanted: list[SamplingParams]) -> tuple[float, list[Any]]:
        begin = time.perf_counter()
        outputs = llm.generate(prompt_token_ids=prompts, sampling_params=wanted, use_tqdm=False)
        return time.perf_counter() - begin, [output.outputs[0] for output in outputs]

    constraint = params[0].structured_outputs
    one = greedy(1, structured_outputs=constraint, num_speculative_tokens=0)
    short, _ = took([one] * len(prompts))
    whole, outputs = took(params)
    numbers = [len(output.token_ids) for output in outputs]
    if constraint is not None:
        ended = all(output.finish_reason == "stop" for output in outputs)
        assert ended, f"{max(numbers)} tokens do not hold the object"
    return numbers, (sum(numbers) - len(numbers)) / (whole - short)


def arguments_of(args: argparse.Namespace, place: Path) -> tuple[dict[str, Any], int]:
    """The engine's arguments, and its vocabulary's size.

    Args:
        place: an empty folder for a shape's files.
    """
    seqs = max(4, *args.batches)
    more = {"device": args.device, "max_num_seqs": seqs, "enable_prefix_caching": False}
    more |= {"max_model_len": args.prompt + MOST_TOKENS + 16, "disable_log_stats": True}
    if args.device == "cpu":
        more["cpu_threads"] = args.threads
    if args.model:
        folder = demo_folder(args.model) if args.model in ALIASES else Path(args.model)
        return {"model": str(folder), **more}, load_model_config(folder).vocab_size
    config = {**(SHAPES | CPU_SHAPES)[args.shape], "bos_token_id": 1, "eos_token_id": _EOS}
    made = write_config(config, place)
    write_tokenizer(made, config["vocab_size"])
    return {"model": str(made), "load_format": "dummy", **more}, config["vocab_size"]


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--model", help="a folder, or demo")
    parser.add_argument("--shape", choices=list(SHAPES | CPU_SHAPES), default="S")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2, help="of the native executor")
    parser.add_argument("--prompt", type=int, default=512, help="tokens")
    parser.add_argument("--batches", type=numbers, default=[1], help="of fields")
    parser.add_argument("--parts", type=names_of(PARTS), default=["first", "fields"])
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as place:
        arguments, vocab = arguments_of(args, Path(place))
        given = (Prompts(vocab), args.prompt, args.rounds)
        if "first" in args.parts:
            results["first"] = asyncio.run(first_of_an_engine(arguments, *given))
            print_table(results["first"])
        if "fields" in args.parts:
            with LLM(**arguments) as llm:
                results["fields"] = [fields(llm, *given, batch=batch) for batch in args.batches]
            print_table(results["fields"])
        if "pieces" in args.parts:
            results["pieces"] = pieces(Path(arguments["model"]), vocab, *given)
            print_table(results["pieces"])
    args.model = args.model or args.shape
    about = settings_of(args, "model device prompt rounds")
    name = f"guided_requests.{about['model']}.{machine_of(args.device)}"
    write_results(name, {**about, **results}, args.out)


if __name__ == "__main__":
    main()
