"""One rank's trainer: policy, reference and optimizer on a mesh, and the training step. No Ray.

A step (`Trainer.update`), in order: encode the images that no step before had; compute old
logprobs, where the first forward does not give them; then, per mini-batch, the loss and gradient
of each micro-batch, and one optimizer step.

The loss is a sum over micro-batches and ranks of terms whose denominators are global counts,
agreed before the first micro-batch. So neither loss nor gradient depends on how trajectories are
packed or who trains them.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from rlinf_vl.actor import checkpoint
from rlinf_vl.actor.batch_types import Advantages, Logprobs, RankMiniBatch, TurnKl
from rlinf_vl.actor.batches import BatchMaker, LogprobRecord, ReferencePass, turn_kl
from rlinf_vl.actor.expert_sharding import check_policy
from rlinf_vl.actor.gradients import clip_gradient
from rlinf_vl.actor.loss import micro_batch_loss, needs_start
from rlinf_vl.actor.mesh import Mesh, reduce_in_backward, reshard_all, whole_tensors
from rlinf_vl.actor.minibatch_tokens import minibatch_tokens
from rlinf_vl.actor.offload import Offload
from rlinf_vl.actor.optimizer import make_optimizer, make_scheduler
from rlinf_vl.actor.terms.forwards import Forwards
from rlinf_vl.actor.terms.reference import reference_logprobs
from rlinf_vl.actor.terms.teacher import Teacher
from rlinf_vl.actor.weight_means import weight_means
from rlinf_vl.algorithms import divergence
from rlinf_vl.algorithms.losses import MiniBatchTokens
from rlinf_vl.config.algorithm_files import built_ins
from rlinf_vl.config.schema import ActorConfig, AlgorithmConfig
from rlinf_vl.models.loading import DTYPES, part_of
from rlinf_vl.models.lora import engine_weights, is_adapter, train_parts, with_adapter
from rlinf_vl.models.mixture import ExpertLoad
from rlinf_vl.models.nf4 import dense, shape_of
from rlinf_vl.models.policy import PolicyModel
from rlinf_vl.models.recompute import checkpoint_blocks
from rlinf_vl.models.vision_cache import TRAINER_BYTES, VisionCache
from rlinf_vl.observe.metrics import MetricSums
from rlinf_vl.observe.replay_file import MAX_WEIGHT_BYTES
from rlinf_vl.observe.spans import span
from rlinf_vl.packing.collator import Collator
from rlinf_vl.types import Group
from rlinf_vl.weights.buckets import fingerprint
from rlinf_vl.weights.shard import ShardPart, local_part

Groups = Mapping[int, Group]
#: Reads a model in a dtype, on the CPU.
Load = Callable[[torch.dtype], PolicyModel]


@dataclass(frozen=True, slots=True)
class TeacherSource:
    """A teacher that is yet to be loaded.

    Attributes:
        load: reads the model.
        collate: makes its micro-batches.
        labels: of the rows that it teaches; none: all rows.
    """

    load: Load
    collate: Collator
    labels: tuple[str, ...] = ()


class Trainer:
    """Trains one rank's part of the policy.

    Methods are collective: all ranks call them together, with equally many micro-batches. Groups go
    by number.
    """

    def __init__(
        self,
        load: Load,
        collate: Collator,
        mesh: Mesh,
        actor: ActorConfig,
        algorithm: AlgorithmConfig,
        *,
        max_tokens: int,
        total_steps: int,
        loss: Callable[..., torch.Tensor] | None = None,
        teachers: Sequence[TeacherSource] = (),
    ) -> None:
        """Load the models, shard them, and make the optimizer.

        Args:
            load: reads the model in a dtype, on the CPU: once for the policy, and again for a
                reference when the policy is sharded, so that a host need not have both whole.
            collate: makes the policy's micro-batches; it has `pixels`.
            max_tokens: of a micro-batch, and so of the images that are encoded at once.
            total_steps: of the run, for the learning rate.
            loss: the code that `algorithm.loss_type` names.
            teachers: read and sharded in this order.
        """
        self.mesh = mesh
        self.actor = actor
        self.algorithm = algorithm
        self.total_steps = total_steps
        self.loss = loss
        self.max_tokens = max_tokens
        self.frozen_differ = False  # whether frozen weights differ from those the engines loaded
        self.sends_frozen = False  # whether engines lose them when they sleep
        # Weights that never change are stored in the dtype in which they compute; those that train
        # need the digits of float32 for small updates.
        compute_dtype = DTYPES[actor.fsdp_config.mixed_precision.param_dtype]
        policy = load(compute_dtype if actor.model.is_lora else torch.float32)
        if mesh.experts is not None:
            check_policy(policy, mesh.experts)
        self.policy = self._sharded(policy, frozen=False)
        self.reference: PolicyModel | None = None
        if algorithm.kl_beta > 0:  # with LoRA, it is the policy without its adapters
            self.reference = (
                self.policy
                if actor.model.is_lora
                else self._sharded(load(compute_dtype), frozen=True)
            )
        self.optimizer = make_optimizer(self.policy, actor.optim)
        self.writer: checkpoint.CheckpointWriter | None = None  # from the first checkpoint on
        self.scheduler = self._schedule(done=0)
        self.forwards = Forwards(
            self.policy,
            self.reference if algorithm.kl_placement == "loss" else None,
            [self._load_teacher(source) for source in teachers],
            algorithm,
        )
        frozen = self.forwards.teachers.models
        if self.reference is not None and self.reference is not self.policy:
            frozen.insert(0, self.reference)
        self.memory = Offload(self.policy, self.optimizer, frozen, mesh.device)
        family, named = self.policy.family, self.policy.model.named_parameters()
        trained = {part_of(name, family) for name, p in named if p.requires_grad}
        # Images must then be encoded again in every micro-batch.
        self.trains_vision = not trained <= {"language_model"}
        encodes_once = family.vision_tower and not self.trains_vision
        self.batches = BatchMaker(
            self.policy, collate, self._vision_cache() if encodes_once else None, self.max_tokens
        )

    def _sharded(self, policy: PolicyModel, frozen: bool) -> PolicyModel:
        """Prepare a model for training, or freeze it, and shard it over the mesh."""
        fsdp = self.actor.fsdp_config
        policy.context_ranks = self.mesh.context_ranks
        if frozen:
            policy.requires_grad_(False)
        else:
            model = self.actor.model
            train_parts(
                policy.model,
                policy.family,
                model.frozen_parts,
                model.adapters,
                router=not model.freeze_router,
            )
            policy.replay = self.actor.routing_replay == "replay"
        mode = self._checkpointing_mode
        if mode != "none" and not frozen:
            checkpoint_blocks(
                policy.model, policy.family, mode, fsdp.gradient_checkpointing_use_reentrant
            )
        return self.mesh.shard(policy, fsdp).train(not frozen)

    @property
    def _needs_minibatch(self) -> bool:
        """Whether the loss reads all tokens of its mini-batch."""
        if self.loss is not None:  # code of the user's, whose file has the constant
            return bool(getattr(self.loss, "__globals__", {}).get("NEEDS_MINIBATCH"))
        loss = built_ins("losses").get(self.algorithm.loss_type)
        return loss is not None and loss.needs_minibatch

    @property
    def _checkpointing_mode(self) -> str:
        """The mode of activation checkpointing; `auto` that no ledger has settled is the safe one."""
        mode = self.actor.fsdp_config.gradient_checkpointing
        return mode if mode != "auto" else "none" if self.mesh.device == "cpu" else "full"

    def _load_teacher(self, source: TeacherSource) -> Teacher:
        """Return a teacher, sharded as the policy is, with the maker of its micro-batches."""
        dtype = DTYPES[self.actor.fsdp_config.mixed_precision.param_dtype]
        model = self._sharded(source.load(dtype), frozen=True)
        cache = self._vision_cache() if model.family.vision_tower else None
        batches = BatchMaker(model, source.collate, cache, self.max_tokens)
        return Teacher(model, batches, source.labels)

    def _vision_cache(self) -> VisionCache:
        return VisionCache(TRAINER_BYTES, self.mesh.device)

    def _schedule(self, done: int) -> torch.optim.lr_scheduler.LRScheduler:
        """Make the schedule of the learning rate, `done` steps of the run having been taken."""
        n = self.algorithm.n_minibatches
        return make_scheduler(
            self.optimizer, self.actor.optim, total=self.total_steps * n, done=done * n
        )

    def update(
        self,
        groups: Groups,
        minibatches: Sequence[RankMiniBatch],
        advantages: Advantages,
        recorded: Collection[int] = (),
        reference_pass: ReferencePass | None = None,
        kl_scale: float = 0.0,
        seed: int = 0,
        version: int = 0,
    ) -> tuple[MetricSums, Logprobs]:
        """Train on this rank's mini-batches of `groups`, one optimizer step each.

        Args:
            recorded: groups whose logprobs are returned.
            reference_pass: from `reference_kl`, with a KL in the reward.
            kl_scale: how much of the KL from a token to its trajectory's end is subtracted from the
                token's advantage.
            seed: seeds the corruption of images.
            version: of the current weights.

        Returns:
            This rank's part of the metrics, and the old logprobs of the trajectories that it has
            trained on, of the groups `recorded`.
        """
        sums, record = MetricSums(), LogprobRecord(recorded)
        with span("images"):
            self.batches.prepare(groups.values())
            self.forwards.prepare(self.batches, groups.values(), seed)
        with span("old logprobs"):
            if reference_pass is None:
                old_logprobs = self._logprobs_before(groups, minibatches, advantages)
            else:
                old_logprobs = reference_pass.old_logprobs
        gathers_once = self.mesh.gathers_once(self.actor.fsdp_config)
        for m, mini in enumerate(minibatches):
            load, balance = self._expert_load(), self._balance(groups, mini, advantages)
            means, tokens = self._minibatch_values(groups, mini, advantages, old_logprobs[m])
            all_inputs = self.forwards.inputs(self.batches, mini, groups, advantages)
            for i, inputs in enumerate(all_inputs):
                batch, _ = inputs.policy
                if reference_pass is not None and kl_scale:
                    batch = reference_pass.penalized(batch, m, i, kl_scale)
                is_last = i == len(mini.micro_batches) - 1
                reduce_in_backward(self.policy, not gathers_once or is_last)
                logprobs, entropy, passes = self.forwards.run(inputs, i, load, balance)
                # In the first mini-batch the weights are still those of the start, so the forward's
                # own logprobs are the old ones.
                start = (
                    old_logprobs[m][i] if old_logprobs[m] else logprobs.detach() if m == 0 else None
                )
                loss, metrics = micro_batch_loss(
                    logprobs,
                    entropy,
                    start,
                    passes,
                    batch,
                    self.algorithm,
                    mini.denominator,
                    self.loss,
                    version,
                    [means[item.group] for item in mini.micro_batches[i]] if means else None,
                    tokens,
                )
                with span("backward", micro_batch=i):
                    # FSDP2 averages gradients; the loss is a sum over ranks.
                    (loss * self.mesh.size).backward()
                if self.mesh.reports:
                    # A sum over micro-batches and ranks: `_optimize` adds its count, once.
                    metrics.add("actor/loss", loss.detach(), 0)
                    sums.merge(metrics)
                    trained_logprobs = logprobs.detach() if start is None else start
                    record.add(mini.micro_batches[i], batch, trained_logprobs)
            with span("optimizer", mini_batch=m):
                sums.merge(self._optimize())
            if load is not None:
                sums.merge(self._expert_metrics(load))
        sums.add("actor/lr", self.scheduler.get_last_lr()[0], 1)
        for name, gib in self.memory.measured().items():
            sums.maximum(name, gib)
        return sums, record.on_host()

    @torch.no_grad()
    def reference_kl(
        self, groups: Groups, minibatches: Sequence[RankMiniBatch]
    ) -> tuple[TurnKl, ReferencePass]:
        """Return KL(policy‖reference), in nats, of this rank's part of the coming `update`.

        It is that of the current weights. The second value is for `update`.
        """
        assert self.reference is not None and self.algorithm.kl_penalty_type is not None
        no_advantages = _no_advantages(groups)
        with span("images"):
            self.batches.prepare(groups.values())
        with span("old logprobs"):
            old_logprobs = self._logprobs_before(groups, minibatches, no_advantages, first=0)
        reference_pass = ReferencePass(old_logprobs)
        kl_by_trajectory: TurnKl = {}
        for mini, logprobs in zip(minibatches, old_logprobs, strict=True):
            reference_pass.kl_to_end.append([])
            for i, (batch, features) in enumerate(self.batches(mini, groups, no_advantages)):
                reference = reference_logprobs(self.reference, (batch, features))
                mask = torch.ones_like(reference, dtype=torch.bool)
                kl = (
                    divergence(reference, logprobs[i], mask, self.algorithm.kl_penalty_type)
                    .double()
                    .cpu()
                    .numpy()
                )
                turn_counts = [
                    len(groups[item.group].trajectories[item.index].turns)
                    for item in mini.micro_batches[i]
                ]
                kl_to_end, sums_by_turn = turn_kl(kl, batch, sum(turn_counts))
                reference_pass.kl_to_end[-1].append(kl_to_end)
                ends = np.cumsum(turn_counts)
                for item, end, n in zip(mini.micro_batches[i], ends, turn_counts, strict=True):
                    kl_by_trajectory[item.group, item.index] = sums_by_turn[end - n : end]
        return kl_by_trajectory, reference_pass

    def _logprobs_before(
        self,
        groups: Groups,
        minibatches: Sequence[RankMiniBatch],
        advantages: Advantages,
        first: int | None = None,
    ) -> list[list[torch.Tensor]]:
        """Return logprobs of the current weights, [R], by mini-batch and micro-batch.

        Mini-batches before number `first` get [], as they need no forward of their own. The first
        optimizer step starts from these very weights, so its own forward gives them: `auto` makes
        the forward for later mini-batches only, `true` for all. Dropout is for gradients alone, so
        with it the step's own forward gives no old logprobs. Where nothing in the loss needs them
        (`needs_start`), there is no forward.
        """
        auto = 0 if self.actor.model.is_lora and self.actor.model.lora.dropout else 1
        if first is None:
            # Known before the first micro-batch, so nothing is left to its own forward.
            of_all = self.algorithm.importance_sampling_normalize != "none" or self._needs_minibatch
            first = 0 if self.algorithm.recompute_logprobs == "true" or of_all else auto
            first = first if of_all or needs_start(self.algorithm) else len(minibatches)
        self.policy.eval()
        with torch.no_grad():
            old_logprobs: list[list[torch.Tensor]] = []
            for m, mini in enumerate(minibatches):
                inputs = self.batches(mini, groups, advantages) if m >= first else ()
                old_logprobs.append([self.policy(batch, features)[0] for batch, features in inputs])
        self.policy.train()
        return old_logprobs

    def _minibatch_values(
        self,
        groups: Groups,
        mini: RankMiniBatch,
        advantages: Advantages,
        start_logprobs: Sequence[torch.Tensor],
    ) -> tuple[dict[int, float], MiniBatchTokens | None]:
        """Return `weight_means` and `minibatch_tokens`; ({}, None) where the loss needs neither.

        Collective.
        """
        means, tokens = dict[int, float](), None
        normalizes = self.algorithm.importance_sampling_normalize != "none"
        if normalizes or self._needs_minibatch:
            batches = self.batches.without_pixels(mini, groups, advantages)
            if normalizes:
                means = weight_means(batches, mini, start_logprobs, self.algorithm, self.mesh)
            if self._needs_minibatch:
                tokens = minibatch_tokens(batches, start_logprobs, self.mesh)
        return means, tokens

    def _expert_load(self) -> ExpertLoad | None:
        """Make empty counters of how busy the experts are; None for a model without experts."""
        mixture = self.policy.mixture
        return (
            None
            if mixture is None
            else ExpertLoad(len(mixture.layers), mixture.experts, self.mesh.device)
        )

    def _balance(
        self, groups: Groups, mini: RankMiniBatch, advantages: Advantages
    ) -> torch.Tensor | None:
        """Return `Routing`'s `balance` for the load-balancing loss; None without one.

        Its gradient for any token depends on how busy each expert is in the whole mini-batch, which
        a forward without gradients counts.
        """
        load, weight = self._expert_load(), self.actor.model.router_aux_loss_coef
        if load is None or not weight:
            return None
        with torch.no_grad(), span("expert load"):
            for batch, features in self.batches(mini, groups, advantages):
                self.policy(batch, features, load)
        load.sum_over_ranks()
        # FSDP2 averages gradients, and the loss is a sum over ranks.
        return (weight * self.mesh.size * load.balance_gradient()).float()

    def _expert_metrics(self, load: ExpertLoad) -> MetricSums:
        """Return the expert metrics of one mini-batch, the balance loss included.

        `micro_batch_loss` does not see that loss.
        """
        sums, weight = MetricSums(), self.actor.model.router_aux_loss_coef
        _, n_reported, n_differing = load.tokens.clone()
        sums.add(
            "actor/routing_disagreement", load.differing.clone(), len(load.counts) * n_reported
        )
        sums.add("actor/routing_disagreement_tokens", n_differing, n_reported)
        load.sum_over_ranks()
        sums.add("actor/expert_load", load.imbalance(), 1)
        if weight:
            loss = load.balance_loss()
            sums.add("actor/router_aux_loss", loss, 1)
            sums.add("actor/loss", weight * loss / self.mesh.size, 0)
        return sums

    def _optimize(self) -> MetricSums:
        """Clip the gradient by its norm over all shards, and take an optimizer step.

        There is no step if that norm is 0 or not finite. A gradient of 0 has nothing to teach (no
        trajectory to train on, or advantages that all tie): a step would still move the weights, by
        momentum and by their decay.
        """
        reshard_all(self.policy)
        trained = [p for p in self.policy.parameters() if p.requires_grad]
        norm = clip_gradient(self.mesh, trained, self.actor.optim.clip_grad)
        finite, idle = np.isfinite(norm), norm == 0
        if finite and not idle:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.scheduler.step()
        # Every rank reports these; only ratios matter, so the equal weights cancel. The loss is
        # summed over ranks.
        sums = MetricSums()
        sums.add("actor/grad_norm", norm, 1)
        sums.add("actor/skipped_steps", float(not finite), 1)
        sums.add("actor/idle_steps", float(idle), 1)
        sums.add("actor/loss", 0.0, 1.0 / self.mesh.size)
        return sums

    @torch.no_grad()
    def score(self, groups: Groups, mini: RankMiniBatch) -> list[tuple[int, int, float, float]]:
        """Compare the engine's logprobs of trajectories with this policy's.

        The policy is given the images that the engine saw, then blank ones. At most one trajectory
        of a group may be in a micro-batch: corrupted images are not shared.

        Returns:
            Per trajectory, (group, sampled tokens, Σ|rollout - train|, the same with blank images).
        """
        image_batches = self.batches.without_cache()
        pixels = image_batches.pixels
        collate = replace(image_batches.collate, pixels=lambda image: np.zeros_like(pixels(image)))
        blank_batches = BatchMaker(self.policy, collate, None, image_batches.max_tokens)
        groups = {
            g: replace(group, trajectories=tuple(map(group.as_seen, group.trajectories)))
            for g, group in groups.items()
        }
        no_advantages = _no_advantages(groups)
        pairs = zip(
            image_batches(mini, groups, no_advantages),
            blank_batches(mini, groups, no_advantages),
            strict=True,
        )
        scores: list[tuple[int, int, float, float]] = []
        self.policy.eval()
        for ((batch, _), (blank_batch, _)), items in zip(pairs, mini.micro_batches, strict=True):
            # |rollout - train| of each sampled token, [R].
            gaps = np.abs(batch.rollout_logprobs - self.policy(batch)[0].cpu().numpy())
            blank_logprobs = self.policy(blank_batch)[0].cpu().numpy()
            blank_gaps = np.abs(blank_batch.rollout_logprobs - blank_logprobs)
            for place, item in enumerate(items):
                mask = batch.trajectories == place
                gap, blank_gap = float(gaps[mask].sum()), float(blank_gaps[mask].sum())
                scores.append((item.group, int(mask.sum()), gap, blank_gap))
        self.policy.train()
        reshard_all(self.policy)
        return scores if self.mesh.reports else []

    @torch.no_grad()
    def total_loss(self, groups: Groups, mini: RankMiniBatch) -> tuple[float, int]:
        """Return Σ -logprob, in nats, over this rank's tokens that carry loss, and their number."""
        self.batches.prepare(groups.values())
        self.policy.eval()
        total, n_tokens = 0.0, 0
        for batch, features in self.batches(mini, groups, _no_advantages(groups)):
            total -= float(self.policy(batch, features)[0].double().sum())
            n_tokens += len(batch.targets) if batch.part is None else len(batch.trajectories)
        self.policy.train()
        reshard_all(self.policy)
        return (total, n_tokens) if self.mesh.reports else (0.0, 0)

    def weights(
        self, dtype: torch.dtype, device: str = "cpu", *, everything: bool = False
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name and whole value of every weight that the engines need, on `device`.

        Names are the transformers model's own; values are cast once to `dtype`. A tied weight
        appears once. Of a model with adapters, the weights that these change, with them added; or
        the adapters, in float32 and by their own names (`actor.model.lora.sync`). With `everything`,
        weights that engines have already, too, and adapters are always added. Every rank must
        exhaust it; on the device `meta` one rank alone may.
        """
        for name, value in whole_tensors(self._sharded_weights(dtype, device, everything)):
            yield name, value.to(device)

    @torch.no_grad()
    def replay_weights(self, max_bytes: float = MAX_WEIGHT_BYTES) -> dict[str, np.ndarray]:
        """Return a copy of all weights, by the model's own names, for a replay of the coming step.

        {} on other ranks than the first, and if their float32 has more than `max_bytes`.
        Collective.
        """
        n_bytes = sum(4 * math.prod(shape_of(p)) for p in self.policy.model.parameters())
        if n_bytes > max_bytes:
            return {}
        values = self.weights(torch.float32, everything=True)
        if dist.get_world_size() == 1 and not self.actor.model.is_lora:
            # Nothing is to be gathered or added, and this takes a seventh of the time.
            named = self.policy.model.named_parameters()
            local = ((name, p.to_local() if isinstance(p, DTensor) else p) for name, p in named)
            values = ((name, value.detach().float().cpu()) for name, value in local)
        # A copy: on a CPU, the whole value of a weight may be the memory that is trained.
        is_first = dist.get_rank() == 0
        return {name: value.numpy().copy() for name, value in values if is_first}

    def _sharded_weights(
        self, dtype: torch.dtype, device: str, everything: bool = False
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what `weights` does, sharded as the parameters are; on the device `meta` whole."""
        merged = everything or self.actor.model.lora.sync == "merged"
        for name, param, adapter in engine_weights(self.policy.model, merged):
            # The engines have the frozen weights from their own start.
            engines_have_it = not (self.frozen_differ or self.sends_frozen or everything)
            if not param.requires_grad and adapter is None and engines_have_it:
                continue
            stays_float32 = is_adapter(name) or self.policy.family.stays_float32(name)
            sent_dtype = torch.float32 if stays_float32 else dtype
            if device == "meta":
                yield name, torch.empty(shape_of(param), device="meta", dtype=sent_dtype)
                continue
            # With `fsdp_config.cpu_offload` the parameter is in host memory.
            value = dense(param).detach().to(self.mesh.device)
            yield name, (with_adapter(value, adapter) if adapter else value).to(sent_dtype)

    def parts(self, dtype: torch.dtype) -> Iterator[ShardPart]:
        """Yield this rank's part of each of `weights`, on the rank's device.

        Every rank must exhaust it.
        """
        for name, value in self._sharded_weights(dtype, self.mesh.device):
            yield local_part(name, value)

    def stage(self) -> None:
        """Copy this rank's part of a checkpoint to host memory."""
        self.writer = self.writer or checkpoint.CheckpointWriter()
        self.writer.stage(self.policy, self.optimizer, trained_only=self.actor.model.is_lora)

    def write(self, folder: str) -> dict[str, str]:
        """Write the staged checkpoint, in any thread: `CheckpointWriter.write`."""
        assert self.writer is not None
        return self.writer.write(folder)

    def load(self, folder: str, step: int) -> None:
        """Read the checkpoint of `step`, written on any number of ranks.

        Frozen weights may have been trained before: the engines, which have those of
        `rollout.model.model_path`, are then sent them, too. The reference remains the model at that
        path, so it encodes images itself.
        """
        initial_fingerprint = self._frozen_fingerprint()
        checkpoint.load(folder, dist.get_rank(), self.policy, self.optimizer)
        self.scheduler = self._schedule(done=step)
        differ = torch.tensor(int(self._frozen_fingerprint() != initial_fingerprint))
        dist.all_reduce(differ, dist.ReduceOp.MAX)
        self.frozen_differ = bool(differ)
        if self.batches.cache is not None:
            self.batches.cache.clear()
            if self.frozen_differ and self.reference not in (None, self.policy):
                self.batches = self.batches.without_cache()

    def _frozen_fingerprint(self) -> int:
        """Return the fingerprint of this rank's part of the weights that are not trained."""
        frozen = (p.detach() for p in self.policy.parameters() if not p.requires_grad)
        return fingerprint(p.to_local() if isinstance(p, DTensor) else p for p in frozen)


def _no_advantages(groups: Groups) -> dict[int, list[list[float]]]:
    """Return an advantage of 0 for every turn, for forwards whose logprobs alone are used."""
    advantages: dict[int, list[list[float]]] = {}
    for number, group in groups.items():
        advantages[number] = [[0.0] * len(trajectory.turns) for trajectory in group.trajectories]
    return advantages
