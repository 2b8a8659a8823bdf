"""Acceptance of one part on the machine that its figures are claimed for: tests and benches.

    python -m bench.accept --list
    python -m bench.accept PART [STEP ...] --out FOLDER

A step is one command with a time limit. Its output goes to FOLDER/STEP.log and its last lines to
the terminal; its results go to FOLDER. Without STEPs all of a part run, except those that must be
named. With them only those, and the ones they need: builds, and models by tools/scale_up.py.

Set TRITON_CACHE_DIR to keep most of the compiling from call to call, MODELS to keep the models
(default: a temporary folder), and THREADS for the engine's threads in the part "cpu" (default: 12,
or all cores if there are fewer).
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hetero_llm.utils.topology import compute_cpus

ROOT = Path(__file__).parents[1]
_WIDTH = 175
_MOST_FAILURES = 40
_LEAST_SECONDS, _GRACE_SECONDS = 10, 15
_FAILURES = re.compile(r"FAILED|ERROR|^E  | passed| failed|Timeout")


@dataclass(frozen=True)
class Step:
    """
    Attributes:
        command: {out}, {models}, {threads}, {parts}, {python} and {budget} are filled in; "-m" and
            "tools/" at its beginning run Python.
        limit: seconds.
        lines: shown of its output; "failures": only lines about failures, and totals.
        condition: "named": runs only if it is named. "if FILE": only if that is in the folder.
    """

    name: str
    limit: int
    lines: str
    condition: str
    command: str

    @property
    def makes(self) -> str:
        """The model that it makes, a folder below {models}; empty for other steps."""
        return self.name.removeprefix("scale_") if self.name.startswith("scale_") else ""


@dataclass(frozen=True)
class Part:
    """
    Attributes:
        machine: that the figures are claimed for.
        table: the steps in order, a line each: name, limit, lines, condition in brackets, command.
            Indented lines continue the command.
        limit: seconds of a whole call; None: only the steps' own limits.
        strict: a failed step makes the call fail; else it is only reported.
    """

    about: str
    machine: str
    table: str
    limit: int | None = None
    strict: bool = False

    @property
    def steps(self) -> list[Step]:
        found = []
        for line in re.sub(r"\n +", " ", self.table).split("\n"):
            if line:
                match = re.fullmatch(r"(\S+) (\d+) (\S+)(?: \[(.+?)\])?: (.*)", line)
                assert match is not None, line
                name, limit, lines, condition, command = match.groups("")
                found.append(Step(name, int(limit), lines, condition, command))
        return found


_SCALE = "tools/scale_up.py hetero_llm/demo_models"
_BUILD = "build 90 6: -m hetero_llm.cpu.build\n"
_BUILDS = _BUILD + "build_bridge 90 6: -m hetero_llm.bridge.build\n"
_MISTRAL = f"scale_mistral-7b 90 6: {_SCALE}/demo mistral-7b {{models}}/mistral-7b --device cuda\n"
_PAIR = f"scale_draft-68m 90 6: {_SCALE}/demo-draft draft-68m {{models}}/draft-68m --device cpu\n"
_PAIR += _MISTRAL
_PYTEST = "-vv --tb=short --durations=5 -p no:benchmark -o faulthandler_timeout=100"
_OFFLINE = "-m bench.engine.cpu_offline --threads {threads} --patience 5"
_SPEEDUP = (
    "-m bench.speculation.speedup --device cuda --repeats 1 --prompt 1024 --tokens 256 --random 8"
)
_WITH_PAIR = "--model {models}/mistral-7b --draft {models}/draft-68m"
_TWO = f"{_SPEEDUP} {_WITH_PAIR}"

PARTS = {
    "cpu": Part(
        "the CPU executor", "16 cores with AMX; neither network nor peers", limit=540,
        table=f"""{_BUILD}
draft_step 150 16: -m bench.speculation.draft_step --threads 12,8 --out {{out}}/draft_step.g.json
offline_L_bfloat16 120 8: {_OFFLINE} --model L --dtype bfloat16 --rounds 2
    --out {{out}}/cpu_offline.L.bfloat16.g.json
offline_M_bfloat16 120 8: {_OFFLINE} --model M --dtype bfloat16 --rounds 2
    --out {{out}}/cpu_offline.M.bfloat16.g.json
matmul 75 30: -m bench.kernels.cpu_matmul --threads {{threads}} --formats BF16 INT8
    --out {{out}}/kernels_cpu_matmul.g.json
