"""The launchers of examples/launchers: their syntax, and that what they ask for fits together; tests/e2e runs them."""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rlinf_vl.config import load_config
from rlinf_vl.config.placement import placement_of

ROOT = Path(__file__).resolve().parents[3]
LAUNCHERS = ROOT / "examples/launchers"
SLURM, RAYJOB, SKYPILOT = (
    LAUNCHERS / name for name in ("slurm.sh", "rayjob.yaml", "skypilot.yaml")
)
SCRIPTS = sorted([*ROOT.glob("ray_utils/*.sh"), SLURM])
SHELLCHECK = shutil.which("shellcheck", path=str(Path(sys.executable).parent)) or shutil.which(
    "shellcheck"
)


def rayjob() -> dict:
    return yaml.safe_load(RAYJOB.read_text())["spec"]


def pods() -> dict[str, tuple[int, dict]]:
    """Of each group: how many, and their pod's spec."""
    cluster = rayjob()["rayClusterSpec"]
    groups = [("head", 1, cluster["headGroupSpec"])]
    groups += [
        (group["groupName"], group["replicas"], group) for group in cluster["workerGroupSpecs"]
    ]
    return {name: (count, group["template"]["spec"]) for name, count, group in groups}


def skypilot() -> dict:
    return yaml.safe_load(SKYPILOT.read_text())


def directives() -> dict[str, str]:
    return dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", SLURM.read_text(), re.M))


