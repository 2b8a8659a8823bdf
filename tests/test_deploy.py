"""The files in deploy/ name commands, routes and metrics that exist. Images are not built here."""

from __future__ import annotations

import configparser
import json
import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from hetero_llm.cli import build_parser
from hetero_llm.config.args import resolve_engine_args, spec_of
from hetero_llm.config.engine_config import EngineConfig
from hetero_llm.core.histogram import Histogram
from hetero_llm.server.middleware import PUBLIC
from hetero_llm.utils.env import flag_variables
from tests.server.fake_engine import demo_tokenizer
from tests.server.serving import serving
from tests.server.test_metrics import OFFLOAD, Reporting

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"


def parsed(words: list[str]) -> Any:
    """The options of a command line that the program takes."""
    options = build_parser().parse_args(words)
    assert options.run is not None
    return options


# the systemd unit


@pytest.fixture(scope="module")
def unit() -> configparser.SectionProxy:
    found = configparser.ConfigParser(strict=False, interpolation=None)
    found.optionxform = str  # type: ignore[assignment, method-assign]
    found.read(DEPLOY / "hetero-llm.service")
    return found["Service"]


def test_the_unit_runs_a_command_that_there_is(unit: configparser.SectionProxy) -> None:
    program, *words = shlex.split(unit["ExecStart"])
    assert program.endswith("/hetero-llm")
    assert int(unit["TimeoutStopSec"]) > parsed(words).shutdown_timeout
    assert unit["KillMode"] == "mixed", "the engine's process is ended by the API's"


def test_the_unit_leaves_what_the_engine_needs(unit: configparser.SectionProxy) -> None:
    assert "MemoryDenyWriteExecute" not in unit, "numba and Triton compile"
    assert "PrivateDevices" not in unit and unit["DeviceAllow"] == "char-nvidia* rw"
    assert unit.get("ProcSubset", "all") == "all", "/proc/stat and meminfo are read"


def test_the_unit_is_hardened() -> None:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("needs systemd-analyze")
    words = [program, "security", "--offline=true", "--no-pager", "--threshold=25"]
    done = subprocess.run(
        [*words, str(DEPLOY / "hetero-llm.service")], capture_output=True, text=True
    )
    if "offline" in done.stderr:
        pytest.skip("this systemd-analyze reads no files")
    assert done.returncode == 0, done.stdout.splitlines()[-1:]


# the image


@pytest.fixture(scope="module")
def dockerfile() -> list[str]:
    """The instructions of the Dockerfile, a line each."""
    text = (DEPLOY / "Dockerfile").read_text()
    kept = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    return [line for line in kept.replace("\\\n", " ").splitlines() if line]


def test_the_image_runs_commands_that_there_are(dockerfile: list[str]) -> None:
    (command,) = (json.loads(line[4:]) for line in dockerfile if line.startswith("CMD "))
    parsed(command)
    for line in dockerfile:
        if line.startswith("RUN hetero-llm "):
            parsed(shlex.split(line)[2:])


def test_the_image_copies_files_that_the_context_has(dockerfile: list[str]) -> None:
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    kept = {line[1:] for line in ignored if line.startswith("!")}
    copied = {
        name for line in dockerfile if line.startswith("COPY ") for name in line.split()[1:-1]
    }
    assert copied == kept and all((ROOT / name).exists() for name in copied)


def test_the_image_installs_into_an_environment_of_its_own(dockerfile: list[str]) -> None:
    text = "\n".join(dockerfile)
    before, _, after = text.partition("python3 -m venv /opt/hetero-llm")
    assert after and "pip install" not in before, "PEP 668: Ubuntu's Python has no packages"
    assert "python3-dev python3-venv" in before, "Triton compiles with Python.h"
    torch, ours = re.findall(r"RUN pip install .*", after)
    assert "/whl/cpu\n" in after and "$TORCH_INDEX" in torch and torch.endswith(" torch")
    assert all("-c constraints.txt" in line for line in (torch, ours))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = re.search(r"\.\[([a-z,-]+)\]", ours)
    assert wanted is not None
    assert set(wanted[1].split(",")) <= extras["optional-dependencies"].keys()


def test_the_user_is_a_number(dockerfile: list[str]) -> None:
    (user,) = (line.split()[1] for line in dockerfile if line.startswith("USER "))
    assert user.isdecimal() and f"--uid {user} " in "\n".join(dockerfile)


