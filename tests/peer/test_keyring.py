"""Keys: where they come from, who can read them, and what is said where they are of no use."""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
import threading
import time

import pytest
import zmq
from zmq.utils import z85

from kvconnect.config import ExtraConfig
from kvconnect.errors import ConfigError
from kvconnect.peer.allow_list import AllowList
from kvconnect.peer.keyring import (
    NodeKeys,
    SharedKeys,
    derive,
    fingerprint,
    load_keyring,
    new_key_pair,
    read_secret,
    user_key,
    user_key_path,
    write,
)
from tests.peer.keys import introduce, make_folder, node_keys

SECRET = "a secret that is long enough for anybody"


@pytest.fixture(autouse=True)
def _own_mask():
    old = os.umask(0o022)
    yield
    os.umask(old)


def key_file(folder, text=SECRET, mode=0o600):
    path = folder / "key"
    path.write_text(text + "\n")
    path.chmod(mode)
    return path


# --- derivation -----------------------------------------------------------------------------------


def test_keys_are_derived_by_hkdf_and_are_pairs():
    keys = SharedKeys(SECRET, "a test")
    extracted = hmac.new(b"kvconnect 1", SECRET.encode(), hashlib.sha256).digest()
    assert derive(SECRET, "handles") == hmac.new(extracted, b"handles\x01", hashlib.sha256).digest()
    assert keys.handle_secret == derive(SECRET, "handles")
    for pair, purpose in ((keys.server, "curve server"), (keys.client, "curve client")):
        assert pair.secret == derive(SECRET, purpose)
        assert z85.encode(pair.public) == zmq.curve_public(z85.encode(pair.secret))
    assert len({keys.server.secret, keys.client.secret, keys.handle_secret}) == 3


def test_nodes_with_one_secret_know_each_other_and_nobody_else():
    one, two, other = (SharedKeys(text, "a test") for text in (SECRET, SECRET, SECRET + "!"))
    assert one.knows(two.client.public)
    assert one.server_key("anywhere", 1) == two.server.public
    assert not one.knows(other.client.public)
    assert not one.knows(one.server.public)
    assert one.describe() == two.describe() != other.describe()


def test_no_secret_is_in_what_people_are_shown():
    keys = SharedKeys(SECRET, "a test")
    for shown in (repr(keys.server), keys.describe()):
        assert keys.server.secret.hex() not in shown
        assert repr(keys.server.secret)[2:-1] not in shown
        assert SECRET not in shown


# --- where they come from -------------------------------------------------------------------------


def test_keys_come_from_the_configuration_and_then_from_the_environment(tmp_path):
    path, folder = str(key_file(tmp_path)), str(tmp_path / "node")
    shared, own = SharedKeys(SECRET, "").server.public, bytes.fromhex(make_folder(tmp_path / "node"))
    for extra, environ, public in (
        ({"key_file": path}, {}, shared),
        ({"key_file": path}, {"KVCONNECT_KEY": "x" * 40}, shared),
        ({}, {"KVCONNECT_KEY": f" {SECRET}\n"}, shared),
        ({"keys_dir": folder}, {}, own),
        ({}, {"KVCONNECT_KEYS_DIR": folder}, own),
    ):
        found = load_keyring(ExtraConfig(host="10.0.0.1", **extra), environ)
        assert found.server.public == public
        assert next(iter(extra.values()), "") in found.describe()
    assert load_keyring(ExtraConfig(insecure=True), {"KVCONNECT_KEY": SECRET}) is None
    with pytest.raises(ConfigError, match="KVCONNECT_KEY and KVCONNECT_KEYS_DIR; accepted: one"):
        load_keyring(ExtraConfig(), {"KVCONNECT_KEY": SECRET, "KVCONNECT_KEYS_DIR": "/x"})


@pytest.mark.parametrize("host", ["10.0.0.1", "node-1", "2001:db8::1"])
def test_without_keys_a_host_that_others_reach_is_refused_with_what_to_do(host, tmp_path):
    with pytest.raises(ConfigError, match=r"no key.*kvconnect keys new FILE"):
        load_keyring(ExtraConfig(host=host), {"HOME": str(tmp_path)})