@pytest.mark.skipif(SHELLCHECK is None, reason="needs shellcheck (requirements/dev.txt)")
@pytest.mark.parametrize(
    "what", [*SCRIPTS, "setup", "run"], ids=lambda what: getattr(what, "name", what)
)
def test_shellcheck_finds_nothing(what, tmp_path):
    path = what
    if isinstance(what, str):
        path = tmp_path / what
        path.write_text("#!/usr/bin/env bash\n" + skypilot()[what])
    done = subprocess.run([SHELLCHECK, "-x", str(path)], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("path", [SLURM, RAYJOB, SKYPILOT], ids=lambda path: path.name)
def test_every_launcher_calls_the_scripts_of_ray_utils_and_files_that_exist(path):
    named = re.findall(
        r"(?:/opt/rlinf_vl/)?((?:ray_utils|examples|requirements)/[\w/]+\.sh)", path.read_text()
    )
    assert {"ray_utils/launch.sh", "examples/reasoning/run_main_grpo_vqa.sh"} <= set(named)
    assert all((ROOT / name).is_file() for name in named)
    assert not re.search(r"\bray (start|stop)\b", path.read_text()), "Ray is the scripts' business"


def run_of(path: Path) -> tuple[list[str], int, int]:
    """The words of what trains, nodes, GPUs of a node, as a launcher's own file says."""
    if path == SLURM:
        variables = {
            "SLURM_NNODES": directives()["nodes"],
            "config": "qwen3-vl-2b-grpo-fsdp-geo3k",
            "SLURM_PROCID": "0",
        }
        text = (
            SLURM.read_text()
            .replace("\\\n", " ")
            .splitlines()[-1]
            .replace('"${@:2}"', "")
            .replace('"${wanted[@]}"', "16")
        )
        nodes, gpus = int(directives()["nodes"]), int(directives()["gpus-per-node"])
        assert "((SLURM_NNODES * SLURM_GPUS_ON_NODE))" in SLURM.read_text()
    elif path == RAYJOB:
        variables, text = {}, rayjob()["entrypoint"]
        nodes = sum(count for count, _ in pods().values())
        (gpus,) = {
            int(spec["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
            for _, spec in pods().values()
        }
    else:
        task = skypilot()
        nodes, gpus = task["num_nodes"], int(task["resources"]["accelerators"].partition(":")[2])
        variables = task["envs"] | {
            "SKYPILOT_NUM_NODES": str(nodes),
            "CHECKPOINTS": "s3://bucket/runs",
        }
        text = task["run"].replace("\\\n", " ").splitlines()[-1]
        text = text.replace(
            '"$((SKYPILOT_NUM_NODES * SKYPILOT_NUM_GPUS_PER_NODE))"', str(nodes * gpus)
        )
    return shlex.split(re.sub(r"\$(\w+)", lambda match: variables[match[1]], text)), nodes, gpus


@pytest.mark.parametrize("path", [SLURM, RAYJOB, SKYPILOT], ids=lambda path: path.name)
def test_the_run_waits_for_all_gpus_and_its_config_is_accepted_for_them(path):
    words, nodes, gpus = run_of(path)
    first = words.index("--")
    assert words[first - 1] == str(nodes * gpus)
    script, config, *overrides = words[first + 2 :]
    assert script.endswith("run_main_grpo_vqa.sh")
    made = load_config(config, overrides)
    assert made.cluster.num_nodes == nodes and made.runner.resume_dir == "auto"
    placement = placement_of(made, [gpus] * nodes)
    assert {*placement.actor, *(slot for engine in placement.engines for slot in engine)} == set(
        range(nodes * gpus)
    )


def test_the_job_of_kuberay_is_plain_words():
    """Two shells and Ray read its entrypoint: what any of them would take apart or expand must not stand in it."""
    assert re.fullmatch(r"[\w ./=:,-]+", rayjob()["entrypoint"].strip())


def test_pods_of_kuberay_start_ray_themselves_and_know_who_they_are():
    nodes = sum(count for count, _ in pods().values())
    cluster = rayjob()["rayClusterSpec"]
    assert cluster["authOptions"]["mode"] == "token", (
        "the dashboard is open to the cluster's network"
    )
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert (
            group["template"]["metadata"]["annotations"]["ray.io/overwrite-container-cmd"] == "true"
        )
    for name, (_, spec) in pods().items():
        (container,) = spec["containers"]
        said = {variable["name"]: variable.get("value") for variable in container["env"]}
        assert said["WORLD_SIZE"] == str(nodes) and (said["RANK"] == "0") == (name == "head")
        assert "ray_utils/launch.sh" in container["command"][-1]
        assert {mount["name"] for mount in container["volumeMounts"]} == {
            volume["name"] for volume in spec["volumes"]
        }
        assert any(mount["mountPath"] == "/dev/shm" for mount in container["volumeMounts"])
    installed = [
        line
        for line in (ROOT / "requirements/base.txt").read_text().splitlines()
        if line.startswith("ray[")
    ]
    low, high = re.findall(r"(\d+)\.(\d+)", installed[0])
    assert (
        tuple(map(int, low))
        <= tuple(map(int, cluster["rayVersion"].split(".")[:2]))
        < tuple(map(int, high))
    )


def test_slurm_has_time_to_write_a_checkpoint():
    seconds = int(directives()["signal"].partition("@")[2])
    grace = int(re.search(r"runner\.grace_period=(\d+)", SLURM.read_text())[1])
    assert directives()["signal"].startswith("TERM@") and grace < seconds
    assert directives()["ntasks-per-node"] == "1"


# --- launch.sh, with a Python that only says what it is asked --------------------------------------------------------


@pytest.fixture
def launch(tmp_path):
    """Starts launch.sh; node.py's verbs `start`, `check` and `stop` succeed at once, and `serve` ends when it is asked to stop."""
    fake = tmp_path / "python"
    fake.write_text(
        "#!/usr/bin/env bash\n"
        'if [[ "$1" == -c ]]; then exit; fi\n'
        "trap 'echo served; exit 0' TERM\n"
        'echo "node ${*:2}, RAY_ADDRESS=${RAY_ADDRESS:-}"\n'
        'while [[ "$2" == serve ]]; do sleep 0.05; done\n'
    )
    fake.chmod(0o755)
    running = []

    def start(*arguments: str, **settings: str) -> subprocess.Popen:
        running.append(
            subprocess.Popen(
                ["bash", str(ROOT / "ray_utils/launch.sh"), *arguments],
                env=os.environ
                | {"RLINF_VL_PYTHON": str(fake), "RAY_ADDRESS": "127.0.0.1:6380"}
                | settings,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )  # fmt: skip
        )
        return running[-1]

    yield start
    for process in running:
        process.kill()


def said_until(process: subprocess.Popen, words: str) -> str:
    said = ""
    for line in process.stdout:
        said += line
        if words in line:
            break
    return said


def test_rank_0_checks_works_and_stops(launch):
    output, _ = (
        process := launch("16", "--cpu", "--", "sh", "-c", "echo working; exit 5")
    ).communicate(timeout=30)
    asked = [line for line in output.splitlines() if line != "working"]
    assert process.returncode == 5
    assert asked == [
        f"node {verb}, RAY_ADDRESS=" for verb in ("start", "check 16 --cpu", "stop")
    ], "not in another's Ray"


@pytest.mark.parametrize(("rank", "arguments"), [("1", ["16", "--", "true"]), ("0", [])])
def test_others_serve_until_they_are_done(launch, rank, arguments):
    process = launch(*arguments, RANK=rank)
    said = said_until(process, "serve")
    process.send_signal(signal.SIGTERM)
    rest, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert "check" not in said and rest.splitlines() == ["served", "node stop, RAY_ADDRESS="]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_reach_the_command_as_sigterm_and_its_exit_code_counts(launch, number):
    work = (
        "trap 'sleep 0.3; echo written; exit 7' TERM; echo working; while true; do sleep 0.05; done"
    )
    process = launch("1", "--", "bash", "-c", work)
    said_until(process, "working")
    for _ in range(2):  # an impatient user
        process.send_signal(number)
    rest, _ = process.communicate(timeout=30)
    assert process.returncode == 7
    assert "written" in rest and rest.splitlines()[-1] == "node stop, RAY_ADDRESS="
