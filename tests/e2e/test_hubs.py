"""Environments of hubs by their own packages, unmodified: each trains three steps, with the rewards that its package gives."""

import json
import os
import socket
import subprocess
import sysconfig
import time
import urllib.request
from pathlib import Path

import pytest
from fresh_environment import python_with
from whole_run import metrics_of

ROOT = Path(__file__).resolve().parents[2]
#: What the environments were tried with: both ends of a range, and what each resolves to with the
#: packages of a run, behind which it stands.
PACKAGES = ("verifiers==0.3.1", "openenv==0.10.0", "antlr4-python3-runtime==4.9.3")
OLDEST = ("verifiers==0.1.14", "antlr4-python3-runtime==4.9.3")
STEPS = 3
IN_PYTHON = {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(2400)]


def python_beside(folder: Path, *packages: str) -> str:
    """A Python with packages beside those of this one."""
    python = python_with(folder, *packages)
    command = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    own_packages = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    # Behind its own: what it installs itself comes first.
    Path(own_packages.strip(), "tests.pth").write_text(sysconfig.get_path("purelib"))
    return str(python)


@pytest.fixture(scope="module")
def hub_python(tmp_path_factory) -> str:
    return python_beside(tmp_path_factory.mktemp("hubs"), *PACKAGES)


@pytest.fixture(scope="module")
def oldest_python(tmp_path_factory) -> str:
    return python_beside(tmp_path_factory.mktemp("oldest"), *OLDEST)


@pytest.fixture
def server(hub_python):
    """The address of an OpenEnv server on this machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [hub_python, str(ROOT / "tests/openenv_toy.py"), str(port)]
    process = subprocess.Popen(command, env=os.environ | IN_PYTHON)
    url = f"http://127.0.0.1:{port}"
    try:
        while True:  # until the test's own limit
            assert process.poll() is None, "the server ended"
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def trained(python: str, folder: Path, *overrides: str) -> Path:
    """The folder of a run of three steps with these overrides, whose metrics are sound."""
    command = [
        *(python, "-m", "rlinf_vl", "train", "toy-grpo-cpu"),
        f"runner.output_dir={folder}",
        f"runner.max_steps={STEPS}",
        "runner.val_check_interval=-1",
        "runner.save_interval=-1",
        "data.rollout_batch_size=4",
        "algorithm.group_size=4",
        *overrides,
    ]
    options = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL}
    done = subprocess.run(command, env=os.environ | IN_PYTHON, timeout=1200, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = metrics_of(folder / "toy-grpo-cpu")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for row in rows:
        assert row["rollout/errors"] == 0 and row["actor/rollout_train_abs_diff_mean"] <= 2e-5
    return folder / "toy-grpo-cpu"


def assert_paid_alike(python: str, kind: str, run: Path, *url: str) -> None:
    """Every recorded reward is what the package alone pays for the recorded replies."""
    command = [python, str(ROOT / "tests/hub_rewards.py"), kind, str(run), *url]
    done = subprocess.run(
        command, env=os.environ | IN_PYTHON, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    pairs = json.loads(done.stdout.splitlines()[-1])
    assert len(pairs) == STEPS * 16 and len({ours for ours, _ in pairs}) > 3
    for ours, theirs in pairs:
        assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-7)  # ours are kept in float32


def verifiers_run(python: str, folder: Path, *overrides: str) -> None:
    """Train on an environment of verifiers, and compare its metrics and rewards."""
    run = trained(
        python,
        folder,
        "rollout.env_class=verifiers:verifiers-toy",
        "rollout.env_kwargs.tries=2",
        "data.train_data_paths=[verifiers://verifiers-toy]",
        "data.val_data_paths=[verifiers://verifiers-toy]",
        *overrides,
    )
    for row in metrics_of(run):
        assert row["env/num_turns"] == row["agent/calls"] > 1
        assert row["agent/branches"] == row["agent/reencoded_images"] == 0
        assert row["reward/mean"] == pytest.approx(row["env/right"] + row["env/brief"] / 4)
    assert_paid_alike(python, "verifiers", run)


def test_an_environment_of_verifiers_trains_on_ray(hub_python, tmp_path):
    verifiers_run(hub_python, tmp_path)


@pytest.mark.nightly
def test_the_oldest_verifiers_trains(oldest_python, tmp_path):
    """With the older `datasets` that it asks for."""
    verifiers_run(oldest_python, tmp_path, "cluster.backend=local")


def test_an_openenv_server_trains(hub_python, server, tmp_path):
    run = trained(
        hub_python,
        tmp_path,
        "cluster.backend=local",
        f"rollout.env_class=openenv:{server}",
        "rollout.env_kwargs={fields: [picture, question], reset_columns: [seed]}",
        "data.train_data_paths=[seeds://64]",
        "data.val_data_paths=[seeds://8]",
        "data.image_keys=[]",
    )
    for row in metrics_of(run):
        assert row["env/episode_reward"] == pytest.approx(row["reward/mean"], abs=1e-6)
    assert_paid_alike(hub_python, "openenv", run, server)


@pytest.mark.parametrize(
    ("python", "files"),
    [
        ("hub_python", ("envs/test_openenv.py", "data/test_verifiers_rows.py")),
        # Columns of mixed types came with a later `datasets`.
        pytest.param(
            "oldest_python",
            ("data/test_verifiers_rows.py", "data/test_dataset.py", "-knot mixed"),
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_the_tests_of_the_packages_pass_where_they_are(python, files, request):
    """Elsewhere they are skipped. Rows of geometry may be skipped here, too, where they are absent."""
    options = ("-p", "no:cacheprovider", "-q", "-rs", "-o", "addopts=--import-mode=importlib")
    command = [request.getfixturevalue(python), "-m", "pytest", *options, *files]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command, env=environment, cwd=ROOT / "tests/unit", capture_output=True, text=True
    )
    skipped = [line for line in done.stdout.splitlines() if line.startswith("SKIPPED")]
    assert done.returncode == 0 and all("no geo3k data" in line for line in skipped), done.stdout
