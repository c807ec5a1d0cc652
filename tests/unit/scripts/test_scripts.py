"""The shell scripts: their syntax, what they refuse, and what they hand on."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
RUN = ROOT / "examples/reasoning/run_main_grpo_vqa.sh"
SCRIPTS = sorted([*ROOT.glob("*/*.sh"), *ROOT.glob("examples/**/*.sh"), ROOT / ".ci/run"])


def bash(
    script: Path, *arguments: str, cwd: Path | None = None, **environment: str
) -> subprocess.CompletedProcess:
    """Run a script without this test's own Python; whatever it starts is bounded by a minute."""
    env = {
        name: value for name, value in os.environ.items() if name != "RLINF_VL_PYTHON"
    } | environment
    command = ["bash", str(script), *arguments]
    return subprocess.run(
        command,
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )


@pytest.fixture
def fake_python(tmp_path: Path) -> Path:
    """Stands in for Python: prints its arguments and where it runs as JSON, and exits with FAKE_EXIT."""
    tell = tmp_path / "tell.py"
    tell.write_text(
        "import json, os, sys\n"
        "print(json.dumps({'argv': sys.argv[1:], 'cwd': os.getcwd(), 'threads': os.environ['OMP_NUM_THREADS']}))\n"
        "sys.exit(int(os.environ.get('FAKE_EXIT', 0)))\n"
    )
    fake = tmp_path / "python"
    fake.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{tell}" "$@"\n')
    fake.chmod(0o755)
    return fake


def test_every_script_was_found():
    names = {path.name for path in SCRIPTS}
    assert names >= {
        "install.sh",
        "run.sh",
        "run_main_grpo_vqa.sh",
        "start_ray.sh",
        "check_ray.sh",
        "stop_ray.sh",
        "run",
    }


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_syntax(script: Path):
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


