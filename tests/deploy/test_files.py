"""The deployment files are valid where they say what they are for, and their parts agree with each other."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvconnect.config import TransferConfig, parse_kv_transfer_config
from kvconnect.router.router_options import clean_url
from tests.deploy.commands import (
    DEPLOY,
    KINDS,
    POD_IPS,
    WITH_README,
    Part,
    compose_file,
    deployment,
    kubernetes_object,
    kubernetes_objects,
    unit_settings,
)

KUSTOMIZATIONS = sorted(path.parent for path in DEPLOY.rglob("kustomization.yaml"))
SERVERS = ("prefill", "decode")
MOST_RANKS = 8
MOONCAKE_PORTS = (15000, 17000)


@pytest.fixture
def parts(request, tmp_path) -> dict[str, Part]:
    return deployment(request.param, tmp_path)


every_kind = pytest.mark.parametrize("parts", KINDS, indirect=True)
every_kind_and_readme = pytest.mark.parametrize("parts", WITH_README, indirect=True)


def transfer(part: Part) -> TransferConfig:
    return parse_kv_transfer_config(part.option("--kv-transfer-config"))


# --- what every kind of deployment must have in common --------------------------------------------


@every_kind_and_readme
def test_prefill_and_decode_agree(parts) -> None:
    assert set(parts) == {*SERVERS, "router"}
    prefill, decode = transfer(parts["prefill"]), transfer(parts["decode"])
    assert (prefill.kv_role, decode.kv_role) == ("kv_producer", "kv_consumer")
    assert decode.kv_load_failure_policy == "recompute"
    for config in (prefill, decode):
        assert config.kv_connector_module_path == "kvconnect.vllm"
        assert config.extra.port, "peers and firewalls could not know a port that is free by chance"
        assert config.extra.host != "127.0.0.1"
        assert config.extra.key_file, "others than this machine's users can reach it"
    assert prefill.extra.host != decode.extra.host
    different = {"host": "", "port": 1}
    one, other = ({**_fields(config.extra), **different} for config in (prefill, decode))
    assert one == other
    same = [{k: v for k, v in parts[name].environment.items() if k.startswith("UCX_")} for name in SERVERS]
    assert same[0] == same[1]


def _fields(extra: Any) -> dict[str, Any]:
    return {name: getattr(extra, name) for name in extra.__struct_fields__}


@every_kind_and_readme
def test_the_router_names_every_server_at_the_port_that_it_listens_on(parts) -> None:
    for name in SERVERS:
        listening = {f"{url}:{parts[name].option('--port')}" for url in parts[name].urls}
        assert {clean_url(url) for url in parts["router"].options[f"--{name}"]} == listening != set()


@every_kind
def test_the_servers_run_one_model_and_take_further_options(parts, tmp_path, request) -> None:
    kind = request.node.callspec.params["parts"]
    given = deployment(
        kind, tmp_path, {"MODEL": "some/model", "SERVE_ARGS": "--block-size 64 --enforce-eager"}
    )
    for name in SERVERS:
        assert parts[name].command[:3] == ["vllm", "serve", parts["prefill"].command[2]]
        words = " ".join(given[name].command)
        assert words.startswith("vllm serve some/model ")
        assert " --block-size 64 --enforce-eager" in words


@every_kind
def test_a_server_may_finish_what_it_holds_before_it_is_killed(parts, request) -> None:
    kind = request.node.callspec.params["parts"]
    for name in SERVERS:
        drain_s = int(parts[name].option("--shutdown-timeout"))
        assert transfer(parts[name]).extra.lease_s < drain_s < _grace_s(kind, name) - 10
    assert float(parts["router"].option("--drain-timeout-s")) < _grace_s(kind, "router") - 5


def _grace_s(kind: str, name: str) -> int:
    if kind == "compose":
        return int(compose_file()["services"][name]["stop_grace_period"].removesuffix("s"))
    if kind == "systemd":
        unit = "kvconnect-router.service" if name == "router" else "kvconnect-vllm@.service"
        return int(unit_settings(unit)["TimeoutStopSec"][0])
    return int(workload(name)["template"]["spec"]["terminationGracePeriodSeconds"])


@every_kind_and_readme
def test_the_router_has_a_fetch_in_time(parts) -> None:
    """A request that waits for D longer than the lease of its blocks would be prefilled for nothing."""
    config = transfer(parts["prefill"]).extra
    connect_s = float(parts["router"].options.get("--connect-timeout-s", ["3"])[0])
    assert connect_s < config.lease_s


# --- compose --------------------------------------------------------------------------------------


def test_the_compose_file_is_valid() -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    run = subprocess.run([*command, DEPLOY / "compose.yaml"], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stdout + run.stderr


def test_compose_keeps_the_side_channel_on_a_network_of_its_own(tmp_path) -> None:
    read = compose_file()
    services, parts = read["services"], deployment("compose", tmp_path)
    assert read["networks"]["side"]["internal"] is True
    assert {name for name, service in services.items() if "side" in service["networks"]} == set(SERVERS)
    for name in SERVERS:
        side = services[name]["networks"]["side"]
        assert side["ipv4_address"] == transfer(parts[name]).extra.host
        assert side["interface_name"] == parts[name].environment["UCX_NET_DEVICES"]
        assert "ports" not in services[name]
    (published,) = services["router"]["ports"]
    assert published.startswith("127.0.0.1:")
    assert published.endswith(":" + parts["router"].option("--port"))


def test_compose_puts_the_key_where_the_servers_look_for_it(tmp_path) -> None:
    read, parts = compose_file(), deployment("compose", tmp_path)
    (name,) = read["secrets"]
    for server in SERVERS:
        assert read["services"][server]["secrets"] == [name]
        assert transfer(parts[server]).extra.key_file == f"/run/secrets/{name}"
    assert "secrets" not in read["services"]["router"]
    assert read["secrets"][name]["file"] == "./kvconnect.key"
    given = compose_file({"KVCONNECT_KEY_FILE": "/elsewhere/key"})
    assert given["secrets"][name]["file"] == "/elsewhere/key"


def test_compose_gives_each_server_a_gpu_and_checks_the_port_it_serves(tmp_path) -> None:
    services, parts = compose_file()["services"], deployment("compose", tmp_path)
    gpus = [services[name]["deploy"]["resources"]["reservations"]["devices"][0] for name in SERVERS]
    assert gpus[0]["device_ids"] != gpus[1]["device_ids"]
    for name, path in (("prefill", "/health"), ("decode", "/health"), ("router", "/ready")):
        check = services[name]["healthcheck"]["test"]
        assert f"http://127.0.0.1:{parts[name].option('--port')}{path}" in check[-1]
        compile(check[-1], "health check", "exec")


# --- Kubernetes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SERVERS)
def test_a_pods_side_channel_is_at_the_pods_own_address(name, tmp_path) -> None:
    assert transfer(deployment("kubernetes", tmp_path)[name]).extra.host == POD_IPS[name]


@pytest.mark.parametrize("name", SERVERS)
def test_a_pods_key_is_a_secret_that_only_its_user_can_read(name, tmp_path) -> None:
    pod = workload(name)["template"]["spec"]
    (volume,) = (one for one in pod["volumes"] if "secret" in one)
    (mount,) = (one for one in pod["containers"][0]["volumeMounts"] if one["name"] == volume["name"])
    assert volume["secret"]["defaultMode"] == 0o400
    assert transfer(deployment("kubernetes", tmp_path)[name]).extra.key_file == f"{mount['mountPath']}/key"
    assert mount["readOnly"] is True
    made = f"create secret generic {volume['secret']['secretName']} --from-file=key="
    assert made in (DEPLOY / "README.md").read_text()


def workload(name: str) -> dict[str, Any]:
    kind = "Deployment" if name == "router" else "StatefulSet"
    spec: dict[str, Any] = kubernetes_object(kind, f"kvconnect-{name}")["spec"]
    return spec


def assert_valid(objects: list[dict[str, Any]]) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    for one in objects:
        validate.validate(one, validate.latest_version(), strict=True)


def test_kubernetes_objects_are_valid() -> None:
    assert_valid(kubernetes_objects())


@pytest.mark.parametrize("folder", KUSTOMIZATIONS, ids=lambda path: path.name)
def test_kustomize_renders_valid_objects_with_all_that_they_name(folder) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl, which has kustomize in it, is not installed")
    run = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    objects = list(yaml.safe_load_all(run.stdout))
    assert_valid(objects)
    assert not any("namespace" in one["metadata"] for one in objects)
    configs = {one["metadata"]["name"] for one in objects if one["kind"] == "ConfigMap"}
    assert set(re.findall(r"name: (kvconnect-(?:transfer|vllm)-\w+)", run.stdout)) == configs
    assert len(configs) == 2
    for one in objects:
        if one["kind"] == "StatefulSet":
            (container,) = one["spec"]["template"]["spec"]["containers"]
            limits, added = container["resources"]["limits"], container["securityContext"]["capabilities"]
            assert limits["nvidia.com/gpu"] == 1
            is_rdma = folder.name == "rdma"
            assert ("rdma/hca" in limits) is is_rdma
            assert added == {"drop": ["ALL"], **({"add": ["IPC_LOCK"]} if is_rdma else {})}


@pytest.mark.parametrize("name", [*SERVERS, "router"])
def test_kubernetes_probes_and_services_lead_to_the_port_that_is_served(name, tmp_path) -> None:
    port = int(deployment("kubernetes", tmp_path)[name].option("--port"))
    (container,) = workload(name)["template"]["spec"]["containers"]
    named = {one["name"]: one["containerPort"] for one in container["ports"]}
    assert named["http"] == port
    probes = {key: value for key, value in container.items() if key.endswith("Probe")}
    paths = {key: probe["httpGet"]["path"] for key, probe in probes.items()}
    assert paths.pop("readinessProbe") == ("/ready" if name == "router" else "/health")
    assert set(paths.values()) == {"/health"}
    assert all(probe["httpGet"]["port"] == "http" for probe in probes.values())
    service = kubernetes_object("Service", f"kvconnect-{name}")["spec"]
    assert [one["port"] for one in service["ports"]] == [port]
    labels = workload(name)["template"]["metadata"]["labels"]
    selectors = [service["selector"], workload(name)["selector"]["matchLabels"]]
    budget = kubernetes_object("PodDisruptionBudget", f"kvconnect-{name}")["spec"]
    assert selectors == [labels, labels] == [labels, budget["selector"]["matchLabels"]]


def test_kubernetes_keeps_pair_and_side_channel_from_everybody_else(tmp_path) -> None:
    parts = deployment("kubernetes", tmp_path)
    policy = kubernetes_object("NetworkPolicy", "kvconnect-servers")["spec"]
    assert policy["policyTypes"] == ["Ingress"]
    component = "app.kubernetes.io/component"
    for name in SERVERS:
        labels = workload(name)["template"]["metadata"]["labels"]
        assert _selects(policy["podSelector"], labels)
        config, http = transfer(parts[name]).extra, int(parts[name].option("--port"))
        low, high = map(int, parts[name].environment["UCX_TCP_PORT_RANGE"].split("-"))
        engine = {low, high, *MOONCAKE_PORTS, *range(config.port, config.port + MOST_RANKS)}
        for other in SERVERS:
            # A pair's server has no business at another's HTTP port: only the router may set addresses.
            assert _allowed(policy, other, {*engine, http, 22}) == engine
        assert _allowed(policy, "router", {*engine, http, 22}) == {http}
    (container,) = workload("prefill")["template"]["spec"]["containers"]
    assert transfer(parts["prefill"]).extra.port in {one["containerPort"] for one in container["ports"]}
    for stranger in ({}, {component: "prefill"}, {"app.kubernetes.io/name": "kvconnect"}):
        assert not any(
            _selects(peer["podSelector"], stranger) for rule in policy["ingress"] for peer in rule["from"]
        )


def _allowed(policy: dict[str, Any], component: str, ports: set[int]) -> set[int]:
    """Which of the TCP ports a pod of ours may connect to."""
    labels = {"app.kubernetes.io/name": "kvconnect", "app.kubernetes.io/component": component}
    return {
        port
        for rule in policy["ingress"]
        if any(_selects(peer["podSelector"], labels) for peer in rule["from"])
        for one in rule["ports"]
        for port in ports
        if one["protocol"] == "TCP" and one["port"] <= port <= one.get("endPort", one["port"])
    }


def _selects(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    chosen = selector.get("matchLabels", {}).items() <= labels.items()
    for one in selector.get("matchExpressions", []):
        assert one["operator"] == "In"
        chosen = chosen and labels.get(one["key"]) in one["values"]
    return chosen


# --- systemd --------------------------------------------------------------------------------------


def test_systemd_takes_the_units_without_a_word(tmp_path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    binaries = tmp_path / "bin"
    binaries.mkdir()
    for name in ("vllm", "kvconnect"):
        (binaries / name).write_text("#!/bin/sh\n")
        (binaries / name).chmod(0o755)
    names = []
    for unit in sorted((DEPLOY / "systemd").glob("*.service")):
        # Only the executables are not where the units will find them.
        text = unit.read_text().replace("=/opt/kvconnect/bin/", f"={binaries}/")
        names.append(unit.name.replace("@.", "@prefill."))
        (tmp_path / names[-1]).write_text(text)
    assert len(names) == 2
    command = ["systemd-analyze", "verify", "--man=no", *(f"./{name}" for name in names)]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stdout + run.stderr) == (0, "")


def test_the_readme_puts_the_key_where_the_units_look_for_it(tmp_path) -> None:
    (path,) = {transfer(deployment("systemd", tmp_path)[name]).extra.key_file for name in SERVERS}
    found = re.search(r"install -o root -g (\S+) -m 640 key (\S+)", (DEPLOY / "README.md").read_text())
    assert found is not None
    assert found.groups() == (*unit_settings("kvconnect-vllm@.service")["User"], path)


def test_units_lock_memory_restart_and_come_after_the_network() -> None:
    for unit in ("kvconnect-vllm@.service", "kvconnect-router.service"):
        settings = unit_settings(unit)
        assert settings["Restart"] == ["always"]
        assert settings["After"] == settings["Wants"] == ["network-online.target"]
        assert settings["NoNewPrivileges"] == ["yes"]
        # A limit on starts that is never reached would let a broken configuration restart for ever.
        starts_s = int(settings["StartLimitBurst"][0]) * int(settings["RestartSec"][0])
        assert starts_s < int(settings["StartLimitIntervalSec"][0])
    server = unit_settings("kvconnect-vllm@.service")
    assert server["LimitMEMLOCK"] == ["infinity"]
    assert not {"PrivateDevices", "ProtectClock", "MemoryDenyWriteExecute"} & set(server), "no GPU, no JIT"


# --- the images -----------------------------------------------------------------------------------

DOCKERFILE = (DEPLOY / "Dockerfile").read_text()


def test_the_dockerfile_has_the_images_and_files_that_are_used() -> None:
    targets = set(re.findall(r"^FROM .* AS (\w+)$", DOCKERFILE, re.MULTILINE))
    for service in compose_file()["services"].values():
        assert service["build"]["target"] in targets
        assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).exists()
    arguments = set(re.findall(r"^ARG (\w+)=", DOCKERFILE, re.MULTILINE))
    assert {"VLLM_IMAGE"} <= arguments
    used = {
        name for service in compose_file()["services"].values() for name in service["build"].get("args", {})
    }
    assert used <= arguments
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE, re.MULTILINE)
    let_through = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    for name in " ".join(copied).split():
        assert (DEPLOY.parent / name).exists()
        assert f"!{name}" in let_through


def test_the_routers_image_has_all_that_the_router_imports(tmp_path) -> None:
    (line,) = re.findall(r"pip install --no-cache-dir ((?:\"[^\"]+\" ?)+)&&", DOCKERFILE)
    wanted = re.findall(r'"([^"]+)"', line)
    project = (DEPLOY.parent / "pyproject.toml").read_text()
    assert all(f'"{requirement}"' in project for requirement in wanted), "ranges differ from pyproject.toml"
    names = {re.split(r"[><=]", requirement)[0].replace("-", "_") for requirement in wanted}
    # Everything else that the project names is made to fail, but for rich, which typer brings along.
    named = {name.replace("-", "_") for name in re.findall(r'"([A-Za-z-]+)[><=]', project)}
    blocked = {{"pyzmq": "zmq"}.get(name, name) for name in named - names - {"rich"}}
    assert {"torch", "nixl", "numpy", "pyzmq", "aiohttp", "typer"} <= named
    assert "torch" in blocked
    script = f"import sys\nfor name in {sorted(blocked)}: sys.modules[name] = None\n"
    script += "from kvconnect.cli import main\nmain()"
    arguments = ["router", "--port=-1", "--prefill=http://a:1", "--decode=http://b:1"]
    run = subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=60, cwd=Path.cwd()
    )
    # As far as listening, where a port that there is not ends it.
    assert run.returncode == 2, run.stderr
    assert "cannot listen on 127.0.0.1:-1" in run.stderr