attention 60 16: -m bench.kernels.cpu_attention --out {{out}}/kernels_cpu_attention.g.json
tests 150 6: -m pytest tests/cpu/csrc/step -q --tb=short --durations=5
offline_L_int8 120 8: {_OFFLINE} --model L --dtype int8 --rounds 1 --work decode1,prefill
    --out {{out}}/cpu_offline.L.int8.g.json
offline_S_bfloat16 120 8: {_OFFLINE} --model S --dtype bfloat16 --rounds 1
    --out {{out}}/cpu_offline.S.bfloat16.g.json
""",
    ),
    "gpu-tests": Part(
        "tests of the GPU path; those of memory alone, as they claim the card's", "one H200",
        table=f"""
tests_kernels 200 failures: -m pytest tests/gpu/kernels -n 12 {_PYTEST}
tests_engine 280 failures: -m pytest tests/gpu --ignore tests/gpu/kernels
    --ignore tests/gpu/test_memory_cuda.py -n 5 --dist loadfile {_PYTEST}
tests_memory 150 failures: -m pytest tests/gpu/test_memory_cuda.py {_PYTEST}
""",
    ),
    "gpu": Part(
        "the GPU path", "one H200",
        table="""
suite 150 16: -m bench.engine.gpu_suite --parts decode,ttft,closed --sampling --out {out}
verify 150 52: -m bench.speculation.verify --out {out}/verify.g.json
attention 150 16: -m bench.kernels.attention --out {out}/attention.g.json
small_linear 150 16: -m bench.kernels.skinny_gemm --rows 1 4 8 32
    --out {out}/kernels_small_linear.g.json
elementwise 150 16: -m bench.kernels.elementwise --out {out}/kernels_elementwise.g.json
pick 150 16: -m bench.kernels.sample --out {out}/kernels_pick.g.json
step_parts 150 16: -m bench.kernels.step_parts --out {out}/kernels_step_parts.g.json
ceilings 150 16: -m bench.kernels.gpu_ceilings --out {out}/gpu_ceilings.g.json
""",
    ),
    "quantized": Part(
        "quantized weights: shares of the copy speed, steps and first tokens beside bf16",
        "one H200", limit=590,
        table="""
quantized_suite 480 24: -m bench.engine.gpu_suite --batches 1,8,32,128 --lengths 4096,16384
    --quantization none,fp8,int4,fp8_block,ifq,ifq_nf4 --out {out}
quantized_gemm 200 24: -m bench.kernels.quantized_gemm
    --kinds fp8,int4,fp8_block,int8,nf4 --many 64,128,256,1024
    --out {out}/kernels_quantized_gemm.json
quantized_70b 240 12 [named]: -m bench.engine.gpu_suite --shape llama-3.1-70b --parts decode
    --batches 1,8 --lengths 1024 --quantization fp8 --out {out}
""",
    ),
    "adapters": Part(
        "LoRA and prompt adapters", "one H200", limit=590,
        table=f"""
tests_adapters 200 failures: -m pytest tests/gpu/kernels/test_lora.py tests/gpu/test_adapters.py
    tests/gpu/scenarios/test_lora_cuda.py tests/gpu/scenarios/test_prompt_adapters_cuda.py
    -n 5 --dist loadfile {_PYTEST}
lora_steps 180 16: -m bench.engine.lora --arms none,decode,prefill,cold
    --out {{out}}/lora.llama-3.1-8b.g.json
lora_zipf 180 8: -m bench.engine.lora --arms zipf --out {{out}}/lora_zipf.llama-3.1-8b.g.json
kernels_lora 100 10: -m bench.kernels.lora --out {{out}}/kernels_lora.json
""",
    ),
    "lookahead": Part(
        "the lookahead cache", "one H200",
        table=f"""{_BUILD}
tests 200 8: -m pytest tests/gpu/scenarios/test_lookahead_cuda.py
    tests/gpu/scenarios/test_drafts_beside_cuda.py -n 5 --dist loadfile -q --tb=short
    -p no:benchmark
{_MISTRAL}
speculation 260 45: {_SPEEDUP} --model {{models}}/mistral-7b --batches 1,8,32,128
    --arms none ngram hybrid merged warm --out {{out}}/speculation.cuda.json
lookahead_cache 60 14: -m bench.speculation.lookahead_cache --threads 8
    --out {{out}}/lookahead_cache.g.json
""",
    ),
    "draft": Part(
        "the draft worker: speed-ups, timeline, faults, hand-off", "one H200, a Xeon with AMX",
        table=f"""{_BUILD}{_PAIR}
rings 30 6: -m bench.speculation.rings --cpus 0 1 --out {{out}}/rings.g.json
speculation.draft 240 34: {_TWO} --batches 1,8,32 --arms none merged draft "draft + merged"
    --out {{out}}/speculation.draft.json
