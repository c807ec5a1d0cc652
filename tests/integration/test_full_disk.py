"""A disk that is really full: the last good checkpoint stays, and the message says what is needed."""

import hashlib
import os
import shutil
import subprocess

import pytest

from rlinf_vl.runtime.checkpoints import CheckpointFailed, checkpoints, save_checkpoint

MB = 10**6


@pytest.fixture
def small_disk(tmp_path):
    """A folder on a disk of its own, and the means to resize it."""
    if os.geteuid() != 0 or not shutil.which("mount"):
        pytest.skip("mounting a small disk takes root")
    folder = tmp_path / "disk"
    folder.mkdir()

    def resize(megabytes: int) -> None:
        subprocess.run(["mount", "-o", f"remount,size={megabytes}m", folder], check=True)

    try:
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=5m", "tmpfs", folder],
            check=True,
            capture_output=True,
        )
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no disk can be mounted here: {error.stderr}")
    yield folder, resize
    subprocess.run(["umount", folder], check=True)


def save(run_dir, step: int) -> None:
    def write_actor(folder: str) -> dict[str, str]:
        with open(f"{folder}/rank_0", "wb") as file:
            file.write(bytes(9 * MB))
        return {"rank_0": hashlib.sha256(bytes(9 * MB)).hexdigest()}

    save_checkpoint(run_dir, step, write_actor, {"step": step}, keep_last=1)


def test_a_full_disk_keeps_the_last_good_checkpoint_and_says_what_is_needed(small_disk):
    """A checkpoint is 9 MB: the first is too large in the writing, the second fits, for the third there is no room."""
    folder, resize = small_disk
    with pytest.raises(
        CheckpointFailed, match=r"step 2.*needs at least.*The last good one is none$"
    ):
        save(folder, 2)
    assert checkpoints(folder) == []
    resize(15)
    save(folder, 4)
    with pytest.raises(
        CheckpointFailed, match=r"step 6.*MB are free.*runner\.keep_last.*global_step_4$"
    ):
        save(folder, 6)
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["global_step_4"]
    resize(60)
    save(folder, 6)
    assert [step for step, _ in checkpoints(folder)] == [6]
