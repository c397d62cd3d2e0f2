"""The deployment files are valid where they say what they are for, and their parts agree with each other."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from kvconnect.config import TransferConfig, parse_kv_transfer_config
from kvconnect.router.membership import _LOOK_UP_S
from kvconnect.router.router_options import clean_url
from tests.deploy.commands import (
    DEPLOY,
    KINDS,
    NAMESPACE,
    POD_IPS,
    RELEASE,
    WITH_README,
    Part,
    chart,
    compose_file,
    deployment,
    helm,
    named,
    unit_settings,
)

README = (DEPLOY / "README.md").read_text()
SERVERS = ("prefill", "decode")
MOST_RANKS = 8
MOONCAKE_PORTS = (15000, 17000)
RESOLVERS_KEEP_S = 30
"""CoreDNS, as kubeadm sets it up."""


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
    one, other = (msgspec.structs.replace(config.extra, **different) for config in (prefill, decode))
    assert one == other
    same = [{k: v for k, v in parts[name].environment.items() if k.startswith("UCX_")} for name in SERVERS]
    assert same[0] == same[1]
    # A request that waits for D longer than the lease of its blocks would be prefilled for nothing.
    assert float(parts["router"].options.get("--connect-timeout-s", ["3"])[0]) < prefill.extra.lease_s


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
    """Seconds from SIGTERM to SIGKILL."""
    if kind == "compose":
        return int(compose_file()["services"][name]["stop_grace_period"].removesuffix("s"))
    if kind == "systemd":
        unit = "kvconnect-router.service" if name == "router" else "kvconnect-vllm@.service"
        return int(unit_settings(unit)["TimeoutStopSec"][0])
    return int(pod(name)["terminationGracePeriodSeconds"]) - _sleep_s(name)


def _sleep_s(name: str) -> int:
    program, seconds = container(name)["lifecycle"]["preStop"]["exec"]["command"]
    assert program == "sleep"
    return int(seconds)


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

SCALED = {"maxReplicas": 8, "requests": 64}
VARIANTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "a pair": {"prefill": {"replicas": 1}, "decode": {"replicas": 1}, "router": {"replicas": 1}},
    "several GPUs": {"prefill": {"replicas": 5, "gpus": 8}, "decode": {"gpus": 2}, "args": ['--x={"a": 1}']},
    "rdma": {"rdma": {"resource": "rdma/hca"}, "podAnnotations": {"k8s.v1.cni.cncf.io/networks": "rdma"}},
    "mooncake": {"transfer": {"engine": "mooncake", "lease_s": 90.5}, "env": {"MC_LOG": 1, "HOME": "/tmp"}},
    "kept models": {"modelClaim": "models", "pod": {"nodeSelector": {"gpu": "h100"}}},
    "monitored": {"monitoring": {"enabled": True, "labels": {"release": "kps"}}},
    "autoscaled": {
        "monitoring": {"enabled": True},
        "prefill": {"autoscaling": SCALED},
        "decode": {"autoscaling": {**SCALED, "waiting": 16}},
    },
}
CUSTOM = ("PodMonitor", "ScaledObject")
"""Kinds without a schema here."""
every_variant = pytest.mark.parametrize("variant", VARIANTS)


def pod(name: str, variant: str = "as it is") -> dict[str, Any]:
    workload = named(chart(VARIANTS[variant]), "Deployment", name)
    spec: dict[str, Any] = workload["spec"]["template"]["spec"]
    return spec


def container(name: str, variant: str = "as it is") -> dict[str, Any]:
    (only,) = pod(name, variant)["containers"]
    found: dict[str, Any] = only
    return found


@every_variant
def test_the_chart_makes_valid_objects(variant) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    helm("lint", DEPLOY / "helm", "--strict", values=VARIANTS[variant])
    objects = chart(VARIANTS[variant])
    for one in objects:
        if one["kind"] not in CUSTOM:
            validate.validate(one, validate.latest_version(), strict=True)
    assert not any("namespace" in one["metadata"] for one in objects)
    assert len({(one["kind"], one["metadata"]["name"]) for one in objects}) == len(objects)
    has = {one["kind"] for one in objects}
    assert has & set(CUSTOM) == {"monitored": {CUSTOM[0]}, "autoscaled": set(CUSTOM)}.get(variant, set())


@every_variant
@pytest.mark.parametrize("name", [*SERVERS, "router"])
def test_selectors_and_ports_lead_to_the_pods(name, variant) -> None:
    objects = chart(VARIANTS[variant])
    workload, service = named(objects, "Deployment", name), named(objects, "Service", name)["spec"]
    labels = workload["spec"]["template"]["metadata"]["labels"]
    budget = named(objects, "PodDisruptionBudget", name)["spec"]
    assert labels == workload["spec"]["selector"]["matchLabels"] == service["selector"]
    assert labels == budget["selector"]["matchLabels"]
    (only,) = workload["spec"]["template"]["spec"]["containers"]
    port = int(Part(only["args"]).option("--port"))
    assert {one["name"]: one["containerPort"] for one in only["ports"]}["http"] == port
    assert [one["port"] for one in service["ports"]] == [port]
    probes = [value for key, value in only.items() if key.endswith("Probe") and "httpGet" in value]
    paths = ["/health", "/ready"] if name == "router" else ["/health", "/health"]
    assert sorted(probe["httpGet"]["path"] for probe in probes) == paths
    assert {probe["httpGet"]["port"] for probe in probes} == {"http"}


def test_two_releases_of_a_namespace_share_nothing() -> None:
    one, other = (
        [*yaml.safe_load_all(helm("template", name, DEPLOY / "helm"))] for name in ("first", "second")
    )
    names = [{(x["kind"], x["metadata"]["name"]) for x in objects} for objects in (one, other)]
    assert not names[0] & names[1]
    labels = [x["spec"]["template"]["metadata"]["labels"] for x in other if x["kind"] == "Deployment"]
    for x in one:
        selector = x["spec"].get("selector", x["spec"].get("podSelector"))
        selector = selector if "matchLabels" in selector else {"matchLabels": selector}
        assert not any(_selects(selector, found) for found in labels)


@pytest.mark.parametrize("name", SERVERS)
def test_the_routers_find_pods_that_are_ready_and_no_others(name) -> None:
    service = named(chart(), "Service", name)["spec"]
    assert service["clusterIP"] == "None"
    assert not service.get("publishNotReadyAddresses")
    # Until resolvers and routers have forgotten a pod that ends, it serves.
    assert _sleep_s(name) > RESOLVERS_KEEP_S + _LOOK_UP_S


@pytest.mark.parametrize("name", SERVERS)
def test_a_pods_side_channel_is_at_the_pods_own_address(name, tmp_path) -> None:
    assert transfer(deployment("kubernetes", tmp_path)[name]).extra.host == POD_IPS[name]


@pytest.mark.parametrize(("name", "ranks"), [("prefill", 8), ("decode", 2)])
def test_a_pod_with_several_gpus_is_ready_when_all_ranks_are(name, ranks) -> None:
    server = container(name, "several GPUs")
    assert Part(server["args"]).option("--tensor-parallel-size") == str(ranks)
    assert server["resources"]["limits"]["nvidia.com/gpu"] == ranks
    *shell, script = server["readinessProbe"]["exec"]["command"]
    assert shell == ["sh", "-c"]
    assert re.findall(r'"\$POD_IP:(\d+)"', script) == [str(14600 + rank) for rank in range(ranks)]


@pytest.mark.parametrize("name", SERVERS)
def test_a_pods_key_is_a_secret_that_only_its_user_can_read(name, tmp_path) -> None:
    (volume,) = (one for one in pod(name)["volumes"] if "secret" in one)
    (mount,) = (one for one in container(name)["volumeMounts"] if one["name"] == volume["name"])
    assert volume["secret"]["defaultMode"] == 0o400
    path = f"{mount['mountPath']}/key"
    assert transfer(deployment("kubernetes", tmp_path)[name]).extra.key_file == path
    assert f" --key {path} " in container(name)["readinessProbe"]["exec"]["command"][-1]
    assert mount["readOnly"] is True
    made = f"create secret generic {volume['secret']['secretName']} --from-file=key="
    assert made in README


@every_variant
@pytest.mark.parametrize("name", SERVERS)
def test_a_card_is_given_where_it_is_named_and_leaves_no_tcp(name, variant) -> None:
    server = container(name, variant)
    has_card = variant == "rdma"
    added = server["securityContext"]["capabilities"]
    assert added == {"drop": ["ALL"], **({"add": ["IPC_LOCK"]} if has_card else {})}
    assert ("rdma/hca" in server["resources"]["limits"]) is has_card
    (lanes,) = (one["value"] for one in server["env"] if one["name"] == "UCX_TLS")
    assert ("tcp" in lanes) is not has_card


def test_a_longer_lease_gives_servers_longer_to_end() -> None:
    for name in SERVERS:
        part = Part(container(name, "mooncake")["args"])
        drain_s = int(part.option("--shutdown-timeout"))
        assert transfer(part).extra.lease_s == 90.5 < drain_s
        assert drain_s + _sleep_s(name) < pod(name, "mooncake")["terminationGracePeriodSeconds"] - 10


def test_the_chart_names_every_mistake_of_the_values() -> None:
    wrong = {
        "prefill": {"replica": 3, "gpus": 0},
        "decode": {"autoscaling": {"maxReplicas": 8}},
        "modle": "x",
    }
    with pytest.raises(subprocess.CalledProcessError) as raised:
        chart(wrong)
    assert all(word in raised.value.stderr for word in ("replica", "gpus", "requests", "modle"))
    with pytest.raises(subprocess.CalledProcessError) as raised:
        chart({"decode": {"autoscaling": SCALED}})
    assert "set monitoring.enabled to true" in raised.value.stderr


@pytest.mark.parametrize("name", SERVERS)
def test_what_scales_servers_is_their_workload_and_asks_prometheus_for_this_release(name) -> None:
    objects = chart(VARIANTS["autoscaled"])
    scaled, workload = named(objects, "ScaledObject", name)["spec"], named(objects, "Deployment", name)
    # KEDA's default is a Deployment of apps/v1.
    assert scaled["scaleTargetRef"] == {"name": workload["metadata"]["name"]}
    assert "replicas" not in workload["spec"], "every upgrade would set it back"
    assert 0 < scaled["minReplicaCount"] < scaled["maxReplicaCount"]
    (monitor,) = (one for one in objects if one["kind"] == "PodMonitor")
    job = f'job="{NAMESPACE}/{monitor["metadata"]["name"]}"'
    for trigger in scaled["triggers"]:
        assert trigger["type"] == "prometheus"
        asked = trigger["metadata"]
        assert all(isinstance(value, str) for value in asked.values()), "KEDA takes nothing else"
        assert job in asked["query"]
        assert float(asked["threshold"]) > 0
        assert asked["serverAddress"].startswith("http://")
    assert f'role="{name}"' in scaled["triggers"][0]["metadata"]["query"]


def test_prometheus_scrapes_every_pod_and_may_connect() -> None:
    objects = chart(VARIANTS["monitored"])
    (monitor,) = (one for one in objects if one["kind"] == "PodMonitor")
    assert monitor["metadata"]["labels"]["release"] == "kps"
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["path"] == "/metrics"
    for name in (*SERVERS, "router"):
        template = named(objects, "Deployment", name)["spec"]["template"]
        assert _selects(monitor["spec"]["selector"], template["metadata"]["labels"])
        (only,) = template["spec"]["containers"]
        assert endpoint["port"] in {port["name"] for port in only["ports"]}
    rules = named(objects, "NetworkPolicy", "servers")["spec"]["ingress"]
    (peer,) = (peer for rule in rules for peer in rule["from"] if "namespaceSelector" in peer)
    assert peer in rules[0]["from"]
    assert peer["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}
    assert peer["podSelector"]["matchLabels"]


@pytest.mark.parametrize("variant", ["as it is", "mooncake", "autoscaled"])
def test_kubernetes_keeps_pair_and_side_channel_from_all_others(variant, tmp_path) -> None:
    parts = deployment("kubernetes", tmp_path)
    objects = chart(VARIANTS[variant])
    policy = named(objects, "NetworkPolicy", "servers")["spec"]
    assert policy["policyTypes"] == ["Ingress"]
    labels = {
        name: named(objects, "Deployment", name)["spec"]["template"]["metadata"]["labels"]
        for name in (*SERVERS, "router")
    }
    for name in SERVERS:
        assert _selects(policy["podSelector"], labels[name])
        config, http = transfer(parts[name]).extra, int(parts[name].option("--port"))
        low, high = map(int, parts[name].environment["UCX_TCP_PORT_RANGE"].split("-"))
        engine = {low, high, *MOONCAKE_PORTS, *range(config.port, config.port + MOST_RANKS)}
        for other in SERVERS:
            # A server has no business at another's HTTP port: only the router may set addresses.
            assert _allowed(policy, labels[other], {*engine, http, 22}) == engine
        assert _allowed(policy, labels["router"], {*engine, http, 22}) == {http}
    declared = {one["containerPort"] for one in container("prefill")["ports"]}
    assert transfer(parts["prefill"]).extra.port in declared
    alone = ({}, {"app.kubernetes.io/component": "prefill"}, {"app.kubernetes.io/name": "kvconnect"})
    for stranger in (*alone, {**labels["prefill"], "app.kubernetes.io/instance": "another"}):
        assert not _allowed(policy, stranger, {*engine, http, 22})


def _allowed(policy: dict[str, Any], labels: dict[str, str], ports: set[int]) -> set[int]:
    """Which of the TCP ports a pod of the same namespace may connect to."""
    return {
        port
        for rule in policy["ingress"]
        if any(_selects(peer["podSelector"], labels) for peer in rule["from"] if len(peer) == 1)
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


@pytest.mark.parametrize("number", [0, 1])
def test_the_chart_takes_the_readmes_commands(number) -> None:
    commands = re.findall(r"^    helm upgrade --install (kvconnect (?:.*\\\n)*.*)$", README, re.MULTILINE)
    assert len(commands) == 2
    # What is of a cluster that has a release already.
    words = shlex.split(commands[number].replace("\\\n", " ").replace("--reuse-values", ""))
    words[words.index("deploy/helm")] = str(DEPLOY / "helm")
    objects = list(yaml.safe_load_all(helm("template", *words)))
    workloads = [named(objects, "Deployment", name)["spec"] for name in (*SERVERS, "router")]
    images = [one["image"] for found in workloads for one in found["template"]["spec"]["containers"]]
    (vllm,), (router,) = (re.findall(rf"--target {one} +-t (\S+)", README) for one in ("vllm", "router"))
    assert (images == [vllm, vllm, router]) is (number == 0)
    scaled = {one["metadata"]["name"] for one in objects if one["kind"] == "ScaledObject"}
    assert scaled == ({f"{RELEASE}-{name}" for name in SERVERS} if number else set())


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
    found = re.search(r"install -o root -g (\S+) -m 640 key (\S+)", README)
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


# --- Ray, Dynamo, and the page --------------------------------------------------------------------


def test_rays_application_takes_the_readmes_arguments() -> None:
    (given,) = re.findall(r"serve run pd_app:build (.*)", README)
    assert given in README.split("## Ray")[1]
    taken = re.findall(r"``(\w+)``", (DEPLOY / "ray" / "pd_app.py").read_text())
    assert {word.partition("=")[0] for word in given.split()} | {"extra"} <= set(taken)


def test_every_file_that_the_readme_names_is_there_and_every_way_has_a_section() -> None:
    links = {DEPLOY / link for link in re.findall(r"\]\(([^)#]+)\)", README)}
    paths = {DEPLOY.parent / path.rstrip(".,;") for path in re.findall(r"\bdeploy/[\w./@*-]+", README)}
    paths |= {DEPLOY / f"{name}.*" for name in re.findall(r"`([\w-]+)\.\*`", README)}
    made = {DEPLOY / "kvconnect.key"}
    for path in links | paths - made:
        assert list(path.parent.glob(path.name)), f"README.md names {path}"
    sections = ["By hand", "Compose", "systemd", "Kubernetes by Helm", "Ray", "Dynamo"]
    assert re.findall(r"^## (.*)$", README, re.MULTILINE)[: len(sections)] == sections


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
    # Everything else that the project names is made to fail.
    named = {name.replace("-", "_") for name in re.findall(r'"([A-Za-z-]+)[><=]', project)}
    blocked = {{"pyzmq": "zmq"}.get(name, name) for name in named - names}
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
