"""install.sh with the real pip on small stand-in packages: versions that moved are told and put back, torchvision fits torch."""

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from rlinf_vl.tools.check import packages

ROOT = Path(__file__).resolve().parents[3]
TORCH = re.findall(
    r"^TORCH_DEFAULT=(\S+)", (ROOT / "requirements/install.sh").read_text(), re.MULTILINE
)[0]
NEWER = "2.15.0"
#: Modules that an environment imports once before it is ready.
IMPORTED = (
    re.search(
        r'for module in \((("[\w.]+",? ?)+)\)', (ROOT / "requirements/install.sh").read_text()
    )[1]
    .replace('"', "")
    .split(", ")
)
#: Distribution → module of what `verify` looks at, beside torch.
OTHERS = {
    "transformers": "transformers",
    "ray": "ray",
    "datasets": "datasets",
    "hydra-core": "hydra",
    "numpy": "numpy",
    "pillow": "PIL",
    "safetensors": "safetensors",
    "tensorboard": "tensorboard",
    "math-verify": "math_verify",
}
TORCH_CODE = """
import types
__version__ = {version!r}
version, cuda = types.SimpleNamespace(cuda=None), types.SimpleNamespace(is_available=lambda: False)
"""
#: As the real one does, it fails where torch is not the one that it was built with.
TORCHVISION_CODE = """
import torch
if torch.__version__ != {torch!r}:
    raise RuntimeError("operator torchvision::nms does not exist")
"""
#: An editable install of the stand-in project, which needs no build tool.
BACKEND = """
import os, zipfile
def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    name = "rlinf_vl-0.1-py3-none-any.whl"
    with zipfile.ZipFile(os.path.join(wheel_directory, name), "w") as wheel:
        wheel.writestr("rlinf_vl.pth", os.getcwd())
        wheel.writestr("rlinf_vl-0.1.dist-info/METADATA", "Metadata-Version: 2.1\\nName: rlinf_vl\\nVersion: 0.1\\n")
        wheel.writestr("rlinf_vl-0.1.dist-info/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr("rlinf_vl-0.1.dist-info/RECORD", "")
    return name
"""


def wheel(folder: Path, name: str, version: str, files: dict[str, str], requires: str = "") -> None:
    stem = name.replace("-", "_")
    info = f"{stem}-{version}.dist-info"
    needed = f"Requires-Dist: {requires}\n" if requires else ""
    with zipfile.ZipFile(folder / f"{stem}-{version}-py3-none-any.whl", "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needed}"
        )
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")


def add_torch(wheels: Path, version: str) -> None:
    wheel(
        wheels,
        "torch",
        version,
        {
            "torch/__init__.py": TORCH_CODE.format(version=version),
            "torch/version.py": "cuda = None",
        },
    )


def add_torchvision(wheels: Path, version: str, torch: str) -> None:
    code = {"torchvision/__init__.py": TORCHVISION_CODE.format(torch=torch)}
    wheel(wheels, "torchvision", version, code, requires=f"torch=={torch}")


