"""Files written aside, and files of JSON lines: whole after any crash."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlinf_vl.runtime.files import LineFile, append_lines, read_lines, recover, write_aside


@pytest.mark.parametrize("durable", [True, False])
def test_a_file_is_replaced_as_a_whole(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")
    with write_aside(path, durable=durable) as aside:
        aside.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]


def test_a_folder_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "step"
    for text in ("old", "new"):
        with write_aside(path) as aside:
            (aside / "deep").mkdir(parents=True)
            (aside / "deep/file").write_text(text)
        assert (path / "deep/file").read_text() == text
    assert [p.name for p in tmp_path.iterdir()] == ["step"]


def test_a_block_that_raises_leaves_everything_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "step"
    path.mkdir()
    (path / "file").write_text("old")
    with pytest.raises(OSError, match="full"), write_aside(path) as aside:
        aside.mkdir()
        raise OSError("full")
    assert (path / "file").read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["step"]


def test_a_path_that_can_not_be_written_is_named_as_it_was_given():
    with (
        pytest.raises(OSError, match=r"'/proc/a\.json'"),
        write_aside(Path("/proc/a.json")) as aside,
    ):
        aside.write_text("x")


def test_recover_deletes_halves_and_gives_a_replaced_folder_its_name_back(tmp_path: Path) -> None:
    for name in (".a.replaced", ".a.tmp", "b", ".b.replaced", ".c.tmp", ".other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(name)
    (tmp_path / ".d.json.tmp").write_text("half")
    assert recover(tmp_path) == [tmp_path / "a"]
    assert sorted(p.name for p in tmp_path.iterdir()) == [".other", "a", "b"]
    assert (tmp_path / "a/file").read_text() == ".a.replaced"
    assert recover(tmp_path / "absent") == []


def test_a_line_after_a_torn_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    append_lines(path, {"step": 1}, {"step": 2, "text": "ä\n"}, durable=True)
    path.write_bytes(path.read_bytes() + b'{"step": 3, "te')
    append_lines(path, {"step": 4})
    assert read_lines(path) == ([{"step": 1}, {"step": 2, "text": "ä\n"}, {"step": 4}], 1)


def test_lines_that_are_no_objects_count_as_torn(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'[1]\n\n{"step": 1}\n\xff\n' + b"[" * 100_000 + b"\n")
    assert read_lines(path) == ([{"step": 1}], 3)


def test_nan_is_refused_and_nothing_is_written(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    with pytest.raises(ValueError, match="not JSON compliant"):
        append_lines(path, {"step": 1}, {"step": 2, "loss": float("nan")})
    assert not path.exists()


def test_a_line_that_does_not_fit_leaves_the_file_as_it_was(small_disk: Path) -> None:
    path = small_disk / "lines.jsonl"
    append_lines(path, {"step": 1})
    with pytest.raises(OSError, match="No space left"):
        append_lines(path, {"step": 2}, {"step": 3, "text": "x" * 2**20})
    assert read_lines(path) == ([{"step": 1}], 0)


def test_lines_that_a_full_disk_refuses_are_written_when_it_has_room(
    small_disk: Path, caplog
) -> None:
    path, ballast = small_disk / "lines.jsonl", small_disk / "ballast"
    lines = LineFile(path)
    lines.append({"step": 1})
    fill(ballast)
    for step in (2, 3):
        lines.append({"step": step, "text": "x" * 8000})
    assert (
        caplog.text.count(
            "lines.jsonl can't be written (No space left on device); 1 line(s) are kept"
        )
        == 1
    )
    with pytest.raises(OSError, match="No space left"):
        lines.flush()
    ballast.unlink()
    lines.append({"step": 4})
    assert [row["step"] for row in read_lines(path)[0]] == [1, 2, 3, 4]

    fill(ballast)
    lines.keep([{"step": 1, "text": "x" * 8000}])
    lines.append({"step": 2})
    assert [row["step"] for row in read_lines(path)[0]] == [1, 2, 3, 4]
    ballast.unlink()
    lines.flush()
    assert [row["step"] for row in read_lines(path)[0]] == [1, 2]
    assert [file.name for file in small_disk.iterdir()] == ["lines.jsonl"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 200 kB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounting = ["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", disk]
    if os.geteuid() or subprocess.run(mounting, capture_output=True).returncode:
        pytest.skip("no disk can be mounted here")
    yield disk
    subprocess.run(["umount", disk], check=True)


def fill(ballast: Path) -> None:
    with ballast.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(bytes(4096))
