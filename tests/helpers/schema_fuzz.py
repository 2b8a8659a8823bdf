"""Random JSON schemas on a tiny model: every finished output has to be valid under `jsonschema`.

By hand, for more schemas than the suite runs:

    python -m tests.helpers.schema_fuzz 0 100000
    python -m tests.helpers.schema_fuzz --walk 0 100000  # no model: more keywords, random bytes
    python -m tests.helpers.schema_fuzz --files FOLDER   # the same with all *.json below it
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import Any

import jsonschema
import torch

from hetero_llm import LLM, SamplingParams
from hetero_llm.core.errors import SamplingError
from hetero_llm.core.structured_outputs import StructuredOutputsParams
from hetero_llm.engine.text.tokenizer import Tokenizer
from hetero_llm.structured_output.compiler import GrammarCompiler
from tests.helpers.grammar_walk import byte_compiler, check, random_keywords, walk
from tests.models.tiny import make_tiny_checkpoint

EOS = 2
_NAMES = ("a", "b", "name", "é", "a b", 'q"', "\\", "$id", "")
_FORMATS = ("date", "time", "date-time", "email", "ipv4", "uuid", "uri", "hostname")
_PATTERNS = ("^[a-c]{1,4}$", "x", "^(ab|cd)+$", r"^\d{2}-\d{2}$", "^é?$")
_MOST_TOKENS = 300
_BATCH = 256


def random_schema(rng: Random, depth: int = 0) -> Any:
    """A schema of keywords that llguidance supports. Its outputs are mostly short."""
    kinds = ["integer", "number", "string", "boolean", "null", "enum", "const", "format", "pattern"]
    if depth < 3:
        kinds += ["object", "array", "anyOf", "ref", "tuple", "nullable", "map"] * 2
    match rng.choice(kinds):
        case "integer":
            low = rng.randint(-50, 50)
            limits = {"minimum": low, "maximum": low + rng.choice((0, 1, 7, 1000))}
            return {"type": "integer", **limits}
        case "number":
            low = rng.randint(-50, 50) / 4
            exclusive = rng.random() < 0.5
            names = (
                ("exclusiveMinimum", "maximum") if exclusive else ("minimum", "exclusiveMaximum")
            )
            return {"type": "number", names[0]: low, names[1]: low + rng.choice((0.5, 3, 100))}
        case "string":
            least = rng.randint(0, 3)
            return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 5)}
        case "boolean" | "null" as kind:
            return {"type": kind}
        case "enum":
            return {"enum": rng.sample((1, "a", None, True, 2.5, "é", {"a": 1}, [1, "b"]), 3)}
        case "const":
            return {"const": rng.choice((0, "x", {"b": [1]}, False))}
        case "format":
            return {"type": "string", "format": rng.choice(_FORMATS), "maxLength": 40}
        case "pattern":
            return {"type": "string", "pattern": rng.choice(_PATTERNS), "maxLength": 12}
        case "object":
            names = rng.sample(_NAMES, rng.randint(0, 4))
            schema: dict[str, Any] = {
                "type": "object",
                "properties": {name: random_schema(rng, depth + 1) for name in names},
                "required": rng.sample(names, rng.randint(0, len(names))),
                "additionalProperties": False,
            }
            return schema
        case "map":
            return {
                "type": "object",
                "additionalProperties": random_schema(rng, depth + 1),
                "maxProperties": rng.randint(0, 2),
            }
        case "array":
            least = rng.randint(0, 2)
            return {
                "type": "array",
                "items": random_schema(rng, depth + 1),
                "minItems": least,
                "maxItems": least + rng.randint(0, 2),
            }
        case "tuple":
            items = [random_schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]
            return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}
        case "nullable":
            return {"type": [rng.choice(("boolean", "null")), "null"]}
        case "ref":
            return {
                "$defs": {"d": random_schema(rng, 3)},
                "type": "array",
                "items": {"$ref": "#/$defs/d"} if depth == 0 else random_schema(rng, 3),
                "maxItems": 2,
            }
        case _:
            return {"anyOf": [random_schema(rng, depth + 1) for _ in range(rng.randint(2, 3))]}


def run(seeds: Iterable[int], llm: LLM, *, drafts: bool = True) -> Counter[str]:
    """Generates one output for each seed's schema.

    Raises:
        AssertionError: an output is not valid, with its seed and schema.
    """
    counts: Counter[str] = Counter()
    compiler = GrammarCompiler(Tokenizer(llm.get_tokenizer()).vocabulary(300, (EOS,)))
    schemas: list[tuple[int, Any, SamplingParams]] = []
    for seed in seeds:
        rng = Random(seed)
        schema = random_schema(rng)
        params = SamplingParams(
            temperature=rng.choice((0.0, 0.7, 1.5)),
            seed=seed,
            max_tokens=_MOST_TOKENS,
            num_speculative_tokens=None if drafts else 0,
            structured_outputs=StructuredOutputsParams(
                json=schema, disable_any_whitespace=rng.random() < 0.5
            ),
        )
        schemas.append((seed, schema, params))
    taken = []
    for item in schemas:
        try:
            compiler.grammar(item[2].structured_outputs)
            taken.append(item)
        except SamplingError as error:
            assert "an excluded integer" in str(error) or "Unsatisfiable" in str(error), item
            counts["refused"] += 1
    outputs = llm.generate(
        [[5 + seed % 200] for seed, _, _ in taken], [p for _, _, p in taken], use_tqdm=False
    )
    for (seed, schema, _), output in zip(taken, outputs, strict=True):
        one = output.outputs[0]
        counts[str(one.finish_reason)] += 1
        if one.finish_reason != "stop":
            continue
        try:
            jsonschema.Draft202012Validator(schema).validate(json.loads(one.text))
        except Exception as error:
            raise AssertionError(f"seed {seed}: {schema}\n{one.text!r}\n{error}") from error
    return counts


def open_model(folder: Path, **engine_args: Any) -> LLM:
    """The tiny model; its tokens are bytes."""
    path = make_tiny_checkpoint(folder / "llama", "llama", with_tokenizer=True)
    return LLM(str(path), dtype="float32", device="cpu", max_num_seqs=64, **engine_args)


def run_model(first: int, last: int) -> Counter[str]:
    """Schemas of `random_schema`, and the tiny model."""
    torch.set_num_threads(1)
    total: Counter[str] = Counter()
    begun = time.monotonic()
    # One thread: several of these processes may run beside each other.
    with tempfile.TemporaryDirectory() as folder, open_model(Path(folder), cpu_threads=1) as llm:
        for begin in range(first, last, _BATCH):
            seeds = range(begin, min(begin + _BATCH, last))
            try:
                total += run(seeds, llm)
            except AssertionError as error:
                total["failed"] += 1
                print(error, flush=True)
            if (begin // _BATCH) % 20 == 19:
                print(begin + _BATCH, dict(total), f"{time.monotonic() - begun:.0f} s", flush=True)
    return total


def run_walks(schemas: Iterable[tuple[Any, Any]], walks: int) -> Counter[str]:
    """Random outputs of schemas, each with a name that seeds its walks."""
    counts: Counter[str] = Counter()
    compiler = byte_compiler()
    for name, schema in schemas:
        rng = Random(f"walk {name}")
        params = StructuredOutputsParams(json=schema, disable_any_whitespace=rng.random() < 0.7)
        try:
            compiler.grammar(params)
            counts["compiled"] += 1
            for _ in range(walks):
                text = walk(compiler, params, rng, _MOST_TOKENS)
                counts["length" if text is None else "stop"] += 1
                if text is not None:
                    check(schema, text)
        except SamplingError as error:
            counts["refused" if error.field.startswith("json") else "failed"] += 1
        except RecursionError:
            counts["not validated"] += 1
        except Exception as error:  # of the validator, the walk or the grammar
            counts["failed"] += 1
            print(f"{name}: {json.dumps(schema)[:1000]}\n{error!r:.1000}", flush=True)
    return counts


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--walk", action="store_true", help="no model: all keywords, random bytes")
    parser.add_argument("--files", type=Path, help="no model: the schemas in a folder")
    parser.add_argument("seeds", nargs="*", type=int, help="the first, and the one behind the last")
    given = parser.parse_args()
    if given.files:
        paths = sorted(given.files.rglob("*.json"))
        print(dict(run_walks(((path.name, json.loads(path.read_text())) for path in paths), 2)))
    elif given.walk:
        schemas = ((seed, random_keywords(Random(seed))) for seed in range(*given.seeds))
        print(dict(run_walks(schemas, 4)))
    else:
        print(dict(run_model(*given.seeds)))


if __name__ == "__main__":
    main()
