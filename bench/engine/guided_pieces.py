"""CPU time of what a request with a 10 KB schema adds before its first token, piece by piece.

    python -m bench.engine.guided_pieces --shape llama-3.1-8b

No model runs: the shape gives the size of the made-up vocabulary (see `guided_decode`). Pieces, in
ms of the calling thread's CPU time, medians over the rounds; without a schema, with one that was
seen before, and with a new one:

- request: the server's process makes a request of token ids; a new schema is read, checked and
  written as a grammar.
- message: the request is encoded for the engine's process and decoded there.
- check: the server's process finds out whether the grammar can be followed, beside the engine.
- compile: the engine's thread for grammars compiles it, beside the step.
- mask: the first mask of a sequence, beside the step.

Behind them the pieces of writing a new schema's grammar. A first token waits for request and
message, and for the others only if they take longer than the prompt.
"""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import numpy as np

from bench.common import bench_parser, print_table, write_results
from bench.engine.guided_decode import write_tokenizer
from bench.engine.guided_requests import SCHEMA_BYTES, guided, schema
from bench.generation import greedy
from bench.shapes import CPU_SHAPES, SHAPES, Prompts, write_config
from hetero_llm.engine.inputs.input_processor import InputProcessor, Prompt
from hetero_llm.engine.processes import messages
from hetero_llm.engine.text.tokenizer import Tokenizer, load_tokenizer
from hetero_llm.structured_output.compiler import GrammarCompiler
from hetero_llm.structured_output.endless_values import check_values_end
from hetero_llm.structured_output.grammar_text import constraint_grammar
from hetero_llm.structured_output.json_schema import check_schema, mended, read_schema, schemas_in

R = TypeVar("R")
_EOS = 2


class Pieces:
    """CPU times of pieces of work, in ms, by arm and piece."""

    def __init__(self) -> None:
        self.times: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))

    def take(self, arm: str, piece: str, work: Callable[[], R]) -> R:
        begin = time.thread_time()
        result = work()
        self.times[arm][piece].append((time.thread_time() - begin) * 1e3)
        return result

    def rows(self) -> list[dict[str, Any]]:
        """One row for each arm, the first round left out; 0 for pieces that it does not have."""
        names = dict.fromkeys(piece for pieces in self.times.values() for piece in pieces)
        return [
            {"arm": arm, **{name: median(pieces[name][1:] or [0.0]) for name in names}}
            for arm, pieces in self.times.items()
        ]


def requests(tokenizer: Tokenizer, vocab: int, length: int, rounds: int) -> list[dict[str, Any]]:
    server, engine = (GrammarCompiler(tokenizer.vocabulary(vocab, (_EOS,))) for _ in range(2))
    server.warm_up()
    engine.warm_up()
    inputs = InputProcessor(
        tokenizer,
        vocab_size=vocab,
        max_model_len=length + 16,
        eos_ids=(_EOS,),
        max_logprobs=0,
        seed=0,
        grammars=server,
    )
    prompts, pieces = Prompts(vocab), Pieces()
    mask = np.zeros(-(-vocab // 32), np.int32)
    seen = schema(at_least=SCHEMA_BYTES)
    for turn in range(rounds + 1):
        arms = {"unguided": None, "seen": seen, "new": schema(turn + 1, at_least=SCHEMA_BYTES)}
        for arm, wanted in arms.items():
            prompt = Prompt(token_ids=prompts.one(length))
            params = greedy(1, structured_outputs=None if wanted is None else guided(wanted))

            def make(prompt: Prompt = prompt, params: Any = params) -> Any:
                return inputs.make_request("", prompt, params, check_grammar=False)

            request = pieces.take(arm, "request", make)

            def send(request: Any = request) -> Any:
                data = messages.encode(messages.request_to_wire("1", request))
                return messages.request_from_wire(messages.decode_to_engine(data))

            sent = pieces.take(arm, "message", send)
            if sent.grammar is not None:
                grammar = sent.grammar
                pieces.take(arm, "check", lambda own=request: inputs.check_grammar(own))
                pieces.take(arm, "compile", lambda own=grammar: engine.prepare(own))
                pieces.take(arm, "mask", lambda own=grammar: engine.open(own, []).fill_mask(mask))
    return pieces.rows()


def writing(rounds: int) -> list[dict[str, Any]]:
    """The pieces of a new schema's grammar."""
    pieces = Pieces()
    for turn in range(rounds + 1):
        given = schema(turn + 1, at_least=SCHEMA_BYTES)
        read = pieces.take("new", "read", lambda own=given: read_schema(own, "json"))
        schemas = pieces.take("new", "walk", lambda own=read: schemas_in(own))
        pieces.take("new", "check", lambda own=schemas: check_schema(own))
        pieces.take("new", "ends, with $ref", lambda own=read: check_values_end(own))
        pieces.take("new", "mend", lambda own=read, all_=schemas: mended(own, all_))
        params = guided(given)
        pieces.take("new", "all of it", lambda own=params: constraint_grammar(own, {}))
    return pieces.rows()


def main() -> None:
    parser = bench_parser(__doc__)
    parser.add_argument("--shape", choices=list(SHAPES | CPU_SHAPES), default="llama-3.1-8b")
    parser.add_argument("--prompt", type=int, default=512, help="tokens")
    parser.add_argument("--rounds", type=int, default=60)
    args = parser.parse_args()
    config = {**(SHAPES | CPU_SHAPES)[args.shape], "bos_token_id": 1, "eos_token_id": _EOS}
    with tempfile.TemporaryDirectory() as place:
        made = write_config(config, Path(place))
        write_tokenizer(made, config["vocab_size"])
        tokenizer = load_tokenizer(made, mode="auto", trust_remote_code=False)
    request = requests(tokenizer, config["vocab_size"], args.prompt, args.rounds)
    print_table(request)
    written = writing(args.rounds)
    print_table(written)
    about = {"shape": args.shape, "prompt": args.prompt, "rounds": args.rounds}
    write_results("guided_pieces.c", {**about, "request": request, "writing": written}, args.out)


if __name__ == "__main__":
    main()
