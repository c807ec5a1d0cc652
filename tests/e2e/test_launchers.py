"""The launchers of examples/launchers on two hosts of one machine: what Slurm and SkyPilot would run there.

The run that they start has a config that does not exist, so it ends at once, with 2: what is tested is the way to it and back.
"""

import json
import os
import shlex
import subprocess
import sys
import time

import pytest
import yaml
from hosts import POSSIBLE, ROOT, finish, hosts_with

LAUNCHERS = ROOT / "examples/launchers"
RESOURCES = json.dumps({"CPU": 1, "GPU": 1})
TOKEN = "7" * 64

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not POSSIBLE, reason="needs root, and ip of iproute2"),
]


@pytest.fixture(scope="module")
def hosts():
    try:
        with hosts_with([1, 1], "10.214.7") as both:
            yield both
    except OSError as error:
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def nothing_left(hosts):
    yield
    deadline = time.monotonic() + 20  # Ray's agents end by themselves after their raylet
    while (left := [host.processes() for host in hosts]) != [[], []] and time.monotonic() < deadline:
        time.sleep(0.5)
    assert left == [[], []]


def ended(processes: list[subprocess.Popen], expect: list[int]) -> list[str]:
    return [finish(process, code, 150) for process, code in zip(processes, expect, strict=True)]


def test_slurm_runs_a_part_on_each_node_and_has_the_exit_code(hosts, tmp_path):
    """`srun` stands for Slurm's: it runs its command on each host, with that one's number."""
    told = [["ip", "netns", "exec", host.namespace] for host in hosts]
    folders = [str(host.folder) for host in hosts]
    (tmp_path / "srun").write_text(
        f"#!{sys.executable}\n"
        "import os, subprocess, sys\n"
        f"told, folders = {told!r}, {folders!r}\n"
        "own = [os.environ | {'SLURM_PROCID': str(i), 'RAY_TMPDIR': folder} for i, folder in enumerate(folders)]\n"
        "running = [subprocess.Popen([*how, *sys.argv[1:]], env=env) for how, env in zip(told, own)]\n"
        "sys.exit(max(process.wait() for process in running))\n"
    )
    (tmp_path / "srun").chmod(0o755)
    job = f"test{os.getpid()}"
    variables = {
        "SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_ID": job, "SLURM_NNODES": "2", "SLURM_CPUS_ON_NODE": "1",
        "PATH": f"{tmp_path}:{os.environ['PATH']}", "RLINF_VL_PYTHON": sys.executable, "RAY_OVERRIDE_RESOURCES": RESOURCES,
    }  # fmt: skip
    done = subprocess.run(
        ["bash", str(LAUNCHERS / "slurm.sh"), "no-such-config"], env=os.environ | variables, timeout=200,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert done.returncode == 2, done.stdout
    assert "2 of 2 node(s)" in done.stdout and "offer 2 CPU(s); at least 2 wanted" in done.stdout
    assert "no config 'no-such-config'" in done.stdout
    assert f"the head at {hosts[0].ip}:6379 has gone" in done.stdout
    assert done.stdout.count("none of this node is left") == 2
    assert not list((ROOT / "results").glob(f".ray-head-{job}-*"))


def test_skypilot_runs_a_part_on_each_machine(hosts):
    task = yaml.safe_load((LAUNCHERS / "skypilot.yaml").read_text())
    variables = task["envs"] | {
        "CONFIG": "no-such-config", "CHECKPOINTS": "s3://bucket/runs", "RAY_AUTH_TOKEN": TOKEN,
        "RAY_ADDRESS": "127.0.0.1:6380",  # of SkyPilot's own Ray
        "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "1", "RAY_OVERRIDE_RESOURCES": RESOURCES,
        "SKYPILOT_NODE_IPS": "\n".join(host.ip for host in hosts),
    }  # fmt: skip
    command = ["sh", "-c", f'cd {shlex.quote(str(ROOT))} && exec bash -c "$0"', task["run"]]
    processes = [host.popen(*command, **variables, SKYPILOT_NODE_RANK=str(host.rank)) for host in hosts]
    head, other = ended(processes, [2, 0])
    assert "offer 2 GPU(s); at least 2 wanted" in head and "no config 'no-such-config'" in head
    assert f"rank 1 joined {hosts[0].ip}:6379" in other and "has gone" in other