def test_compose() -> None:
    services = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    arguments = (DEPLOY / "Dockerfile").read_text()
    for name in ("server", "gpu"):
        service = services[name]
        command = [re.sub(r"\$\{\w+:-(.*)\}", r"\1", word) for word in service["command"]]
        options = parsed(command)
        assert int(service["stop_grace_period"].rstrip("s")) > options.shutdown_timeout
        assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).exists()
        assert all(f"ARG {each}=" in arguments for each in service["build"].get("args", ()))
    (device,) = services["gpu"]["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": "all", "capabilities": ["gpu"]}
    (mount,) = services["prometheus"]["volumes"]
    assert (DEPLOY / mount.split(":")[0]).exists()


# Kubernetes


@pytest.fixture(scope="module")
def manifests() -> dict[str, Any]:
    """The specification of each object in kubernetes.yaml by its kind."""
    found = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    return {each["kind"]: each["spec"] for each in found}


def test_the_pod_runs_a_command_that_there_is(manifests: dict[str, Any]) -> None:
    pod = manifests["Deployment"]["template"]["spec"]
    (container,) = pod["containers"]
    assert pod["terminationGracePeriodSeconds"] > parsed(container["args"]).shutdown_timeout
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}


def test_the_probes_ask_routes_without_a_key(manifests: dict[str, Any]) -> None:
    (container,) = manifests["Deployment"]["template"]["spec"]["containers"]
    ports = {port["name"] for port in container["ports"]}
    paths = {}
    for name in ("startup", "readiness", "liveness"):
        asked = container[f"{name}Probe"]["httpGet"]
        assert asked["port"] in ports
        paths[name] = asked["path"]
    assert paths == {"startup": "/ready", "readiness": "/ready", "liveness": "/live"}
    assert set(paths.values()) <= PUBLIC


def test_the_service_finds_the_pod(manifests: dict[str, Any]) -> None:
    deployment, service = manifests["Deployment"], manifests["Service"]
    labels = deployment["template"]["metadata"]["labels"]
    assert service["selector"] == deployment["selector"]["matchLabels"] == labels
    (container,) = deployment["template"]["spec"]["containers"]
    assert service["ports"][0]["targetPort"] in {port["name"] for port in container["ports"]}