@pytest.mark.parametrize("text", ["", "short", "x" * 31])
def test_a_secret_that_could_be_guessed_is_refused(text, tmp_path):
    with pytest.raises(ConfigError, match=f"key_file has {len(text)} characters, accepted: 32 and more"):
        load_keyring(ExtraConfig(key_file=str(key_file(tmp_path, text))), {})


# --- the key of a user ----------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost", "127.9.9.9"])
def test_on_loopback_a_user_has_a_key_that_is_made_when_first_needed(host, tmp_path):
    environ = {"HOME": str(tmp_path)}
    first, second = (load_keyring(ExtraConfig(host=host), environ) for _ in range(2))
    path = tmp_path / ".config" / "kvconnect" / "key"
    assert first.server == second.server
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert [found.name for found in path.parent.iterdir()] == ["key"], "nothing half made is left"


def test_the_runtime_directory_comes_first_if_it_is_this_users(tmp_path):
    runtime = tmp_path / "run"
    runtime.mkdir()
    environ = {"XDG_RUNTIME_DIR": str(runtime), "HOME": str(tmp_path)}
    assert user_key_path(environ) == runtime / "kvconnect" / "key"
    assert user_key_path({**environ, "XDG_RUNTIME_DIR": "/does/not/exist"}).parent.parent.name == ".config"


def test_many_that_make_it_at_once_end_up_with_one(tmp_path):
    environ, found = {"HOME": str(tmp_path)}, []
    barrier = threading.Barrier(8)

    def make():
        barrier.wait()
        found.append(user_key(environ)[0])

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1


def test_a_home_that_cannot_be_written_is_a_config_error(tmp_path):
    (tmp_path / ".config").write_text("not a folder")
    with pytest.raises(ConfigError, match="cannot be"):
        user_key({"HOME": str(tmp_path)})


# --- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o644, 0o604, 0o660, 0o620, 0o602, 0o666, 0o777])
def test_a_secret_is_read_where_nobody_else_can_use_it_and_else_refused_with_its_mode(mode, tmp_path):
    with pytest.raises(ConfigError, match=f"whose mode is {mode:04o}.*accepted: 0600"):
        read_secret(key_file(tmp_path, mode=mode), "key_file")
    for own in (0o600, 0o400):
        (tmp_path / "key").chmod(own)
        assert read_secret(tmp_path / "key", "key_file").strip() == SECRET


def test_a_group_may_read_what_is_roots_alone(tmp_path):
    path = key_file(tmp_path, mode=0o440)
    if path.stat().st_uid != 0:
        with pytest.raises(ConfigError, match="whose mode is 0440"):
            read_secret(path, "key_file")
        pytest.skip("only root can make a file of root's")
    assert read_secret(path, "key_file").strip() == SECRET
    os.chown(path, 12345, 12345)
    with pytest.raises(ConfigError, match="whose mode is 0440"):
        read_secret(path, "key_file")


def test_what_is_no_file_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe", 0o600)
    with pytest.raises(ConfigError, match="not a file"):
        read_secret(tmp_path / "pipe", "key_file")
    for name in ("", "missing"):
        with pytest.raises(ConfigError, match=r"key_file is '.*which (cannot be read|is not a file)"):
            read_secret(tmp_path / name, "key_file")


def test_a_file_is_made_once(tmp_path):
    assert write(tmp_path / "a" / "key", "one")
    assert not write(tmp_path / "a" / "key", "two")
    assert (tmp_path / "a" / "key").read_text() == "one\n"


# --- the folder of a node -------------------------------------------------------------------------


def test_a_node_knows_its_peers_by_key_and_by_address(tmp_path):
    one, two = node_keys(tmp_path, "one", "two")
    assert one.knows(two.client.public)
    assert one.server_key("127.0.0.1", 5) == two.server.public
    assert one.server_key("10.0.0.1", 5) is None
    assert not one.knows(one.client.public)
    assert not one.knows(new_key_pair().public)
    assert one.handle_secret == two.handle_secret
    assert fingerprint(one.server.public) in one.describe()


def test_a_peer_without_addresses_is_at_the_host_of_its_name(tmp_path):
    make_folder(tmp_path / "node")
    publics = [new_key_pair().public for _ in range(2)]
    introduce(tmp_path / "node", "10.0.0.7", publics[0].hex())
    introduce(tmp_path / "node", "client-only", publics[1].hex(), "10.0.0.8:5600-5607")
    keys = NodeKeys(tmp_path / "node", "keys_dir")
    assert keys.server_key("10.0.0.7", 1234) == publics[0]
    assert keys.server_key("10.0.0.8", 5607) == publics[1]
    assert keys.server_key("10.0.0.8", 5608) is None


