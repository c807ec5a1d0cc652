"""The record of a run's data, `datasets.json` in its folder.

The file holds {"train" or "val": {entry of the data paths: {"sha256", "bytes"}}}. The hash of a
file is that of `sha256sum`; the hash of a folder is that of the lines which `sha256sum` prints for
its files, sorted by path. An entry of the hub has its revision instead: {"revision"}.
"""

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from rlinf_vl.data.sources import HUB_PREFIX
from rlinf_vl.runtime.files import write_aside

FILE = "datasets.json"


def write_digests(run_dir: Path, files: Mapping[str, Mapping[str, Path]]) -> None:
    """Write `datasets.json`, given the path of each entry's data.

    Entries that can't be read are left out; the run itself reports them.
    """
    digests: dict[str, dict[str, Any]] = {split: {} for split in files}
    for split, paths in files.items():
        for entry, path in paths.items():
            with suppress(Exception):  # errors of the disk, and of the hub's client
                digests[split][entry] = (
                    _revision(entry) if entry.startswith(HUB_PREFIX) else digest(path)
                )
    with suppress(OSError), write_aside(run_dir / FILE) as aside:
        aside.write_text(json.dumps(digests, indent=1) + "\n", encoding="utf-8")


def digest(path: Path) -> dict[str, Any]:
    """Return hash and size of a file or folder.

    Raises:
        OSError: it can't be read.
    """
    if path.is_file():
        with path.open("rb") as file:
            return {
                "sha256": hashlib.file_digest(file, "sha256").hexdigest(),
                "bytes": path.stat().st_size,
            }
    folder_hash, size = hashlib.sha256(), 0
    for file in sorted(
        (file for file in path.rglob("*") if file.is_file()),
        key=lambda file: str(file.relative_to(path)),
    ):
        file_digest = digest(file)
        folder_hash.update(f"{file_digest['sha256']}  {file.relative_to(path)}\n".encode())
        size += file_digest["bytes"]
    return {"sha256": folder_hash.hexdigest(), "bytes": size}


def _revision(entry: str) -> dict[str, Any]:
    from huggingface_hub import HfApi

    name = entry.removeprefix(HUB_PREFIX).partition(":")[0]
    return {"revision": HfApi().dataset_info(name, timeout=10).sha}
