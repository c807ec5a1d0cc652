"""The cluster's scripts, as far as they go without a cluster: settings, addresses, tokens, and which cluster a run joins."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlinf_vl.runtime.cluster import (
    MARK,
    NodeRecord,
    cluster_to_join,
    read_record,
    record_path,
    write_private,
)

ROOT = Path(__file__).resolve().parents[3]
SETTINGS = (
    "RANK", "WORLD_SIZE", "MASTER_ADDR", "RAY_HEAD_FILE", "RAY_PORT", "RAY_INTERFACE", "RAY_NODE_IP", "RAY_ADDRESS",
    "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_WAIT_TIMEOUT",
)  # fmt: skip


@pytest.fixture(autouse=True)
def node(tmp_path: Path, monkeypatch):
    """A node on which nothing was started, with a home folder of its own."""
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "ray"))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("RLINF_VL_PYTHON", sys.executable)


def bash(name: str, *arguments: str, **settings: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["bash", str(ROOT / "ray_utils" / name), *arguments],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )


@pytest.fixture
def closed_port():
    """A port of this machine on which nobody listens: bound, so that nobody takes it meanwhile, but not listening."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


@pytest.fixture
def open_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


# --- the scripts ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [[], ["many"], ["--cpu"], ["1", "2"]])
def test_check_needs_a_number(arguments: list[str]):
    done = bash("check_ray.sh", *arguments)
    assert done.returncode == 2 and "check_ray.sh N [--cpu]" in done.stderr


@pytest.mark.slow
def test_a_launch_that_cannot_be_right_ends_with_its_reason_and_stops_what_is_there():
    done = bash("launch.sh", "2", "--", "true", RANK="first")
    assert done.returncode == 2 and "RANK must be a number, not 'first'" in done.stderr
    assert "start_ray.sh has started nothing on this node" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK must lie in"),
        ({"RANK": "first"}, "RANK must be a number, not 'first'"),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "needs MASTER_ADDR, or RAY_HEAD_FILE"),
        ({"RAY_PORT": "http"}, "RAY_PORT must be a number, not 'http'"),
        ({"RAY_PORT": "65536"}, "RAY_PORT must be a number from 1 to 65535"),
        (
            {"RAY_INTERFACE": "eth77"},
            "RAY_INTERFACE=eth77: no such interface with an IPv4 address; this machine has lo",
        ),
        (
            {"RAY_NODE_IP": "203.0.113.9"},
            "RAY_NODE_IP=203.0.113.9 is not an address of this machine",
        ),
        (
            {"RAY_NODE_IP": "127.0.0.1", "WORLD_SIZE": "2", "RAY_HEAD_FILE": "head"},
            "cannot reach 127.0.0.1",
        ),
        (
            {"RAY_INTERFACE": "lo", "RAY_AUTH_TOKEN_PATH": "/no/such"},
            "RAY_AUTH_TOKEN_PATH=/no/such is no readable file",
        ),
    ],
)
def test_start_refuses(settings: dict[str, str], said: str, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = bash("start_ray.sh", **{"RAY_PORT": "16379", **settings})
    assert done.returncode == 2 and said in done.stderr
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.slow
def test_check_gives_up_in_time(closed_port: int):
    start = time.monotonic()
    done = bash(
        "check_ray.sh",
        "1",
        MASTER_ADDR="127.0.0.1",
        RAY_PORT=str(closed_port),
        RAY_WAIT_TIMEOUT="1",
    )
    assert done.returncode == 1
    assert f"gave up after 1 s: no Ray head answers at 127.0.0.1:{closed_port}" in done.stderr
    assert time.monotonic() - start < 20


def test_start_names_a_stale_head_file(closed_port: int, tmp_path: Path):
    (tmp_path / "head").write_text(f"127.0.0.1:{closed_port}\n")
    settings = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "RAY_HEAD_FILE": str(tmp_path / "head"),
        "RAY_WAIT_TIMEOUT": "0",
    }
    done = bash("start_ray.sh", **settings)
    assert done.returncode == 1
    assert (
        f"names 127.0.0.1:{closed_port}, where no Ray head answers from 127.0.0.1 (left by an earlier"
        in done.stderr
    )


def test_stop_where_nothing_was_started():
    done = bash("stop_ray.sh")
    assert (done.returncode, done.stderr) == (
        0,
        "",
    ) and "started nothing on this node" in done.stdout