timeline 70 6: -m bench.speculation.timeline {_WITH_PAIR} --out {{out}}
draft_faults 90 6: -m bench.speculation.draft_faults {_WITH_PAIR} --out {{out}}/draft_faults.g.json
""",
    ),
    "draft-more": Part(
        "other overlaps, a temperature, the draft model on the GPU, a 13B target",
        "one H200, a Xeon with AMX",
        table=f"""{_BUILD}{_PAIR}
speculation.sampled 70 12: {_TWO} --batches 1 --arms none draft --temperature 0.7
    --out {{out}}/speculation.sampled.json
speculation.gpu_draft 90 12: {_TWO} --batches 1,8,32 --arms none "gpu draft" --gpu-draft
    --out {{out}}/speculation.gpu_draft.json
speculation.enumerate 70 12: {_TWO} --batches 1 --arms none draft --overlap enumerate
    --out {{out}}/speculation.enumerate.json
speculation.off 70 12: {_TWO} --batches 1 --arms none draft --overlap off
    --out {{out}}/speculation.off.json
make_room 60 6: rm -rf {{models}}/mistral-7b
scale_llama-2-13b 90 6: {_SCALE}/demo llama-2-13b {{models}}/llama-2-13b --device cuda
speculation.13b 120 12: {_SPEEDUP} --model {{models}}/llama-2-13b --draft {{models}}/draft-68m
    --batches 1,8 --arms none draft "draft + merged" --out {{out}}/speculation.13b.json
""",
    ),
    "engine": Part(
        "overhead and CPU ratios of the engine, CUDA tests", "one H200",
        table="""
engine_overhead 200 16: -m bench.engine.engine_overhead --out {out}/engine_overhead.g.json
batch_vs_transformers 200 16: -m bench.engine.batch_vs_transformers --threads 2
    --out {out}/batch_vs_transformers.g.json
prefix_hit 200 16: -m bench.engine.prefix_hit --threads 2 --out {out}/prefix_hit.g.json
cpu_kernels 200 16: -m bench.kernels.cpu_kernels --threads 2 --out {out}/cpu_kernels.g.json
tests 200 16: -m pytest tests/gpu tests/cpu/test_native_kernels.py -q --durations=3
""",
    ),
    "offload": Part(
        "the host tier of the prefix cache; soak: five minutes of random traffic", "one H200",
        limit=540, strict=True,
        table=f"""{_BUILDS}
tests 90 6: -m pytest tests/gpu/scenarios/test_offload_cuda.py -v --tb=short --durations=5
{_PAIR}
offload 540 90: -m bench.offload.suite --parts {{parts}} --budget {{budget}} --out {{out}}
    --target {{models}}/mistral-7b --draft {{models}}/draft-68m
plot 30 6 [if offload.ttft.json]: -m bench.offload.plot {{out}}/offload.ttft.json
    {{out}}/offload_ttft.png
soak 420 30 [named]: env SOAK_SECONDS=300 {{python}} -m pytest
    tests/gpu/scenarios/test_offload_cuda.py -k soak -v --tb=short
""",
    ),
    "models": Part(
        "model families, transformers' classes, mixtures of experts", "one H200", strict=True,
        table=f"""{_BUILDS}
families 200 60: -m bench.engine.families --out {{out}}/families.g.json
transformers 90 60: -m bench.engine.transformers_backend --out {{out}}/transformers_backend.g.json
moe 120 60: -m bench.engine.moe_decode --batches 1,32 --out {{out}}/moe_decode.g.json
tests 240 60: -m pytest tests/gpu/scenarios/test_attention_variants_cuda.py
    tests/gpu/scenarios/test_experts_cuda.py tests/gpu/scenarios/test_loading_cuda.py
    tests/gpu/scenarios/test_transformers_backend_cuda.py tests/gpu/kernels/test_norm.py
    tests/gpu/kernels/test_activation.py tests/gpu/test_fused.py tests/gpu/kernels/test_experts.py
    -n 8 -q -rf -o timeout=120
