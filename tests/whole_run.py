"""What the tests of whole runs share: the fixed metrics, runs that can be struck, and finding every process of a run."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import psutil

from rlinf_vl.extras.toy.checkpoint import toy_checkpoint_path

FIXED_METRICS = {
    "reward/mean", "reward/std", "reward/zero_std_groups", "actor/loss", "actor/grad_norm", "actor/entropy",
    "actor/clip_fraction", "actor/rollout_train_kl", "actor/rollout_train_k3", "actor/rollout_train_abs_diff_mean",
    "actor/rollout_train_abs_diff_max", "actor/tis_mean", "actor/tis_clip_fraction", "actor/tis_ess",
    "rollout/response_length_mean", "rollout/response_length_max", "rollout/truncated", "rollout/tokens_per_second",
    "actor/tokens_per_second", "packing/fill", "data/object_store_bytes", "data/unique_bytes", "time/step",
    "time/generate", "time/train", "time/sync",
}  # fmt: skip

#: Runs that test no process of theirs are one process: they start in half the time.
LOCAL = "cluster.backend=local"

ROOT = Path(__file__).resolve().parents[1]
#: Toy → supervised steps after which its answers have the right form, and some of them are right.
SUPERVISED = {"toy-maze": 160, "toy-tool": 90, "toy-browser": 120}
#: Toy that an agent of the examples can play → the agent.
AGENT_TOYS = {"toy-maze": "maze", "toy-tool": "rectangle_tool"}


def marked(mark: dict[str, str]) -> list[psutil.Process]:
    """Processes whose environment carries the mark."""
    found = []
    for process in psutil.process_iter():
        try:
            if (
                mark.items() <= process.environ().items()
                and process.status() != psutil.STATUS_ZOMBIE
            ):
                found.append(process)
        except psutil.Error:
            continue
    return found


class Run:
    """A run in a process group of its own, whose processes can be found and struck while it goes on."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        self.folder, self.mark = (
            folder / "toy-grpo-cpu",
            {"RLINF_VL_TEST_RUN": f"{folder}-{time.monotonic()}"},
        )
        command = [
            sys.executable,
            "-m",
            "rlinf_vl",
            "train",
            "toy-grpo-cpu",
            f"runner.output_dir={folder}",
            *overrides,
        ]
        self._output = tempfile.TemporaryFile("w+")
        self.process = subprocess.Popen(
            command,
            env=os.environ | self.mark,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def output(self) -> str:
        self._output.seek(0)
        return self._output.read()

    def until(self, condition: Callable[[], Any], seconds: float = 600) -> Any:
        """Wait for something to become true; its value."""
        deadline = time.monotonic() + seconds
        while not (value := condition()):
            assert self.process.poll() is None, self.output()
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.002)
        return value

    def until_step(self, step: int) -> None:
        self.until(lambda: step in [row["step"] for row in rows_of(self.folder / "metrics.jsonl")])

    def actors(self, title: str) -> list[psutil.Process]:
        """Ray actors whose title begins so: `ray::` and the class, and while they work the method."""
        found = []
        for process in psutil.process_iter():
            try:
                if (
                    process.name().startswith("ray::")
                    and self.mark.items() <= process.environ().items()
                ):
                    if process.cmdline()[0].startswith(title):
                        found.append(process)
            except (psutil.Error, IndexError):
                continue
        return sorted(found, key=lambda process: process.pid)

    def finish(self, expect: int | None = 0, seconds: float = 600) -> str:
        """Wait for the end, with that exit code (None: any but 0), and see that every process is gone; what was written to
        the terminal."""
        try:
            code = self.process.wait(timeout=seconds)
            assert code == expect or (expect is None and code), f"exit code {code}\n{self.output()}"
        finally:
            if self.process.poll() is None:
                self.process.kill()
        # The Ray agents of a killed driver try for up to a minute to reach its GCS, which is dead as well.
        psutil.wait_procs(marked(self.mark), timeout=150)
        left = [" ".join(process.cmdline())[:120] for process in marked(self.mark)]
        assert not left, left
        return self.output()


def rows_of(path: Path) -> list[dict]:
    """The lines of a file of JSON objects, a last one that is still being written left out; none if it is not there."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


#: Not the same in two runs, or counts of what happened to a run.
VARIES = (
    *("time/", "rollout/tokens_per_second", "actor/tokens_per_second", "rollout/engine_busy"),
    *("rollout/worker_restarts", "actor/restarts", "sync/offer_seconds", "sync/load_seconds"),
)


def comparable(folder: Path) -> dict[int, dict]:
    """By step, the metrics that must be equal in runs of the same computation."""
    rows = {row.pop("step"): row for row in rows_of(folder / "metrics.jsonl")}
    return {
        step: {name: value for name, value in row.items() if not name.startswith(VARIES)}
        for step, row in rows.items()
    }


def played_run(
    folder: Path,
    toy: str,
    steps: int,
    *overrides: str,
    recipe: str = "",
) -> Path:
    """The folder of a whole run of `recipe` (`toy`-cpu unless named) with so many steps, in one process, from a checkpoint of `toy`
    that knows the form of answers (`SUPERVISED`) or nothing yet. It is made once and kept in the cache. All trajectories are
    recorded."""
    recipe = recipe or f"{toy}-cpu"
    model = toy_checkpoint_path(toy, steps=SUPERVISED.get(toy, 1), progress=False)
    command = [sys.executable, "-m", "rlinf_vl", "train", recipe, f"runner.output_dir={folder}"]
    command += [
        f"rollout.model.model_path={model}",
        f"runner.max_steps={steps}",
        f"runner.val_check_interval={steps}",
        "data.val_samples=24",
        "runner.save_interval=-1",
        "runner.max_tokens_per_mbs=2000",
        "runner.trajectories.groups=-1",
        LOCAL,
    ]
    done = subprocess.run(
        [*command, *overrides],
        capture_output=True,
        text=True,
        timeout=800,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / recipe


def agent_overrides(agent: str) -> tuple[str, ...]:
    """Return the overrides with which an agent of the examples plays instead of the environment."""
    function = f"{ROOT / 'examples/agents' / agent}.py:solve"
    return "rollout.env_class=single_turn", f"rollout.agent.function={function}"


def trajectories_of(run: Path) -> pd.DataFrame:
    """Return a run's recorded trajectories, by their places in groups and steps."""
    key = ["split", "step", "group_id", "sample"]
    table = pd.read_parquet(run / "trajectories").set_index(key).sort_index()
    assert table.index.is_unique
    return table


def metrics_of(run: Path) -> list[dict]:
    """The lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def assert_engine_and_trainer_agree(rows: list[dict], steps: int) -> None:
    assert [row["step"] for row in rows] == list(range(steps + 1))
    for row in rows[1:]:
        assert row["actor/rollout_train_abs_diff_mean"] <= 2e-5
        assert 0 < row["actor/rollout_train_abs_diff_max"] <= 2e-4
        assert row["rollout/errors"] == 0