class Tree:
    """A checkout with install.sh and stand-ins for all that it installs."""

    def __init__(self, folder: Path) -> None:
        self.root, self.wheels, self.venv = folder / "root", folder / "wheels", folder / "env"
        self.wheels.mkdir()
        for name in ("requirements/install.sh", "rlinf_vl/tools/check/packages.py"):
            (self.root / name).parent.mkdir(parents=True, exist_ok=True)
            (self.root / name).write_text((ROOT / name).read_text())
        (self.root / "rlinf_vl/__init__.py").touch()
        for module in IMPORTED:
            path = self.root / f"rlinf_vl/{module.replace('.', '/')}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        (self.root / "requirements/base.txt").write_text("torch>=2.11\n" + "\n".join(OTHERS))
        (self.root / "backend.py").write_text(BACKEND)
        (self.root / "pyproject.toml").write_text(
            '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        )
        for name, module in OTHERS.items():
            wheel(self.wheels, name, "1.0", {f"{module}/__init__.py": ""})
        add_torch(self.wheels, TORCH)
        pip = {
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(self.wheels),
            "PIP_CONFIG_FILE": os.devnull,
        }
        self.environment = {
            k: v for k, v in os.environ.items() if not k.startswith(("PIP_", "TORCH_"))
        } | pip
        self.environment["PYTHON"] = sys.executable

    def run(self, *command: str | Path) -> str:
        done = subprocess.run(
            list(map(str, command)),
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=120,
            stdin=subprocess.DEVNULL,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def install(self) -> str:
        return self.run("bash", self.root / "requirements/install.sh", "--venv", self.venv)

    def pip(self, *arguments: str) -> str:
        return self.run(self.venv / "bin/python", "-m", "pip", "-q", *arguments)

    def version(self, name: str) -> str | None:
        code = "import importlib.metadata as m, sys; print(next((d.version for d in m.distributions(name=sys.argv[1])), ''))"
        return self.run(self.venv / "bin/python", "-c", code, name).strip() or None


@pytest.mark.slow
def test_what_another_pip_moved_is_told_and_put_back_and_no_broken_torchvision_stays(tmp_path):
    tree = Tree(tmp_path)
    fitting = f"0.{int(TORCH.split('.')[1]) + 15}.0"
    # As PyPI's is beside a CPU torch: transformers fails with it.
    add_torchvision(tree.wheels, fitting, "2.13.0+cu130")
    said = tree.install()
    assert "none for this torch can be had here" in said
    assert tree.version("torchvision") is None and tree.version("torch") == TORCH
    assert f"pip install --no-deps 'torchvision=={fitting[:-1]}*'" in said.replace(
        "--retries 0 ", ""
    )
    assert "nothing to do" in tree.install()
    # As a user does who reads "wants torchvision".
    for torch, torchvision in ((TORCH, fitting), (NEWER, "0.30.0")):
        add_torch(tree.wheels, torch)
        add_torchvision(tree.wheels, torchvision, torch)
    wheel(tree.wheels, "transformers", "2.0", {"transformers/__init__.py": ""})
    tree.pip("install", "torchvision")
    tree.pip("install", "-U", "transformers")
    assert (tree.version("torch"), tree.version("transformers")) == (NEWER, "2.0"), (
        "nothing moved, nothing is tested"
    )
    stamp = tree.venv / packages.STAMP
    said = tree.run(
        tree.venv / "bin/python",
        "-P",
        tree.root / "rlinf_vl/tools/check/packages.py",
        "moved",
        stamp,
    )
    assert said.splitlines() == [f"torch {TORCH} {NEWER}", "transformers 1.0 2.0"]
    said = tree.install()
    assert (
        f"moved since it was made: torch {TORCH} -> {NEWER}" in said and "nothing to do" not in said
    )
    assert (tree.version("torch"), tree.version("transformers")) == (TORCH, "1.0")
    assert tree.version("torchvision") == fitting
    assert "nothing to do" in tree.install()


@pytest.mark.parametrize(
    ("torch", "fits", "others"),
    [
        ("2.13.0", ["0.28.0", "0.28.3"], ["0.30.0", "0.27.1", "0.2.8"]),
        ("2.13.0+cpu", ["0.28.0+cpu"], ["0.28.0", "0.28.0+cu130"]),
        ("2.8.0+cu128", ["0.23.0+cu128"], ["0.23.0", "0.24.0+cu128"]),
        ("2.14.1+local", ["0.29.1", "0.29.0+mine"], ["0.28.0"]),
    ],
)
def test_which_torchvision_fits(torch, fits, others):
    assert all(packages.torchvision_fits(torch, version) for version in fits)
    assert not any(packages.torchvision_fits(torch, version) for version in others)


def test_the_command_leaves_torch_alone_and_the_docs_give_it(monkeypatch):
    versions = {"torch": TORCH}
    monkeypatch.setattr(packages, "installed_version", versions.get)
    command = packages.torchvision_command()
    assert "--no-deps" in command and command.endswith(
        f"'torchvision==0.{int(TORCH.split('.')[1]) + 15}.*'"
    )
    assert f"`.venv/bin/{command}`" in " ".join((ROOT / "docs/checkpoints.md").read_text().split())
    versions["torch"] = "2.13.0+cpu"
    assert "--index-url https://download.pytorch.org/whl/cpu " in packages.torchvision_command()


def test_no_place_asks_for_a_torchvision_that_moves_torch():
    asking = re.compile(r"pip install (-U )?torchvision\b")
    files = [
        *ROOT.glob("rlinf_vl/**/*.py"),
        *ROOT.glob("docs/*.md"),
        ROOT / "README.md",
        *ROOT.glob("benchmarks/**/*.py"),
    ]
    lines = [
        (file.name, line)
        for file in files
        for line in file.read_text().splitlines()
        if asking.search(line)
    ]
    assert all("replaces torch" in line for _, line in lines), lines