def test_kubernetes_variables_are_no_flags(
    manifests: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service called hetero-llm sets HETERO_LLM_PORT for every pod that takes service links."""
    monkeypatch.setenv("HETERO_LLM_PORT", "tcp://10.0.0.1:8000")
    assert flag_variables()["port"] == "tcp://10.0.0.1:8000"
    assert manifests["Deployment"]["template"]["spec"]["enableServiceLinks"] is False


def k8s(name: str) -> dict[str, Any]:
    """The objects of a file of deploy/k8s by kind."""
    found = yaml.safe_load_all((DEPLOY / "k8s" / name).read_text())
    return {each["kind"]: each for each in found}


@pytest.fixture(scope="module", params=["servers.yaml", "router.yaml"])
def pods(request: pytest.FixtureRequest) -> tuple[dict[str, Any], dict[str, Any]]:
    """A workload's specification, and its service's."""
    objects = k8s(request.param)
    (workload,) = (each for kind, each in objects.items() if kind != "Service")
    assert workload["apiVersion"] == "apps/v1" and objects["Service"]["apiVersion"] == "v1"
    return workload["spec"], objects["Service"]["spec"]


def test_all_files_belong_to_the_kustomization() -> None:
    listed = k8s("kustomization.yaml")["Kustomization"]["resources"]
    others = {path.name for path in (DEPLOY / "k8s").iterdir()} - {"kustomization.yaml"}
    assert set(listed) == others


def test_pods_of_several_servers(pods: tuple[dict[str, Any], dict[str, Any]]) -> None:
    spec, service = pods
    labels = spec["template"]["metadata"]["labels"]
    assert service["selector"] == spec["selector"]["matchLabels"] == labels
    pod = spec["template"]["spec"]
    assert pod["enableServiceLinks"] is False, "HETERO_LLM_PORT is a flag"
    assert pod["securityContext"]["runAsNonRoot"] is True
    (container,) = pod["containers"]
    options = parsed(container["args"])
    assert pod["terminationGracePeriodSeconds"] > float(options.shutdown_timeout)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert {port["targetPort"] for port in service["ports"]} <= ports.keys()
    for probe in ("readinessProbe", "livenessProbe"):
        asked = container[probe]["httpGet"]
        assert asked["port"] == "http" and asked["path"] in PUBLIC
    scraped = spec["template"]["metadata"]["annotations"]["prometheus.io/port"]
    assert int(scraped) == ports["http"]
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_the_router_knows_every_server() -> None:
    servers, router = k8s("servers.yaml"), k8s("router.yaml")
    spec = servers["StatefulSet"]["spec"]
    name, service = servers["StatefulSet"]["metadata"]["name"], spec["serviceName"]
    assert servers["Service"]["metadata"]["name"] == service
    assert servers["Service"]["spec"]["clusterIP"] == "None", "else pods have no names"
    (container,) = router["Deployment"]["spec"]["template"]["spec"]["containers"]
    options = parsed(container["args"])
    (port,) = (one["port"] for one in servers["Service"]["spec"]["ports"] if one["name"] == "http")
    wanted = [f"http://{name}-{number}.{service}:{port}" for number in range(spec["replicas"])]
    assert options.urls == wanted
    assert options.port == container["ports"][0]["containerPort"]
    assert options.health_path in PUBLIC


def test_the_servers_publish_kv_events_at_their_ports() -> None:
    (container,) = k8s("servers.yaml")["StatefulSet"]["spec"]["template"]["spec"]["containers"]
    options = parsed(container["args"])
    given = {"model": "m", "kv_events_config": options.kv_events_config}
    config = EngineConfig.from_args(resolve_engine_args(given)).kv_events
    assert config is not None and config.replay_endpoint is not None
    ports = {port["name"]: str(port["containerPort"]) for port in container["ports"]}
    assert config.endpoint.rpartition(":")[2] == ports["kv-events"]
    assert config.replay_endpoint.rpartition(":")[2] == ports["kv-replay"]
    extras = re.search(r"\.\[([a-z,-]+)\]", (DEPLOY / "Dockerfile").read_text())
    assert extras is not None and "kv-events" in extras[1].split(",")


# Prometheus and Grafana


@pytest.fixture(scope="module")
def exported() -> dict[str, set[str]]:
    """The labels of every sample that a server with drafts and offload exports, by name."""
    engine = Reporting(demo_tokenizer())
    engine.histograms = {
        "iteration_tokens_total": Histogram((1.0, 2.0), [0, 1, 0], 2.0),
        "step_seconds/wait": Histogram((0.1, 1.0), [1, 0, 0], 0.05),
    }
    engine.more = {**OFFLOAD, "cpu_seconds": 1.0, "spec_decode_num_drafts": 1.0,
                   "spec_decode_num_draft_tokens": 4.0,
                   "spec_decode_num_accepted_tokens": 2.0}  # fmt: skip
    body = {"prompt": "a", "max_tokens": 1}
    with serving(engine) as served:
        assert served.post("/v1/completions", body).status_code == 200
        text = served.http.get("/metrics").text
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_the_dashboard_asks_for_metrics_that_there_are(exported: dict[str, set[str]]) -> None:
    dashboard = json.loads((DEPLOY / "grafana.json").read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    counted = 0
    for panel in panels:
        for target in panel["targets"]:
            names = re.findall(r"\b(?:vllm:|hetero_llm:|http_|process_)\w+", target["expr"])
            assert names, target["expr"]
            for name in names:
                # Labelled counters that nothing has happened to have no samples yet.
                assert name in exported or name in SILENT, name
                counted += 1
            labels = exported.get(names[0], SILENT.get(names[0], set()))
            shown = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            assert shown <= labels, panel["title"]
            grouped = re.findall(r"by \(([^)]*)\)", target["expr"])
            assert {one.strip() for group in grouped for one in group.split(",")} <= labels
            if "model_name=~" in target["expr"]:
                assert "model_name" in labels, panel["title"]
    assert counted > 40
    (query,) = (
        each["query"]["query"]
        for each in dashboard["templating"]["list"]
        if each["name"] == "model"
    )
    name = re.match(r"label_values\((\S+), model_name\)", query)
    assert name is not None and "model_name" in exported[name[1]]


SILENT = {"vllm:admission_rejections_total": {"model_name", "engine", "reason"}}
"""Metrics without samples before the first refusal, and their labels."""


def test_the_scrape_asks_the_port_that_is_served() -> None:
    (job,) = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text())["scrape_configs"]
    (targets,) = job["static_configs"]
    port = spec_of("port")
    assert port is not None and targets["targets"] == [f"127.0.0.1:{port.default}"]
    assert job["metrics_path"] == "/metrics"


def test_the_readme_names_every_file() -> None:
    text = (DEPLOY / "README.md").read_text()
    files = {path.name for path in DEPLOY.iterdir()} - {"README.md", "Dockerfile.dockerignore"}
    assert {name for name in files if f"]({name})" not in text} == set()
