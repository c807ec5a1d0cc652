"""A real pool and real ranks under the loop: workers that die between generation and training, and a step that is skipped."""

import math
import os
import signal
import time
from contextlib import closing
from functools import partial
from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import RayActorError

from rlinf_vl.config import load_config
from rlinf_vl.controller.remote_writer import RemoteWriter
from rlinf_vl.weights.buckets import unpack
from rlinf_vl.weights.object_store import ObjectStoreStrategy

pytestmark = pytest.mark.integration


def weights_of(learner) -> dict[str, bytes]:
    (offered,) = learner.call("sender.offer", 1, False)
    found = {
        name: value.numpy().tobytes()
        for ref in offered.labels
        for name, value in unpack(ray.get(ref)).items()
    }
    learner.call("sender.release")
    return found


def kill_the_worker(pool) -> None:
    (worker,) = pool.workers
    _, pid = ray.get(worker.process.remote())
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(RayActorError):
        while True:
            ray.get(worker.process.remote())
    time.sleep(2)  # until its objects are gone from this node, too


def test_fetched_groups_outlive_their_worker_and_lost_ones_are_sampled_again(tmp_path, monkeypatch):
    from rlinf_vl.actor.group import ActorGroup
    from rlinf_vl.controller.batch import rollout
    from rlinf_vl.controller.mismatch import MismatchGuard
    from rlinf_vl.controller.run_log import RunLog
    from rlinf_vl.controller.schedules import Sync
    from rlinf_vl.extras.toy.checkpoint import toy_checkpoint_path
    from rlinf_vl.observe.progress import RunProgress
    from rlinf_vl.rollout.pool.pool import RolloutPool
    from rlinf_vl.runtime.launch import ray_cluster, reserve

    overrides = [
        "cluster.component_placement={actor: 0, rollout: 0}",
        "data.filter_prompt_by_length=false",
        "data.rollout_batch_size=6",
        "rollout.weight_sync=object_store",
        "runner.trajectories.max_gb=0",
        f"runner.output_dir={tmp_path}",
    ]
    config = load_config("toy-grpo-cpu", overrides)
    path = str(toy_checkpoint_path())
    with (
        ray_cluster(config),
        reserve(config) as placement,
        closing(
            RunLog(config, tmp_path, partial(RemoteWriter, config, tmp_path, path), RunProgress())
        ) as log,
    ):
        pool = RolloutPool(config, path, placement)
        learner = ActorGroup(config, path, placement.device, placement.actor)
        pool.start()
        learner.start(10)
        learner.call("set_weight_sync", ObjectStoreStrategy(), 2**20)
        guard = MismatchGuard(config, learner, log)
        data = SimpleNamespace(
            sampler=SimpleNamespace(next_rows=lambda n: (0, list(range(n)))), total_steps=10
        )

        scheduler = Sync(config, pool, data, log, sync=lambda version: {})

        batch = rollout(1, scheduler, config, pool, learner, guard, log)
        kill_the_worker(pool)
        assert guard.check(1, batch.scored, batch.to_score)["mismatch/one_image"] < 1e-4
        before = weights_of(learner)
        infinite = [[(math.inf,)] * 8] * 6
        assert learner.update(1, batch.plan.minibatches, infinite)[0]["actor/skipped_steps"] == 1
        assert weights_of(learner) == before

        submit, asked = pool.submit, []

        def submitted(tasks, events=None):
            asked.append([task.group_id for task in tasks])
            submission = submit(tasks, events)
            if len(asked) == 1:
                results = submission.results()
                kill_the_worker(pool)
                for result in results:
                    events.put(result)
            return submission

        monkeypatch.setattr(pool, "submit", submitted)
        batch = rollout(2, scheduler, config, pool, learner, guard, log)
        assert asked == [[f"train-2-{k}" for k in range(6)]] * 2, "all were lost, and sampled again"
        assert log.count("groups_lost") == 1
        assert (
            learner.update(2, batch.plan.minibatches, batch.plan.advantages)[0]["actor/grad_norm"]
            > 0
        )
        assert weights_of(learner) != before
        pool.stop()
        learner.stop()
