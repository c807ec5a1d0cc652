"""What a step survives: gradients that are not finite, and rollout workers that die between generation and training."""

import math
import os
import signal
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import RayActorError

from rlinf_vl.config import load_config
from rlinf_vl.transport import unpack

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


@pytest.fixture
def controller(tmp_path):
    from rlinf_vl.controller.grpo import GrpoController
    from rlinf_vl.observe.progress import RunProgress
    from rlinf_vl.runtime.launch import ray_cluster, reserve
    from rlinf_vl.toy.model import toy_checkpoint_path

    overrides = [
        "runner.max_steps=6",
        "runner.max_bad_steps=2",
        "runner.save_interval=1",
        "runner.val_check_interval=-1",
        "data.rollout_batch_size=6",
        "data.filter_prompt_by_length=false",
        "algorithm.group_size=8",
        "algorithm.sampling_params.max_new_tokens=24",
        "rollout.weight_sync=object_store",
        f"runner.output_dir={tmp_path}",
    ]
    config = load_config("toy-grpo-cpu", overrides)
    with ray_cluster(config), reserve(config) as placement:
        controller = GrpoController(config, str(toy_checkpoint_path()), placement, tmp_path, RunProgress())
        yield controller
        controller.stop()


def weights_of(actors) -> dict[str, bytes]:
    offered = actors.offer_weights(check=False)
    found = {name: value.numpy().tobytes() for ref in offered for name, value in unpack(ray.get(ref)).items()}
    actors.release_weights()
    return found


def test_a_step_whose_gradient_is_not_finite_is_skipped_and_a_few_in_a_row_end_the_run(
    controller, monkeypatch, tmp_path
):
    from rlinf_vl.controller.grpo import TooManyBadSteps
    from rlinf_vl.runtime.files import read_lines

    plan, weights = controller.plan, {}

    def planned(summaries):
        weights[controller.step] = weights_of(controller.actors)
        made = plan(summaries)
        if controller.step + 1 in (2, 4, 5):
            made = replace(made, advantages=tuple(tuple(math.inf for _ in group) for group in made.advantages))
        return made

    monkeypatch.setattr(controller, "plan", planned)
    with pytest.raises(TooManyBadSteps, match=r"runner\.max_bad_steps.*global_step_4"):
        controller.fit()
    weights[5] = weights_of(controller.actors)
    assert controller.step == 5
    same = [weights[step] == weights[step - 1] for step in range(1, 6)]
    assert same == [False, True, False, True, True]
    rows = read_lines(tmp_path / "metrics.jsonl")[0]
    assert [row["actor/skipped_steps"] for row in rows] == [0, 1, 0, 1]
    assert rows[1]["actor/grad_norm"] is None and rows[2]["actor/grad_norm"] > 0
    assert controller.events.count("step_skipped") == 3


def test_whatever_happens_names_the_step_that_is_being_trained(controller, monkeypatch, tmp_path):
    """The step of the ledger, of the trajectories and of metrics.jsonl, in events, bad rows and spans alike."""
    from rlinf_vl.observe import spans
    from rlinf_vl.runtime.files import read_lines

    submit, plan, done = controller.pool.submit, controller.plan, set()
    (tmp_path / "spans").mkdir()
    monkeypatch.setattr(spans, "_file", None)
    spans.record_spans(tmp_path, "controller")

    def first_time_in(step: int) -> bool:
        now = controller.current_step == step and step not in done
        return now and not done.add(step)

    def kill(actor) -> None:
        _, pid = ray.get(actor.process.remote())
        os.kill(pid, signal.SIGKILL)

    def submitted(tasks):
        assert all(task.group_id.startswith(f"train-{controller.current_step}-") for task in tasks)
        if first_time_in(2):
            kill(controller.pool.workers[0])
        results = submit(tasks).results()
        if first_time_in(5):
            summary, group = results[0]
            results[0] = replace(summary, errors=("odd: one of its rows", *summary.errors[1:])), group
        return SimpleNamespace(results=lambda: results)

    def planned(summaries):
        made = plan(summaries)
        if first_time_in(3):
            kill(controller.actors.ranks[0])
        if controller.current_step == 4:
            made = replace(made, advantages=tuple(tuple(math.inf for _ in group) for group in made.advantages))
        return made

    monkeypatch.setattr(controller.pool, "submit", submitted)
    monkeypatch.setattr(controller, "plan", planned)
    controller.fit()
    spans.flush_spans()
    events = [(row["kind"], row["step"]) for row in read_lines(tmp_path / "events.jsonl")[0]]
    named = ("worker_replaced", "actors_restarted", "resumed", "step_skipped")
    assert [event for event in events if event[0] in named] == list(zip(named, (2, 3, 2, 4), strict=True))
    assert [row["step"] for row in read_lines(tmp_path / "bad_rows.jsonl")[0]] == [5]
    for name in ("ledger.jsonl", "metrics.jsonl"):
        assert [row["step"] for row in read_lines(tmp_path / name)[0]] == [1, 2, 3, 4, 5, 6]
    (skipped,) = [row for row in read_lines(tmp_path / "metrics.jsonl")[0] if row["actor/skipped_steps"]]
    assert skipped["step"] == 4
    for phase in ("step", "generate", "train", "sync", "checkpoint"):
        seen = {span["about"]["step"] for span in spans.read_spans(tmp_path) if span["name"] == phase}
        assert seen == {1, 2, 3, 4, 5, 6}, phase


def test_groups_that_ranks_have_fetched_outlive_their_worker_and_others_are_reported_lost(controller):
    def kill_the_worker():
        (worker,) = controller.pool.workers
        _, pid = ray.get(worker.process.remote())
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RayActorError):
            while True:
                ray.get(worker.process.remote())
        time.sleep(2)  # until its objects are gone from this node, too

    tasks = controller.tasks("train", list(range(6)), 8, 1)
    summaries, _, plan, guard = controller.rollout(tasks)
    assert guard
    kill_the_worker()
    assert len(controller.actors.score(guard)) > 0
    assert controller.actors.update(1, plan.minibatches, plan.advantages)["actor/grad_norm"] > 0

    submit, calls = controller.pool.submit, []

    def submitted(tasks):
        calls.append([task.group_id for task in tasks])
        results = submit(tasks).results()
        if len(calls) == 1:
            kill_the_worker()
        return SimpleNamespace(results=lambda: results)

    controller.pool.submit = submitted
    summaries, _, plan, _ = controller.rollout(tasks)
    assert [s.id for s in summaries] == calls[0] and calls[1] == calls[0], "all were lost, and sampled again"
    assert controller.events.count("groups_lost") == 1
    assert controller.actors.update(1, plan.minibatches, plan.advantages)["actor/grad_norm"] > 0
