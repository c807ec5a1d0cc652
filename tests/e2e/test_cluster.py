"""Two hosts on one machine, network namespaces joined by a cable: the cluster's scripts, and a run across both."""

import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest
from hosts import POSSIBLE, ROOT, finish, hosts_with, script
from whole_run import FIXED_METRICS, rows_of

from rlinf_vl.extras.toy.checkpoint import toy_checkpoint_path

PORT = 6379

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not POSSIBLE, reason="needs root, and ip of iproute2"),
]


@pytest.fixture(scope="module")
def hosts():
    """Room for both actor ranks on the head, for the rollout worker on the other."""
    try:
        with hosts_with([2, 1]) as both:
            yield both
    except OSError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def head_file(hosts) -> Path:
    return hosts[0].folder / "shared/head"


def environment_at(folder: Path) -> Path:
    """An environment of its own with what ours has, whose interpreters note their process ids in `folder`/started."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (folder / "started").mkdir()
    (site,) = folder.glob("lib/python*/site-packages")
    note = f"import os; open(f'{folder}/started/{{os.getpid()}}', 'w').close()"
    (site / "ours.pth").write_text(
        f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n{note}\n"
    )
    return folder / "bin/python"


@pytest.fixture(scope="module")
def second(hosts) -> Path:
    """A second environment, as .venv-sglang beside .venv."""
    return environment_at(hosts[0].folder / "second")


@pytest.fixture(scope="module")
def local(hosts) -> Path:
    """One that the head alone has: on the other host an empty disk lies over it."""
    return environment_at(hosts[0].folder / "local")


@pytest.fixture(scope="module")
def cluster(hosts, head_file, local):
    """The two hosts as a cluster through a shared file; rank 1 was started first, and waited."""
    head, other = hosts
    hide = 'mount -t tmpfs none "$0" && exec "$@"'
    early = other.popen(
        "unshare",
        "--mount",
        "sh",
        "-c",
        hide,
        str(local.parents[1]),
        *other.starting(),
        RAY_HEAD_FILE=str(head_file),
    )
    time.sleep(1.5)
    said = head.start(RAY_HEAD_FILE=str(head_file))
    assert f"head is up at {head.ip}:{PORT}; 1 other node(s) may join" in said
    said = finish(early)
    assert f"{head_file} is not there yet. Is rank 0 started?; waiting up to" in said
    assert f"rank 1 joined {head.ip}:{PORT} as {other.ip}" in said
    yield hosts
    for host in hosts:
        host.run(*script("stop_ray.sh"))


# --- what goes wrong before there is a cluster ------------------------------------------------------------------------


def test_a_head_file_that_an_earlier_cluster_left(hosts, tmp_path):
    (tmp_path / "head").write_text(f"{hosts[0].ip}:{PORT}\n")
    begin = time.monotonic()
    settings = {"RAY_HEAD_FILE": str(tmp_path / "head"), "RAY_WAIT_TIMEOUT": "2"}
    said = hosts[1].run(*script("start_ray.sh"), expect=1, **settings)
    assert (
        f"gave up after 2 s: {tmp_path}/head names {hosts[0].ip}:{PORT}, where no Ray head answers"
        in said
    )
    assert "left by an earlier cluster?" in said
    assert time.monotonic() - begin < 2 + 50


def test_a_port_that_is_taken(hosts, tmp_path):
    listen = f"import socket; s = socket.create_server(('', {PORT})); print('up', flush=True); s.accept()"
    holder = hosts[0].popen(sys.executable, "-c", listen)
    try:
        assert holder.stdout.readline() == "up\n"
        said = hosts[0].run(*script("start_ray.sh"), expect=1, RAY_HEAD_FILE=str(tmp_path / "head"))
        assert f"port {PORT} of this machine is taken by process {holder.pid} (python" in said
        # nor does the other node take for a head what merely listens there
        settings = {"MASTER_ADDR": hosts[0].ip, "RAY_AUTH_TOKEN": "0" * 64, "RAY_WAIT_TIMEOUT": "2"}
        said = hosts[1].run(*script("start_ray.sh"), expect=1, **settings)
        assert f"what listens at {hosts[0].ip}:{PORT} does not answer as a Ray head does" in said
    finally:
        holder.kill()
        holder.communicate()
    assert [host.processes() for host in hosts] == [[], []]


# --- a cluster --------------------------------------------------------------------------------------------------------


def test_check_counts_the_nodes(cluster, head_file):
    head, other = cluster
    for host in cluster:  # by the record, and by the file
        for settings in ({}, {"RAY_HEAD_FILE": str(head_file)}):
            said = host.run(*script("check_ray.sh", "3", "--cpu"), **settings)
            assert (
                f"2 of 2 node(s) ({head.ip}, {other.ip}) offer 3 CPU(s); at least 3 wanted" in said
            )
    # That Ray was told of.
    assert "offer 2 GPU(s); at least 2 wanted" in head.run(*script("check_ray.sh", "2"))


def test_a_peer_that_does_not_come(cluster):
    begin = time.monotonic()
    said = cluster[0].run(
        *script("check_ray.sh", "4", "--cpu"), expect=1, WORLD_SIZE="3", RAY_WAIT_TIMEOUT="2"
    )
    assert (
        "gave up after 2 s: 2 of 3 node(s)" in said and "offer 3 CPU(s); at least 4 wanted" in said
    )
    said = cluster[0].run(*script("check_ray.sh", "3"), expect=1, RAY_WAIT_TIMEOUT="0")
    assert "offer 2 GPU(s); at least 3 wanted" in said
    assert time.monotonic() - begin < 2 + 50


def test_starting_twice_is_starting_once(cluster, head_file):
    before = [{process.pid for process in host.processes()} for host in cluster]
    said = [host.start(RAY_HEAD_FILE=str(head_file)) for host in cluster]
    assert "the head already runs" in said[0] and "this machine has already joined" in said[1]
    assert [{process.pid for process in host.processes()} for host in cluster] == before


def test_the_token_is_wanted_and_private(cluster, head_file, tmp_path):
    files = [head_file, Path(f"{head_file}.token"), *cluster[0].folder.glob("rlinf_vl-*/*")]
    assert len(files) == 4 and {oct(path.stat().st_mode & 0o777) for path in files} == {"0o600"}
    stranger = {
        "MASTER_ADDR": cluster[0].ip,
        "RAY_TMPDIR": str(tmp_path),
        "HOME": str(tmp_path),
        "RAY_WAIT_TIMEOUT": "1",
    }
    check = script("check_ray.sh", "1", "--cpu")
    assert "wants a token, and there is none in" in cluster[1].run(*check, expect=1, **stranger)
    said = cluster[1].run(*check, expect=1, RAY_AUTH_TOKEN="0" * 64, **stranger)
    assert "refuses the token of RAY_AUTH_TOKEN" in said
    asking = "import sys; from ray._raylet import GcsClient as G; print(len(G(address=sys.argv[1]).get_all_node_info()))"
    asking = [sys.executable, "-c", asking, f"{cluster[0].ip}:{PORT}"]
    assert "InvalidAuthToken" in cluster[0].run(*asking, expect=1, RAY_AUTH_MODE="disabled")
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": f"{head_file}.token"}
    assert cluster[0].run(*asking, **token) == "2\n"


def test_the_dashboard_is_on_loopback(cluster):
    ask = "import socket, sys; print([socket.socket().connect_ex((ip, 8265)) == 0 for ip in sys.argv[1:]])"
    assert (
        cluster[0].run(sys.executable, "-c", ask, "127.0.0.1", cluster[0].ip) == "[True, False]\n"
    )


def test_an_interface_that_does_not_lead_to_the_head(cluster, tmp_path):
    fresh = {"MASTER_ADDR": cluster[0].ip, "RAY_TMPDIR": str(tmp_path), "RAY_WAIT_TIMEOUT": "2"}
    said = cluster[1].run(*script("start_ray.sh"), expect=1, RAY_INTERFACE="lo", **fresh)
    assert (
        f"cannot be reached from 127.0.0.1: wrong interface? this machine has lo (127.0.0.1), {cluster[1].interface}"
        in said
    )
    said = cluster[1].run(*script("start_ray.sh"), expect=2, RAY_INTERFACE="eth7", **fresh)
    assert "RAY_INTERFACE=eth7: no such interface" in said
    said = cluster[0].run(*script("start_ray.sh"), expect=2, RAY_INTERFACE="lo", **fresh)
    assert "the other nodes cannot reach 127.0.0.1" in said


def test_a_head_that_is_busy_is_not_taken_for_dead(cluster, head_file):
    head = cluster[0]
    before = {process.pid for process in head.processes()}
    (gcs,) = [process for process in head.processes() if process.name() == "gcs_server"]
    gcs.suspend()
    try:
        said = head.run(*script("start_ray.sh"), expect=1, RAY_HEAD_FILE=str(head_file))
    finally:
        gcs.resume()
    assert f"what listens at {head.ip}:{PORT} does not answer" in said
    assert {process.pid for process in head.processes()} >= before
    assert "2 of 2 node(s)" in head.run(*script("check_ray.sh", "3", "--cpu"))


def test_a_run_across_both_hosts(cluster, second, tmp_path):
    """By the run script, which finds the cluster by itself: the actor ranks on one host, the rollout worker on the other, all
    in the environment of the run, which is not that of the cluster."""
    head, other = cluster
    seen = {head.ip: set(), other.ip: set()}
    # A file: nobody reads while it runs, and a pipe that is full would stop it.
    with (tmp_path / "said").open("w") as output:
        run = head.popen(
            "bash",
            str(ROOT / "examples/reasoning/run_main_grpo_vqa.sh"),
            "toy-grpo-cpu",
            f"runner.output_dir={tmp_path}",
            f"rollout.model.model_path={toy_checkpoint_path(steps=1)}",
            "runner.max_steps=2",
            "runner.val_check_interval=-1",
            "runner.save_interval=-1",
            "data.rollout_batch_size=4",
            "cluster.num_nodes=2",
            "cluster.component_placement={actor: 0-1, rollout: 2}",
            RLINF_VL_PYTHON=str(second),
            PYTHONFAULTHANDLER="1",
            output=output,
        )
    try:
        deadline = time.monotonic() + 600
        while run.poll() is None and time.monotonic() < deadline:
            for host in cluster:
                seen[host.ip] |= host.actors()
            time.sleep(0.3)
    finally:
        # Where it hangs it says where, and the tests that follow do not find it.
        run.send_signal(signal.SIGABRT)
        run.wait()
    said = (tmp_path / "said").read_text()
    assert run.returncode == 0, said
    assert f"joining the Ray cluster at {head.ip}:{PORT}" in said
    assert {ip: {name for name, _ in actors} for ip, actors in seen.items()} == {
        head.ip: {"ActorRank"},
        other.ip: {"RolloutRank"},
    }
    started = {int(path.name) for path in (second.parents[1] / "started").iterdir()}
    assert {pid for actors in seen.values() for _, pid in actors} <= started, (
        "actors run another interpreter"
    )
    rows = rows_of(tmp_path / "toy-grpo-cpu/metrics.jsonl")
    assert [row["step"] for row in rows if row.keys() >= FIXED_METRICS] == [1, 2]
    versions = [
        (row["rollout/weight_version_min"], row["rollout/weight_version_max"]) for row in rows[-2:]
    ]
    assert versions == [(0, 0), (1, 1)], (
        "the second step is sampled from weights that travelled to the other host"
    )
    assert all(row["actor/rollout_train_abs_diff_max"] <= 2e-4 for row in rows[-2:])


def test_an_environment_that_a_host_lacks_is_named_with_the_host(cluster, local):
    joining = (
        "from rlinf_vl.config.load import load_config; from rlinf_vl.runtime import launch\n"
        "launch.WORKER_S = 20\n"
        "with launch.ray_cluster(load_config('toy-grpo-cpu', [])): pass"
    )
    said = cluster[0].run(str(local), "-c", joining, expect=1, PYTHONPATH=str(ROOT))
    assert f"node {cluster[1].ip} can't run {local}: " in said
    assert f"node {cluster[0].ip} can't" not in said and "at the same path on every node" in said


# --- the end of one, and the next -------------------------------------------------------------------------------------


def test_a_cluster_that_died_is_not_joined_but_replaced(cluster, head_file):
    """By addresses this time, the token from the environment; and a stranger's Ray on the machine is left alone."""
    head, other = cluster
    finding = "import os; from rlinf_vl.runtime.cluster import cluster_to_join as c; print(c('auto', os.environ))"
    asking = [sys.executable, "-c", finding]
    assert head.run(*asking).endswith(f"('{head.ip}:{PORT}', '{head.ip}')\n")
    for process in other.processes():
        # Agents, which end by themselves after their raylet: unless they can't.
        if process.name().startswith("ray::"):
            process.suspend()
    for host, name in [(head, "gcs_server"), (other, "raylet")]:
        for process in host.processes():
            if process.name() == name:
                process.send_signal(signal.SIGKILL)
    said = head.run(*asking)
    assert "its head does not answer" in said and said.endswith("(None, None)\n")

    stranger = shutil.copy(shutil.which("sleep"), head.folder / "raylet")
    decoy = head.popen(stranger, "300")
    settings = {"MASTER_ADDR": head.ip, "RAY_AUTH_TOKEN": "5" * 64, "RAY_HEAD_FILE": ""}
    assert f"ending what is left of a node of the cluster at {head.ip}:{PORT}" in head.start(
        **settings
    )
    assert "ending what is left" in other.start(**settings)
    head.run(*script("check_ray.sh", "3", "--cpu"), **settings)

    other.run(*script("stop_ray.sh"))
    assert other.processes() == []
    assert "1 of 2 node(s)" in head.run(
        *script("check_ray.sh", "3", "--cpu"), expect=1, RAY_WAIT_TIMEOUT="1"
    )
    head.run(*script("stop_ray.sh"))
    assert [process.pid for process in head.processes()] == [decoy.pid]
    decoy.kill()
    decoy.communicate()
    assert "stopped already" in head.run(*script("stop_ray.sh"))
    assert head.run(*asking) == "(None, None)\n"
    with pytest.raises(AssertionError, match="no cluster was started on this node"):
        head.run(*script("check_ray.sh", "1", "--cpu"))


def test_stopping_the_head_takes_its_file_away(hosts, head_file):
    # The tests before may have left their cluster running, or ended it.
    for host in hosts[::-1]:
        host.run(*script("stop_ray.sh"))
    hosts[0].start(RAY_HEAD_FILE=str(head_file))
    assert head_file.read_text() == f"{hosts[0].ip}:{PORT}\n"
    hosts[0].run(*script("stop_ray.sh"))
    assert list(head_file.parent.iterdir()) == []
    assert [host.processes() for host in hosts] == [[], []]
