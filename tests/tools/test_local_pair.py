"""The commands of ``kvconnect up``: what each machine gets, and everything that is missing, at once."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace

import pytest

from kvconnect.errors import ConfigError
from kvconnect.tools import local_pair
from kvconnect.tools.local_pair import LocalHost, LocalModel, free_memory, look_at_model, plan_pair

GIB = 1 << 30
MODEL = LocalModel("org/model", 32768, GIB)
CPU = LocalHost("0.32.0", ("serve",), is_cpu_build=True, cpus=tuple(range(8)), free_bytes=32 * GIB)
GPUS = LocalHost("0.33.0", ("serve",), gpus=("4", "6"))


def config(launch):
    return json.loads(launch.command[launch.command.index("--kv-transfer-config") + 1])


def option(launch, name):
    return launch.command[launch.command.index(name) + 1] if name in launch.command else None


def test_two_gpus_serve_one_server_each():
    pair = plan_pair(MODEL, GPUS, 8000)
    assert [one.environment for one in (pair.prefill, pair.decode)] == [
        {"CUDA_VISIBLE_DEVICES": "4"},
        {"CUDA_VISIBLE_DEVICES": "6"},
    ]
    assert [config(one)["kv_role"] for one in (pair.prefill, pair.decode)] == ["kv_producer", "kv_consumer"]
    assert config(pair.decode)["kv_load_failure_policy"] == "recompute"
    assert option(pair.prefill, "--gpu-memory-utilization") is None
    assert (pair.prefill.url, pair.decode.url) == ("http://127.0.0.1:8100", "http://127.0.0.1:8200")
    assert option(pair.router, "--prefill") == pair.prefill.url
    assert option(pair.router, "--decode") == pair.decode.url
    assert not pair.one_by_one


def test_one_gpu_is_shared_and_its_servers_start_one_by_one():
    pair = plan_pair(MODEL, replace(GPUS, gpus=("0",)), 8000)
    for one in (pair.prefill, pair.decode):
        assert one.environment == {"CUDA_VISIBLE_DEVICES": "0"}
        assert float(option(one, "--gpu-memory-utilization")) < 0.5
    assert pair.one_by_one


def test_tensor_parallel_servers_take_gpus_of_their_own():
    pair = plan_pair(MODEL, replace(GPUS, gpus=tuple("0123")), 8000, ["--tensor-parallel-size=2"])
    assert [one.environment["CUDA_VISIBLE_DEVICES"] for one in (pair.prefill, pair.decode)] == ["0,1", "2,3"]
    with pytest.raises(ConfigError, match=r"size is 2, and 2 GPUs are visible; two servers need 4"):
        plan_pair(MODEL, GPUS, 8000, ["-tp", "2"])
    with pytest.raises(ConfigError, match=r"-tp is 'two'; accepted: a number"):
        plan_pair(MODEL, GPUS, 8000, ["-tp", "two"])


def test_a_cpu_is_halved_and_its_memory_left_usable():
    pair = plan_pair(MODEL, CPU, 9000)
    assert pair.prefill.environment == {"VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_CPU_OMP_THREADS_BIND": "0,1,2,3"}
    assert pair.decode.environment["VLLM_CPU_OMP_THREADS_BIND"] == "4,5,6,7"
    assert option(pair.prefill, "--max-model-len") == "4096"
    assert "--enforce-eager" in pair.prefill.command
    bare = replace(CPU, cpus=(5,), has_compiler=False, free_bytes=10 * GIB)
    small = plan_pair(MODEL, bare, 9000, ["--max-model-len", "512"])
    assert small.decode.environment == {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "5",
        "TORCHDYNAMO_DISABLE": "1",
    }
    assert small.decode.command.count("--max-model-len") == 1
    two = plan_pair(MODEL, CPU, 9000, ["-tp", "2"])
    assert two.decode.environment["VLLM_CPU_OMP_THREADS_BIND"] == "4,5|6,7"


def test_everything_that_is_missing_is_named_at_once(tmp_path):
    host = LocalHost(lacks=("aiohttp", "nixl", "mooncake"), taken_ports=(8000, 8200))
    with pytest.raises(ConfigError) as caught:
        plan_pair(look_at_model(str(tmp_path / "none")), host, 8000)
    text = str(caught.value)
    for part in ("no such folder", "vLLM is not installed", "aiohttp", "engine", "port 8000", "port 8200"):
        assert part in text
    assert "there are 6 mistakes" in text


def test_a_machine_that_is_too_small_is_refused_with_what_is_needed():
    with pytest.raises(
        ConfigError, match=r"8 GiB of memory are free, and two servers of org/model need 9 GiB"
    ):
        plan_pair(MODEL, replace(CPU, free_bytes=8 * GIB), 8000)
    with pytest.raises(ConfigError, match=r"0\.33\.0 is a build for GPUs, and none is visible"):
        plan_pair(MODEL, replace(GPUS, gpus=()), 8000)


def test_a_command_can_be_copied_into_a_shell():
    launch = plan_pair(LocalModel("/a folder/model"), CPU, 8000).prefill
    words = shlex.split(str(launch))
    assert words[0] == "VLLM_CPU_KVCACHE_SPACE=4"
    assert tuple(words[len(launch.environment) :]) == launch.command


def test_a_model_is_read_from_its_folder(tmp_path):
    (tmp_path / "config.json").write_text('{"text_config": {"max_position_embeddings": 64}}')
    (tmp_path / "one.safetensors").write_bytes(b"12345")
    assert look_at_model(str(tmp_path)) == LocalModel(str(tmp_path), 64, 5)
    (tmp_path / "config.json").write_text("{")
    assert "is not JSON" in look_at_model(str(tmp_path)).problem
    (tmp_path / "config.json").unlink()
    assert "config.json: it cannot be read" in look_at_model(str(tmp_path)).problem


def test_free_memory_is_also_that_of_the_control_group(tmp_path):
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 100 kB\nMemAvailable: 64 kB\n")
    assert free_memory(tmp_path) == 64 << 10
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("4096\n")
    assert free_memory(tmp_path) == 64 << 10
    (group / "memory.max").write_text("8192\n")
    assert free_memory(tmp_path) == 4096


def test_this_machine_is_looked_at():
    host = local_pair.look_at_host(8000)
    assert host.cpus
    assert host.free_bytes > 0
