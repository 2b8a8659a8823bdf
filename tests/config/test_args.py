"""The argument table: completeness against the manual, checks, notices, the command line."""

from __future__ import annotations

import argparse
import logging
import math
import pathlib
from typing import Any

import pytest

from hetero_llm.config.args import (
    ARGS,
    ENGINE_ARGS,
    SERVER_ARGS,
    ArgSpec,
    Kind,
    Scope,
    Status,
    add_engine_arguments,
    engine_args_from_namespace,
    resolve_engine_args,
)
from hetero_llm.config.args_spec import checked, effective, from_text
from hetero_llm.config.engine_config import EngineConfig
from hetero_llm.core.errors import ConfigError

# The flags of `taco_llm serve -h`, with the manual's spelling, in its order, and two flags of other
# chapters.
MANUAL_FLAGS = """
config host port uvicorn-log-level allow-credentials allowed-origins allowed-methods allowed-headers
api-key lora-modules prompt-adapters chat-template response-role ssl-keyfile ssl-certfile
ssl-ca-certs ssl-cert-reqs root-path middleware return-tokens-as-token-ids
disable-frontend-multiprocessing enable-auto-tool-choice tool-call-parser model tokenizer
skip-tokenizer-init revision code-revision tokenizer-revision tokenizer-mode trust-remote-code
download-dir load-format config-format dtype kv-cache-dtype quantization-param-path max-model-len
guided-decoding-backend distributed-executor-backend worker-use-ray pipeline-parallel-size
tensor-parallel-size max-parallel-loading-workers ray-workers-use-nslight block-size
enable-prefix-caching disable-sliding-window use-v2-block-manager num-lookahead-slots seed
swap-space cpu-offload-gb gpu-memory-utilization num-gpu-blocks-override max-num-batched-tokens
max-num-seqs max-logprobs disable-log-stats quantization rope-scaling rope-theta enforce-eager
max-context-len-to-capture max-seq-len-to-capture disable-custom-all-reduce tokenizer-pool-size
tokenizer-pool-type tokenizer-pool-extra-config limit-mm-per-prompt enable-lora max-loras
max-lora-rank lora-extra-vocab-size lora-dtype long-lora-scaling-factors max-cpu-loras
fully-sharded-loras enable-prompt-adapter max-prompt-adapters max-prompt-adapter-token device
num-scheduler-steps scheduler-delay-factor enable-chunked-prefill speculative-model
speculative-model-quantization num-speculative-tokens speculative-draft-tensor-parallel-size
speculative-max-model-len speculative-disable-by-batch-size ngram-prompt-lookup-max
ngram-prompt-lookup-min spec-decoding-acceptance-method
typical-acceptance-sampler-posterior-threshold typical-acceptance-sampler-posterior-alpha
disable-logprobs-during-spec-decoding model-loader-extra-config ignore-patterns preemption-mode
served-model-name qlora-adapter-name-or-path otlp-traces-endpoint collect-detailed-traces
disable-async-output-proc override-neuron-config lookahead-cache-config-dir
cpu-decoding-memory-utilization cpu-prefill-memory-utilization ignore-prompt-for-lookahead-cache
enable-prefix-cache-offload apc-offload-not-lazy apc-offload-min-access-threshold
apc-offload-enable-hit-cnt apc-offload-gpu-evictor-limit disable-log-requests max-log-len
sequence-parallel-size cpu-draft-worker
"""

# The defaults of the manual's LLM constructor.
LLM_DEFAULTS = {
    "tokenizer": None,
    "tokenizer_mode": "auto",
    "skip_tokenizer_init": False,
    "trust_remote_code": False,
    "tensor_parallel_size": 1,
    "dtype": "auto",
    "quantization": None,
    "revision": None,
    "tokenizer_revision": None,
    "seed": 0,
    "gpu_memory_utilization": 0.9,
    "swap_space": 4,
    "cpu_offload_gb": 0,
    "enforce_eager": None,
    "max_context_len_to_capture": None,
    "max_seq_len_to_capture": 8192,
    "disable_custom_all_reduce": False,
    "disable_async_output_proc": False,
}


