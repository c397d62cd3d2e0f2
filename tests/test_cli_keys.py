"""``kvconnect keys``, as an operator uses it: two nodes that know each other in the end."""

from __future__ import annotations

import json
import stat

import pytest
from typer.testing import CliRunner

from kvconnect.cli import app
from kvconnect.config import ExtraConfig
from kvconnect.errors import ConfigError
from kvconnect.peer.keyring import load_keyring
from kvconnect.receipt import Receipt, sign


@pytest.fixture
def keys(monkeypatch, tmp_path):
    """Run ``kvconnect keys ...``; the lines it prints. An error of ours is raised."""
    for name in ("KVCONNECT_KEY", "KVCONNECT_KEYS_DIR", "XDG_RUNTIME_DIR", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))

    def run(*arguments, code=0):
        result = CliRunner().invoke(app, ["keys", *map(str, arguments)])
        if isinstance(result.exception, ConfigError):
            raise result.exception
        assert result.exit_code == code, result.output
        return result.output.splitlines()

    return run


def public_key(lines):
    (line,) = (line for line in lines if line.startswith("public key"))
    return line.split()[-1]


def test_a_shared_key_makes_nodes_that_know_each_other(keys, tmp_path):
    path = tmp_path / "key"
    said = keys("new", path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    one, two = (load_keyring(ExtraConfig(host="10.0.0.1", key_file=str(path)), {}) for _ in range(2))
    assert one.knows(two.client.public)
    assert keys("show", path) == [one.describe()]
    assert one.describe() in said[0]
    assert path.read_text().strip() not in "".join(said)


def test_a_key_is_not_overwritten_unless_told_to(keys, tmp_path):
    keys("new", tmp_path / "key")
    before = (tmp_path / "key").read_text()
    with pytest.raises(ConfigError, match="is there already"):
        keys("new", tmp_path / "key")
    assert (tmp_path / "key").read_text() == before
    keys("new", tmp_path / "key", "--replace")
    assert (tmp_path / "key").read_text() != before


def test_a_key_for_the_environment_is_printed_alone(keys):
    (secret,) = keys("new", "-")
    assert load_keyring(ExtraConfig(host="10.0.0.1"), {"KVCONNECT_KEY": secret}) is not None


def test_two_nodes_with_keys_of_their_own_know_each_other(keys, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    publics = [public_key(keys("node", one))]
    publics.append(public_key(keys("node", two, "--cluster-key", one / "cluster.key")))
    keys("add", one, "two", publics[1], "--at", "10.0.0.2:14600-14607")
    keys("add", two, "10.0.0.1", publics[0])
    first, second = (load_keyring(ExtraConfig(host="10.0.0.1", keys_dir=str(at)), {}) for at in (one, two))
    assert first.knows(second.client.public)
    assert first.server_key("10.0.0.2", 14607) == second.server.public
    assert second.server_key("10.0.0.1", 1) == first.server.public
    assert first.handle_secret == second.handle_secret
    assert {stat.S_IMODE((one / name).stat().st_mode) for name in ("node.key", "cluster.key")} == {0o600}
    assert any("two at 10.0.0.2:14600-14607" in line for line in keys("show", one))
    keys("remove", one, "two")
    assert not first.knows(second.client.public), "at once, without a restart"


def test_a_node_gets_another_key_and_keeps_its_peers(keys, tmp_path):
    before = public_key(keys("node", tmp_path / "n"))
    keys("add", tmp_path / "n", "p", before)
    cluster = (tmp_path / "n" / "cluster.key").read_text()
    with pytest.raises(ConfigError, match="is there already"):
        keys("node", tmp_path / "n")
    said = keys("node", tmp_path / "n", "--replace")
    assert public_key(said) != before
    assert (tmp_path / "n" / "cluster.key").read_text() == cluster
    assert any(line.startswith("peer") for line in said)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("add", "{n}", "p", "xy"), "PUBLIC_KEY is not a key; accepted: 64 hexadecimal"),
        (("add", "{n}", "p", "0" * 64, "--at", "a b"), "--at has 'a b'"),
        (("add", "{n}", "a b", "0" * 64), "NAME, without --at, has 'a b'"),
        (("add", "{n}", "../p", "0" * 64, "--at", "h"), "NAME is '../p'; accepted: a file name"),
        (("add", "{n}/none", "p", "0" * 64), "which has no folder 'peers'"),
        (("remove", "{n}", "p"), "NAME is 'p'.*cannot be removed"),
        (("show", "{n}/none"), "key_file is '.*none', which cannot be read"),
        (("node", "{n}/new", "--cluster-key", "{n}/none"), "--cluster-key is '.*none'"),
    ],
)
def test_what_is_wrong_is_said(keys, tmp_path, arguments, match):
    keys("node", tmp_path / "n")
    with pytest.raises(ConfigError, match=match):
        keys(*(argument.replace("{n}", str(tmp_path / "n")) for argument in arguments))


def test_without_a_path_it_shows_what_a_node_of_this_user_would_use(keys, tmp_path):
    (line,) = keys("show")
    assert str(tmp_path / "home" / ".config" / "kvconnect" / "key") in line


def test_a_receipt_is_verified_from_an_answer_with_the_key_of_the_cluster(keys, tmp_path):
    path, other = tmp_path / "key", tmp_path / "other"
    keys("new", path)
    keys("new", other)
    keyring = load_keyring(ExtraConfig(host="10.0.0.1", key_file=str(path)), {})
    tokens = {"peer": 5, "computed": 1}
    names = {"request_id": "r\x1b[31m", "engine_id": "D", "prompt": ""}
    receipt = Receipt(**names, prompt_tokens=6, tokens=tokens, issued_at=0, version=1)
    signed, file = sign(receipt, keyring.receipt_secret), tmp_path / "answer.json"
    for given in (signed, {"kv_transfer_params": {"kvconnect_receipt": signed}, "id": "cmpl"}):
        file.write_text(json.dumps(given))
        assert keys("verify", file, "--key", path) == [
            "valid: request r [31m, 6 prompt tokens: 5 peer, 1 computed"
        ]
        assert "another key" in keys("verify", file, "--key", other, code=1)[0]
    file.write_text(json.dumps({**signed, "prompt_tokens": 7}))
    assert "was changed" in keys("verify", file, "--key", path, code=1)[0]
    file.write_text("{")
    with pytest.raises(ConfigError, match="has no JSON"):
        keys("verify", file, "--key", path)
