"""What `pip install` gives: built as a release is (sdist, then the wheel from it), installed, and used without a checkout."""

import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("build", reason="build is not installed (--dev)")
pytest.importorskip("setuptools", reason="setuptools is not installed (--dev)")

ROOT = Path(__file__).resolve().parents[3]
EXAMPLES = ROOT / "examples/reasoning/config/vqa"
NOT_SHIPPED = ("__pycache__", "*.pyc", "*.egg-info", ".*")


def run(*command: str | Path, cwd: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    """A command of a user who has neither a checkout nor this test's settings."""
    env = {"PATH": sysconfig.get_path("scripts"), "HOME": str(cwd), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([str(c) for c in command], cwd=cwd, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> tuple[Path, Path]:
    """(wheel, sdist) of a copy of the tree, as building leaves files beside the sources."""
    source = tmp_path_factory.mktemp("source")
    for name in ("rlinf_vl", "examples"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns(*NOT_SHIPPED))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", source / "dist", cwd=source)
    (wheel,), (sdist,) = (source / "dist").glob("*.whl"), (source / "dist").glob("*.tar.gz")
    return wheel, sdist


@pytest.fixture(scope="module")
def installed(built, tmp_path_factory) -> Path:
    """`bin` of an environment that has the wheel, and the dependencies of this one."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    pip = ("-m", "pip", "--python", folder / "bin/python", "install", "--quiet", "--no-deps", "--no-index")
    run(sys.executable, *pip, built[0], cwd=folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    # Behind its own packages; an editable install there is not followed, as its .pth is not read.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    """A folder to stand in, with nothing in it."""
    return tmp_path


def test_the_examples_are_in_the_wheel_and_in_their_place(built):
    names = {path.name for path in EXAMPLES.glob("*.yaml")}
    assert {"toy-grpo-cpu.yaml", "qwen3-vl-2b-grpo-fsdp-geo3k.yaml"} <= names
    with zipfile.ZipFile(built[0]) as wheel:
        for name in names:
            assert wheel.read(f"rlinf_vl/config/examples/{name}") == (EXAMPLES / name).read_bytes()


def test_every_file_of_the_package_is_in_wheel_and_sdist(built):
    files = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "rlinf_vl").rglob("*")
        if path.is_file() and path.suffix != ".pyc" and not path.name.startswith(".")
    }
    assert "rlinf_vl/py.typed" in files and any(name.endswith(".jinja") for name in files)
    with zipfile.ZipFile(built[0]) as wheel:
        assert files <= set(wheel.namelist())
        foreign = {name.split("/")[0] for name in wheel.namelist()} - {"rlinf_vl"}
        assert len(foreign) == 1 and foreign.pop().endswith(".dist-info"), "nothing but the package"
    with tarfile.open(built[1]) as sdist:
        assert files <= {name.partition("/")[2] for name in sdist.getnames()}


def test_the_command_line_works_from_any_folder(installed: Path, empty: Path):
    assert "VERB" in run(installed / "rlinf-vl", "--help", cwd=empty).stdout
    told = run(installed / "rlinf-vl", "train", "toy-grpo-cpu", "runner.max_steps=0", "--help", cwd=empty)
    assert "Hydra overrides" in told.stdout
    refused = run(installed / "rlinf-vl", "train", "toy-grpo-cpu", "runner.max_stesp=1", cwd=empty, code=2)
    assert "runner.max_stesp" in refused.stderr and "runner.max_steps" in refused.stderr
    unknown = run(installed / "rlinf-vl", "train", "toy-grpo-cup", cwd=empty, code=2)
    assert "toy-grpo-cpu" in unknown.stderr
    assert not list(empty.iterdir()), "what is refused leaves nothing behind"


def test_configs_load_by_name_from_any_folder(installed: Path, empty: Path):
    names = sorted(path.stem for path in EXAMPLES.glob("*.yaml"))
    (empty / "mine.yaml").write_text("defaults: [rlinf_vl_schema, toy-grpo-cpu, _self_]\nrunner: {max_steps: 7}\n")
    script = (
        "import rlinf_vl, sys\n"
        "from rlinf_vl.config import load_config\n"
        f"assert rlinf_vl.__file__.startswith({str(installed.parent)!r}), rlinf_vl.__file__\n"
        f"for name in {names!r}:\n    load_config(name, ['rollout.rollout_backend=torch'])\n"
        "print(load_config('mine').runner.max_steps)\n"
        "for path in ('models/tiny', 'toy', 'owner/name'):\n"
        "    print(load_config('mine', [f'rollout.model.model_path={path}']).rollout.model.model_path)\n"
    )
    (empty / "models/tiny").mkdir(parents=True)
    (empty / "toy").mkdir()
    told = run(installed / "python", "-c", script, cwd=empty).stdout.splitlines()
    # A local folder is made absolute: workers of a cluster stand elsewhere.
    assert told == ["7", str(empty / "models/tiny"), "toy", "owner/name"]
