"""Which data a run saw: `datasets.json` of its folder, {"train" or "val": {entry of its data paths: {"sha256", "bytes"}}}.

Of a file the hash is that of `sha256sum`; of a folder, that of the lines that `sha256sum` prints of its files, sorted by path. Of
the hub it is the revision: {"revision"}.
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
    """Write `datasets.json`, given where the data of each entry are. What can't be read is left out: the run says so itself."""
    found: dict[str, dict[str, Any]] = {split: {} for split in files}
    for split, paths in files.items():
        for entry, path in paths.items():
            with suppress(Exception):  # of the disk, and of the hub's client
                found[split][entry] = _revision(entry) if entry.startswith(HUB_PREFIX) else digest(path)
    with suppress(OSError), write_aside(run_dir / FILE) as aside:
        aside.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def digest(path: Path) -> dict[str, Any]:
    """Raises OSError: it can't be read."""
    if path.is_file():
        with path.open("rb") as file:
            return {"sha256": hashlib.file_digest(file, "sha256").hexdigest(), "bytes": path.stat().st_size}
    whole, size = hashlib.sha256(), 0
    for file in sorted(
        (file for file in path.rglob("*") if file.is_file()), key=lambda file: str(file.relative_to(path))
    ):
        one = digest(file)
        whole.update(f"{one['sha256']}  {file.relative_to(path)}\n".encode())
        size += one["bytes"]
    return {"sha256": whole.hexdigest(), "bytes": size}


def _revision(entry: str) -> dict[str, Any]:
    from huggingface_hub import HfApi

    name = entry.removeprefix(HUB_PREFIX).partition(":")[0]
    return {"revision": HfApi().dataset_info(name, timeout=10).sha}