def test_a_python_without_ray_is_named(tmp_path: Path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    done = bash("check_ray.sh", "1", RLINF_VL_PYTHON=str(python))
    assert done.returncode == 1 and f"{python} has no Ray" in done.stderr


# --- addresses and tokens ---------------------------------------------------------------------------------------------


@pytest.fixture
def rendezvous(monkeypatch):
    """The module, on a machine with two networks; the default route leads over eth1, `ib` is the name of the other."""
    monkeypatch.syspath_prepend(str(ROOT / "ray_utils"))
    import rendezvous

    networks = {"lo": ["127.0.0.1"], "eth1": ["10.0.0.5"], "ib0": ["10.1.0.5"]}
    names = {
        "localhost": "127.0.0.1",
        "eth": "10.0.0.5",
        "ib": "10.1.0.5",
        "node0": "127.0.1.1",
        "vip": "10.9.9.9",
    }
    monkeypatch.setattr(rendezvous, "interfaces", lambda: networks)
    monkeypatch.setattr(rendezvous, "route_to", lambda ip: "10.0.0.5")
    monkeypatch.setattr(rendezvous, "resolve", names.get)
    return rendezvous


@pytest.mark.parametrize(
    ("settings", "ip"),
    [
        ({}, "10.0.0.5"),
        ({"MASTER_ADDR": "ib"}, "10.1.0.5"),
        ({"MASTER_ADDR": "node0"}, "10.0.0.5"),  # as Debian's /etc/hosts calls the machine itself
        ({"MASTER_ADDR": "vip"}, "10.0.0.5"),
        ({"MASTER_ADDR": "vip", "RAY_INTERFACE": "ib0"}, "10.1.0.5"),
        ({"RAY_INTERFACE": "ib0"}, "10.1.0.5"),
        ({"RAY_NODE_IP": "10.1.0.5"}, "10.1.0.5"),
    ],
)
def test_the_address_of_the_head(rendezvous, monkeypatch, settings: dict[str, str], ip: str):
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    assert rendezvous.head_ip(2) == ip


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"MASTER_ADDR": "eth", "RAY_INTERFACE": "ib0"},
            "look for the head at MASTER_ADDR=eth (10.0.0.5), but 10.1.0.5",
        ),
        (
            {"RAY_INTERFACE": "lo"},
            "the other nodes cannot reach 127.0.0.1; this machine has lo (127.0.0.1), eth1",
        ),
    ],
)
def test_an_address_that_the_others_do_not_reach(
    rendezvous, monkeypatch, capsys, settings: dict[str, str], said: str
):
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        rendezvous.head_ip(2)
    assert said in capsys.readouterr().err


def test_without_a_default_route(rendezvous, monkeypatch, capsys):
    monkeypatch.setattr(rendezvous, "route_to", lambda ip: None)
    assert rendezvous.head_ip(1) == "127.0.0.1"
    with pytest.raises(SystemExit):
        rendezvous.head_ip(2)
    assert "choose with RAY_INTERFACE" in capsys.readouterr().err
    monkeypatch.setattr(
        rendezvous, "interfaces", lambda: {"lo": ["127.0.0.1"], "eth1": ["10.0.0.5"]}
    )
    assert rendezvous.head_ip(2) == "10.0.0.5"


def test_where_the_token_comes_from(rendezvous, monkeypatch, tmp_path: Path):
    with pytest.raises(rendezvous.NotYet, match="wants a token, and there is none in"):
        rendezvous.token_for("10.0.0.5:6379")
    home = rendezvous.new_token()  # made once, where Ray itself looks
    assert rendezvous.new_token() == home == (tmp_path / "home/.ray/auth_token").read_text()
    assert rendezvous.token_for("10.0.0.5:6379")[0] == home
    monkeypatch.setenv("RAY_HEAD_FILE", str(tmp_path / "head"))
    assert len({home, rendezvous.new_token(), rendezvous.new_token()}) == 3, (
        "a new one for each cluster"
    )
    write_private(tmp_path / "head.token", "shared")
    assert rendezvous.token_for("10.0.0.5:6379") == ("shared", f"{tmp_path}/head.token")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "home/.ray/auth_token"))
    assert rendezvous.token_for("10.0.0.5:6379")[0] == rendezvous.new_token() == home
    # As the head says, once stopped.
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(record_path().with_suffix(".token")))
    assert rendezvous.token_for("10.0.0.5:6379")[0] == "shared"
    monkeypatch.setenv("RAY_AUTH_TOKEN", "given")
    assert rendezvous.token_for("10.0.0.5:6379")[0] == rendezvous.new_token() == "given"


