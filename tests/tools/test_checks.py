"""``kvconnect doctor`` on this machine: faults are named, with what to do; the rest passes."""

from __future__ import annotations

import json
import os
import resource
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvconnect.engine.lanes import look_at_fabric
from kvconnect.errors import ConfigError
from kvconnect.peer.keyring import new_secret, write
from kvconnect.tools.facts import Machine, look
from kvconnect.tools.findings import Level
from kvconnect.tools.trial import Trial, run_trial, wire_of
from kvconnect.vllm.configuration import read_configuration
from tests.ports import free_port
from tests.tools.kit import QUICK, RDMA, configured, failures, found, make_root

ROOT = Path(__file__).parents[2]
OTHER = "192.0.2.77"
"""An address that is no loopback address, and not of this machine."""


@pytest.fixture(autouse=True)
def _home(monkeypatch, tmp_path):
    for name in [*os.environ]:
        if name.startswith(("KVCONNECT_", "XDG_", "UCX_", "MC_", "VLLM_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def doctor(*arguments: str, before: str = "", code: int = 0) -> str:
    """Run the command in a process of its own, after a line of Python; what it prints."""
    program = f"import sys\n{before}\nfrom kvconnect.cli import main\nmain()"
    command = [sys.executable, "-c", program, "doctor", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, cwd=ROOT)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def test_what_is_well_passes_and_no_line_is_wider_than_80():
    said = doctor("--kv-transfer-config", configured("kv_producer"))
    assert "0 failures" in said
    assert max(map(len, map(str.rstrip, said.splitlines()))) <= 80
    assert "nixl 1." in said


def test_no_engine_that_works_is_a_failure_that_says_what_to_install():
    gone = "sys.modules['nixl'] = sys.modules['mooncake'] = None"
    said = json.loads(doctor("--json", before=gone, code=1))
    assert said["works"] is False
    (wrong,) = [one for one in said["findings"] if one["level"] == "failure"]
    assert wrong["about"] == "engine auto"
    assert "none works here" in wrong["found"]
    assert "pip install 'kvconnect[nixl]'" in wrong["found"]


def test_the_engine_that_is_configured_has_to_work_and_no_other():
    engines = {"nixl": "NIXL is not usable", "mooncake": ""}
    said = failures(found(configured(engine="nixl"), engines=engines))
    assert list(said) == ["engine nixl"]
    assert "NIXL is not usable > install it" in said["engine nixl"]
    assert failures(found(configured(engine="mooncake"), engines=engines)) == {}
    assert "takes mooncake" in found(configured(), engines=engines)["engine auto"].found


def test_a_wrong_protocol_is_found_by_starting_the_engine():
    said = failures(found(configured(engine="nixl", protocol="rmda"), trial=run_trial))
    assert "NIXL cannot start its backend 'rmda'" in said["engine nixl"]
    assert "protocol is 'rmda' > look at protocol" in said["engine nixl"]


def test_a_device_that_is_not_there_is_found_by_starting_the_engine_and_those_that_are_are_named():
    said = failures(found(configured(engine="nixl", device_name="mlx5_7:1"), trial=run_trial))
    assert "UCX gets NET_DEVICES=mlx5_7:1 by device_name or host; devices here are" in said["engine nixl"]


def test_rdma_that_is_asked_for_and_is_not_there_is_found_by_starting_the_engine():
    said = failures(found(configured(engine="mooncake", protocol="rdma"), trial=run_trial))
    assert "protocol 'rdma' needs adapters" in said["engine mooncake"]


def test_tcp_beside_an_rdma_device_is_a_warning_between_machines(tmp_path, monkeypatch):
    monkeypatch.setenv("KVCONNECT_KEY", new_secret())
    machine = replace(look(make_root(tmp_path), {"UCX_TLS": "tcp"}), memlock_bytes=None)
    said = found(configured(host=OTHER, engine="mooncake"), machine=machine, trial=Trial("tcp"))
    assert "bytes to other hosts go over tcp, though mlx5_0 is there" in said["transport"].found
    assert said["transport"].advice == "device_name mlx5_0; unset UCX_TLS"
    assert "transport" not in found(configured(engine="mooncake"), machine=machine, trial=Trial("tcp"))


@pytest.mark.parametrize(
    ("given", "level"),
    [({}, Level.WARNING), ({"device_name": "mlx5_9:1,mlx5_0:1"}, Level.FAILURE)],
    ids=["any", "named"],
)
def test_an_rdma_port_that_is_down_is_a_warning_and_a_named_one_a_failure(tmp_path, given, level):
    machine = replace(look(make_root(tmp_path, state="1: DOWN")), memlock_bytes=None)
    down = found(configured(**given), machine=machine, trial=RDMA)["RDMA mlx5_0:1"]
    assert (down.level, down.found[:16]) == (level, "DOWN, 400 Gb/sec")


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


def test_a_host_that_is_not_this_machine_is_a_failure(monkeypatch):
    monkeypatch.setenv("KVCONNECT_KEY", new_secret())
    said = failures(found(configured(host=OTHER)))
    assert f"{OTHER}:0 cannot be listened on" in said["port"]


def test_locked_memory_of_64_kib_is_a_failure_beside_an_rdma_device(tmp_path):
    root = make_root(tmp_path)
    program = (
        "import resource\n"
        "resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))\n"
        "from kvconnect.tools.facts import look\n"
        "from pathlib import Path\n"
        "from tests.tools.kit import *\n"
        f"said = found(configured(), machine=look(Path({str(root)!r})))\n"
        "print(failures(said))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    said = eval(done.stdout)
    assert list(said) == ["memlock"], done.stderr
    assert "64 KiB: RDMA devices cannot register memory" in said["memlock"]
    assert "ulimit -l unlimited" in said["memlock"]


def test_locked_memory_does_not_matter_without_rdma_or_where_it_may_be_exceeded(tmp_path):
    little = Machine(memlock_bytes=65536, shm_free_bytes=1 << 30)
    assert failures(found(configured(), machine=little)) == {}
    mighty = replace(look(make_root(tmp_path)), memlock_bytes=65536, may_lock=True)
    assert failures(found(configured(), machine=mighty)) == {}


def test_small_limits_are_warnings():
    small = Machine(open_files=1024, shm_free_bytes=64 << 20, shm_bytes=64 << 20)
    said = found(configured(), machine=small)
    assert "1024" in said["open files"].found
    assert "--shm-size" in said["/dev/shm"].advice
    assert look().open_files == resource.getrlimit(resource.RLIMIT_NOFILE)[0]


GPUS = ("H200", "H200")


def test_gpus_without_their_way_to_the_network_are_warned_of(tmp_path):
    machine = replace(look(make_root(tmp_path)), gpus=GPUS, visible_gpus=2, memlock_bytes=None, compiler="")
    said = found(configured(), machine=machine)
    assert "go through host memory" in said["GPUDirect"].found
    assert "no C compiler" in failures(said)["Triton"]
    well = replace(machine, has_peermem=True, compiler="/usr/bin/gcc")
    assert "nvidia_peermem" in found(configured(), machine=well)["GPUDirect"].found
    well = replace(machine, has_dmabuf=True)
    assert "by DMA-BUF" in found(configured(), machine=well)["GPUDirect"].found


def test_gpus_that_torch_does_not_see_are_warned_of():
    said = found(configured(), machine=Machine(gpus=GPUS, shm_free_bytes=1 << 30))
    assert "no GPU, though this machine has 2 x H200" in said["torch"].found


class Nvml:
    """Four GPUs: two with 12 links to a switch, two with a bridge of 4 links, one of which is down."""

    NVML_NVLINK_MAX_LINKS = 18
    ENDS = ([*["switch"] * 12], [*["switch"] * 12], ["3", "3", "3", None], ["2", "2", "2", None])

    class NVMLError(Exception):
        pass

    def __init__(self, *, has_driver: bool = True) -> None:
        self.has_driver = has_driver

    def nvmlInit(self):
        if not self.has_driver:
            raise self.NVMLError

    def nvmlShutdown(self):
        pass

    def nvmlDeviceGetCount(self):
        return len(self.ENDS)

    def nvmlDeviceGetHandleByIndex(self, index):
        return index

    def nvmlDeviceGetPciInfo(self, gpu):
        return SimpleNamespace(busId=str(gpu))

    def nvmlDeviceGetName(self, gpu):
        return "H200"

    def nvmlDeviceGetNvLinkState(self, gpu, number):
        if number >= len(self.ENDS[gpu]):
            raise self.NVMLError
        return self.ENDS[gpu][number] is not None

    def nvmlDeviceGetNvLinkRemotePciInfo(self, gpu, number):
        return SimpleNamespace(busId=self.ENDS[gpu][number])


def test_the_links_of_gpus_are_counted_by_where_they_end(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", Nvml())
    for ends, links in ((Nvml.ENDS, 12), ((["1", "1", None], ["0", "0", "0"]), 2), ((["1"], ["switch"]), 1)):
        monkeypatch.setattr(Nvml, "ENDS", ends)
        found = look_at_fabric(with_gpus=True)
        assert (found.gpus, found.nvlinks) == (("H200",) * len(ends), links)
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(has_driver=False))
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
    tried = run_trial("nowhere", "127.0.0.1")
    assert tried.error


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


@pytest.mark.parametrize(
    ("version", "environ", "about", "names"),
    [
        ("0.29.1", {}, "vLLM", "install vLLM 0.30 to 0.33"),
        ("0.32.0", {"VLLM_PLUGINS": "other"}, "vLLM plugin", '"kv_connector_module_path": "kvconnect.vllm"'),
    ],
)
def test_a_vllm_that_would_not_find_us_is_named(version, environ, about, names):
    machine = Machine(versions={"vllm": version}, environ=environ, shm_free_bytes=1 << 30)
    assert names in found(configured(), machine=machine)[about].advice


def test_no_secret_of_the_environment_is_kept():
    assert "KVCONNECT_KEY" not in look(environ={"KVCONNECT_KEY": "x", "UCX_TLS": "tcp"}).environ
    assert QUICK.machine is look


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
