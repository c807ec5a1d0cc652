"""What every test session has: explicit thread counts, real data where it is at hand, and nothing left running."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

# Before torch is imported anywhere, and inherited by every process that a test starts.
os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
os.environ.update(TOKENIZERS_PARALLELISM="false", RAY_USAGE_STATS_ENABLED="0")

import guard
import hypothesis
import psutil
import pytest

ROOT = Path(__file__).resolve().parent.parent
SESSION = "RLINF_VL_TEST_SESSION"
#: Parameters of a unit test in the quick suite; the others run at merge.
QUICK_PARAMETERS = 4
#: Variables with the time, in seconds since the epoch, from which no slow test begins, or no test.
SLOW_UNTIL, ALL_UNTIL = "RLINF_VL_SLOW_TESTS_UNTIL", "RLINF_VL_TESTS_UNTIL"
# Before they are marked: what ends everything that has the mark of this run, once this process is gone.
RUN = "RLINF_VL_TEST_RUN"
if is_first := RUN not in os.environ:
    subprocess.Popen(
        [sys.executable, guard.__file__, str(os.getpid()), f"{RUN}={os.getpid()}"],
        start_new_session=True,
        **dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL),
    )
    os.environ[RUN] = str(os.getpid())
# Marks what this session starts, through any number of generations.
os.environ[SESSION] = str(os.getpid())

# A loaded machine is slow, not wrong.
hypothesis.settings.register_profile("rlinf_vl", deadline=None)
hypothesis.settings.load_profile("rlinf_vl")


@pytest.fixture(scope="session")
def geo3k_dir() -> Path:
    """Folder of train.parquet and test.parquet: RLINF_VL_GEO3K, or shared/data/geo3k beside the repository."""
    folder = Path(os.environ.get("RLINF_VL_GEO3K") or ROOT.parent / "shared/data/geo3k")
    if not (folder / "train.parquet").is_file():
        pytest.skip(f"no geo3k data in {folder}; RLINF_VL_GEO3K names its folder")
    return folder


@pytest.fixture(scope="session")
def toy_folder(tmp_path_factory) -> Path:
    """A toy checkpoint after a single step of warm start: real files, made in a moment, but it has learned nothing."""
    from rlinf_vl.extras.toy.warm_start import build_toy_checkpoint

    folder = tmp_path_factory.mktemp("toy") / "checkpoint"
    build_toy_checkpoint(folder, progress=False, steps=1)
    return folder


def _is_named(item: pytest.Item, mark: pytest.Mark) -> bool:
    """Return whether the mark names one of the parameters of this test, whose ids are joined by hyphens."""
    ids = f"-{item.callspec.id}-"  # pyright: ignore[reportAttributeAccessIssue]
    return any(f"-{name}-" in ids for name in mark.args)


def _left_to_merge(items: list[pytest.Item]) -> set[pytest.Item]:
    """Return those parameters of unit tests that the quick suite leaves out: of each test it runs a few, spread evenly."""
    functions: dict[str, list[pytest.Item]] = {}
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if hasattr(item, "callspec") and not marks & {"quick", "sample"}:
            functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left = set()
    for parameters in functions.values():
        last = len(parameters) - 1
        chosen = {round(i * last / (QUICK_PARAMETERS - 1)) for i in range(QUICK_PARAMETERS)}
        if last >= QUICK_PARAMETERS:
            left.update(item for i, item in enumerate(parameters) if i not in chosen)
    return left


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as nightly what its test's `sample` leaves out; and as slow that, what `quick` leaves out, what is no unit test, and
    most parameters of unit tests that have many."""
    left = _left_to_merge(items)
    for item in items:
        is_slow = ROOT / "tests/unit" not in item.path.parents or item in left
        if quick := item.get_closest_marker("quick"):
            is_slow = bool(quick.args) and not _is_named(item, quick)
        sample = item.get_closest_marker("sample")
        if sample and not _is_named(item, sample):
            item.add_marker("nightly")
        if is_slow or item.get_closest_marker("nightly"):
            item.add_marker("slow")


@pytest.hookimpl(tryfirst=True)  # before fixtures are made
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test where the time for it is over: a late answer of CI is none."""
    for name, is_meant in ((SLOW_UNTIL, item.get_closest_marker("slow")), (ALL_UNTIL, True)):
        if is_meant and time.time() > float(os.environ.get(name, "inf")):
            pytest.skip(f"the time for such tests is over ({name})")


def pytest_keyboard_interrupt() -> None:
    """End at once: the processes that run tests would finish theirs, which may take minutes."""
    if is_first:
        guard.end_all(f"{RUN}={os.getpid()}")


def _left_running() -> list[psutil.Process]:
    """Processes that this session started: children, and those whose parent has already gone."""
    running = []
    for process in guard.marked_processes(f"{SESSION}={os.getpid()}"):
        try:
            if (
                process.status() != psutil.STATUS_ZOMBIE
                and "multiprocessing.resource_tracker"
                not in " ".join(process.cmdline())  # ends with this process
            ):
                running.append(process)
        except psutil.Error:
            continue  # gone
    return running


@pytest.fixture(scope="session", autouse=True)
def nothing_left_running():
    """Fail where processes that the tests started outlive them (they are given ten seconds), and end them."""
    yield
    _, alive = psutil.wait_procs(_left_running(), timeout=10)
    lines = []
    for process in alive:
        try:
            lines.append(f"  {process.pid}: {' '.join(process.cmdline())[:200]}")
            process.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
    assert not lines, f"left running by this test session ({len(lines)}):\n" + "\n".join(lines)
