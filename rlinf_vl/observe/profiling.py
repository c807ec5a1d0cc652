"""torch.profiler around one rank's training step."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


@contextmanager
def profiler(run_dir: Path, step: int, rank: int) -> Iterator[None]:
    """Write `profile/step_N-rank_R.json.gz` in the run's folder, for ui.perfetto.dev: operators and, on a GPU, kernels."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])
    with profile(activities=activities) as profiled:
        yield
    folder = run_dir / "profile"
    folder.mkdir(parents=True, exist_ok=True)
    profiled.export_chrome_trace(str(folder / f"step_{step}-rank_{rank}.json.gz"))