def with_status(status: Status) -> list[ArgSpec]:
    return [spec for spec in ENGINE_ARGS if spec.status is status]


def names(specs: Any) -> list[str]:
    return [spec.name for spec in specs]


def resolve(**given: Any) -> dict[str, Any]:
    return resolve_engine_args({"model": "demo", **given})


def refused(**given: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(**given)
    return str(caught.value)


def parse(*words: str) -> dict[str, Any]:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_engine_arguments(parser)
    return engine_args_from_namespace(parser.parse_args(words))


def parse_error(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as caught:
        parse(*words)
    assert caught.value.code == 2
    return capsys.readouterr().err


class TestTable:
    def test_every_flag_of_the_manual_is_there(self) -> None:
        known = {name for spec in ARGS for name in (spec.name, *spec.aliases)}
        flags = MANUAL_FLAGS.split()
        assert len(flags) == len(set(flags)) == 119
        assert {flag.replace("-", "_") for flag in flags} <= known

    def test_names_and_short_flags_are_unique(self) -> None:
        spelled = [name for spec in ARGS for name in (spec.name, *spec.aliases, *spec.short)]
        assert len(spelled) == len(set(spelled))

    @pytest.mark.parametrize("spec", ARGS, ids=names(ARGS))
    def test_row_is_complete(self, spec: ArgSpec) -> None:
        assert spec.help.endswith(".")
        assert spec.group
        assert bool(spec.feature) is (spec.status is Status.NOT_YET)
        assert bool(spec.reason) is (spec.status is Status.OBSOLETE)
        assert spec.scope is (Scope.SERVE if spec in SERVER_ARGS else Scope.ENGINE)

    def test_effective_defaults_pass_their_own_check(self) -> None:
        effective = with_status(Status.EFFECTIVE)
        defaults = {spec.name: spec.default for spec in effective if not spec.required}
        assert resolve(**defaults) == resolve()

    def test_llm_defaults_are_the_manuals(self) -> None:
        assert resolve().items() >= LLM_DEFAULTS.items()


class TestResolve:
    def test_returns_every_engine_argument(self) -> None:
        resolved = resolve(max_model_len=512)
        assert list(resolved) == names(ENGINE_ARGS)
        assert resolved["model"] == "demo"
        assert resolved["max_model_len"] == 512
        assert resolved["enable_prefix_caching"] is True

    def test_model_is_required(self) -> None:
        with pytest.raises(ConfigError, match="model=None: is required"):
            resolve_engine_args({})
        assert refused(model=None) == "model=None: is required"
        assert refused(model="") == "model='': must not be empty"

    def test_unknown_name_suggests_the_nearest(self) -> None:
        assert "did you mean 'max_model_len'?" in refused(max_modle_len=5)
        assert "did you mean 'max_model_len'?" in refused(**{"max-model-len": 5})
        assert refused(zzz=1) == "zzz=1: unknown argument"

    def test_server_argument_is_named_as_such(self) -> None:
        assert "an argument of the server" in refused(port=8000)

    def test_alias(self, caplog: pytest.LogCaptureFixture) -> None:
        assert resolve(ray_workers_use_nslight=True)["ray_workers_use_nsight"] is True
        both = refused(ray_workers_use_nsight=True, ray_workers_use_nslight=True)
        assert "another name of 'ray_workers_use_nsight'" in both

    @pytest.mark.parametrize(
        ("name", "value", "reason"),
        [
            ("max_num_seqs", 0, "must be at least 1"),
            ("max_num_seqs", 10**9, "must be at most 65536"),
            ("max_num_batched_tokens", 10**12, "must be at most 16777216"),
            ("max_num_seqs", True, "must be an integer"),
            ("max_num_seqs", 2.0, "must be an integer"),
            ("max_num_seqs", "8", "must be an integer"),
            ("max_model_len", -2, "must be at least 1"),
            ("max_model_len", "long", "must be 'auto' or an integer"),
            ("max_model_len", -1.0, "must be 'auto' or an integer"),
            ("max_logprobs", -2, "must be at least -1"),
            ("seed", -1, "must be at least 0"),
            ("seed", 2**64, "must be at most 18446744073709551615"),
            ("gpu_memory_utilization", 0, "must be greater than 0"),
            ("gpu_memory_utilization", 1.01, "must be at most 1"),
            ("gpu_memory_utilization", math.nan, "must be a finite number"),
            ("gpu_memory_utilization", math.inf, "must be a finite number"),
            ("gpu_memory_utilization", 10**400, "must be a finite number"),
            ("gpu_memory_utilization", "0.9", "must be a number"),
            ("rope_theta", 0.0, "must be greater than 0"),
            ("enable_prefix_caching", 1, "must be True or False"),
            ("enforce_eager", "yes", "must be True or False"),
            ("block_size", 48, "must be 8, 16, 32, 64 or 128"),
            ("dtype", "int8", "must be 'auto', 'half',"),
            ("dtype", "", "must not be empty"),
            ("device", "tpu", "must be 'auto', 'cpu' or 'cuda'"),
            ("load_format", "mistral", "is not available yet; use 'auto', 'safetensors', 'pt'"),
            ("tokenizer_mode", "mistral", "is not available yet; use 'auto' or 'slow'"),
            ("config_format", "mistral", "is not available yet"),
            ("rope_scaling", "linear", "must be a mapping"),
            ("tokenizer", 5, "must be a string"),
        ],
    )
    def test_bad_value_of_an_effective_argument(self, name: str, value: Any, reason: str) -> None:
        with pytest.raises(ConfigError) as caught:
            resolve(**{name: value})
        assert caught.value.field == name
        assert str(caught.value).startswith(f"{name}=")
        assert reason in str(caught.value)

    @pytest.mark.parametrize(
        ("name", "value", "resolved"),
        [
            ("gpu_memory_utilization", 1, 1.0),
            ("dtype", "half", "half"),
            ("tokenizer", pathlib.PurePosixPath("some/folder"), "some/folder"),
            ("rope_scaling", {"rope_type": "linear"}, {"rope_type": "linear"}),
            ("enable_chunked_prefill", None, None),
            ("max_num_batched_tokens", None, None),
            ("seed", 2**64 - 1, 2**64 - 1),
        ],
    )
    def test_good_value_is_normalised(self, name: str, value: Any, resolved: Any) -> None:
        result = resolve(**{name: value})[name]
        assert result == resolved
        assert type(result) is type(resolved)

    def test_numpy_integer_and_torch_dtype(self) -> None:
        numpy = pytest.importorskip("numpy")
        torch = pytest.importorskip("torch")
        resolved = resolve(max_num_seqs=numpy.int64(4), dtype=torch.bfloat16)
        assert type(resolved["max_num_seqs"]) is int
        assert resolved["dtype"] == "bfloat16"
        assert "must be 'auto'" in refused(dtype=torch.int8)


class TestListKind:
    SPEC = ArgSpec("names", Kind.LIST, (), Status.EFFECTIVE, "Names.")

    def test_string_and_sequence(self) -> None:
        assert checked(self.SPEC, "one") == ("one",)
        assert checked(self.SPEC, ["one", "two"]) == ("one", "two")

    @pytest.mark.parametrize("value", [[1], {"one"}, 5, ""])
    def test_refused(self, value: Any) -> None:
        with pytest.raises(ConfigError, match="names="):
            checked(self.SPEC, value)


class TestStatus:
    def test_every_effective_argument_reaches_the_configuration(self) -> None:
        read: set[str] = set()

        class Recorder(dict[str, Any]):
            def __getitem__(self, name: str) -> Any:
                read.add(name)
                return super().__getitem__(name)

        EngineConfig.from_args(Recorder(resolve()))
        nothing_to_do = {"config_format", "guided_decoding_backend"}  # all values mean the same
        assert {spec.name for spec in with_status(Status.EFFECTIVE)} == read | nothing_to_do

    @pytest.mark.parametrize("spec", with_status(Status.OBSOLETE), ids=lambda spec: spec.name)
    def test_obsolete_accepts_anything_with_one_notice(
        self, spec: ArgSpec, caplog: pytest.LogCaptureFixture
    ) -> None:
        anything = object()
        with caplog.at_level(logging.WARNING, logger="hetero_llm.config.args"):
            assert resolve(**{spec.name: anything})[spec.name] is anything
        (record,) = caplog.records
        assert spec.flag in record.message
        assert spec.reason in record.message

    def test_nothing_is_logged_without_obsolete_arguments(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        resolve(swap_space=None, seed=3)
        assert not caplog.records

    @pytest.mark.parametrize("spec", with_status(Status.NOT_YET), ids=lambda spec: spec.name)
    def test_not_yet_accepts_only_the_default(self, spec: ArgSpec) -> None:
        assert resolve(**{spec.name: spec.default})[spec.name] == spec.default
        assert resolve(**{spec.name: None})[spec.name] == spec.default
        with pytest.raises(ConfigError, match=f"{spec.name}='else': {spec.feature} is not avail"):
            resolve(**{spec.name: "else"})

    def test_not_yet_messages_name_the_feature(self) -> None:
        assert refused(speculative_draft_tensor_parallel_size=2) == (
            "speculative_draft_tensor_parallel_size=2: tensor parallelism of draft models is not "
            "available yet"
        )
        assert "QLoRA" in refused(qlora_adapter_name_or_path="/a")

    def test_a_boolean_is_not_the_default_number(self) -> None:
        assert "of draft models" in refused(speculative_draft_tensor_parallel_size=True)
        assert resolve(cpu_offload_gb=0.0)["cpu_offload_gb"] == 0


class TestCommandLine:
    def test_nothing_given_nothing_returned(self) -> None:
        assert parse() == {}

    def test_both_spellings(self) -> None:
        assert parse("--max-model-len", "64") == {"max_model_len": 64}
        assert parse("--max_model_len=64") == {"max_model_len": 64}
        assert parse("--ray-workers-use-nslight") == {"ray_workers_use_nsight": True}
        assert parse("--ray_workers_use_nslight") == {"ray_workers_use_nsight": True}

    @pytest.mark.parametrize(
        ("word", "value"),
        [
            ("--enable-prefix-caching", True),
            ("--enable_prefix_caching", True),
            ("--no-enable-prefix-caching", False),
            ("--no-enable_prefix_caching", False),
            ("--no_enable_prefix_caching", False),
        ],
    )
    def test_boolean(self, word: str, value: bool) -> None:
        assert parse(word) == {"enable_prefix_caching": value}

    def test_boolean_with_an_optional_value(self) -> None:
        for words, value in [
            (("--enable-chunked-prefill",), True),
            (("--enable-chunked-prefill", "False"), False),
            (("--enable_chunked_prefill=true",), True),
            (("--no-enable-chunked-prefill",), False),
            (("--no_enable_chunked_prefill",), False),
        ]:
            assert parse(*words) == {"enable_chunked_prefill": value}

    def test_short_flags(self) -> None:
        words = ("-tp", "2", "-pp", "3", "-q", "fp8", "-spec-draft-tp", "1")
        assert parse(*words) == {
            "tensor_parallel_size": 2,
            "pipeline_parallel_size": 3,
            "quantization": "fp8",
            "speculative_draft_tensor_parallel_size": 1,
        }

    def test_json_list_and_none(self) -> None:
        assert parse("--rope-scaling", '{"factor": 2.0}') == {"rope_scaling": {"factor": 2.0}}
        assert parse("--quantization", "None", "--max-model-len", "None") == {
            "quantization": None,
            "max_model_len": None,
        }
        assert parse("--ignore-patterns", "*.bin", "--ignore-patterns", "*.pt") == {
            "ignore_patterns": ["*.bin", "*.pt"]
        }

    @pytest.mark.parametrize(
        ("text", "number"),
        [("10k", 10_000), ("10K", 10_240), ("25.6k", 25_600), ("1m", 1_000_000), ("2G", 2 << 30),
         ("0.0005m", 500), ("4096", 4096), ("1.5t", 1_500_000_000_000)],
    )  # fmt: skip
    def test_integers_with_suffixes(self, text: str, number: int) -> None:
        for flag in ("--max-model-len", "--max-num-batched-tokens"):
            assert list(parse(flag, text).values()) == [number]

    @pytest.mark.parametrize(
        ("words", "reason"),
        [
            (("--max-model-len", "2.5K"), "suffix K; did you mean 2.5k?"),
            (("--max-model-len", "1.2345k"), "max_model_len='1.2345k': must be an integer"),
            (("--max-model-len", "10kk"), "max_model_len='10kk': must be an integer"),
            (("--max-num-seqs", "1k"), "max_num_seqs='1k': must be an integer"),
            (("--max-model-len", "long"), "max_model_len='long': must be an integer"),
            (("--rope-theta", "big"), "must be a number"),
            (("--rope-scaling", "{"), "is not valid JSON"),
            (("--rope-scaling", '{"factor": NaN}'), "NaN is not JSON"),
            (("--rope-scaling", '{"factor": ' + "9" * 5000 + "}"), "is not valid JSON"),
            (("--enable-chunked-prefill", "maybe"), "must be true or false"),
        ],
    )
    def test_bad_word(
        self, words: tuple[str, ...], reason: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert reason in parse_error(capsys, *words)

    def test_obsolete_flag_takes_any_word(self) -> None:
        assert parse("--swap-space", "lots") == {"swap_space": "lots"}

    def test_every_flag_parses(self) -> None:
        for spec in ENGINE_ARGS:
            for name in (spec.name, *spec.aliases):
                flag = "--" + name.replace("_", "-")
                words = (flag,) if spec.kind is Kind.BOOL else (flag, _a_word(spec))
                assert list(parse(*words)) == [spec.name]

    def test_help_shows_what_works(self) -> None:
        parser = argparse.ArgumentParser()
        add_engine_arguments(parser)
        text = parser.format_help()
        for spec in ENGINE_ARGS:
            assert (f"{spec.flag} " in text or f"{spec.flag}," in text) is (
                spec.status is Status.EFFECTIVE
            ), spec.name


def _a_word(spec: ArgSpec) -> str:
    if spec.choices:
        return str(spec.choices[0])
    return {
        Kind.INT: "1",
        Kind.FLOAT: "0.5",
        Kind.JSON: "{}",
        Kind.COUNTS: "image=1",
        Kind.AUTO_FLOAT: "1.5",
        Kind.AUTO_INT: "1",
    }.get(spec.kind, "word")


def test_auto_or_a_number() -> None:
    spec = effective("room", Kind.AUTO_FLOAT, "auto", "", above=0)
    assert [checked(spec, value) for value in ("auto", 24, 1.5, "2.5")] == ["auto", 24.0, 1.5, 2.5]
    assert from_text(spec, "24") == 24.0
    for wrong, reason in (
        ("most", "'auto' or a number"), ("nan", "'auto' or a number"), ([], "a number"),
        (0, "greater than 0"), (True, "a number"), (math.inf, "a finite number"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=reason):
            checked(spec, wrong)


def test_auto_or_an_integer() -> None:
    for words, value in ((["auto"], "auto"), (["-1"], "auto"), (["1k"], 1000), (["None"], None)):
        given = parse("--max-model-len", *words)
        assert resolve(**given)["max_model_len"] == value
    for value in ("auto", -1):
        config = EngineConfig.from_args(
            resolve_engine_args({"model": "demo", "max_model_len": value})
        )
        assert config.max_model_len is None and config.fit_max_model_len


def test_vllms_name_of_the_fast_tokenizer() -> None:
    assert resolve(tokenizer_mode="hf")["tokenizer_mode"] == "auto"
