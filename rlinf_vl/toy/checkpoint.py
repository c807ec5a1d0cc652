"""Where the toys' checkpoints are. To find one that is there takes neither torch nor transformers, which `model` makes it with."""

import os
from pathlib import Path

from rlinf_vl.data.cache import build_once, cache_root, source_version
from rlinf_vl.toy import task


def toy_checkpoint_path(
    toy: str = "toy",
    *,
    seed: int = task.DEFAULT_SEED,
    cache_dir: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> Path:
    """Folder of a task's checkpoint of a seed, built on first use under `cache_root(cache_dir)`."""
    own = (str(Path(__file__).with_name(name)) for name in ("task.py", "files.py", "model.py"))
    target = (
        cache_root(cache_dir) / f"{toy}-{source_version(*task.toy_of(toy).sources, *own)}" / f"checkpoint-seed{seed}"
    )

    def build(folder: Path) -> None:
        from rlinf_vl.toy.model import build_toy_checkpoint

        build_toy_checkpoint(folder, seed, progress, toy=toy)

    return build_once(target, build)