def test_peers_come_and_go_while_a_node_runs(tmp_path, caplog):
    make_folder(tmp_path / "node")
    keys, new = NodeKeys(tmp_path / "node", "keys_dir"), new_key_pair().public
    assert not keys.knows(new)
    introduce(tmp_path / "node", "new", new.hex())
    assert keys.knows(new)
    (tmp_path / "node" / "peers" / "bad.json").write_text("{")
    assert keys.knows(new), "those known before stay"
    assert "not a peer's public key" in caplog.text
    (tmp_path / "node" / "peers" / "bad.json").unlink()
    (tmp_path / "node" / "peers" / "new.json").unlink()
    assert not keys.knows(new)


def test_two_changes_at_the_same_time_are_both_seen(tmp_path):
    folder = tmp_path / "node"
    make_folder(folder)
    keys, new = NodeKeys(folder, "keys_dir"), [new_key_pair().public for _ in range(2)]
    now = time.time_ns()
    for number, public in enumerate(new):
        introduce(folder, f"peer{number}", public.hex())
        os.utime(folder / "peers", ns=(now, now))
        assert keys.knows(public)


@pytest.mark.parametrize(
    ("name", "text", "match"),
    [
        ("node.key", "zz", "node.key is not a key; accepted: 64 hexadecimal digits"),
        ("cluster.key", "short", "cluster.key has 5 characters"),
        ("peers/x.json", "{}", "x.json is not a peer's public key"),
        ("peers/x.json", '{"public_key": "00"}', "public_key is not a key"),
        ("peers/x.json", f'{{"public_key": "{"0" * 64}", "addresses": ["a b"]}}', "has 'a b'; accepted"),
        ("peers/x.json", f'{{"public_key": "{"0" * 64}", "adresses": []}}', "adresses"),
        ("node.key", None, "keys_dir: node.key"),
        ("cluster.key", None, "keys_dir: cluster.key"),
    ],
)
def test_what_is_wrong_or_missing_in_a_folder_is_named(name, text, match, tmp_path):
    make_folder(tmp_path / "node")
    path = tmp_path / "node" / name
    if text is None:
        path.unlink()
    else:
        path.write_text(text)
        path.chmod(0o600)
    with pytest.raises(ConfigError, match=match):
        NodeKeys(tmp_path / "node", "keys_dir")


# --- addresses ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entry", "inside", "outside"),
    [
        ("10.0.0.1", [("10.0.0.1", 1), ("::ffff:10.0.0.1", 9)], [("10.0.0.2", 1), ("h", 1)]),
        ("10.0.0.1:5", [("10.0.0.1", 5)], [("10.0.0.1", 6)]),
        ("10.0.0.0/24:5-7", [("10.0.0.255", 7)], [("10.0.1.0", 7), ("10.0.0.1", 8), ("10.0.0.1", 4)]),
        ("Node-1.example:5", [("node-1.EXAMPLE", 5)], [("node-1", 5), ("10.0.0.1", 5)]),
        ("2001:db8::1", [("2001:DB8:0::1", 5)], [("2001:db8::2", 5)]),
        ("[2001:db8::/64]:5", [("2001:db8::9", 5)], [("2001:db8:1::9", 5), ("2001:db8::9", 6)]),
        ("0.0.0.0/0", [("1.2.3.4", 1)], [("::1", 1), ("name", 1)]),
    ],
)
def test_addresses_are_what_an_entry_says(entry, inside, outside):
    allowed = AllowList([entry])
    assert allowed
    assert not AllowList([])
    assert all(allowed.allows(*address) for address in inside)
    assert not any(allowed.allows(*address) for address in outside)


@pytest.mark.parametrize(
    "entry",
    [
        "",
        "a b",
        "10.0.0.1:0",
        "10.0.0.1:7-5",
        "10.0.0.1:70000",
        "h:x",
        "10.0.0.1/33",
        "[::1",
        "[::1]x",
        "a/b",
    ],
)
def test_an_entry_that_means_nothing_is_refused_by_name(entry):
    with pytest.raises(ConfigError, match="allow_peers has "):
        AllowList([entry])
