"""Paths of the toys' checkpoints.

Finding a checkpoint needs neither torch nor transformers, only building one does.
"""

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
    """Return the folder of a task's checkpoint, which is built on first use.

    It lies under `cache_root(cache_dir)`.
    """
    # The folder's name has a hash of the sources, so that a change of them builds a new checkpoint.
    builder_sources = (
        str(Path(__file__).with_name(name)) for name in ("task.py", "files.py", "model.py")
    )
    target = (
        cache_root(cache_dir)
        / f"{toy}-{source_version(*task.toy_of(toy).sources, *builder_sources)}"
        / f"checkpoint-seed{seed}"
    )

    def build(folder: Path) -> None:
        from rlinf_vl.toy.model import build_toy_checkpoint

        build_toy_checkpoint(folder, seed, progress, toy=toy)

    return build_once(target, build)
