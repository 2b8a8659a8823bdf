"""The table of vLLM's arguments that this engine lacks: complete, true to its own rules, and the
same for Python, the command line, the variables and the file."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from hetero_llm.cli import build_parser, main
from hetero_llm.commands.serve import gather
from hetero_llm.config.args import (
    ARGS,
    Scope,
    foreign_of,
    is_argument_of,
    resolve_engine_args,
    resolve_server_args,
    spec_of,
)
from hetero_llm.config.foreign_args import FOREIGN_ARGS
from hetero_llm.config.foreign_spec import ForeignArg, Takes
from hetero_llm.core.errors import ConfigError

# The flags of `vllm serve`, 0.6.6, and those that 0.33 has besides.
VLLM_0_6_6 = """
allow-credentials allowed-headers allowed-local-media-path allowed-methods allowed-origins api-key
block-size chat-template chat-template-content-format code-revision collect-detailed-traces
compilation-config config config-format cpu-offload-gb device disable-async-output-proc
disable-custom-all-reduce disable-fastapi-docs disable-frontend-multiprocessing
disable-log-requests disable-log-stats disable-logprobs-during-spec-decoding
disable-mm-preprocessor-cache disable-sliding-window distributed-executor-backend download-dir
dtype enable-auto-tool-choice enable-chunked-prefill enable-lora enable-lora-bias
enable-prefix-caching enable-prompt-adapter enable-prompt-tokens-details enable-request-id-headers
enforce-eager fully-sharded-loras generation-config gpu-memory-utilization guided-decoding-backend
hf-overrides host ignore-patterns kv-cache-dtype kv-transfer-config limit-mm-per-prompt
load-format logits-processor-pattern long-lora-scaling-factors lora-dtype lora-extra-vocab-size
lora-modules max-cpu-loras max-log-len max-logprobs max-lora-rank max-loras max-model-len
max-num-batched-tokens max-num-seqs max-parallel-loading-workers max-prompt-adapter-token
max-prompt-adapters max-seq-len-to-capture middleware mm-processor-kwargs model
model-loader-extra-config multi-step-stream-outputs ngram-prompt-lookup-max
ngram-prompt-lookup-min num-gpu-blocks-override num-lookahead-slots num-scheduler-steps
num-speculative-tokens otlp-traces-endpoint override-neuron-config override-pooler-config
pipeline-parallel-size port preemption-mode prompt-adapters qlora-adapter-name-or-path
quantization quantization-param-path ray-workers-use-nsight response-role
return-tokens-as-token-ids revision root-path rope-scaling rope-theta scheduler-delay-factor
scheduling-policy seed served-model-name skip-tokenizer-init spec-decoding-acceptance-method
speculative-disable-by-batch-size speculative-disable-mqa-scorer
speculative-draft-tensor-parallel-size speculative-max-model-len speculative-model
speculative-model-quantization ssl-ca-certs ssl-cert-reqs ssl-certfile ssl-keyfile swap-space task
tensor-parallel-size tokenizer tokenizer-mode tokenizer-pool-extra-config tokenizer-pool-size
tokenizer-pool-type tokenizer-revision tool-call-parser tool-parser-plugin trust-remote-code
typical-acceptance-sampler-posterior-alpha typical-acceptance-sampler-posterior-threshold
use-v2-block-manager uvicorn-log-level worker-cls worker-use-ray
"""
VLLM_0_33_BESIDES = """
additional-config aggregate-engine-logging all2all-backend allow-deprecated-quantization
allowed-media-domains anthropic-disabled-thinking-effort api-server-count async-scheduling
attention-backend attention-config aux-output-config cohere-format cohere-is-reasoning-model
convert cp-kv-cache-interleave-size cpu-distributed-timeout-seconds cpu-offload-params
cudagraph-capture-sizes cudagraph-metrics custom-histogram-buckets data-parallel-address
data-parallel-backend data-parallel-external-lb data-parallel-hybrid-lb
data-parallel-multi-port-external-lb data-parallel-rank data-parallel-rpc-port data-parallel-size
data-parallel-size-local data-parallel-start-rank data-parallel-supervisor-port
dbo-decode-token-threshold dbo-prefill-token-threshold dcp-comm-backend
dcp-kv-cache-interleave-size dcp-q-replicate decode-context-parallel-size
default-chat-template-kwargs default-mm-loras device-ids device-memory-utilization
diffusion-config disable-access-log-for-endpoints disable-cascade-attn disable-chunked-mm-input
disable-hybrid-kv-cache-manager disable-nccl-for-dp-synchronization disable-uvicorn-access-log
distributed-timeout-seconds dp-supervisor-probe-failure-threshold dp-supervisor-probe-interval-s
dp-supervisor-probe-timeout-s dp-sync-interval ec-manager-config ec-transfer-config
elastic-ep-max-dp-size enable-batch-sharded-sampling enable-cumem-allocator enable-dbo
enable-elastic-ep enable-ep-weight-filter enable-eplb enable-expert-parallel
enable-fault-tolerance enable-flash-late-interaction enable-flashinfer-autotune
enable-force-include-usage enable-hc-sp enable-layerwise-nvtx-tracing enable-log-deltas
enable-log-outputs enable-log-requests enable-logging-iteration-details
enable-mamba-cache-stochastic-rounding enable-mamba-shared-prefix-checkpoint enable-mfu-metrics
enable-mixed-moe-lora-format enable-mm-embeds enable-moe-shared-loras enable-nccl-comm-suspend
enable-offline-docs enable-per-request-metrics enable-prompt-embeds enable-return-routed-experts
enable-scale-out enable-server-load-tracking enable-shm-tensor-arena enable-sleep-mode
enable-ssl-refresh enable-tokenizer-info-endpoint enable-tower-connector-lora enable-trace-replay
engram-config eplb-config exclude-tools-when-tool-choice-none expert-placement-strategy
fail-on-environ-validation fault-tolerance-config fingerprint-mode fingerprint-value
gdn-prefill-backend grpc grpc-port h11-max-header-count h11-max-incomplete-event-size headless
hf-config-path hf-token interleave-mm-strings io-processor-plugin ir-op-priority jit-monitor-mode
jit-monitor-verbose kda-decode-backend kda-prefill-backend kernel-config
kv-cache-dtype-skip-layers kv-cache-memory-bytes kv-cache-metrics kv-cache-metrics-sample
kv-events-config kv-offloading-backend kv-offloading-size kv-sharing-fast-prefill
language-model-only linear-backend log-config-file log-error-stack log-level logging-config
logits-processors logprobs-mode long-prefill-token-threshold long-prefill-token-threshold-adaptive
lora-target-modules mamba-backend mamba-block-size mamba-cache-dtype mamba-cache-mode
mamba-cache-philox-rounds mamba-ssm-cache-dtype mamba-ssu-algorithm master-addr master-port
max-cudagraph-capture-size max-lora-cls-labels max-num-active-seqs max-num-queued-reqs
max-num-queued-tokens max-num-scheduled-tokens media-io-kwargs mm-device-do-normalize
mm-encoder-attn-backend mm-encoder-attn-dtype mm-encoder-fp8-scale-path
mm-encoder-fp8-scale-save-margin mm-encoder-fp8-scale-save-path mm-encoder-only mm-encoder-tp-mode
mm-hasher-algorithm mm-ipc-gpu-memory-gb mm-processor-cache-gb mm-processor-cache-type
mm-processor-device mm-shm-cache-max-object-size-mb mm-tensor-ipc model-class-overrides model-impl
moe-backend monokernel nnodes node-rank numa-bind numa-bind-cpus numa-bind-nodes offload-backend
offload-group-size offload-num-in-group offload-params offload-prefetch-step optimization-level
override-generation-config per-request-spec-decode-metrics performance-mode pooler-config
prefill-context-parallel-size prefill-schedule-interval prefix-cache-retention-interval
prefix-caching-hash-algo prefix-match-unit profiler-config pt-load-map-location
quantization-config reasoning-config reasoning-effort-map reasoning-parser reasoning-parser-plugin
renderer-num-workers replayssm-buffer-len return-sampling-mask runner safetensors-load-strategy
safetensors-prefetch-block-size safetensors-prefetch-num-threads scheduler-cls
scheduler-reserve-full-isl show-hidden-metrics-for-version shutdown-timeout skip-mm-profiling
sleep-mode-backend sleep-mode-offload-cudagraph sleep-preserve-parameter-names
sparse-indexer-topk-backend spec-method spec-model spec-tokens specialize-active-lora
speculative-config sse-keep-alive-interval ssl-ciphers stream-interval structured-outputs-config
swa-bounded-replay tokens-only tool-server tool-strict-level trust-request-chat-template
trust-request-mm-kwargs ubatch-size uds use-fp64-gumbel use-replayssm use-tqdm-on-load
video-pruning-method video-pruning-rate watchdog-config watermark watermark-config
weight-transfer-config worker-extension-cls
"""


def names(args: Any) -> list[str]:
    return [arg.name for arg in args]


def resolve(**given: Any) -> dict[str, Any]:
    return resolve_engine_args({"model": "demo", **given})


def gathered(*words: str, **variables: str) -> dict[str, Any]:
    engine, server = gather(build_parser().parse_args(["serve", *words]), variables)
    assert not engine.keys() & server.keys()
    resolve_engine_args(engine)
    resolve_server_args(server)
    return {**engine, **server}


WITHOUT_EFFECT = tuple(arg for arg in FOREIGN_ARGS if arg.name != "enable_log_requests")
"""That one is the opposite of an argument that acts."""


class TestTable:
    def test_every_flag_of_two_versions_is_known(self) -> None:
        flags = (VLLM_0_6_6 + VLLM_0_33_BESIDES).replace("-", "_").split()
        assert len(VLLM_0_6_6.split()) == 127 and len(flags) == len(set(flags))
        assert [name for name in flags if spec_of(name) is None and foreign_of(name) is None] == []

    def test_no_name_or_short_flag_stands_twice(self) -> None:
        rows = (*ARGS, *FOREIGN_ARGS)
        spelled = [name for arg in rows for name in (arg.name, *arg.aliases, *arg.short)]
        assert len(spelled) == len(set(spelled))

    @pytest.mark.parametrize("arg", FOREIGN_ARGS, ids=names(FOREIGN_ARGS))
    def test_row_is_complete(self, arg: ForeignArg) -> None:
        assert arg.reason.endswith(".")
        assert not arg.feature.endswith(".")
        if not arg.feature:
            assert not arg.harmless and not arg.instead

    @pytest.mark.parametrize("turned", [True, False])
    def test_the_log_of_requests_by_its_opposite(self, turned: bool) -> None:
        resolved = resolve_server_args({"enable_log_requests": turned})
        assert resolved["disable_log_requests"] is not turned

    @pytest.mark.parametrize("arg", WITHOUT_EFFECT, ids=names(WITHOUT_EFFECT))
    def test_row_does_what_it_says(self, arg: ForeignArg, caplog: pytest.LogCaptureFixture) -> None:
        resolved = (
            resolve if arg.scope is Scope.ENGINE else lambda **given: resolve_server_args(given)
        )
        for value in (None, *arg.harmless):
            caplog.clear()
            assert arg.name not in resolved(**{arg.name: value})
            assert [f"{arg.flag} has no effect" in line for line in caplog.messages] == [True]
        wild: Any = "something else" if arg.takes is not Takes.NOTHING else True
        if not arg.feature:
            resolved(**{arg.name: wild})
        elif wild not in arg.harmless:
            with pytest.raises(ConfigError) as caught:
                resolved(**{arg.name: wild})
            assert f"{arg.feature} is not available yet" in str(caught.value)
            assert arg.instead in str(caught.value)


class TestValues:
    """What asks for nothing is accepted; what asks for more names its feature."""

    @pytest.mark.parametrize(
        ("given", "accepted"),
        [
            ({"decode_context_parallel_size": 1}, True),
            ({"decode_context_parallel_size": True}, False),
            ({"decode_context_parallel_size": "1"}, True),
            ({"decode_context_parallel_size": 2}, False),
            ({"offload_group_size": 0.0}, True),
            ({"enable_sleep_mode": False}, True),
            ({"enable_sleep_mode": "false"}, True),
            ({"enable_sleep_mode": 0}, False),
            ({"enable_sleep_mode": True}, False),
            ({"kv_transfer_config": "{}"}, True),
            ({"kv_transfer_config": "null"}, True),
            ({"kv_transfer_config": {"kv_connector": "x"}}, False),
            ({"lora_target_modules": []}, True),
            ({"reasoning_parser_plugin": ""}, True),
            ({"reasoning_parser_plugin": "["}, False),
            ({"hf_config_path": None}, True),
            ({"hf_config_path": "a"}, False),
            ({"override_pooler_config": {}}, True),
            ({"compilation_config": 3}, True),
            ({"compilation_config": object()}, True),
            ({"runner": "auto"}, True),
            ({"scheduling_policy": "fcfs"}, True),
            ({"scheduling_policy": "priority"}, False),
        ],
    )
    def test_value(self, given: dict[str, Any], accepted: bool) -> None:
        if accepted:
            resolve(**given)
            return
        with pytest.raises(ConfigError, match="is not available yet"):
            resolve(**given)

    @pytest.mark.parametrize(
        "given",
        [
            {"speculative_draft_tensor_parallel_size": 1},
            {"disable_logprobs_during_spec_decoding": False},
            {"model_loader_extra_config": {}},
            {"seed": None, "block_size": None, "max_num_seqs": None, "enable_prefix_caching": None},
        ],
    )
    def test_rows_of_our_own_table(self, given: dict[str, Any]) -> None:
        assert resolve(**given) == resolve()

    def test_what_our_own_table_still_refuses(self) -> None:
        for name, value, feature in (
            ("speculative_draft_tensor_parallel_size", 2, "tensor parallelism of draft models"),
            ("disable_logprobs_during_spec_decoding", True, "without log probabilities"),
            ("model_loader_extra_config", {"a": 1}, "a loader with options of its own"),
        ):
            with pytest.raises(ConfigError, match=feature):
                resolve(**{name: value})

    def test_new_names_of_old_arguments(self) -> None:
        new = resolve(device_memory_utilization=0.5, spec_model="demo-draft", spec_tokens=3)
        assert new["gpu_memory_utilization"] == 0.5
        assert (new["speculative_model"], new["num_speculative_tokens"]) == ("demo-draft", 3)
        assert resolve_server_args({"sse_keep_alive_interval": 3})["stream_keep_alive"] == 3.0

    def test_an_argument_of_the_server_is_none_of_the_engine(self) -> None:
        with pytest.raises(ConfigError, match="an argument of the server"):
            resolve(enable_server_load_tracking=True)

    def test_an_unknown_name_may_resemble_a_foreign_one(self) -> None:
        with pytest.raises(ConfigError, match="did you mean 'scheduling_policy'"):
            resolve(schedulin_policy="fcfs")


class TestCommandLine:
    @pytest.mark.parametrize("arg", FOREIGN_ARGS, ids=names(FOREIGN_ARGS))
    def test_every_flag_parses(self, arg: ForeignArg) -> None:
        words = {Takes.NOTHING: (), Takes.ONE: ("None",), Takes.MANY: ("a", "b")}[arg.takes]
        value = vars(PARSER.parse_args(["m", arg.flag, *words]))[arg.name]
        assert value == {Takes.NOTHING: True, Takes.ONE: "None", Takes.MANY: ["a", "b"]}[arg.takes]
        for flag in arg.short:
            assert arg.name in vars(PARSER.parse_args(["m", flag, *words]))
        if arg.takes is Takes.NOTHING:
            negated = PARSER.parse_args([f"--no-{arg.flag[2:]}", "m"])
            assert vars(negated)[arg.name] is False and negated.model_tag == "m"

    def test_words_of_a_foreign_flag_are_not_the_model(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        found = gathered(
            *("m", "--compilation-config", "3", "-O3", "-dcp", "1", "--scheduling_policy=fcfs"),
            *("-spec-draft-tp", "1", "--disable-logprobs-during-spec-decoding", "false"),
            *("--disable-frontend-multiprocessing", "--model-loader-extra-config", "{}"),
            *("--max-log-len", "5", "--enable-server-load-tracking"),
        )
        assert found["model"] == "m" and found["decode_context_parallel_size"] == "1"
        assert len(caplog.messages) == len(set(caplog.messages)) == 6

    def test_variables_and_the_file(self, tmp_path: Any) -> None:
        file = tmp_path / "options.yaml"
        file.write_text("scheduling-policy: fcfs\nenable_sleep_mode: false\n")
        gathered("m", "--config", str(file), decode_context_parallel_size="1")
        with pytest.raises(ConfigError, match="context parallelism is not available yet"):
            gathered("m", "--config", str(file), decode_context_parallel_size="2")
        file.write_text("enable_sleep_mode: true\n")
        with pytest.raises(ConfigError, match="sleep mode is not available yet"):
            gathered("m", "--config", str(file))

    def test_one_line_names_the_feature(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["serve", "demo", "--kv-transfer-config", '{"kv_connector": "x"}']) == 2
        said = capsys.readouterr().err.strip().splitlines()
        assert len(said) == 1 and "KV transfer between engines is not available yet" in said[0]

    @pytest.mark.parametrize(
        ("flag", "guess"),
        [
            ("--enable-slep-mode", "--enable-sleep-mode"),
            ("--compilatoin-config.mode", "--compilation-config"),
            ("--max-modle-len", "--max-model-len"),
        ],
    )
    def test_did_you_mean(self, capsys: pytest.CaptureFixture[str], flag: str, guess: str) -> None:
        with pytest.raises(SystemExit):
            main(["serve", "demo", flag, "3"])
        assert f"(did you mean {guess}?)" in capsys.readouterr().err

    def test_help_shows_none_of_them(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            main(["serve", "--help"])
        shown = capsys.readouterr().out
        assert "--max-model-len" in shown and "--kv-transfer-config" not in shown


def _parser() -> argparse.ArgumentParser:
    from hetero_llm.config.args import SERVER_ARGS, add_engine_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("model_tag", nargs="?")
    add_engine_arguments(parser, SERVER_ARGS)
    add_engine_arguments(parser)
    return parser


PARSER = _parser()


def test_scopes_are_disjoint() -> None:
    for arg in FOREIGN_ARGS:
        assert is_argument_of(arg.scope, arg.name)
        other = Scope.SERVE if arg.scope is Scope.ENGINE else Scope.ENGINE
        assert not is_argument_of(other, arg.name)
