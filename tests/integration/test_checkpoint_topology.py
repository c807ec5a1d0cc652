"""Checkpoints of real FSDP2 ranks over gloo: written while the ranks train on, read by other numbers of ranks, sharded otherwise.

What they go on as is compared with a run of one rank that never stopped, and a checkpoint's content with that rank's own state.
"""

import threading

import numpy as np
import pytest
import torch
import torch.distributed as dist
from plain_step import groups_of
from tiny import IMAGE_ID, tiny_trainer

from rlinf_vl.types import GroupSummary

KINDS = ("mixed", "turns")  # groups of each step


def trainer_on(context: int, shard: int | None):
    from rlinf_vl.actor.mesh import Mesh

    trainer = tiny_trainer(Mesh.make("cpu", context=context, shard=shard))
    trainer.total_steps = len(KINDS)
    return trainer


def step(trainer, kind: str) -> dict[str, float]:
    """One step of the whole process group; its metrics."""
    from rlinf_vl.controller.step_plan import plan_step
    from rlinf_vl.observe.metrics import MetricSums

    groups, mesh = groups_of(kind), trainer.mesh
    summaries = [GroupSummary.of(group, IMAGE_ID) for group in groups]
    shares = mesh.ranks["data"].size()
    plan = plan_step(
        summaries,
        trainer.algorithm,
        ranks=shares,
        budget=400,
        micro_batch_size=None,
        share_prompts=True,
    )
    minibatches = [ranks[mesh.data_rank] for ranks in plan.minibatches]
    mine = {
        i.group: groups[i.group]
        for mini in minibatches
        for items in mini.micro_batches
        for i in items
    }
    sums, _ = trainer.update(mine, minibatches, plan.advantages, version=0)
    states: list = [None] * dist.get_world_size()
    dist.all_gather_object(states, sums.state())
    return MetricSums.merged(states).compute()


def whole(trainer) -> dict[str, np.ndarray]:
    """Weights and the optimizer's moments by name, gathered."""
    found = {}
    for name, weight in trainer.policy.named_parameters():
        state = trainer.optimizer.state.get(weight, {})
        for kind, value in {"weight": weight, **state}.items():
            value = value.full_tensor() if hasattr(value, "full_tensor") else torch.as_tensor(value)
            found[f"{kind} {name}"] = value.detach().numpy().copy()
    return found


def never_stopped() -> list[dict[str, np.ndarray]]:
    """The state of one rank after each step, and its metrics."""
    trainer = trainer_on(1, None)
    found = []
    for kind in KINDS:
        metrics = step(trainer, kind)
        found.append((whole(trainer), metrics))
    return found


def save_after_one(folder: str, context: int, shard: int | None):
    """Train a step, and save it while the next one is trained; the digests and the state then."""
    trainer = trainer_on(context, shard)
    step(trainer, KINDS[0])
    then = whole(trainer)
    torch.manual_seed(100 + dist.get_rank())
    random = torch.get_rng_state().numpy()
    trainer.stage()
    torch.rand(3)
    digests: dict[str, str] = {}
    writing = threading.Thread(target=lambda: digests.update(trainer.write(folder)))
    writing.start()
    step(trainer, KINDS[1])
    writing.join()
    return digests, then, whole(trainer), random


def go_on(folder: str, context: int, shard: int | None):
    """The state as it is read, that after another step with its metrics, and the random state."""
    trainer = trainer_on(context, shard)
    trainer.load(folder, 1)
    read, random = whole(trainer), torch.get_rng_state().numpy()
    metrics = step(trainer, KINDS[1])
    return read, whole(trainer), metrics, random


@pytest.fixture(scope="module")
def undisturbed(processes):
    return processes.run(1, never_stopped)[0]


def assert_close(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        np.testing.assert_allclose(value, theirs[name], atol=2e-6, rtol=1e-4, err_msg=name)


# Ranks, how many of them share a row, how many have the weights between them.
ALONE, PAIR = (
    (1, 1, None),
    (2, 1, None),
)


@pytest.mark.sample("(4, 2, 2)")
@pytest.mark.parametrize(
    ("written_by", "read_by"),
    [(PAIR, [ALONE, (2, 2, None), (4, 1, 2)]), ((4, 2, 2), [PAIR, (4, 2, None)])],
    ids=str,
)
def test_a_checkpoint_fits_any_ranks_and_holds_what_was_when_it_was_begun(
    processes, undisturbed, tmp_path, written_by, read_by
):
    ranks, *layout = written_by
    saved = processes.run(ranks, save_after_one, str(tmp_path), *layout)
    assert_close(saved[0][1], undisturbed[0][0])
    assert_close(saved[0][2], undisturbed[1][0])  # training went on as if nothing was written
    files = {path.name for path in tmp_path.iterdir()}
    assert sorted(name for digests, *_ in saved for name in digests) == sorted(files), (
        "each by the rank that wrote it"
    )
    for ranks, *layout in read_by:
        for rank, (read, later, metrics, random) in enumerate(
            processes.run(ranks, go_on, str(tmp_path), *layout)
        ):
            for name, value in saved[0][1].items():
                # Not those of the step after.
                np.testing.assert_array_equal(read[name], value, err_msg=name)
            assert_close(later, undisturbed[1][0])
            for name in ("actor/loss", "actor/grad_norm", "actor/lr"):
                assert metrics[name] == pytest.approx(
                    undisturbed[1][1][name], rel=1e-4, abs=1e-6
                ), name
            if rank < len(saved):
                np.testing.assert_array_equal(random, saved[rank][3])