def test_the_token_of_the_node_that_was_started_here(
    rendezvous, monkeypatch, raylet: int, tmp_path: Path
):
    kept = record_path().with_suffix(".token")
    write_private(kept, "kept")
    NodeRecord("10.0.0.5:6379", "10.0.0.5", "aa", raylet, "m1", 0, str(kept)).save()
    rendezvous.write_private(rendezvous.shared_token(), "home")
    assert rendezvous.token_for("10.0.0.5:6379") == ("kept", str(kept))
    assert rendezvous.token_for("10.0.0.6:6379")[0] == "home"
    monkeypatch.setenv("RAY_HEAD_FILE", str(tmp_path / "head"))
    assert rendezvous.token_for("10.0.0.5:6379")[0] == "kept"
    write_private(tmp_path / "head.token", "of the next cluster")
    assert rendezvous.token_for("10.0.0.5:6379")[0] == "of the next cluster"


# --- which cluster a run joins ----------------------------------------------------------------------------------------


@pytest.fixture
def raylet():
    """Stands in for a node's raylet: it carries the mark."""
    process = subprocess.Popen(["sleep", "60"], env={**os.environ, MARK: "m1"})
    yield process.pid
    process.kill()
    process.wait()


def record(port: int, pid: int, mark: str = "m1") -> NodeRecord:
    return NodeRecord(f"127.0.0.1:{port}", "127.0.0.1", "aa", pid, mark, 0, "/token")


def test_a_node_that_was_started_here_is_joined_with_its_token(raylet: int, open_port: int):
    record(open_port, raylet).save()
    assert record_path().stat().st_mode & 0o777 == 0o600
    environment = {"RAY_AUTH_TOKEN": "of another one"}
    assert cluster_to_join("auto", environment) == (f"127.0.0.1:{open_port}", "127.0.0.1")
    assert environment == {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "/token"}


@pytest.mark.parametrize(
    ("field", "said"),
    [("pid", "has ended"), ("mark", "has ended"), ("port", "its head does not answer")],
)
def test_a_dead_one_is_not(
    raylet: int, open_port: int, closed_port: int, field: str, said: str, caplog
):
    """Its raylet is gone, another process got the raylet's id, or its head is gone."""
    pid = 2**22 + 1 if field == "pid" else raylet  # beyond the kernel's largest
    record(
        closed_port if field == "port" else open_port, pid, "m0" if field == "mark" else "m1"
    ).save()
    environment = {}
    assert cluster_to_join("auto", environment) == (None, None)
    assert environment == {"RAY_AUTH_MODE": "token"}
    assert said in caplog.text


def test_nothing_was_started_here():
    assert cluster_to_join("auto", {}) == (None, None)


@pytest.mark.parametrize("ray_address", [None, "", "local"])
def test_a_private_one_is_asked_for(raylet: int, open_port: int, ray_address: str | None):
    record(open_port, raylet).save()
    environment = {"RAY_ADDRESS": "10.0.0.5:6379", "RAY_AUTH_MODE": "disabled"}
    assert cluster_to_join(ray_address, environment) == (None, None)
    assert environment["RAY_AUTH_MODE"] == "disabled", "the user's choice"


def test_a_cluster_that_is_named_comes_before_the_one_started_here(raylet: int, open_port: int):
    record(open_port, raylet).save()
    environment = {"RAY_ADDRESS": "10.0.0.5:6379"}
    assert cluster_to_join("auto", environment) == ("10.0.0.5:6379", None)
    assert cluster_to_join("10.0.0.6:6379", environment) == ("10.0.0.6:6379", None)
    assert environment == {"RAY_ADDRESS": "10.0.0.5:6379"}, "its token is the user's"
    # For Ray that is any cluster on this machine, somebody's private one too.
    named = {"RAY_ADDRESS": "auto"}
    assert cluster_to_join("auto", named) == (f"127.0.0.1:{open_port}", "127.0.0.1")


@pytest.mark.parametrize("content", ["", "{", '{"address": "x"}', "[]"])
def test_a_damaged_record_is_ignored(content: str, caplog):
    write_private(record_path(), content)
    assert read_record() is None and "is unreadable and ignored" in caplog.text


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to write as somebody else")
def test_a_record_of_another_user_is_not_believed(raylet: int, open_port: int):
    record(open_port, raylet).save()
    os.chown(record_path(), 1, 1)
    assert read_record() is None
