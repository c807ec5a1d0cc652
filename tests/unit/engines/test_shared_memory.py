"""Shared memory of SGLang processes that were killed."""

import mmap
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from rlinf_vl.engines.sglang.shared_memory import FOLDER, remove_abandoned


def hold(path: str, ready) -> None:
    descriptor = os.open(path, os.O_RDWR)
    mmap.mmap(descriptor, 16)
    ready.set()
    time.sleep(600)


def test_only_what_no_process_has_open_is_removed(tmp_path):
    old = time.time() - 60
    for name in (
        "sglang_loads_open",
        "sglang_loads_left",
        "sem.mp-left",
        "other",
        "sglang_loads_new",
    ):
        (tmp_path / name).write_bytes(b"0" * 16)
        if name != "sglang_loads_new":
            os.utime(tmp_path / name, (old, old))
    context = multiprocessing.get_context("spawn")
    ready = context.Event()
    process = context.Process(target=hold, args=(str(tmp_path / "sglang_loads_open"), ready))
    process.start()
    assert ready.wait(60)
    try:
        assert remove_abandoned(tmp_path) == ["sem.mp-left", "sglang_loads_left"]
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.join()
    assert remove_abandoned(tmp_path) == ["sglang_loads_open"]
    assert {path.name for path in tmp_path.iterdir()} == {"other", "sglang_loads_new"}


def test_load_figures_that_only_this_process_reads_are_removed_at_once(tmp_path):
    """An engine's own, at its close: its scheduler, which wrote them, is dead."""
    old = time.time() - 60
    maps = []
    for name in ("sglang_loads_own", "sem.mp-own"):
        (tmp_path / name).write_bytes(b"0" * 16)
        descriptor = os.open(tmp_path / name, os.O_RDWR)
        maps.append(mmap.mmap(descriptor, 16))
        os.close(descriptor)
    os.utime(tmp_path / "sem.mp-own", (old, old))
    assert remove_abandoned(tmp_path) == ["sglang_loads_own"]
    for mapped in maps:
        mapped.close()
    assert remove_abandoned(tmp_path) == ["sem.mp-own"]


def test_the_folder_of_shared_memory_is_there():
    assert Path(FOLDER).is_dir() and remove_abandoned() is not None


def test_a_semaphore_is_its_makers_though_it_is_mapped_by_another_name():
    """Another process of the user makes one and starts slowly whoever is to open it."""
    made = "import multiprocessing as m; s = m.get_context('spawn').Semaphore(); print(s._semlock.name, flush=True); input()"
    command = [sys.executable, "-c", made]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        name = f"sem.{process.stdout.readline().strip().removeprefix('/')}"
        old = time.time() - 60
        os.utime(FOLDER / name, (old, old))
        assert name not in Path(f"/proc/{process.pid}/maps").read_text()
        assert name not in remove_abandoned()
        assert (FOLDER / name).exists()
        process.communicate("\n")
