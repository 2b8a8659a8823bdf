"""`hetero-llm bench` from the command line to its files."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hetero_llm import cli
from hetero_llm.bench_client.load import ClientHealth
from hetero_llm.commands import bench
from hetero_llm.config.args import resolve_engine_args
from hetero_llm.core.outputs import CompletionOutput, RequestOutput
from tests.bench_client.scripted_server import (
    GENERATION,
    Reply,
    Request,
    Script,
    choice,
    model_script,
    serving_beside,
    words,
)

SHORT = ("--num-prompts", "4", "--input-len", "6", "--output-len", "3", "--num-warmups", "0")


@contextmanager
def server(
    answer: Script = words, **options: Any
) -> Iterator[tuple[list[Request], tuple[str, ...]]]:
    """What the server sees, and the arguments that lead to it."""
    seen: list[Request] = []
    with serving_beside(model_script(answer, seen=seen, **options)) as url:
        yield seen, ("bench", "serve", "--base-url", f"{url}/v1")


def lines(text: str) -> dict[str, str]:
    """The values of a report by label."""
    pairs = (line.rsplit(":", 1) for line in text.splitlines() if ":" in line)
    return {label: value.strip() for label, value in pairs}


def generations(seen: Sequence[Request]) -> list[Request]:
    return [request for request in seen if request.path in GENERATION]


def test_completions(capsys: pytest.CaptureFixture[str]) -> None:
    with server() as (seen, command):
        assert cli.main([*command, *SHORT, "--ignore-eos", "--extra-body", '{"top_k": 5}']) == 0
    found = lines(capsys.readouterr().out)
    assert found["Backend"] == "openai"
    assert found["Successful requests"] == "4"
    assert found["Total input tokens"] == "20"
    assert found["Total generated tokens"] == "12"
    assert found["Total generated tokens (retokenized)"] == "12"
    assert found["Token counts from"] == "usage 4"
    assert "Failed requests" not in found
    bodies = [request.body for request in generations(seen)]
    assert len(bodies) == 4
    for body in bodies:
        assert (body["model"], body["max_tokens"], body["top_k"]) == ("org/name", 3, 5)
        assert body["ignore_eos"] is True
        assert len(body["prompt"]) == 6
    assert len({tuple(body["prompt"]) for body in bodies}) == 4


def test_chat(capsys: pytest.CaptureFixture[str]) -> None:
    with server() as (seen, command):
        assert cli.main([*command, *SHORT, "--backend", "openai-chat", "--model", "mine"]) == 0
    assert lines(capsys.readouterr().out)["Total generated tokens"] == "12"
    assert {request.path for request in generations(seen)} == {"/v1/chat/completions"}
    assert "/v1/models" not in [request.path for request in seen]
    for request in generations(seen):
        assert request.body["model"] == "mine"
        assert len(request.body["messages"][0]["content"].split()) == 6


@pytest.mark.parametrize("stream", ["--stream", "--no-stream"])
@pytest.mark.parametrize(
    ("backend", "path", "texts", "limit"),
    [
        ("openai-responses", "/v1/responses", "input", "max_output_tokens"),
        ("anthropic", "/v1/messages", "messages", "max_tokens"),
    ],
)
def test_other_apis(
    capsys: pytest.CaptureFixture[str],
    backend: str,
    path: str,
    texts: str,
    limit: str,
    stream: str,
) -> None:
    with server() as (seen, command):
        assert cli.main([*command, *SHORT, "--backend", backend, "--ignore-eos", stream]) == 0
    found = lines(capsys.readouterr().out)
    assert found["Backend"] == backend
    assert found["Successful requests"] == "4"
    assert found["Total input tokens"] == "20"
    assert found["Total generated tokens"] == "12"
    assert found["Total generated tokens (retokenized)"] == "12"
    assert found["Token counts from"] == "usage 4"
    assert (found["Mean ITL (ms)"] == "n/a") == (stream == "--no-stream")
    sent = generations(seen)
    assert len(sent) == 4 and {request.path for request in sent} == {path}
    for request in sent:
        assert request.body[limit] == 3 and request.body["ignore_eos"] is True
        assert len(request.body[texts][0]["content"].split()) == 6


def test_another_endpoint_and_no_stream(capsys: pytest.CaptureFixture[str]) -> None:
    seen: list[Request] = []

    async def script(request: Request, reply: Reply) -> None:
        seen.append(request)
        if request.path == "/x/chat/completions":
            await words(request, reply)
        else:
            reply.json({"detail": "none"}, 404)

    with serving_beside(script) as url:
        arguments = ("--endpoint", "/x/chat/completions", "--model", "m", "--no-stream")
        assert cli.main(["bench", "serve", "--url", url, *SHORT, *arguments]) == 0
    found = lines(capsys.readouterr().out)
    assert found["Total generated tokens"] == "12"
    assert found["Total generated tokens (retokenized)"] == "n/a"  # this server has no /tokenize
    assert found["Mean ITL (ms)"] == "n/a"
    assert not seen[0].body["stream"]


def test_the_key_comes_from_the_environment_and_stays_secret(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-hidden")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with server() as (seen, command):
        arguments = ("--save-result", "--result-dir", str(tmp_path))
        assert cli.main([*command, *SHORT, *arguments]) == 0
        assert cli.main([*command, *SHORT, "--api-key", "other"]) == 0
    keys = {request.headers["authorization"] for request in seen}
    assert keys == {"bearer sk-hidden", "bearer other"}
    written = "".join(path.read_text(encoding="utf-8") for path in tmp_path.iterdir())
    assert "sk-hidden" not in written + capsys.readouterr().out


def test_failures_are_counted_shown_and_returned(capsys: pytest.CaptureFixture[str]) -> None:
    count = 0

    async def flaky(request: Request, reply: Reply) -> None:
        nonlocal count
        count += 1
        if count == 1:
            reply.json({"error": {"message": "queue is full"}}, 503)
        elif count == 2:
            reply.head()
            reply.event({"choices": [choice("text", "half", None)]})
            reply.event({"error": {"message": "the engine died"}})
            reply.end()
        elif count == 3:
            reply.head()
            reply.event({"choices": [choice("text", "half", None)]})
            reply.end()
        else:
            await words(request, reply)

    with server(flaky) as (_, command):
        assert cli.main([*command, *SHORT, "--max-concurrency", "1"]) == 1
    text = capsys.readouterr().out
    found = lines(text)
    assert found["Successful requests"] == "1"
    assert found["Failed requests"] == "3"
    assert found["Total generated tokens"] == "3"
    for error in ("HTTP 503: queue is full", "the engine died", "no finish_reason"):
        assert sum(error in line and line.startswith("  1 x") for line in text.splitlines()) == 1


async def silent_on_usage(request: Request, reply: Reply) -> None:
    reply.head()
    reply.event({"choices": [choice("text", "def f(x):", "stop")]})
    reply.event("[DONE]")
    reply.end()


@pytest.mark.parametrize(
    ("tokenize", "arguments", "tokens", "source"),
    [
        (True, (), "8", "retokenized 4"),  # two words each, as this server counts
        (False, (), "0", "unknown 4"),
    ],
)
def test_servers_without_usage(
    capsys: pytest.CaptureFixture[str],
    tokenize: bool,
    arguments: tuple[str, ...],
    tokens: str,
    source: str,
) -> None:
    with server(silent_on_usage, tokenize=tokenize) as (_, command):
        assert cli.main([*command, *SHORT, *arguments]) == 0
    text = capsys.readouterr().out
    found = lines(text)
    assert found["Total generated tokens"] == tokens
    assert found["Total input tokens"] == "24"  # the client sent the ids
    assert found["Token counts from"] == source
    assert ("4 answers came without usage" in text) == (source == "unknown 4")


def test_a_tokenizer_of_our_own_counts(capsys: pytest.CaptureFixture[str]) -> None:
    from hetero_llm.bench_client.serve import local_tokenizer

    expected = len(local_tokenizer("demo").encode("def f(x):", add_special_tokens=False))
    with server(silent_on_usage) as (seen, command):
        assert cli.main([*command, *SHORT, "--tokenizer", "demo"]) == 0
    found = lines(capsys.readouterr().out)
    assert found["Total generated tokens (retokenized)"] == str(4 * expected)
    assert "/tokenize" not in [request.path for request in seen]


def test_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    folder = tmp_path / "new" / "folder"
    with server() as (seen, command):
        arguments = ("--max-concurrency", "1,2", "--runs", "3", "--save-result", "--save-detailed",
                     "--result-dir", str(folder), "--result-filename", "r.json",
                     "--metadata", "enable_lookahead=true", "qps=inf", "--metadata", "gpu=none",
                     "--percentile-metrics", "e2el,ttft",
                     "--metric-percentiles", "50,90")  # fmt: skip
        assert cli.main([*command, *SHORT, *arguments]) == 0
    output = capsys.readouterr().out
    assert output.count("===== Serving Benchmark Result =====") == 2
    assert output.count("Over 3 runs") == 2
    assert "P90 E2E Latency (ms):" in output and "P99 TTFT" not in output
    prompts = [tuple(request.body["prompt"]) for request in generations(seen)]
    assert len(prompts) == len(set(prompts)) == 24
    one, two = json.loads((folder / "r.json").read_text(encoding="utf-8"))
    assert (one["max_concurrency"], two["max_concurrency"]) == (1, 2)
    assert (one["gpu"], one["model_id"], one["num_prompts"]) == ("none", "org/name", 4)
    assert one["completed"] == 12 and len(one["runs"]) == 3
    assert one["generated_texts"] == ["w0 w1 w2 "] * 12
    assert one["p99_ttft_ms"] is not None and one["p50_e2el_ms"] == one["median_e2el_ms"]
    with (folder / "r.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["Max concurrency"] for row in rows] == ["1", "2"]
    assert {row["enable_lookahead"] for row in rows} == {"true"}
    assert (folder / "r.png").read_bytes().startswith(b"\x89PNG")


def test_file_names_and_no_matplotlib(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with server() as (_, command):
        arguments = ("--request-rate", "500", "--max-concurrency", "2", "--save-result",
                     "--result-dir", str(tmp_path))  # fmt: skip
        assert cli.main([*command, *SHORT, *arguments]) == 0
    assert "no picture: module 'matplotlib' is not installed" in capsys.readouterr().err
    names = sorted(path.name for path in tmp_path.iterdir())
    assert [name.rpartition(".")[2] for name in names] == ["csv", "json"]
    assert all(name.startswith("openai-500qps-concurrency2-name-") for name in names)


def test_warm_up_comes_first_and_is_not_counted(capsys: pytest.CaptureFixture[str]) -> None:
    with server() as (seen, command):
        assert cli.main([*command, *SHORT, "--num-warmups", "3"]) == 0
    assert lines(capsys.readouterr().out)["Successful requests"] == "4"
    prompts = [tuple(request.body["prompt"]) for request in generations(seen)]
    assert len(prompts) == len(set(prompts)) == 7


def test_vllms_flags_of_requests(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with server() as (seen, command):
        fields = ("--top-p", "0.9", "--top-k", "3", "--min-p", "0.1", "--repetition-penalty", "1.1")
        more = ("--header", "X-A=b", "X-C=d=e", "--goodput", "ttft:60000", "e2el:0.001")
        files = ("--save-result", "--result-dir", str(tmp_path), "--result-filename", "x.json")
        assert cli.main([*command, *SHORT, *fields, *more, *files]) == 0
    assert lines(capsys.readouterr().out)["Request goodput (req/s)"] == "0.00"
    assert json.loads((tmp_path / "x.json").read_text())["request_goodput"] == 0.0
    for request in generations(seen):
        body, headers = request.body, request.headers
        assert (body["top_p"], body["top_k"], body["min_p"]) == (0.9, 3, 0.1)
        assert body["repetition_penalty"] == 1.1 and "presence_penalty" not in body
        assert (headers["x-a"], headers["x-c"]) == ("b", "d=e")


@pytest.mark.parametrize("named", [("--dataset-name", "custom"), ()])
def test_a_file_of_ones_own(named: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}\n', encoding="utf-8")
    with server() as (seen, command):
        more = ("--custom-output-len", "4", "--custom-skip-chat-template", "--num-prompts", "2")
        assert cli.main([*command, *named, "--dataset-path", str(path), *more]) == 0
    warm, *sent = generations(seen)
    assert warm.body["prompt"] not in ("a", "b")
    assert [request.body["prompt"] for request in sent] == ["a", "b"]
    assert {request.body["max_tokens"] for request in sent} == {4}


def test_sharegpt_is_measured_with_the_models_tokenizer(tmp_path: Path) -> None:
    path = tmp_path / "sharegpt.json"
    turns = [{"from": "human", "value": "a = b + c\n"}, {"from": "gpt", "value": "d = e + f\n"}]
    path.write_text(json.dumps([{"conversations": turns}]), encoding="utf-8")
    with server() as (seen, command):
        given = ("--model", "demo", "--dataset-path", str(path), "--num-prompts", "1")
        assert cli.main([*command, *given]) == 0
        assert cli.main([*command, *given[2:], "--model", "no/such"]) == 2
    assert generations(seen)[-1].body["max_tokens"] >= 4


def test_shared_beginnings() -> None:
    with server() as (seen, command):
        kind = ("--dataset-name", "prefix_repetition", "--num-prompts", "4", "--num-warmups", "0")
        sizes = {"prefix-len": "6", "suffix-len": "2", "num-prefixes": "2", "output-len": "3"}
        flags = [part for k, v in sizes.items() for part in (f"--prefix-repetition-{k}", v)]
        assert cli.main([*command, *kind, *flags]) == 0
    bodies = [request.body for request in generations(seen)]
    assert {len(body["prompt"]) for body in bodies} == {8}
    assert len({tuple(body["prompt"][:6]) for body in bodies}) == 2
    assert {body["max_tokens"] for body in bodies} == {3}


def test_a_failing_warm_up_ends_the_bench(capsys: pytest.CaptureFixture[str]) -> None:
    async def refuse(request: Request, reply: Reply) -> None:
        reply.json({"error": {"message": "no such model"}}, 404)

    with server(refuse) as (seen, command):
        assert cli.main([*command, *SHORT, "--num-warmups", "1"]) == 1
    assert "warm-up request failed: HTTP 404: no such model" in capsys.readouterr().err
    assert len(generations(seen)) == 1


def test_reused_prompts() -> None:
    with server() as (seen, command):
        assert cli.main([*command, "mine", *SHORT, "--runs", "3", "--reuse-prompts"]) == 0
    assert {request.body["model"] for request in generations(seen)} == {"mine"}
    prompts = [tuple(request.body["prompt"]) for request in generations(seen)]
    assert (len(prompts), len(set(prompts))) == (12, 4)


def test_a_late_client_warns(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    late = ClientHealth(lag_p99=0.5, lag_max=0.6, cpu=0.1)
    monkeypatch.setattr("hetero_llm.bench_client.load.ClientHealth", lambda *measured: late)
    with server() as (_, command):
        assert cli.main([*command, *SHORT]) == 0
    assert "warning: the client did not keep up" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--request-rate", "0"), "request_rate='0': must be greater than 0"),
        (("--request-rate", "fast"), "must be numbers with commas between"),
        (("--request-rate", "nan"), "must be greater than 0"),
        (("--max-concurrency", "0"), "max_concurrency='0': must be greater than 0"),
        (("--max-concurrency", "1.5"), "must be numbers with commas between"),
        (("--max-concurrency", "inf"), "must be numbers with commas between"),
        (("--request-rate", "1,2", "--max-concurrency", "1,2"), "is a list, so --request-rate"),
        (("--burstiness", "0"), "burstiness=0.0: must be greater than 0"),
        (("--runs", "2"), "runs=2: must be 1, or at least 3 for a confidence interval"),
        (("--num-prompts", "0"), "num_prompts=0: must be at least 1"),
        (("--random-range-ratio", "1.5"), "random_range_ratio=1.5: must be at most 1"),
        (("--percentile-metrics", "ttft,speed"), "'speed' is none of ttft, tpot, itl, e2el"),
        (("--metric-percentiles", "101"), "metric_percentiles='101': must be at most 100"),
        (("--metric-percentiles", ""), "metric_percentiles='': must not be empty"),
        (("--save-detailed",), "save_detailed=True: needs --save-result"),
        (("--metadata", "word"), "metadata='word': must be KEY=VALUE"),
        (("--endpoint", "v1/x"), "endpoint='v1/x': must start with a slash"),
        (("--base-url", "localhost"), "must be like http://127.0.0.1:8000"),
        (("--port", "70000"), "port=70000: must be at most 65535"),
        (("--dataset-name", "jsonl"), "dataset_path=None: the data set 'jsonl' is a file"),
        (("--dataset-path", "x"), "dataset_path='x': --dataset-name says what it is"),
        (("--dataset-name", "random", "--dataset-path", "x"), "random prompts are no file"),
        (("--no-custom-skip-chat-template",), "--backend openai-chat"),
        (("--goodput", "itl:5"), "goodput='itl:5': must be METRIC:MILLISECONDS"),
        (("--goodput", "ttft"), "goodput='': must be numbers"),
        (("--goodput", "ttft:0"), "goodput='0': must be greater than 0"),
        (("--header", "word"), "header='word': must be KEY=VALUE"),
        (("--dataset-name", "c4"), "dataset_name='c4': must be 'random', 'prefix_repetition'"),
        (("--save-result", "--result-dir", "/dev/null/x"), "result_dir='/dev/null/x'"),
        (("--tokenizer", "/nowhere"), "no usable tokenizer"),
    ],
)
def test_mistakes(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "serve", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_ids_do_not_go_to_chat(capsys: pytest.CaptureFixture[str]) -> None:
    with server() as (seen, command):
        arguments = ("--backend", "openai-chat", "--prompt-as", "ids", "--model", "m")
        assert cli.main([*command, *SHORT, *arguments]) == 2
    assert "prompt_as='ids': a chat endpoint takes text only" in capsys.readouterr().err
    assert generations(seen) == []


def test_aiohttp_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    assert cli.main(["bench", "serve"]) == 2
    assert "pip install 'hetero-llm[bench]'" in capsys.readouterr().err


def test_misspelt_flags_and_missing_commands(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, message in (
        (["bench", "serve", "--num-prompt", "3"], "did you mean --num-prompts?"),
        (["bench", "latency", "--batch-sise", "3"], "did you mean --batch-size?"),
        (["bench"], "required: BENCH"),
        (["bench", "speed"], "invalid choice: 'speed'"),
    ):
        with pytest.raises(SystemExit) as stopped:
            cli.main(arguments)
        assert stopped.value.code == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["serve", "throughput", "latency"])
def test_help(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["bench", kind, "--help"])
    assert stopped.value.code == 0
    assert f"hetero-llm bench {kind}" in capsys.readouterr().out


def test_flags_have_both_spellings() -> None:
    parser = cli.build_parser()
    options = parser.parse_args(["bench", "serve", "--num_prompts", "7", "--random_input_len", "5"])
    assert (options.num_prompts, options.input_len) == (7, 5)
    assert options.run is bench.run_serve


# offline


class FakeLLM:
    """Generates as many tokens as it is asked for."""

    last: FakeLLM

    def __init__(self, **engine_args: Any) -> None:
        self.args = resolve_engine_args(engine_args)
        self.calls: list[list[Any]] = []
        FakeLLM.last = self

    def __enter__(self) -> FakeLLM:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def get_tokenizer(self) -> Any:
        return None

    def generate(
        self, prompts: Sequence[Any], params: Sequence[Any], use_tqdm: bool
    ) -> list[RequestOutput]:
        self.calls.append([(prompt["prompt_token_ids"], p) for prompt, p in zip(prompts, params)])
        return [
            RequestOutput(
                "0", None, prompt["prompt_token_ids"], None,
                [CompletionOutput(0, "", [1] * p.max_tokens, finish_reason="length")], True,
            )
            for prompt, p in zip(prompts, params)
        ]  # fmt: skip


@pytest.fixture
def fake_llm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetero_llm.engine.llm.LLM", FakeLLM)


def test_throughput_command(
    fake_llm: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "t.json"
    arguments = ("--num-prompts", "5", "--input-len", "7", "--output-len", "3",
                 "--max-model-len", "64", "--seed", "9", "--output-json", str(path))  # fmt: skip
    assert cli.main(["bench", "throughput", "m", *arguments]) == 0
    output = capsys.readouterr().out
    assert "Total num prompt tokens: 35\nTotal num output tokens: 15\n" in output
    figures = json.loads(path.read_text(encoding="utf-8"))
    assert (figures["num_requests"], figures["total_num_tokens"]) == (5, 50)
    args = FakeLLM.last.args
    assert (args["model"], args["max_model_len"], args["seed"]) == ("m", 64, 9)
    params = [p for _, p in FakeLLM.last.calls[0]]
    assert all(p.ignore_eos and p.temperature == 0.0 for p in params)
    assert cli.main(["bench", "throughput", *arguments[:-2], "--no-ignore-eos"]) == 0
    assert not FakeLLM.last.calls[0][0][1].ignore_eos
    assert cli.main(["bench", "throughput", *arguments[:-2], "--n", "2", "--backend", "vllm"]) == 0
    assert {params.n for _, params in FakeLLM.last.calls[0]} == {2}


def test_latency_command(fake_llm: None, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--batch-size", "2", "--num-iters", "3", "--num-iters-warmup", "1",
                 "--input-len", "5", "--output-len", "4")  # fmt: skip
    assert cli.main(["bench", "latency", *arguments]) == 0
    assert capsys.readouterr().out.startswith("Avg latency: 0.")
    calls = FakeLLM.last.calls
    assert FakeLLM.last.args["model"] == "demo"
    assert [len(call) for call in calls] == [2] * 4
    assert {(len(ids), p.max_tokens) for call in calls for ids, p in call} == {(5, 4)}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("latency", "--batch-size", "0"), "batch_size=0: must be at least 1"),
        (("latency", "--output-json", "/nowhere/x"), "output_json='/nowhere/x': No such file"),
        (("throughput", "--dataset-name", "sharegpt", "--dataset-path", "/nowhere",
          "--output-len", "3"), "dataset_path='/nowhere': No such file"),
        (("throughput", "--temperature", "-1"), "temperature=-1.0: must be at least 0"),
        (("throughput", "--backend", "hf"), "backend='hf': must be 'hetero_llm' or 'vllm'"),
    ],
)  # fmt: skip
def test_offline_mistakes(
    fake_llm: None,
    arguments: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_the_real_engine(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--dataset-name", "heldout", "--num-prompts", "2", "--input-len", "16",
                 "--output-len", "4", "--max-model-len", "64")  # fmt: skip
    assert cli.main(["bench", "throughput", *arguments]) == 0
    assert "Total num output tokens: 8\n" in capsys.readouterr().out
