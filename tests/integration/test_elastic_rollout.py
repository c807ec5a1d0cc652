"""`cluster.elastic_rollout` in a whole toy run, on a real Ray cluster whose nodes come and go."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

pytestmark = [pytest.mark.integration, pytest.mark.timeout(1800)]
ROOT = Path(__file__).resolve().parents[2]
STORE = 100 * 2**20
#: A reward function, because a worker runs its file before it takes weights, and an environment's file only with its first
#: group. Workers hang while they take weights whole, as long as a file is there. What hangs is no method of the worker: Ray
#: has looked those up before its constructor runs.
HANGING = """
import os
import sys
import time
from pathlib import Path

def nothing(response, answer, **row):
    return 0.0

if "rlinf_vl.rollout.pool.worker" in sys.modules:
    from rlinf_vl.weights import changes
    patches = changes.patches

    def hang(deltas, device):
        while deltas[0].base is None and Path("FOLDER/hang").exists():
            Path("FOLDER", str(os.getpid())).touch()
            time.sleep(0.1)
        yield from patches(deltas, device)

    changes.patches = hang
"""


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    """A head with room for an actor rank, and a node with room for a worker."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    made = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "object_store_memory": STORE, "include_dashboard": False},
    )
    try:
        yield made
    finally:
        made.shutdown()


class Run:
    """A toy run in a process of its own, on the cluster."""

    def __init__(self, cluster, folder, *overrides):
        self.folder, self.said = folder / "run", folder / "said"
        arguments = [
            f"cluster.ray_address={cluster.address}",
            "cluster.device=cpu",
            "cluster.elastic_rollout=true",
            f"runner.output_dir={folder}",
            "runner.experiment_name=run",
            "runner.val_check_interval=-1",
            "data.rollout_batch_size=4",
            "data.filter_prompt_by_length=false",
            *overrides,
        ]
        with self.said.open("w") as out:
            command = [sys.executable, "-m", "rlinf_vl", "train", "toy-grpo-cpu", *arguments]
            self.process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, cwd=ROOT)

    def rows(self, name):
        path = self.folder / f"{name}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def until(self, condition, what):
        end = time.monotonic() + 600
        while not condition():
            assert self.process.poll() is None, self.said.read_text()
            assert time.monotonic() < end, f"{what}:\n{self.said.read_text()}"
            time.sleep(0.2)

    def events(self, kind):
        return [row["message"] for row in self.rows("events") if row["kind"] == kind]

    def workers(self):
        return [row["rollout/workers"] for row in self.rows("metrics") if "rollout/workers" in row]


def test_workers_join_and_leave_with_their_nodes_in_mid_run(cluster, tmp_path):
    first = cluster.add_node(num_cpus=1, object_store_memory=STORE)
    hanging, code = tmp_path / "hanging", tmp_path / "hanging.py"
    hanging.mkdir()
    code.write_text(HANGING.replace("FOLDER", str(hanging)))
    run = Run(
        cluster,
        tmp_path,
        "cluster.component_placement={actor: nodes 0, rollout: nodes 1}",
        "runner.max_epochs=100",
        "runner.max_steps=-1",  # however long nodes take to come and go
        f"reward.functions=[math, {code}:nothing]",
    )
    try:
        run.until(lambda: len(run.workers()) >= 2, "two steps with one worker")
        assert set(run.workers()) == {1}

        (hanging / "hang").touch()
        second = cluster.add_node(num_cpus=2, object_store_memory=STORE)
        run.until(
            lambda: len(list(hanging.iterdir())) == 3,
            "two workers of the new node hang with the weights",
        )
        steps = len(run.workers())
        run.until(lambda: len(run.workers()) >= steps + 5, "steps and syncs go on meanwhile")
        assert run.workers()[-1] == 1 and not run.events("worker_joined")
        (hanging / "hang").unlink()
        run.until(lambda: run.workers()[-1] == 3, "two workers of the new node take part")
        assert len(run.events("worker_joined")) == 2
        steps = len(run.workers())
        run.until(lambda: len(run.workers()) >= steps + 2, "steps with three workers")

        cluster.remove_node(first, allow_graceful=False)  # the one that the run began with
        run.until(lambda: run.workers()[-1] == 2, "the first node's worker leaves")
        assert run.events("worker_left")[0].startswith("rollout worker 0 left: ")
        cluster.remove_node(second, allow_graceful=False)
        run.until(lambda: len(run.events("worker_left")) == 3, "the last ones leave")

        cluster.add_node(num_cpus=1, object_store_memory=STORE)
        run.until(
            lambda: len(run.events("worker_joined")) == 3,
            "the run waits for a worker, and goes on with it",
        )
        steps = len(run.workers())
        run.until(lambda: len(run.workers()) >= steps + 2, "steps with the new worker")
    finally:
        run.process.terminate()
        run.process.wait(300)
    said = run.said.read_text()
    assert run.process.returncode == 128 + 15, said
    assert "node 0 (" in said and "slots 0: actor rank 0" in said and "slots 1: engine 0" in said
    rows = [row for row in run.rows("metrics") if "rollout/workers" in row]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    for row in rows:  # whoever sampled had the weights of the step before, and computed with them
        assert (
            row["rollout/weight_version_min"]
            == row["rollout/weight_version_max"]
            == row["step"] - 1
        )
        assert row["actor/rollout_train_abs_diff_max"] <= 2e-4
    trained = [group for row in run.rows("ledger") for group in row["groups"]]
    assert len(trained) == len(set(trained)) == 4 * len(rows)
    assert not run.events("actors_restarted")
