"""What `pip install` gives: built as a release is (sdist, then the wheel from it), installed, and used without a checkout."""

import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
NOT_SHIPPED = ("__pycache__", "*.pyc", "*.egg-info", ".*")


def run(*command: str | Path, cwd: Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    """A command of a user who has neither a checkout nor this process's settings."""
    env = {"PATH": sysconfig.get_path("scripts"), "HOME": str(cwd), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [str(c) for c in command], cwd=cwd, env=env, capture_output=True, text=True
    )
    assert done.returncode == code, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def build(source: Path) -> tuple[Path, Path]:
    """(wheel, sdist) of a copy of the tree, as building leaves files beside the sources."""
    for name in ("rlinf_vl", "examples"):
        shutil.copytree(
            ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns(*NOT_SHIPPED)
        )
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", source / "dist", cwd=source)
    (wheel,), (sdist,) = (source / "dist").glob("*.whl"), (source / "dist").glob("*.tar.gz")
    return wheel, sdist


def install(wheel: Path, folder: Path) -> Path:
    """`bin` of an environment that has the wheel, and the dependencies of this one."""
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder)
    pip = (
        "-m",
        "pip",
        "--python",
        folder / "bin/python",
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
    )
    run(sys.executable, *pip, wheel, cwd=folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    # Behind its own packages; an editable install there is not followed, as its .pth is not read.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


def check_files(wheel_path: Path, sdist_path: Path) -> int:
    """Every file of the package, the examples in their place, and nothing else; returns how many."""
    files = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "rlinf_vl").rglob("*")
        if path.is_file() and path.suffix != ".pyc" and not path.name.startswith(".")
    }
    assert "rlinf_vl/py.typed" in files and any(name.endswith(".jinja") for name in files)
    examples = [
        path
        for path in EXAMPLES.rglob("*")
        if path.suffix in (".yaml", ".txt")
        or (path.suffix == ".py" and "recipes" in path.relative_to(EXAMPLES).parts)
    ]
    assert {"toy-grpo-cpu.yaml", "qwen3-vl-2b-grpo-fsdp-geo3k.yaml"} <= {
        path.name for path in examples
    }
    with zipfile.ZipFile(wheel_path) as wheel:
        assert files <= set(wheel.namelist()), files - set(wheel.namelist())
        for path in examples:
            assert (
                wheel.read(f"rlinf_vl/config/examples/{path.relative_to(EXAMPLES)}")
                == path.read_bytes()
            ), path
        foreign = {name.split("/")[0] for name in wheel.namelist()} - {"rlinf_vl"}
        assert len(foreign) == 1 and foreign.pop().endswith(".dist-info"), "nothing but the package"
    with tarfile.open(sdist_path) as sdist:
        there = {name.partition("/")[2] for name in sdist.getnames()}
        assert files <= there, files - there
    return len(files)


def check_command_line(installed: Path, empty: Path) -> None:
    """It works from any folder."""
    assert "VERB" in run(installed / "rlinf-vl", "--help", cwd=empty).stdout
    helped = run(
        installed / "rlinf-vl", "train", "toy-grpo-cpu", "runner.max_steps=0", "--help", cwd=empty
    )
    assert "such as runner.max_steps=3" in helped.stdout and "toy-grpo-cpu" in helped.stdout
    refused = run(
        installed / "rlinf-vl", "train", "toy-grpo-cpu", "runner.max_stesp=1", cwd=empty, code=2
    )
    assert "runner.max_stesp" in refused.stderr and "runner.max_steps" in refused.stderr
    unknown = run(installed / "rlinf-vl", "train", "toy-grpo-cup", cwd=empty, code=2)
    assert "toy-grpo-cpu" in unknown.stderr
    assert not list(empty.iterdir()), "what is refused leaves nothing behind"


def check_configs(installed: Path, empty: Path) -> None:
    """Configs load by name from any folder; a local model folder is made absolute, as workers of a cluster stand elsewhere."""
    names = sorted(
        path.stem
        for path in EXAMPLES.rglob("*.yaml")
        if "launchers" not in path.parts and path.name != "recipe.yaml"
    )
    (empty / "mine.yaml").write_text(
        "defaults: [rlinf_vl_schema, toy-grpo-cpu, _self_]\nrunner: {max_steps: 7}\n"
    )
    script = (
        "import rlinf_vl, sys\n"
        "from rlinf_vl.config import load_config\n"
        f"assert rlinf_vl.__file__.startswith({str(installed.parent)!r}), rlinf_vl.__file__\n"
        f"for name in {names!r}:\n    load_config(name)\n"
        "print(load_config('mine').runner.max_steps)\n"
        "for path in ('models/tiny', 'toy', 'owner/name'):\n"
        "    print(load_config('mine', [f'rollout.model.model_path={path}']).rollout.model.model_path)\n"
    )
    (empty / "models/tiny").mkdir(parents=True)
    (empty / "toy").mkdir()
    printed = run(installed / "python", "-c", script, cwd=empty).stdout.splitlines()
    assert printed == ["7", str(empty / "models/tiny"), "toy", "owner/name"], printed


def main() -> str | None:
    with tempfile.TemporaryDirectory() as folder:
        source, environment, empty = (
            Path(folder, name) for name in ("source", "environment", "empty")
        )
        for path in (source, environment, empty):
            path.mkdir()
        try:
            wheel, sdist = build(source)
            files = check_files(wheel, sdist)
            installed = install(wheel, environment)
            check_command_line(installed, empty)
            check_configs(installed, empty)
        except AssertionError as error:
            return f"{error.__traceback__.tb_next.tb_frame.f_code.co_name}: {error}"
    print(f"{wheel.name} has {files} files, installs, and runs without a checkout")
    return None


if __name__ == "__main__":
    sys.exit(main())
