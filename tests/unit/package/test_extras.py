"""Each extra of pyproject.toml does alone what it is for: the list is `ALONE` in tests/extras.py."""

import importlib.util
import subprocess
import sys

import extras
import pytest
from fresh_environment import python_with

#: Those that install no packages for a user of the project, or all of them.
OF_DEVELOPERS = {"dev"}
#: Their imports take seconds each: bitsandbytes, for one, imports torch's compiler.
SLOW = {"browser", "docs", "qlora", "s3"}
#: 11 GB: tests/run.sh --sglang runs in an environment of its own, which is made with this extra.
LARGE = {"sglang"}


def alone(python, *names: str) -> str:
    """Run these extras' programs; returns what they print."""
    done = subprocess.run(
        [str(python), "-P", extras.__file__, *names],
        capture_output=True,
        text=True,
        cwd=extras.ROOT,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_list_has_every_extra():
    assert extras.ALONE.keys() | OF_DEVELOPERS == extras.PROJECT["optional-dependencies"].keys()


@pytest.mark.slow
def test_each_extra_that_is_installed_here_does_alone_what_it_is_for():
    installed = [name for name in extras.ALONE if name not in SLOW and not extras.missing(name)]
    assert {"agents", "envs"} <= set(installed)
    alone(sys.executable, *installed)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(SLOW))
def test_each_slow_one_does_so_too(name):
    if absent := extras.missing(name):
        pytest.skip(f"{', '.join(absent)} is not installed here")
    alone(sys.executable, name)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(extras.ALONE.keys() - LARGE))
def test_each_extra_does_so_in_a_fresh_environment(name, tmp_path):
    """Its newest packages that go together with the core's, which are those of this environment."""
    if name == "fla" and importlib.util.find_spec("triton") is None:
        pytest.skip("kernels for GPUs: the torch of this environment has no Triton")
    constraints = tmp_path / "constraints.txt"
    constraints.write_text(extras.constraints())
    packages = extras.PROJECT["optional-dependencies"][name]
    python = python_with(tmp_path / "venv", "-c", str(constraints), *packages)
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (here,) = {path for path in sys.path if path.endswith("site-packages")}
    # behind its own, so that those go first
    (packages / "core.pth").write_text(here + "\n")
    alone(python, name)
