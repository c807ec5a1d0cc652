"""One training step of a member, on ranks that are processes of their own: real FSDP2 over gloo."""

import pickle
import tempfile
from dataclasses import dataclass
from pathlib import Path

import cloudpickle
import numpy as np
import torch
import torch.multiprocessing as mp
from safetensors.numpy import load_file, save_file

from rlinf_vl.actor.mesh import Mesh, join_ranks
from rlinf_vl.actor.trainer import Trainer
from rlinf_vl.config.presets import with_presets
from rlinf_vl.config.schema import ActorConfig, AlgorithmConfig
from rlinf_vl.controller.step_plan import plan_step
from rlinf_vl.observe.metrics import MetricSums
from rlinf_vl.packing.collator import Collator
from rlinf_vl.tools.verify.prove.member import Member
from rlinf_vl.tools.verify.prove.problems import flat_groups, tree_groups
from rlinf_vl.tools.verify.prove.reference import pixels_of
from rlinf_vl.transport.rendezvous import find, listen
from rlinf_vl.types import GroupSummary

#: Of plain gradient descent, whose step shows the gradients in the weights.
LEARNING_RATE = 0.1
#: Tokens of a micro-batch.
BUDGET = 150


@dataclass(frozen=True)
class Step:
    """The outcome of a training step; `weights` by name, float32."""

    loss: float
    gradient_norm: float
    weights: dict[str, np.ndarray]


def step_on_ranks(member: Member, ranks: int, context: int) -> Step:
    """Train one step on so many ranks, of which `context` share each row's tokens.

    Raises:
        torch.multiprocessing.ProcessRaisedException: a rank failed; it has the rank's traceback.
    """
    store, address = listen("127.0.0.1")  # it listens while it is referenced
    # By value: a family has functions without a name, and may be of a user's file.
    pickled = cloudpickle.dumps(member)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(  # pyright: ignore[reportPrivateImportUsage]
            _train, (ranks, context, address, pickled, folder), nprocs=ranks
        )
        states = [pickle.loads(_state_file(folder, rank).read_bytes()) for rank in range(ranks)]
        weights = load_file(_weights_file(folder))
    metrics = MetricSums.merged(states).compute()
    return Step(metrics["actor/loss"], metrics["actor/grad_norm"], weights)


def _state_file(folder: str, rank: int) -> Path:
    return Path(folder, f"metrics-{rank}.pkl")


def _weights_file(folder: str) -> Path:
    return Path(folder, "weights.safetensors")


def _train(
    rank: int, ranks: int, context: int, address: tuple[str, int], pickled: bytes, folder: str
) -> None:
    """Be one rank: write its part of the metrics into `folder`, and rank 0 the new weights."""
    torch.set_num_threads(1)
    member: Member = cloudpickle.loads(pickled)
    join_ranks("cpu", rank, ranks, find(address))
    mesh = Mesh.make("cpu", context=context)
    actor = ActorConfig()
    actor.fsdp_config.mixed_precision.param_dtype = "fp32"
    actor.model.freeze_vision_tower = False
    algorithm = with_presets(AlgorithmConfig())
    collator = Collator(
        member.family, member.image_tokens, lambda image: pixels_of(member, image), pad_id=0
    )
    trainer = Trainer(
        lambda dtype: member.policy(),
        collator,
        mesh,
        actor,
        algorithm,
        max_tokens=BUDGET,
        total_steps=1,
    )
    trained = [p for p in trainer.policy.parameters() if p.requires_grad]
    trainer.optimizer = torch.optim.SGD(trained, lr=LEARNING_RATE)
    trainer.scheduler = torch.optim.lr_scheduler.LambdaLR(trainer.optimizer, lambda _: 1.0)
    groups = flat_groups(member) + tree_groups(member)
    summaries = [GroupSummary.of(group, member.image_tokens.placeholder_ids) for group in groups]
    plan = plan_step(
        summaries, algorithm, ranks=ranks // context, budget=BUDGET, micro_batch_size=None
    )
    minibatches = [by_rank[mesh.data_rank] for by_rank in plan.minibatches]
    sums, _ = trainer.update(dict(enumerate(groups)), minibatches, plan.advantages)
    weights = {name: value.numpy() for name, value in trainer.weights(torch.float32)}
    _state_file(folder, rank).write_bytes(pickle.dumps(sums.state()))
    if rank == 0:
        save_file(weights, _weights_file(folder))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
