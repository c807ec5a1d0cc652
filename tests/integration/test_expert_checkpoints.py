"""Weights of ranks that share out experts, on their way out: a checkpoint of any layout goes on in any other, and the parts that
weight syncs send are each weight's elements, once each."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
from plain_step import groups_of
from tiny import IMAGE_ID, tiny_policy, tiny_trainer

from rlinf_vl.types import GroupSummary

pytestmark = pytest.mark.integration


def trainer_on(experts: int, context: int, shard: int | None):
    from rlinf_vl.actor.mesh import Mesh

    mesh = Mesh.make("cpu", context=context, shard=shard, experts=experts)
    trainer = tiny_trainer(mesh, lambda dtype: tiny_policy(dtype, model_type="qwen3_vl_moe"))
    trainer.total_steps = 2
    return trainer


def step(trainer, kind: str) -> float:
    """Train one step on groups of this kind; its gradient's norm."""
    from rlinf_vl.controller.step_plan import plan_step

    groups, mesh = groups_of(kind), trainer.mesh
    plan = plan_step(
        [GroupSummary.of(group, IMAGE_ID) for group in groups],
        trainer.algorithm,
        ranks=mesh.ranks["data"].size(),
        budget=400,
        micro_batch_size=None,
        share_prompts=True,
    )
    mine = [ranks[mesh.data_rank] for ranks in plan.minibatches]
    numbers = {item.group for mini in mine for items in mini.micro_batches for item in items}
    sums, _ = trainer.update({n: groups[n] for n in numbers}, mine, plan.advantages)
    return sums.compute()["actor/grad_norm"]


def whole(trainer) -> dict[str, np.ndarray]:
    """Weights and the optimizer's moments by name, gathered."""
    found = {}
    for name, weight in trainer.policy.named_parameters():
        for kind, value in {"weight": weight, **trainer.optimizer.state.get(weight, {})}.items():
            value = value.full_tensor() if hasattr(value, "full_tensor") else torch.as_tensor(value)
            found[f"{kind} {name}"] = value.detach().numpy().copy()
    return found


def save_after_one(folder: str, *layout):
    trainer = trainer_on(*layout)
    step(trainer, "mixed")
    trainer.stage()
    trainer.write(folder)
    then = whole(trainer)
    norm = step(trainer, "text")
    return then, whole(trainer), norm


def go_on(folder: str, *layout):
    trainer = trainer_on(*layout)
    trainer.load(folder, 1)
    read = whole(trainer)
    norm = step(trainer, "text")
    return read, whole(trainer), norm


# Ranks; of them those that share out experts, share a row, and have the weights between them.
ALONE, PAIR, SHARING_PAIR = (1, 1, 1, None), (2, 1, 1, None), (2, 2, 1, None)
FOUR, CONTEXT, COPIES = (4, 4, 1, None), (4, 2, 2, None), (4, 2, 1, 2)


@pytest.mark.sample("(2, 2, 1, None)-read_by0")
@pytest.mark.parametrize(
    ("written_by", "read_by"),
    [(SHARING_PAIR, [PAIR, FOUR]), (PAIR, [CONTEXT]), (COPIES, [SHARING_PAIR, ALONE])],
    ids=str,
)
def test_a_checkpoint_goes_on_in_any_layout(processes, tmp_path, written_by, read_by):
    ranks, *layout = written_by
    then, after, norm = processes.run(ranks, save_after_one, str(tmp_path), *layout)[0]
    for ranks, *layout in read_by:
        read, later, later_norm = processes.run(ranks, go_on, str(tmp_path), *layout)[0]
        assert read.keys() == then.keys()
        for name, value in then.items():
            np.testing.assert_array_equal(read[name], value, err_msg=name)
        assert later_norm == pytest.approx(norm, rel=1e-4)
        for name, value in after.items():
            np.testing.assert_allclose(later[name], value, atol=2e-6, rtol=1e-4, err_msg=name)


def sent(*layout):
    """What a rank sends: whole weights by name, and its parts of them."""
    trainer = trainer_on(*layout)
    weights = {name: value.numpy() for name, value in trainer.weights(torch.float32)}
    parts = [
        (name, tuple(shape), first, value.numpy().copy())
        for name, shape, first, value in trainer.parts(torch.float32)
    ]
    assert dist.get_world_size() == 1 or len(weights) == len(parts)
    replayed = trainer.replay_weights()
    if dist.get_rank() == 0:
        assert all(np.array_equal(replayed[name], value) for name, value in weights.items())
        assert len(replayed) == len(list(trainer.policy.model.parameters()))
    else:
        assert replayed == {}
    return weights, parts


@pytest.mark.parametrize("layout", [SHARING_PAIR, COPIES], ids=str)
def test_weight_syncs_send_the_same_weights(processes, layout):
    (expected, _), *_ = processes.run(1, sent, *ALONE[1:])
    ranks, *sharing = layout
    results = processes.run(ranks, sent, *sharing)
    for weights, _ in results:
        assert list(weights) == list(expected)
        for name, value in weights.items():
            np.testing.assert_array_equal(value, expected[name], err_msg=name)
    times_sent = {name: np.zeros(value.size, int) for name, value in expected.items()}
    for _, parts in results:
        for name, shape, first, value in parts:
            assert shape == expected[name].shape
            times_sent[name][first : first + len(value)] += 1
            np.testing.assert_array_equal(
                value, expected[name].reshape(-1)[first : first + len(value)], err_msg=name
            )
    assert all((times == 1).all() for times in times_sent.values()), "each element once"
