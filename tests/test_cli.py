"""The command line against a fake engine."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import hetero_llm
from hetero_llm import cli
from hetero_llm.commands import demo
from hetero_llm.config.args import ENGINE_ARGS, Status, resolve_engine_args
from hetero_llm.core.errors import HeteroLLMError, ModelLoadError
from hetero_llm.core.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from hetero_llm.core.sampling_params import SamplingParams


def output(prompt: str, text: str, *, count: int = 1, seconds: float = 1.0) -> RequestOutput:
    """`count` equal completions, one token a character, the first one after 0.25 s."""
    tokens = list(range(len(text)))
    logprobs = [{7: Logprob(-0.5, 1, "x")}]
    return RequestOutput(
        request_id="0",
        prompt=prompt,
        prompt_token_ids=[1, 2],
        prompt_logprobs=None,
        outputs=[
            CompletionOutput(i, text, tokens, logprobs=logprobs, finish_reason="length")
            for i in range(count)
        ],
        finished=True,
        metrics=RequestMetrics(
            10.0, first_token_time=10.25, last_token_time=10.25 + seconds, finished_time=12.0
        ),
    )


class FakeLLM:
    """Answers every prompt with `text`; keeps what it was given."""

    text = "abc é\n"
    backend = "torch"
    default_sampling: dict[str, Any] = {}
    error: BaseException | None = None
    last: FakeLLM

    def __init__(self, model: str, **engine_args: Any) -> None:
        self.args = resolve_engine_args({"model": model, **engine_args})
        self.closed = False
        self.prompts: list[str] = []
        self.params: list[SamplingParams] = []
        FakeLLM.last = self

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *exception: object) -> None:
        self.closed = True

    def generate(
        self, prompts: Sequence[str], params: SamplingParams, use_tqdm: bool = True
    ) -> list[RequestOutput]:
        if self.error is not None:
            raise self.error
        self.prompts.extend(prompts)
        self.params.append(params)
        return [output(prompt, self.text, count=params.n) for prompt in prompts]

    def metrics(self) -> dict[str, float]:
        tokens = float(len(self.text) * len(self.prompts))
        return {
            "generation_tokens": tokens,
            "spec_decode_num_accepted_tokens": tokens / 2,
        }

    def stream(self, prompt: str, params: SamplingParams) -> Iterator[RequestOutput]:
        self.prompts.append(prompt)
        self.params.append(params)
        for end in range(len(self.text) + 1):
            yield output(prompt, self.text[:end])


@pytest.fixture(autouse=True)
def fake_llm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetero_llm.engine.llm.LLM", FakeLLM)


def generate(*words: str) -> int:
    return cli.main(["generate", *words])


class TestGenerate:
    def test_one_prompt_prints_the_text_alone(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert generate("some/model", "--prompt", "def f") == 0
        assert capsys.readouterr().out == "abc é\n\n"
        assert FakeLLM.last.args["model"] == "some/model"
        assert FakeLLM.last.prompts == ["def f"]
        assert FakeLLM.last.closed

    def test_keys_of_a_mapping_may_be_flags(self) -> None:
        words = "--prompt x --hf_overrides.rope.factor 2 --speculative-config.method=ngram"
        assert generate("some/model", *words.split(), "--hf-overrides.name", "a b") == 0
        assert FakeLLM.last.args["hf_overrides"] == {"rope": {"factor": 2}, "name": "a b"}
        assert FakeLLM.last.args["speculative_config"] == {"method": "ngram"}

    def test_several_results_have_headings(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert generate("--prompt", "one\ntwo", "--prompt", "p" * 80, "--n", "2") == 0
        heads = [line for line in capsys.readouterr().out.splitlines() if line.startswith("---")]
        assert heads == ["--- one two"] * 2 + ["--- " + "p" * 57 + "..."] * 2

    def test_sampling_and_engine_flags(self) -> None:
        words = """--temperature 0.5 --top-k 3 --top_p=0.9 --stop a --stop b --seed 7
            --max-tokens 4 --ignore-eos --no-skip-special-tokens --early-stopping false
            --stop-token-ids [5] --max-model-len 64 --device cpu --no-enable-prefix-caching"""
        assert generate("--prompt", "x", "--logit-bias", '{"3": 1.5}', *words.split()) == 0
        assert FakeLLM.last.params == [
            SamplingParams(
                temperature=0.5,
                top_k=3,
                top_p=0.9,
                stop=["a", "b"],
                seed=7,
                max_tokens=4,
                ignore_eos=True,
                skip_special_tokens=False,
                stop_token_ids=[5],
                logit_bias={3: 1.5},
            )
        ]
        args = FakeLLM.last.args
        assert (args["seed"], args["max_model_len"], args["device"]) == (7, 64, "cpu")
        assert args["enable_prefix_caching"] is False

    def test_one_flag_for_the_engines_drafts_and_the_requests(self) -> None:
        assert generate("--prompt", "x", "--use-lookahead", "--num-speculative-tokens", "4") == 0
        assert FakeLLM.last.args["num_speculative_tokens"] == 4
        assert FakeLLM.last.params == [SamplingParams(num_speculative_tokens=4)]

    def test_model_argument_and_flag(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert generate("--prompt", "x") == 0
        assert FakeLLM.last.args["model"] == "demo"
        assert generate("--prompt", "x", "--model", "flag") == 0
        assert FakeLLM.last.args["model"] == "flag"
        assert generate("--prompt", "x", "one", "--max-tokens", "3") == 0
        assert FakeLLM.last.args["model"] == "one"
        assert generate("one", "--prompt", "x", "--model", "two") == 2
        assert "contradicts the first argument, 'one'" in capsys.readouterr().err

    def test_json(self, capsys: pytest.CaptureFixture[str]) -> None:
        words = ("--prompt", "x", "--prompt", "y", "--json", "--logprobs", "1")
        assert generate(*words) == 0
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [line["prompt"] for line in lines] == ["x", "y"]
        assert lines[0]["outputs"][0] == {
            "index": 0,
            "text": "abc é\n",
            "token_ids": [0, 1, 2, 3, 4, 5],
            "logprobs": [{"7": {"logprob": -0.5, "rank": 1, "decoded_token": "x"}}],
            "finish_reason": "length",
            "stop_reason": None,
        }

    def test_stream(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert generate("--prompt", "x", "--stream") == 0
        assert capsys.readouterr().out == "abc é\n\n"

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (("--stream", "--n", "2"), "stream=True: shows one sequence"),
            (("--logprobs", "2"), "logprobs=2: is shown with --json only"),
            (("--no-detokenize",), "token ids are shown with --json only"),
            (("--temperature", "-1"), "temperature=-1.0: must be at least 0"),
            (("--early-stopping", "perhaps"), "early_stopping='perhaps'"),
            (("-pp", "0"), "pipeline_parallel_size=0: must be at least 1"),
            (("--block-size", "7"), "block_size=7: must be 8, 16, 32, 64 or 128"),
            (("--prompt-file", "nowhere.txt"), "prompt_file='nowhere.txt': No such file"),
        ],
    )
    def test_mistakes_are_one_line_and_code_2(
        self, words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert generate("--prompt", "x", *words) == 2
        error = capsys.readouterr().err
        assert error.startswith("hetero-llm: error: ") and error.count("\n") == 1
        assert message in error


class TestPrompts:
    def test_files(self, tmp_path: Path) -> None:
        file = tmp_path / "prompt.txt"
        file.write_bytes("é\r\n".encode())
        assert generate("--prompt-file", str(file), "--prompt", "first") == 0
        assert FakeLLM.last.prompts == ["first", "é\r\n"]

    def test_file_that_is_not_text(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        file = tmp_path / "prompt.bin"
        file.write_bytes(b"\xff")
        assert generate("--prompt-file", str(file)) == 2
        assert "is not UTF-8 text" in capsys.readouterr().err

    @pytest.mark.parametrize("words", [(), ("--prompt-file", "-")])
    def test_standard_input(self, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"from stdin\n")))
        assert generate(*words) == 0
        assert FakeLLM.last.prompts == ["from stdin\n"]

    def test_none(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        terminal = io.TextIOWrapper(io.BytesIO())
        monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
        monkeypatch.setattr(sys, "stdin", terminal)
        assert generate() == 2
        assert "give --prompt" in capsys.readouterr().err


class TestDemo:
    def test_streams_three_prompts_and_a_table(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["demo", "--max-tokens", "6"]) == 0
        shown = capsys.readouterr().out
        for prompt in demo.DEMO_PROMPTS:
            assert f"{prompt}abc é\n" in shown
        assert "\x1b" not in shown
        assert FakeLLM.last.args["model"] == "demo"
        assert all(p.greedy and p.max_tokens == 6 for p in FakeLLM.last.params)
        table = shown[shown.index("prompt ") :].splitlines()
        assert len(table) == 2 + len(demo.DEMO_PROMPTS) + 3
        words = "5 tokens/s, 1.0x, 2.0 tokens a step"
        assert table[-2] == f"lookahead cache, text that it has not seen: {words}"
        assert table[-1] == f"lookahead cache, the same text again: {words}"
        assert FakeLLM.last.args["use_lookahead"] is True
        assert table[2].split()[-3:] == ["6", "5.0", "250.0"]

    def test_the_native_executor_is_compared_with_torch(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(FakeLLM, "backend", "native")
        assert cli.main(["demo"]) == 0
        shown = capsys.readouterr().out.splitlines()
        assert shown[-3] == "native executor 5 tokens/s, torch on this CPU 5: 1.0x"
        assert FakeLLM.last.closed
        assert FakeLLM.last.prompts == 2 * list(demo.DEMO_PROMPTS)

    def test_gain_over_torch(self) -> None:
        fast, slow = output("a", "abcdefg", seconds=0.5), output("a", "abcdefg", seconds=2.0)
        assert demo.backend_line([fast, fast], [slow, slow]).endswith(
            "12 tokens/s, torch on this CPU 3: 4.0x\n"
        )
        slow.metrics = None
        assert demo.backend_line([fast], [slow]) == ""

    def test_table_without_times(self) -> None:
        one = output("p" * 60, "a", seconds=0.0)
        nothing = output("q", "")
        nothing.metrics = None
        lines = demo.speed_table([one, nothing]).splitlines()
        assert lines[2].split() == ["p" * 37 + "...", "1", "-", "250.0"]
        assert lines[3].split() == ["q", "0", "-", "-"]


class TestErrors:
    def test_foreign_newlines_stay_on_one_line(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(FakeLLM, "error", ModelLoadError("bad\nfile"))
        assert generate("--prompt", "x") == 2
        assert capsys.readouterr().err == "hetero-llm: error: bad file\n"

    @pytest.mark.parametrize("words", [("--verbose", "generate"), ("generate", "--verbose")])
    def test_verbose_shows_the_traceback(
        self,
        words: tuple[str, ...],
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.setattr(FakeLLM, "error", HeteroLLMError("oh"))
        assert cli.main([*words, "--prompt", "x"]) == 2
        error = capsys.readouterr().err
        assert "Traceback" in error and error.endswith("hetero-llm: error: oh\n")

    def test_interrupt(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(FakeLLM, "error", KeyboardInterrupt())
        assert generate("--prompt", "x") == 130
        assert FakeLLM.last.closed

    def test_interrupted_generation_shows_what_there_is(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        cut = output("x", "so far")
        cut.outputs[0].finish_reason = "abort"
        monkeypatch.setattr(FakeLLM, "generate", lambda *args, **kwargs: [cut])
        assert generate("--prompt", "x") == 130
        assert capsys.readouterr().out == "so far\n"

    def test_our_own_bugs_are_not_hidden(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(FakeLLM, "error", ZeroDivisionError())
        with pytest.raises(ZeroDivisionError):
            generate("--prompt", "x")

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (("generate", "--promt", "x"), "arguments: --promt (did you mean --prompt?)"),
            (("generate", "--max_modle_len=4"), "(did you mean --max-model-len?)"),
            (("generate", "--max-model", "4"), "(did you mean --max-model-len?)"),
            (("generate", "--max-tokens", "many"), "max_tokens='many': must be an integer"),
            (("generate", "--json", "--stream"), "not allowed with"),
            (("servee",), "invalid choice: 'servee'"),
            (("servee",), "did you mean 'serve'?"),
            (("bench", "sevre"), "did you mean 'serve'?"),
            (("completion", "bush"), "did you mean 'bash'?"),
            (("generate", "--max-model-len", "2.5K"), "suffix K; did you mean 2.5k?"),
            (("generate", "--hf-overrides.a"), "--hf-overrides.a=None: needs a value"),
            ((), "required: COMMAND"),
        ],
    )
    def test_usage(
        self, words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as caught:
            cli.main(words)
        assert caught.value.code == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--version", "-v"])
def test_version(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([flag])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"hetero-llm {hetero_llm.__version__}\n"


def test_characters_that_the_terminal_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    assert generate("--prompt", "x") == 0
    assert raw.getvalue() == b"abc \\xe9\n\n"


def test_reader_that_leaves() -> None:
    code = (
        "import os, sys\n"
        "from hetero_llm import cli\n"
        "from hetero_llm.commands import console\n"
        "from hetero_llm.engine import llm\n"
        "reader, writer = os.pipe()\n"
        "os.close(reader); os.dup2(writer, 1)\n"
        "class LLM:\n"
        "    default_sampling = {}\n"
        "    def __init__(self, model): pass\n"
        "    def __enter__(self): return self\n"
        "    def __exit__(self, *e): pass\n"
        "    def generate(self, *a, **k): console.write('text')\n"
        "llm.LLM = LLM\n"
        "sys.exit(cli.main(['generate', '--prompt', 'x']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (141, b"")


def test_help_shows_defaults_under_headings(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "Port to listen on; 0 for any (default: 8000)." in shown
    assert "the manual" not in shown
    groups = [spec.group for spec in ENGINE_ARGS if spec.status is Status.EFFECTIVE]
    assert all(f" {group}: -" in shown for group in set(groups))


def test_help_loads_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from hetero_llm import cli\n"
        "try: cli.main(['generate', '--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'numpy', 'psutil'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