""",
    ),
}  # fmt: skip


def chosen(part: Part, names: list[str]) -> list[Step]:
    """The steps of a call, in the part's order.

    Raises:
        SystemExit: the part has no step of a name.
    """
    steps = part.steps
    known = [step.name for step in steps]
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"no step {unknown[0]!r}: one of {', '.join(known)}")
    if not names:
        return [step for step in steps if step.condition != "named"]
    commands = " ".join(step.command for step in steps if step.name in names)
    return [
        step
        for step in steps
        if step.name in names
        or step.name.startswith("build")
        or (step.makes and f"{{models}}/{step.makes}" in commands)
    ]


class Runner:
    """Runs the steps of one call; `failed` has the names of those that did not end well."""

    def __init__(self, out: Path, values: dict[str, object], limit: float) -> None:
        self._out, self._values, self._limit = out, values, limit
        self._begin = time.monotonic()
        self.failed: list[str] = []

    def run(self, step: Step) -> None:
        """Runs a step to its end or limit, and shows what it said last."""
        spent = time.monotonic() - self._begin
        left = self._limit - spent
        print(f"== {step.name} (after {spent:.0f} s)", flush=True)
        if step.makes and (Path(str(self._values["models"])) / step.makes).exists():
            print("made before")
            return
        wanted = step.condition.removeprefix("if ")
        if step.condition != "named" and not (self._out / wanted).exists():
            print(f"left out: no {wanted}")
            return
        if left < _LEAST_SECONDS:
            print("left out: no time")
            self.failed.append(step.name)
            return
        seconds = min(step.limit, left)
        log = self._out / f"{step.name}.log"
        status = self._execute(self._words(step, seconds), log, seconds)
        said = [line[5:] for line in log.read_text(errors="replace").splitlines()]
        if step.lines == "failures":
            said = [line for line in said if _FAILURES.search(line)][-_MOST_FAILURES:]
        else:
            said = said[-int(step.lines) :]
        print(*(line[:_WIDTH] for line in said), sep="\n")
        if status:
            print(f"{step.name}: exit {status}")
            self.failed.append(step.name)

    def _words(self, step: Step, seconds: float) -> list[str]:
        words = shlex.split(step.command)
        if words[0] == "-m" or words[0].startswith("tools/"):
            words.insert(0, sys.executable)
        values = {**self._values, "python": sys.executable, "budget": int(seconds) - 15}
        return [word.format(**values) for word in words]

    def _execute(self, words: list[str], log: Path, seconds: float) -> int:
        """Exit status; 124 for a command that was ended at its limit. Lines of the log begin with
        the second they came in."""
        path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
        process = subprocess.Popen(
            words, cwd=ROOT, text=True, errors="replace", start_new_session=True,
            env={**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        begin = time.monotonic()
        signal.signal(signal.SIGALRM, _raise_timeout)
        signal.alarm(max(int(seconds), 1))
        try:
            with log.open("w") as file:
                for line in process.stdout or ():
                    file.write(f"{time.monotonic() - begin:4.0f} {line}")
            return process.wait()
        except TimeoutError:
            return 124
        finally:
            signal.alarm(0)
            _end(process)


def _raise_timeout(_: int, __: object) -> None:
    raise TimeoutError


def _end(process: subprocess.Popen[str]) -> None:
    """Ends a step's process group, if it is still there."""
    for number in (signal.SIGINT, signal.SIGKILL):
        if process.poll() is not None:
            return
        os.killpg(process.pid, number)
        try:
            process.wait(_GRACE_SECONDS)
        except subprocess.TimeoutExpired:
            continue


def described() -> Iterator[str]:
    """Lines of --list."""
    for name, part in PARTS.items():
        yield f"{name}: {part.about}. Machine: {part.machine}."
        for step in part.steps:
            yield f"    {step.name} ({step.limit} s): {step.command}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", nargs="?", choices=list(PARTS))
    parser.add_argument("steps", nargs="*", metavar="STEP")
    parser.add_argument("--out", type=Path, help="folder for results and logs")
    parser.add_argument("--limit", type=float, help="seconds of the whole call")
    parser.add_argument(
        "--parts", default="pool,ttft,busy,shared,behind,decode,stores,trace,spec",
        help="of bench.offload.suite, in the step 'offload'",
    )  # fmt: skip
    parser.add_argument("--list", action="store_true", help="parts and their steps")
    args = parser.parse_args()
    if args.list:
        print("\n".join(described()))
        return
    if args.part is None or args.out is None:
        parser.error("PART and --out are needed")
    part = PARTS[args.part]
    steps = chosen(part, args.steps)
    args.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        cores = len(compute_cpus(0))
        values = {
            "out": args.out.resolve(), "models": os.environ.get("MODELS", folder),
            "threads": os.environ.get("THREADS", min(cores, 12)), "parts": args.parts,
        }  # fmt: skip
        runner = Runner(args.out, values, args.limit or part.limit or float("inf"))
        for step in steps:
            runner.run(step)
    print("== done" + (f"; failed: {', '.join(runner.failed)}" if runner.failed else ""))
    if runner.failed and part.strict:
        sys.exit(1)


if __name__ == "__main__":
    main()
