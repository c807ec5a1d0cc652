"""The step as the trainer computes it: packed rows, shared prompts, cached features, FSDP2."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from rlinf_vl.actor.batch_types import RankMiniBatch
from rlinf_vl.actor.mesh import Mesh, join_ranks
from rlinf_vl.actor.optimizer import make_scheduler
from rlinf_vl.actor.rank import step_metrics
from rlinf_vl.actor.trainer import Trainer
from rlinf_vl.algorithms.losses import LossInputs, TokenLoss, formula_of
from rlinf_vl.config.schema import Config
from rlinf_vl.models.policy import PolicyModel
from rlinf_vl.observe.replay_file import PlannedMiniBatch, RecordedStep
from rlinf_vl.packing.collator import Collator
from rlinf_vl.packing.planner import Item
from rlinf_vl.tools.verify.replay.hooks import Hooks, Rows, as_array, gathered
from rlinf_vl.tools.verify.replay.quantities import Owner, Quantity, Trace
from rlinf_vl.tools.verify.replay.subject import Subject
from rlinf_vl.types import Group, MicroBatch


@dataclass(frozen=True)
class TracedCollator(Collator):
    """The trainer's collator, which remembers where in a row each sequence's tokens are.

    Attributes:
        rows: by `id` of a micro-batch: the batch, and (group id, trajectory, sequence, row positions)
            of each sequence.
    """

    rows: dict[int, tuple[MicroBatch, list[tuple[Owner, np.ndarray]]]] = field(default_factory=dict)
    numbers: dict[str, int] = field(default_factory=dict)
    placed: list[Any] = field(default_factory=list)

    def __call__(self, members: Any, *, run_vision: bool) -> MicroBatch:
        self.placed.clear()
        batch = Collator.__call__(self, members, run_vision=run_vision)
        owners: list[Owner] = [
            (self.numbers[member.group.id], member.index, k)
            for member in members
            for k in range(len(member.trajectory.sequences))
        ]
        index = [
            (owner, placed.row_index) for owner, placed in zip(owners, self.placed, strict=False)
        ]
        self.rows[id(batch)] = (batch, index)
        return batch

    def _place(self, sequence: Any, first_feature: Any) -> Any:
        placed = Collator._place(self, sequence, first_feature)
        self.placed.append(placed)
        return placed


@contextmanager
def process_group() -> Iterator[None]:
    """Be the only rank of a process group for the block, unless there is a group already."""
    if dist.is_initialized():
        yield
        return
    join_ranks("cpu")
    try:
        yield
    finally:
        dist.destroy_process_group()


class TrainedStep:
    """Computes a recorded step with a `Trainer` on one CPU process.

    Attributes:
        trainer: from `start` on.
    """

    def __init__(self, subject: Subject, step: RecordedStep, config: Config) -> None:
        self.subject = subject
        self.step = step
        self.config = config
        self.trace = Trace()
        self._weights_before: dict[str, np.ndarray] = {}
        self._gradients: dict[str, np.ndarray] = {}
        self._rates: dict[str, float] = {}

    def start(self, traced: bool = True) -> None:
        """Make the trainer, as `rlinf_vl.actor.load` does; its loss is `traced`, or as in a run."""
        config, subject = self.config, self.subject
        actor = replace(
            config.actor,
            context_parallel_size=1,
            enable_offload=False,
            fsdp_config=replace(config.actor.fsdp_config, cpu_offload=False, strategy="fsdp2"),
        )
        actor.model = replace(actor.model, is_lora=False)
        algorithm = replace(config.algorithm, kl_beta=0.0)
        self.collate = TracedCollator(
            family=subject.family,
            image_tokens=subject.image_tokens,
            pixels=subject.pixels,
            pad_id=subject.pad_id,
            pad_to=None if actor.model.variable_seq_lengths else config.runner.max_tokens_per_mbs,
        )
        self.collate.numbers.update({group.id: g for g, group in enumerate(self.step.groups)})

        def load(dtype: torch.dtype) -> PolicyModel:
            return PolicyModel(
                subject.packed_model(dtype),
                subject.family,
                subject.banned,
                temperature=config.algorithm.sampling_params.temperature,
            )

        self.trainer = Trainer(
            load,
            self.collate,
            Mesh.make("cpu"),
            actor,
            algorithm,
            max_tokens=config.runner.max_tokens_per_mbs,
            total_steps=self.step.total_steps,
            loss=self._traced_loss() if traced else None,
        )
        n = algorithm.n_minibatches
        self.trainer.scheduler = make_scheduler(
            self.trainer.optimizer,
            actor.optim,
            total=self.step.total_steps * n,
            done=self.step.version * n,
        )

    def run(self, with_update: bool = True) -> Trace:
        """Return the trace of the trainer's update; without it, of its forward."""
        trainer, trace = self.trainer, self.trace
        policy = trainer.policy
        hooks = Hooks(policy.model, self.subject.family, trace)
        handles = [
            policy.register_forward_pre_hook(
                lambda module, args: setattr(hooks, "rows", self._rows_of(args[0]))
            ),
            policy.register_forward_hook(
                lambda module, args, output: self._after_forward(hooks, args[0], output)
            ),
            trainer.optimizer.register_step_pre_hook(self._before_optimizer),
            trainer.optimizer.register_step_post_hook(self._after_optimizer),
        ]
        groups = dict(enumerate(self.step.groups))
        try:
            if with_update:
                self._update(groups)
            else:
                self._forward(groups)
        finally:
            hooks.remove()
            for handle in handles:
                handle.remove()
        return trace

    def _minibatches(self) -> list[RankMiniBatch]:
        return [rank_minibatch(mini, self.step) for mini in self.step.minibatches]

    def _forward(self, groups: dict[int, Group]) -> None:
        """Run the policy over every micro-batch, without gradients."""
        trainer = self.trainer
        trainer.batches.prepare(groups.values())
        with torch.no_grad():
            for mini in self._minibatches():
                for batch, features in trainer.batches(mini, groups, self.step.advantages):
                    trainer.policy(batch, features)

    def _update(self, groups: dict[int, Group]) -> None:
        """Run `Trainer.update` on the first mini-batch, and the forward of the others."""
        minibatches = self._minibatches()
        sums, _ = self.trainer.update(
            groups, minibatches, self.step.advantages, version=self.step.version
        )
        metrics = step_metrics([sums.state()])
        trace = self.trace
        for name, weight in self.trainer.policy.model.named_parameters():
            if weight.requires_grad:
                trace.put(Quantity.of("trained weights"), name, np.ones(1))
        if len(minibatches) == 1:
            trace.put(Quantity.of("loss"), "", np.array([metrics["actor/loss"]]))
            norm = metrics["actor/grad_norm"]
            trace.put(Quantity.of("gradient norm"), "", np.array([norm]))
            # The optimizer gets clipped gradients.
            scale = min(1.0, self.config.actor.optim.clip_grad / (norm + 1e-6))
            for name, gradient in self._gradients.items():
                trace.put(Quantity.of("gradient"), name, gradient / scale)

    # --- what the hooks see -------------------------------------------------------------------------

    def _rows_of(self, batch: MicroBatch) -> Rows | None:
        entry = self.collate.rows.get(id(batch))
        return None if entry is None else gathered(entry[1])

    def _after_forward(self, hooks: Hooks, batch: MicroBatch, output: Any) -> None:
        # Backward computes checkpointed layers again, which is not to be recorded.
        hooks.rows = None
        entry = self.collate.rows.get(id(batch))
        if entry is None:
            return
        start = 0
        for owner, _ in entry[1]:
            g, i, k = owner
            sequence = self.step.groups[int(g)].trajectories[int(i)].sequences[int(k)]
            n = int(sequence.loss_mask.sum())
            self.trace.put(Quantity.of("logprobs"), owner, as_array(output[0][start : start + n]))
            start += n
        self._batch = batch

    def _traced_loss(self) -> Any:
        """Return the config's loss, which puts its inputs and its result into the trace."""
        formula = formula_of(self.config.algorithm.loss_type)

        def loss(inputs: LossInputs) -> TokenLoss | torch.Tensor:
            result = formula(inputs)
            per_token = result.loss if isinstance(result, TokenLoss) else result
            columns = {
                "old logprobs": inputs.old_logprobs,
                "advantages": inputs.advantages,
                "correction weights": inputs.weights,
                "loss mask": inputs.mask.float(),
                "token loss": per_token if inputs.weights is None else per_token * inputs.weights,
            }
            trajectories = torch.from_numpy(self._batch.trajectories)
            members = [owner for owner, _ in self.collate.rows[id(self._batch)][1] if owner[2] == 0]
            for place, owner in enumerate(members):
                for name, values in columns.items():
                    if values is not None:
                        part = values[trajectories == place]
                        self.trace.put(Quantity.of(name), owner, as_array(part))
            return result

        return loss

    def _before_optimizer(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._weights_before:  # of a later mini-batch
            return
        rates = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
        for name, weight in self.trainer.policy.model.named_parameters():
            if weight.grad is not None:
                self._weights_before[name] = as_array(_whole(weight.detach()))
                self._gradients[name] = as_array(_whole(weight.grad))
                self._rates[name] = rates.get(id(weight), 0.0)

    def _after_optimizer(self, *_: Any) -> None:
        for name, weight in self.trainer.policy.model.named_parameters():
            if name in self._weights_before:
                value = as_array(_whole(weight.detach()))
                self.trace.put(Quantity.of("weight after the step"), name, value)

    def optimizer_inputs(self) -> Iterator[tuple[str, np.ndarray, np.ndarray, float]]:
        """Yield name, weight, clipped gradient and learning rate of the first optimizer step."""
        for name, weight in self._weights_before.items():
            yield name, weight, self._gradients[name], self._rates[name]


def rank_minibatch(mini: PlannedMiniBatch, step: RecordedStep) -> RankMiniBatch:
    """Return a planned mini-batch as the only rank's."""
    micro_batches = tuple(
        tuple(Item(g, i, 0, 0) for g, i in micro_batch) for micro_batch in mini.micro_batches
    )
    run_vision = tuple(
        any(step.groups[item.group].images for item in items) for items in micro_batches
    )
    return RankMiniBatch(micro_batches, run_vision, mini.denominator)


def _whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value
