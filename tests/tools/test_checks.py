"""``kvconnect doctor`` on this machine: faults are named, with what to do; the rest passes."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest

from kvconnect.engine.lanes import RdmaPort, look_at_fabric
from kvconnect.errors import ConfigError
from kvconnect.node.children import COMMAND
from kvconnect.peer.keyring import new_secret, write
from kvconnect.tools.facts import look
from kvconnect.tools.findings import Level
from kvconnect.tools.trial import Trial, run_trial, wire_of
from kvconnect.vllm.configuration import read_configuration
from tests.ports import free_port
from tests.tools.kit import configured, failures, found

OTHER = "192.0.2.77"
"""An address that is no loopback address, and not of this machine."""


@pytest.fixture(autouse=True)
def _home(monkeypatch, tmp_path):
    for name in [*os.environ]:
        if name.startswith(("KVCONNECT_", "XDG_", "UCX_", "MC_", "VLLM_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def test_what_is_well_passes_and_no_line_is_wider_than_80():
    command = [*COMMAND, "doctor", "--kv-transfer-config", configured("kv_producer")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 failures" in done.stdout
    assert max(map(len, map(str.rstrip, done.stdout.splitlines()))) <= 80
    assert "nixl 1." in done.stdout


def test_the_engine_that_is_configured_has_to_work_and_no_other():
    engines = {"nixl": "NIXL is not usable: pip", "mooncake": ""}
    said = failures(found(configured(engine="nixl"), engines=engines))
    assert list(said) == ["engine nixl"]
    assert "NIXL is not usable: pip > install it" in said["engine nixl"]
    assert failures(found(configured(engine="mooncake"), engines=engines)) == {}
    assert "takes mooncake" in found(configured(), engines=engines)["engine auto"].found
    said = failures(found(configured(), engines={"nixl": "NIXL is not usable: pip"}))
    assert list(said) == ["engine auto"]
    assert "none works here: nixl: NIXL is not usable: pip" in said["engine auto"]


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (
            {"engine": "nixl", "device_name": "mlx5_7:1"},
            "UCX gets NET_DEVICES=mlx5_7:1 by device_name or host; devices here are",
        ),
        ({"engine": "mooncake", "protocol": "rdma"}, "protocol 'rdma' needs adapters"),
    ],
)
def test_what_is_asked_for_and_is_not_there_is_found_by_starting_the_engine(given, why):
    said = failures(found(configured(**given), trial=run_trial))[f"engine {given['engine']}"]
    assert why in said
    assert "> look at protocol, device_name" in said


@pytest.fixture(scope="module")
def with_rdma(tmp_path_factory):
    """A machine with one RDMA device, whose processes have no rights of their own."""
    root = tmp_path_factory.mktemp("root")
    files = {"state": "4: ACTIVE", "rate": "400 Gb/sec (4X NDR)", "link_layer": "InfiniBand"}
    port, status = root / "sys/class/infiniband/mlx5_0/ports/1", root / "proc/self/status"
    for folder in (port, status.parent):
        folder.mkdir(parents=True)
    for name, text in files.items():
        (port / name).write_text(f"{text}\n")
    status.write_text("Name:\tx\nCapEff:\t0000000000000000\n")
    return replace(look(root, {}), memlock_bytes=None)


PASS, WARNING, FAILURE = Level
DOWN = {"rdma": (RdmaPort("mlx5_0", 1, "DOWN", "400 Gb/sec", "InfiniBand"),)}
GPUS = {"gpus": ("H200",) * 2}
SEEN = {**GPUS, "visible_gpus": 2}
LITTLE = {"memlock_bytes": 65536}
TCP = {"environ": {"UCX_TLS": "tcp"}, "given": {"engine": "mooncake"}}
FAR = {**TCP, "given": {**TCP["given"], "host": OTHER}}
GROWS = {"environ": {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}}
HIDDEN = {"versions": {"vllm": "0.32.0"}, "environ": {"VLLM_PLUGINS": "other"}}
NAMED = {"given": {"device_name": "mlx5_9:1,mlx5_0:1"}}
ROWS = [
    ("transport", WARNING, "over tcp, though mlx5_0 is there > device_name mlx5_0; unset UCX_TLS", FAR),
    ("transport", None, "", TCP),
    ("RDMA mlx5_0:1", PASS, "ACTIVE, 400 Gb/sec (4X NDR), InfiniBand", {}),
    ("RDMA mlx5_0:1", WARNING, "DOWN, 400 Gb/sec", DOWN),
    ("RDMA mlx5_0:1", FAILURE, "DOWN, 400 Gb/sec", {**DOWN, **NAMED}),
    ("memlock", FAILURE, "64 KiB: RDMA devices cannot register memory > ulimit -l unlimited", LITTLE),
    ("memlock", WARNING, "RDMA may need more > ulimit -l", {"memlock_bytes": 128 << 20}),
    ("memlock", PASS, "enough without RDMA", {**LITTLE, "rdma": ()}),
    ("memlock", PASS, "may exceed it", {**LITTLE, "may_lock": True}),
    ("open files", WARNING, "1024 > each peer takes several: ulimit -n 16384", {"open_files": 1024}),
    ("/dev/shm", WARNING, "> Docker: --shm-size 8g", {"shm_free_bytes": 64 << 20}),
    ("GPUDirect", WARNING, "go through host memory > modprobe", SEEN),
    ("GPUDirect", PASS, "RDMA devices reach GPU memory by nvidia_peermem", {**SEEN, "has_peermem": True}),
    ("GPUDirect", PASS, "RDMA devices reach GPU memory by DMA-BUF", {**SEEN, "has_dmabuf": True}),
    ("Triton", FAILURE, "no C compiler was found > ", {**SEEN, "compiler": ""}),
    ("Triton", FAILURE, "pip install triton", {**SEEN, "versions": {}}),
    ("torch", WARNING, "no GPU, though this machine has 2 x H200", GPUS),
    ("allocator", WARNING, "take expandable_segments out", {**SEEN, **GROWS}),
    ("aiohttp", WARNING, "pip install 'kvconnect[node]'", {"versions": {}}),
    ("vLLM", WARNING, "install vLLM 0.30 to 0.33", {"versions": {"vllm": "0.29.1"}}),
    ("vLLM plugin", FAILURE, '"kv_connector_module_path": "kvconnect.vllm"', HIDDEN),
]


@pytest.mark.parametrize(("about", "level", "text", "changes"), ROWS)
def test_a_row_of_the_machine(with_rdma, monkeypatch, about, level, text, changes):
    monkeypatch.setenv("KVCONNECT_KEY", new_secret())
    well = {"shm_free_bytes": 1 << 30, "compiler": "gcc", "versions": {"triton": "3.7"}}
    changes = {**well, **changes}
    given = configured(**changes.pop("given", {}))
    said = found(given, machine=replace(with_rdma, **changes), trial=Trial("tcp"), port="")
    row = said.get(about)
    assert (row and row.level) is level
    assert row is None or text in f"{row.found} > {row.advice}"
    assert list(failures(said)) == [about] * (level is FAILURE)


def test_a_key_that_others_can_read_is_a_failure(tmp_path):
    path = tmp_path / "key"
    write(path, new_secret(), mode=0o644)
    path.chmod(0o644)
    said = failures(found(configured(key_file=str(path))))
    assert list(said) == ["key"]
    assert "0644: others can use it" in said["key"]
    assert "(chmod 600)" in said["key"]
    path.chmod(0o600)
    assert "shared key" in found(configured(key_file=str(path)))["key"].found


def test_no_key_between_machines_is_a_failure_and_none_is_made_here(tmp_path):
    said = failures(found(configured(host=OTHER)))
    assert "kvconnect keys new" in said["key"]
    assert f"{OTHER}:0 cannot be listened on" in said["port"]
    assert "none yet" in found(configured())["key"].found
    assert found(configured(insecure=True))["key"].found.startswith("insecure")
    assert not (tmp_path / "home").exists()


def test_a_port_that_another_program_has_is_a_failure():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        said = failures(found(configured(port=port, peer_timeout_s=0.5)))
        router = failures(found(configured("kv_producer", bootstrap_port=port)))
    assert router["bootstrap port"].startswith(f"127.0.0.1:{port} is taken")
    assert list(said) == ["port"]
    assert f"127.0.0.1:{port} is taken" in said["port"]
    assert "another port" in said["port"]
    free = free_port()
    assert found(configured(port=free))["port"].found.startswith(f"127.0.0.1:{free} is free")


def test_the_limits_of_this_process_are_looked_at():
    names = ((resource.RLIMIT_NOFILE, look().open_files), (resource.RLIMIT_MEMLOCK, look().memlock_bytes))
    for limit, found_limit in names:
        assert resource.getrlimit(limit)[0] in (found_limit, resource.RLIM_INFINITY)


class NVMLError(Exception):
    pass


ENDS = ([*["switch"] * 12], [*["switch"] * 12], ["3", "3", "3", None], ["2", "2", "2", None])
"""Of the links of four GPUs: two with 12 to a switch, two with a bridge of 4, one of which is down."""


@pytest.mark.parametrize(
    ("ends", "links"),
    [(ENDS, 12), ((["1", "1", None], ["0", "0", "0"]), 2), ((["1"], ["switch"]), 1)],
    ids=["switch", "bridge", "apart"],
)
def test_the_links_of_gpus_are_counted_by_where_they_end(monkeypatch, ends, links):
    def fails():
        raise NVMLError

    nvml = SimpleNamespace(
        NVMLError=NVMLError,
        NVML_NVLINK_MAX_LINKS=18,
        nvmlInit=lambda: None,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: len(ends),
        nvmlDeviceGetHandleByIndex=int,
        nvmlDeviceGetPciInfo=lambda gpu: SimpleNamespace(busId=str(gpu)),
        nvmlDeviceGetName=lambda gpu: "H200",
        nvmlDeviceGetNvLinkState=lambda gpu, at: (
            ends[gpu][at] is not None if at < len(ends[gpu]) else fails()
        ),
        nvmlDeviceGetNvLinkRemotePciInfo=lambda gpu, at: SimpleNamespace(busId=ends[gpu][at]),
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    found = look_at_fabric(with_gpus=True)
    assert (found.gpus, found.nvlinks) == (("H200",) * len(ends), links)
    nvml.nvmlInit = fails
    assert look_at_fabric(with_gpus=True).gpus == ()


def test_what_ucx_says_of_a_write_is_read_as_it_is_printed():
    lines = [
        "[1.0] [vm:1 :0]   | remote memory write by ucp_put* from host memory to host |",
        "[1.0] [vm:1 :0]   | Range  | Description |              Config               |",
        "[1.0] [vm:1 :0]   | 0..2038 | short      | rc_mlx5/mlx5_0:1 |",
        "[1.0] [vm:1 :0]   | 2039..inf | zero-copy   | rc_mlx5/mlx5_1:1 |",
        "[1.0] [vm:1 :0]   | active message by ucp_am_send* from host memory |",
        "[1.0] [vm:1 :0]   | 0..inf | multi-frag | tcp/lo |",
    ]
    assert wire_of(lines) == "rc_mlx5/mlx5_1:1"
    assert wire_of(lines[4:]) == ""


def test_an_engine_whose_process_dies_is_an_error_and_not_ours(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    assert run_trial("nowhere", "127.0.0.1").error


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ('{"kv_role": "kv_producer", "kv_rol": 1}', "did you mean 'kv_role'"),
        ("{", "not JSON"),
        ("/nowhere/file.json", "it cannot be read: No such file"),
        ('{"kv_connector": "MultiConnector", "kv_role": "kv_both"}', "0 connectors named 'KVConnect'"),
    ],
)
def test_a_configuration_that_cannot_be_used_is_a_failure_beside_all_others(given, names):
    said = found(given)
    assert names in failures(said)["configuration"]
    assert "Python" in said


def test_a_configuration_is_read_as_vllm_takes_it(tmp_path):
    ours = json.loads(configured("kv_consumer", port=14_600)) | {"kv_rank": 1, "kv_buffer_size": 1e9}
    (tmp_path / "config.json").write_text(json.dumps(ours))
    assert read_configuration(str(tmp_path / "config.json")).extra.port == 14_600
    several = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"connectors": [{"kv_connector": "Other"}, ours]},
    }
    assert read_configuration(json.dumps(several)).extra.port == 14_600
    several["kv_connector_extra_config"]["connectors"][0] = ours
    with pytest.raises(ConfigError, match="2 connectors"):
        read_configuration(json.dumps(several))


def test_no_secret_of_the_environment_is_kept():
    assert "KVCONNECT_KEY" not in look(environ={"KVCONNECT_KEY": "x", "UCX_TLS": "tcp"}).environ


def test_ranks_are_shown_with_the_machine_that_they_are_of_and_devices_that_are_missing():
    ranks = {
        "0-1": {"host": OTHER},
        "2": {"host": "127.0.0.0/8", "device_name": "lo"},
        "3": {"host": "127.0.0.2", "device_name": "lo,none0:1"},
        "4": {"host": "192.0.2.64/28", "bind": "0.0.0.0"},
    }
    port = free_port()
    asked = []

    def look_at_port(host, port):
        asked.append((host, port))
        return ""

    rows = found(configured(ranks=ranks, port=port, bootstrap_port=port + 9), port=look_at_port)
    assert rows["ranks 0-1"].found == f"{OTHER}, on another machine"
    assert rows["ranks 2"].found == "127.0.0.1, over lo"
    assert rows["ranks 4"].found == "192.0.2.64/28, listening at 0.0.0.0, on another machine"
    assert list(failures(rows)) == ["ranks 3"]
    assert rows["ranks 3"].found == "127.0.0.2, over lo,none0:1, and none0 is not here"
    assert "lo" in rows["ranks 3"].advice
    assert asked[0] == ("127.0.0.1", port + 2), "the first rank that is here"
    assert "bootstrap port" not in rows, "that of rank 0"