# --- install.sh -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--sglagn"], "unknown option '--sglagn'"),
        (["--torch"], "--torch needs a version"),
        (["--transformers", "--dev"], "--transformers needs a version"),
        (["--venv"], "--venv needs a folder"),
        (["0.5.23"], "unknown option '0.5.23'"),
    ],
)
def test_install_refuses(arguments: list[str], said: str, tmp_path: Path):
    done = bash(ROOT / "requirements/install.sh", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert said in done.stderr and "usage: bash requirements/install.sh" in done.stderr
    assert not list(tmp_path.iterdir())


def test_install_leaves_a_folder_alone_that_is_no_environment(tmp_path: Path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/work.txt").write_text("precious")
    done = bash(ROOT / "requirements/install.sh", "--venv", "mine", cwd=tmp_path)
    assert done.returncode == 1 and "is no Python environment" in done.stderr
    assert (tmp_path / "mine/work.txt").read_text() == "precious"


def test_install_names_an_old_python(tmp_path: Path):
    old = tmp_path / "python3.10"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    done = bash(ROOT / "requirements/install.sh", "--venv", str(tmp_path / "env"), PYTHON=str(old))
    assert done.returncode == 1 and f"PYTHON={old} is no Python 3.11 or newer" in done.stderr
    assert not (tmp_path / "env").exists()


def nvidia_smi(folder: Path, driver: str) -> str:
    """A PATH whose nvidia-smi reports this driver for each of two GPUs."""
    program = folder / "bin/nvidia-smi"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\necho {driver}\necho {driver}\n")
    program.chmod(0o755)
    return os.pathsep.join([str(program.parent), os.environ["PATH"]])


def test_install_names_a_driver_that_sglang_can_not_use(tmp_path: Path):
    """Before anything is fetched: 11 GB later the engine would not start."""
    path = nvidia_smi(tmp_path, "575.57.08")
    install = [ROOT / "requirements/install.sh", "--sglang", "--venv", str(tmp_path / "env")]
    done = bash(*install, PATH=path)
    assert (
        done.returncode == 1
        and "NVIDIA driver 575.57.08 is too old" in done.stderr
        and "580" in done.stderr
    )
    assert not list(tmp_path.glob("env*"))


@pytest.mark.parametrize(
    "driver", ["580.65.06", "NVIDIA-SMI has failed because it could not communicate"]
)
def test_install_goes_on_with_a_newer_driver_or_one_that_does_not_answer(
    tmp_path: Path, driver: str
):
    path = nvidia_smi(tmp_path, driver)
    no_python = tmp_path / "python"  # where the script ends that goes on
    done = bash(
        ROOT / "requirements/install.sh",
        "--sglang",
        "--venv",
        str(tmp_path / "env"),
        PATH=path,
        PYTHON=str(no_python),
    )
    assert (
        done.returncode == 1
        and "driver" not in done.stderr
        and f"PYTHON={no_python} is no Python" in done.stderr
    )


@pytest.mark.parametrize("version", ["0.5.9", "0.5.17", "0.5.22.post1"])
def test_install_refuses_an_sglang_that_the_engine_would_refuse(tmp_path: Path, version: str):
    done = bash(
        ROOT / "requirements/install.sh", "--sglang", version, "--venv", str(tmp_path / "env")
    )
    assert (
        done.returncode == 1
        and f"SGLang {version} is too old; --sglang 0.5.23 is the oldest" in done.stderr
    )
    assert not (tmp_path / "env").exists()


def test_every_place_names_the_version_of_sglang_that_the_engine_takes():
    import re
    import tomllib

    from rlinf_vl.engines.sglang.machine import OLDEST

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["optional-dependencies"]["sglang"] == [f"sglang>={OLDEST}"]
    for file, name in [
        ("requirements/install.sh", "SGLANG_DEFAULT"),
        ("docker/Dockerfile.cuda", "SGLANG_VERSION"),
    ]:
        assert re.findall(rf"^(?:ARG )?{name}=(\S+)", (ROOT / file).read_text(), re.MULTILINE) == [
            OLDEST
        ]


def test_pyproject_and_base_requirements_name_the_same():
    import re
    import tomllib

    def names(lines):
        return sorted(
            m[0].lower()
            for line in lines
            if (m := re.match(r"[A-Za-z0-9_.-]+(\[[a-z]+\])?", line.strip()))
        )

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for file, declared in [
        ("base", project["dependencies"]),
        ("dev", project["optional-dependencies"]["dev"]),
    ]:
        assert names((ROOT / f"requirements/{file}.txt").read_text().splitlines()) == names(
            declared
        )


@pytest.fixture
def nothing_installed(fake_python: Path, tmp_path: Path) -> Path:
    """The run script in a tree where SGLang's environment is yet to be made; its installation only says that it was begun."""
    root = tmp_path / "root"
    config = RUN.parent / "config/vqa/toy-grpo-cpu-sglang.yaml"
    for file in (RUN, config):
        copy = root / file.relative_to(ROOT)
        copy.parent.mkdir(parents=True)
        copy.write_text(file.read_text())
    (root / "requirements").mkdir()
    (root / "requirements/install.sh").write_text('echo "{\\"install\\": \\"$*\\"}"\n')
    (root / ".venv-sglang/bin").mkdir(parents=True)
    (root / ".venv-sglang/bin/python").symlink_to(fake_python)
    return root


def begun(done: subprocess.CompletedProcess) -> list:
    """What was run, in order."""
    lines = [
        json.loads(line) for line in done.stdout.splitlines() if not line.startswith("[check]")
    ]
    return [line.get("argv", line) for line in lines]


CHECKED = ["-m", "rlinf_vl", "train", "--check", "toy-grpo-cpu-sglang", "a=1"]
RAN = ["-m", "rlinf_vl", "train", "toy-grpo-cpu-sglang", "a=1"]


@pytest.mark.parametrize(("code", "goes_on"), [(0, True), (1, True), (2, False)])
def test_a_config_is_checked_by_the_light_environment_before_sglang_is_installed(
    nothing_installed, fake_python, code, goes_on
):
    light = nothing_installed / ".venv/bin/python"
    light.parent.mkdir(parents=True)
    light.write_text(
        f'#!/bin/sh\n[ "$1" = -c ] && exit 0\nOMP_NUM_THREADS= "{fake_python}" "$@"\nexit {code}\n'
    )
    light.chmod(0o755)
    done = bash(nothing_installed / RUN.relative_to(ROOT), "toy-grpo-cpu-sglang", "a=1")
    assert done.returncode == (0 if goes_on else 2), done.stderr
    assert begun(done) == [CHECKED, *([{"install": "--sglang"}, RAN] if goes_on else [])]


@pytest.mark.parametrize("has_packages", [True, False])
def test_a_config_is_checked_where_there_is_no_environment_at_all(
    nothing_installed, tmp_path, has_packages
):
    """A stand-in for Python makes the environment of a moment; without packages to be had the installation goes on."""
    made = '#!/bin/sh\necho "made: $*" >>"$LOG"\n[ "$2" = pip ] && exit %d\n[ "$3" = train ] && exit 2\nexit 0\n'
    python = tmp_path / "bin/python3.11"
    python.parent.mkdir()
    python.write_text(
        '#!/bin/sh\necho "base: $*" >>"$LOG"\n[ "$2" = venv ] || exit 0\n'
        f'mkdir -p "$4/bin"\ncat >"$4/bin/python" <<\'EOF\'\n{made % (not has_packages)}EOF\nchmod +x "$4/bin/python"\n'
    )
    python.chmod(0o755)
    log, scratch = tmp_path / "log", tmp_path / "scratch"
    scratch.mkdir()
    environment = {"PYTHON": str(python), "LOG": str(log), "TMPDIR": str(scratch)}
    done = bash(
        nothing_installed / RUN.relative_to(ROOT), "toy-grpo-cpu-sglang", "a=1", **environment
    )
    assert done.returncode == (2 if has_packages else 0), done.stderr
    assert begun(done) == ([] if has_packages else [{"install": "--sglang"}, RAN])
    last = (
        "made: -m rlinf_vl train --check toy-grpo-cpu-sglang a=1"
        if has_packages
        else "made: -m pip install"
    )
    assert log.read_text().splitlines()[-1].startswith(last)
    assert not any(scratch.iterdir()), "the environment of a moment is gone"


#: Runs `rlinf-vl` with the arguments, in a Python that has only the packages of argv[1] and those that they bring along.
WITH_FEW_PACKAGES = """
import re, sys
from importlib.metadata import distribution, packages_distributions, PackageNotFoundError

def name_of(text):
    return re.match(r"[\\w.-]+", text)[0].lower().replace("_", "-").replace(".", "-")

allowed, waiting = {"rlinf-vl"}, [name_of(line) for line in open(sys.argv[1]) if not line.startswith("#")]
while waiting:
    name = waiting.pop()
    if name not in allowed:
        allowed.add(name)
        try:
            required = distribution(name).requires or []
        except PackageNotFoundError:  # for another version of Python
            continue
        waiting += [name_of(text) for text in required if "extra ==" not in text]

class Blocker:
    places = packages_distributions()

    def find_spec(self, module, path=None, target=None):
        owners = {name_of(owner) for owner in self.places.get(module.partition(".")[0], ())}
        if owners and not owners & allowed:
            raise ModuleNotFoundError(f"No module named {module!r}", name=module)

sys.meta_path.insert(0, Blocker())
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name == "torch" else find(name, package)
sys.argv[:2] = ["rlinf-vl"]
from rlinf_vl.__main__ import main
sys.exit(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("wrong, code", [([], 0), (["runner.max_stesp=3"], 2)])
@pytest.mark.parametrize("sweep", [[], ["--multirun", "runner.seed=1,2"]])
def test_a_check_needs_no_package_but_those_of_its_list(wrong, code, sweep, tmp_path):
    listed = ROOT / "requirements/check.txt"
    arguments = ["train", "--check", "toy-grpo-cpu-sglang", f"runner.output_dir={tmp_path}"]
    done = subprocess.run(
        [sys.executable, "-c", WITH_FEW_PACKAGES, listed, *arguments, *sweep, *wrong],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == code, done.stderr
    assert ("did you mean 'runner.max_steps'" in done.stderr) == bool(wrong)


def test_a_config_is_not_checked_twice_where_sglang_is_installed(nothing_installed):
    (nothing_installed / ".venv-sglang/.rlinf_vl").touch()
    done = bash(nothing_installed / RUN.relative_to(ROOT), "toy-grpo-cpu-sglang", "a=1")
    assert begun(done) == [{"install": "--sglang"}, RAN]


def test_a_config_needs_the_environment_of_the_one_that_it_builds_on(nothing_installed):
    for name, base in (("grandchild", "child"), ("child", "toy-grpo-cpu-sglang")):
        (nothing_installed / f"examples/{name}.yaml").write_text(
            f"defaults:\n  - {base}\n  - _self_\n"
        )
    (nothing_installed / ".venv-sglang/.rlinf_vl").touch()
    for arguments, flags in ([], "--sglang"), (["rollout.rollout_backend=torch"], ""):
        done = bash(nothing_installed / RUN.relative_to(ROOT), "grandchild", *arguments)
        assert begun(done)[0] == {"install": flags}


# --- tests/run.sh and .ci/run ------------------------------------------------------------------------------------------


@pytest.fixture
def tree(fake_python: Path, tmp_path: Path) -> Path:
    """The scripts in a tree of their own, where nothing is installed and Python is a stand-in."""
    root = tmp_path / "root"
    for script in (ROOT / "tests/run.sh", ROOT / "tests/checks.sh", ROOT / ".ci/run"):
        copy = root / script.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(script.read_text())
    (root / "tests/checks").mkdir()
    for check in ("one", "two"):
        (root / f"tests/checks/{check}.py").touch()
    (root / "requirements").mkdir()
    (root / "requirements/install.sh").write_text('echo "{\\"install\\": \\"$*\\"}"\n')
    for venv in (".venv", ".venv-sglang"):
        (root / venv / "bin").mkdir(parents=True)
        (root / venv / "bin/python").write_text(
            f'#!/bin/sh\necho "{{\\"venv\\": \\"{venv}\\"}}"\nexec "{fake_python}" "$@"\n'
        )
        (root / venv / "bin/python").chmod(0o755)
    return root


def ci(tree: Path) -> subprocess.CompletedProcess:
    """.ci/run where a Chromium is there: it would install one."""
    (tree / "chromium").write_text("#!/bin/sh\n")
    (tree / "chromium").chmod(0o755)
    path = f"{tree}:{os.environ['PATH']}"
    return bash(tree / ".ci/run", PATH=path, OMP_NUM_THREADS="1")


LIGHT = ({"install": "--dev"}, {"venv": ".venv"}, ["-m", "pytest"])
WITH_SGLANG = (
    {"install": "--sglang --dev"},
    {"venv": ".venv-sglang"},
    ["-m", "pytest", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]
    + ["-o", "faulthandler_timeout=240"]
    + [
        "tests/e2e/test_sglang_agents_run.py",
        "tests/integration/sglang",
        "tests/e2e/test_sglang_run.py",
    ]
    + ["tests/unit/models/test_attention.py", "tests/unit/models/test_layers.py"],
)


PROCESSES = str(min(os.sysconf("SC_NPROCESSORS_ONLN") + 1, 4))


def with_marks(expression: str) -> tuple:
    """What is run of the tests that `expression` selects, in several processes."""
    options = ["-n", PROCESSES, "--dist", "loadfile", "--no-loadscope-reorder", "-m", expression]
    return (*LIGHT[:2], [*LIGHT[2], *options])


@pytest.mark.parametrize(
    ("script", "arguments", "runs"),
    [
        ("tests/run.sh", ["-k", "a b"], [LIGHT]),
        ("tests/run.sh", ["--sglang", "-k", "a b"], [WITH_SGLANG]),
        ("tests/run.sh", ["--all", "-k", "a b"], [with_marks("not nightly")]),
        ("tests/run.sh", ["--slow", "-k", "a b"], [with_marks("slow and not nightly")]),
        ("tests/run.sh", ["--nightly", "-k", "a b"], [with_marks("nightly")]),
    ],
)
def test_the_tests_run_in_their_environments(
    tree: Path, script: str, arguments: list[str], runs: list
):
    done = bash(tree / script, *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    for (install, venv, argv), lines in zip(
        runs, (told[i : i + 3] for i in range(0, len(told), 3)), strict=True
    ):
        assert lines[:2] == [install, venv]
        assert lines[2]["argv"] == [*argv, "-k", "a b"] and lines[2]["cwd"] == str(tree)


def test_without_arguments_the_quick_tests_run(tree: Path):
    done = bash(tree / "tests/run.sh")
    argv = json.loads(done.stdout.splitlines()[-1])["argv"]
    assert argv == with_marks("not slow")[2]


def test_checks_run_all_or_those_named(tree: Path):
    done = bash(tree / "tests/checks.sh", OMP_NUM_THREADS="1")
    assert (
        done.returncode == 0
        and "tests/checks/one.py" in done.stdout
        and "tests/checks/two.py" in done.stdout
    )
    done = bash(tree / "tests/checks.sh", "two", OMP_NUM_THREADS="1")
    assert (
        done.returncode == 0 and "one" not in done.stdout and "tests/checks/two.py" in done.stdout
    )
    done = bash(tree / "tests/checks.sh", FAKE_EXIT="1", OMP_NUM_THREADS="1")
    assert done.returncode == 1 and "two: failed" in done.stdout


def test_continuous_integration_runs_every_part(tree: Path):
    done = ci(tree)
    assert (done.returncode, done.stderr) == (0, "")
    parts = [line.partition(" ")[2] for line in done.stdout.splitlines() if line.startswith("=== ")]
    assert parts == [
        f"bash {tree}/requirements/install.sh --dev",
        f"beside the next steps: nice -n 19 bash {tree}/requirements/install.sh --sglang --dev",
        f"bash {tree}/tests/run.sh",
        f"bash {tree}/tests/run.sh --slow",
        "sglang-install has ended:",
        f"beside the next steps: bash {tree}/tests/checks.sh",
        f"bash {tree}/tests/run.sh --sglang",
        "checks has ended:",
    ]
    assert "tests/checks/one.py" in done.stdout, "what ran beside is shown"


@pytest.mark.parametrize("failing", [".venv", ".venv-sglang"])
def test_continuous_integration_fails_if_either_part_does(tree: Path, failing: str):
    python = tree / failing / "bin/python"
    python.write_text(python.read_text().replace("exec", "FAKE_EXIT=3 exec"))
    done = ci(tree)
    assert done.returncode == 1
    failed = [line for line in done.stdout.splitlines() if line.startswith("failed: ")]
    assert all("tests/run.sh" in line or line == "failed: checks" for line in failed)
    assert any("--sglang" in line for line in failed) == (failing == ".venv-sglang")
    assert [venv in done.stdout for venv in ('".venv"', '".venv-sglang"')] == [True, True]


# --- run_main_grpo_vqa.sh ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [[], ["toy-grpo-cup"], ["../../secret"], ["--help"]])
def test_run_without_a_known_config(arguments: list[str], fake_python: Path):
    done = bash(RUN, *arguments, RLINF_VL_PYTHON=str(fake_python))
    assert done.returncode == 2 and done.stdout == ""
    assert (
        "usage:" in done.stderr
        and "\n  toy-grpo-cpu\n" in done.stderr
        and "qwen3-vl-2b-grpo-fsdp-geo3k" in done.stderr
    )
    assert all(name in done.stderr for name in arguments)


@pytest.mark.parametrize(
    "written",
    ["defaults: [base]\n", "defaults:\n- base\n- _self_\n", "defaults: [ base, _self_ ]\n"],
)
@pytest.mark.parametrize("given", ["{folder}/own.yaml", "../mine/own.yaml", "own.yaml", "own"])
def test_run_takes_own_configs_and_their_engine(written: str, given: str, tmp_path: Path):
    """The engine of a config that it builds on decides on the environment, which is then made (here it can't be)."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/own.yaml").write_text(f"# mine\n{written}runner:\n  max_steps: 3\n")
    (tmp_path / "mine/base.yaml").write_text("defaults: [toy-grpo-cpu-sglang]\n")
    shutil.copytree(ROOT / "examples", tmp_path / "root/examples")
    (tmp_path / "root/requirements").mkdir()
    (tmp_path / "root/requirements/install.sh").write_text("echo install $*; exit 5\n")
    (tmp_path / "root/.venv-sglang").mkdir()
    (tmp_path / "root/.venv-sglang/.rlinf_vl").touch()
    command = f'cd "{tmp_path}/mine"; bash "$0" "$@"'
    script = tmp_path / "root" / RUN.relative_to(ROOT)
    done = subprocess.run(
        ["bash", "-c", command, str(script), given.format(folder=f"{tmp_path}/mine")],
        env={name: value for name, value in os.environ.items() if name != "RLINF_VL_PYTHON"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (5, "install --sglang\n"), done.stderr


def test_run_hands_overrides_on_untouched(fake_python: Path, tmp_path: Path):
    overrides = [
        "runner.max_steps=3",
        "data.train_data_paths=[a b/train.parquet,'c$HOME.json']",
        "data.system_prompt='Say \"hello\" * ? \\n'",
        "+cluster.component_placement={actor: 0-1, rollout: 0}",
        "~data.prompt_suffix",
        "",
    ]
    done = bash(
        RUN,
        "toy-grpo-cpu",
        *overrides,
        cwd=tmp_path,
        RLINF_VL_PYTHON=str(fake_python),
        OMP_NUM_THREADS="3",
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["argv"] == ["-m", "rlinf_vl", "train", "toy-grpo-cpu", *overrides]
    assert told["cwd"] == str(tmp_path), (
        "relative paths in overrides are relative to where the user stands"
    )
    assert told["threads"] == "3"


def test_run_has_the_exit_code_of_the_run(fake_python: Path):
    assert (
        bash(RUN, "toy-grpo-cpu", RLINF_VL_PYTHON=str(fake_python), FAKE_EXIT="7").returncode == 7
    )


def test_the_image_has_the_libraries_with_which_nccl_reaches_other_machines_without_tcp():
    """Of InfiniBand and RoCE; NCCL opens them when it starts."""
    text = (ROOT / "docker/Dockerfile.cuda").read_text()
    assert {"libibverbs1", "ibverbs-providers", "librdmacm1t64"} <= set(text.split())
