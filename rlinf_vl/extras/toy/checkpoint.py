"""Paths of the toys' checkpoints.

Finding a checkpoint needs neither torch nor transformers, only building one does.
"""

import os
from pathlib import Path

from rlinf_vl.data.cache import build_once, cache_root, source_version
from rlinf_vl.extras.toy import task

#: Files with the recipe of the warm start, its model and its tokenizer.
BUILDER_SOURCES = ("task.py", "files.py", "model.py", "tile_models.py", "warm_start.py")


def toy_checkpoint_path(
    toy: str = "toy",
    *,
    seed: int = task.DEFAULT_SEED,
    steps: int | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> Path:
    """Return the folder of a task's checkpoint, which is built on first use.

    It lies under `cache_root(cache_dir)`.

    Args:
        toy: name of the task.
        seed: seed of the random weights and of the demonstrations.
        steps: supervised steps of the warm start; None for the number of the task.
        cache_dir: root of the cache; None for the user's.
        progress: whether to show a progress bar on the terminal.
    """
    # The folder's name has a hash of the sources, so that a change of them builds a new checkpoint.
    builder_sources = (str(Path(__file__).parent / name) for name in BUILDER_SOURCES)
    version = source_version(*task.toy_of(toy).sources, *builder_sources)
    name = f"checkpoint-seed{seed}" if steps is None else f"checkpoint-seed{seed}-steps{steps}"

    def build(folder: Path) -> None:
        from rlinf_vl.extras.toy.warm_start import build_toy_checkpoint  # imports torch

        build_toy_checkpoint(folder, seed, progress, toy=toy, steps=steps)

    return build_once(cache_root(cache_dir) / f"{toy}-{version}" / name, build)
