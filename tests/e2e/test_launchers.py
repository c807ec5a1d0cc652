"""The launchers of examples/launchers on two hosts of one machine: what Slurm and KubeRay would run there.

The run that they start has a config that does not exist, so it ends at once, with 2: what is tested is the way to it and back.
"""

import json
import os
import shlex
import signal
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
        with hosts_with([1, 1]) as both:
            yield both
    except OSError as error:
        pytest.skip(str(error))


@pytest.fixture(autouse=True)
def nothing_left(hosts):
    yield
    deadline = time.monotonic() + 20  # Ray's agents end by themselves after their raylet
    while (left := [host.processes() for host in hosts]) != [
        [],
        [],
    ] and time.monotonic() < deadline:
        time.sleep(0.5)
    assert left == [[], []]


def ended(processes: list[subprocess.Popen], expect: list[int]) -> list[str]:
    return [finish(process, code, 150) for process, code in zip(processes, expect, strict=True)]


def until_it_says(process: subprocess.Popen, words: str) -> str:
    said = ""
    for line in process.stdout:
        said += line
        if words in line:
            return said
    raise AssertionError(said)


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
    ended = [
        done.stdout.count(how)
        for how in ("none of this node is left", "has gone while this node joined")
    ]
    # The second may still be joining when so short a run is over.
    assert sum(ended) == 2 and ended[0] >= 1
    assert not list((ROOT / "results").glob(f".ray-head-{job}-*"))


@pytest.mark.nightly
def test_kuberay_submits_the_job_to_pods_that_have_started_ray(hosts):
    spec = yaml.safe_load((LAUNCHERS / "rayjob.yaml").read_text())["spec"]
    cluster = spec["rayClusterSpec"]
    processes = []
    for host, group in zip(
        hosts, (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]), strict=True
    ):
        (container,) = group["template"]["spec"]["containers"]
        variables = {
            variable["name"]: variable.get("value", host.ip) for variable in container["env"]
        }
        variables = {
            name: value.replace("$(RAY_NODE_IP)", host.ip) for name, value in variables.items()
        }
        variables |= {
            "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN, "RAY_PORT": "6379", "RAY_OVERRIDE_RESOURCES": RESOURCES,
        }  # fmt: skip
        if host.rank:
            variables |= {"FQ_RAY_IP": hosts[0].ip}
        command = [word.replace("/opt/rlinf_vl", str(ROOT)) for word in container["command"]]
        processes.append(host.popen(*command, **variables))
    for process in processes:
        until_it_says(process, "serving the cluster")
    entrypoint = spec["entrypoint"].replace("/opt/rlinf_vl", str(ROOT)).replace(" 16 ", " 2 ")
    entrypoint = entrypoint.replace("qwen3-vl-2b-grpo-fsdp-geo3k", "no-such-config")
    submit = f"{shlex.quote(sys.executable)} -m ray.scripts.scripts job submit --address http://{hosts[0].ip}:8265 -- {entrypoint}"
    said = hosts[1].run(
        "bash", "-c", submit, expect=1, within=120, RAY_AUTH_MODE="token", RAY_AUTH_TOKEN=TOKEN
    )
    assert "offer 2 GPU(s); at least 2 wanted" in said and "no config 'no-such-config'" in said
    for process in processes:
        process.send_signal(signal.SIGTERM)
    head, other = ended(processes, [0, 0])
    assert "asked to stop; the head goes first" in other and "has gone" in other
    assert all("none of this node is left" in said for said in (head, other))
