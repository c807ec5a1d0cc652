"""One rank's trainer: policy, reference and optimizer on a mesh, and the training step. No Ray.

A step (`Trainer.update`), in order: encode the images that no step before had; compute old logprobs, where the first forward
does not give them; then, per mini-batch, the loss and gradient of each micro-batch, and one optimizer step.

The loss is a sum over micro-batches and ranks of terms whose denominators are global counts, agreed before the first
micro-batch. So neither loss nor gradient depends on how trajectories are packed or who trains them.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from rlinf_vl.actor import checkpoint
from rlinf_vl.actor.batches import BatchMaker, turn_kl
from rlinf_vl.actor.loss import micro_batch_loss, needs_start
from rlinf_vl.actor.mesh import Mesh, reduce_in_backward, reshard_all, whole_tensors
from rlinf_vl.actor.messages import Advantages, Logprobs, RankMiniBatch, TurnKl
from rlinf_vl.actor.offload import Offload
from rlinf_vl.actor.optimizer import make_optimizer, make_scheduler
from rlinf_vl.actor.passes import FurtherPasses, reference_logprobs
from rlinf_vl.algorithms import divergence
from rlinf_vl.config.schema import ActorConfig, AlgorithmConfig
from rlinf_vl.models.loading import DTYPES, checkpoint_blocks, part_of
from rlinf_vl.models.lora import engine_weights, is_adapter, train_parts, with_adapter
from rlinf_vl.models.mixture import ExpertLoad
from rlinf_vl.models.nf4 import dense, shape_of
from rlinf_vl.models.policy import PolicyModel
from rlinf_vl.models.vision_cache import VisionCache
from rlinf_vl.observe.metrics import MetricSums
from rlinf_vl.observe.spans import span
from rlinf_vl.packing.collator import Collator
from rlinf_vl.transport.buckets import fingerprint
from rlinf_vl.transport.delta import Part, local_part
from rlinf_vl.types import Group

Groups = Mapping[int, Group]
#: Reads a model in a dtype, on the CPU.
Load = Callable[[torch.dtype], PolicyModel]
Teacher = tuple[Load, Collator]


class Trainer:
    """Methods are collective: all ranks call them together, with equally many micro-batches. Groups go by number."""

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
        teacher: Teacher | None = None,
    ) -> None:
        """`load` reads the model in a dtype, on the CPU: once for the policy, and again for a reference when the policy is sharded,
        so that a host need not have both whole. `collate` makes pixels. `max_tokens`: of a micro-batch, and so of the images that
        are encoded at once. `total_steps`: of the run, for the learning rate. `loss`: the code that `algorithm.loss_type` names.
        `teacher`: how it is read, and its collator."""
        self.mesh = mesh
        self.actor = actor
        self.algorithm = algorithm
        self.total_steps = total_steps
        self.loss = loss
        #: By mini-batch and micro-batch of the step to come, old logprobs and the KL from each token on: see `reference_kl`.
        self.before: list[list[tuple[torch.Tensor, np.ndarray]]] = []
        self.max_patches = max_tokens * collate.merge_size**2
        self.frozen_differ = False  # from those of the engines' first weights
        computes = DTYPES[actor.fsdp_config.mixed_precision.param_dtype]  # what never changes is stored as it computes
        self.policy = self._sharded(load(computes if actor.model.is_lora else torch.float32), frozen=False)
        self.reference: PolicyModel | None = None
        if algorithm.kl_beta > 0:  # of LoRA, the policy without its adapters
            self.reference = self.policy if actor.model.is_lora else self._sharded(load(computes), frozen=True)
        self.optimizer = make_optimizer(self.policy, actor.optim)
        self.writer: checkpoint.CheckpointWriter | None = None  # from the first checkpoint on
        self.scheduler = self._schedule(done=0)
        self.passes = FurtherPasses(
            self.policy,
            self.reference if algorithm.kl_placement == "loss" else None,
            *self._taught_by(teacher),
            algorithm,
        )
        frozen = [m for m in (self.reference, self.passes.teacher) if m not in (None, self.policy)]
        self.memory = Offload(self.policy, self.optimizer, frozen, mesh.device)
        family, named = self.policy.family, self.policy.model.named_parameters()
        trained = {part_of(name, family) for name, p in named if p.requires_grad}
        self.trains_vision = not trained <= {"language_model"}  # images must then be encoded again in every micro-batch
        encodes_once = family.vision_tower and not self.trains_vision
        self.batches = BatchMaker(
            self.policy, collate, self._vision_cache() if encodes_once else None, self.max_patches
        )

    def _sharded(self, policy: PolicyModel, frozen: bool) -> PolicyModel:
        fsdp = self.actor.fsdp_config
        policy.context_ranks = self.mesh.context_ranks
        if frozen:
            policy.requires_grad_(False)
        else:
            model = self.actor.model
            train_parts(policy.model, policy.family, model.frozen_parts, model.adapters, router=not model.freeze_router)
            policy.replay = self.actor.routing_replay == "replay"
        if fsdp.gradient_checkpointing and not frozen:
            checkpoint_blocks(policy.model, policy.family, fsdp.gradient_checkpointing_use_reentrant)
        return self.mesh.shard(policy, fsdp).train(not frozen)

    def _taught_by(self, teacher: Teacher | None) -> tuple[PolicyModel | None, BatchMaker | None]:
        """The teacher, sharded as the policy, and what makes its micro-batches."""
        if teacher is None:
            return None, None
        load, collate = teacher
        model = self._sharded(load(DTYPES[self.actor.fsdp_config.mixed_precision.param_dtype]), frozen=True)
        cache = self._vision_cache() if model.family.vision_tower else None
        return model, BatchMaker(model, collate, cache, self.max_patches)

    def _vision_cache(self) -> VisionCache:
        return VisionCache(int(self.actor.vision_cache_gb * 2**30), self.mesh.device)

    def _schedule(self, done: int) -> torch.optim.lr_scheduler.LRScheduler:
        """The learning rate of the config, after so many steps of the run."""
        n = self.algorithm.n_minibatches
        return make_scheduler(self.optimizer, self.actor.optim, total=self.total_steps * n, done=done * n)

    def update(
        self,
        groups: Groups,
        minibatches: Sequence[RankMiniBatch],
        advantages: Advantages,
        recorded: Collection[int] = (),
        kl_scale: float = 0.0,
        seed: int = 0,
        version: int = 0,
    ) -> tuple[MetricSums, Logprobs]:
        """Train on this rank's mini-batches of `groups`, one optimizer step each. Returns its part of the metrics, and the old
        logprobs of what it has trained on of the groups `recorded`. `kl_scale`: how much of the KL from a token on to its
        trajectory's end, as `reference_kl` has found it, is subtracted from the token's advantage. `seed` draws what PAPO hides.
        `version`: of the weights as they are."""
        sums, seen = MetricSums(), dict[int, dict[int, torch.Tensor]]()
        with span("images"):
            self.batches.prepare(groups.values())
            self.passes.prepare(self.batches, groups.values(), seed)
        with span("old logprobs"):
            old = [[logprobs for logprobs, _ in mini] for mini in self.before]
            old = old or self._logprobs_before(groups, minibatches, advantages)
        gathers_once = self.mesh.gathers_once(self.actor.fsdp_config)
        for m, mini in enumerate(minibatches):
            load, balance = self._expert_load(), self._balance(groups, mini, advantages)
            for i, view in enumerate(self.passes.over(self.batches, mini, groups, advantages)):
                batch, features = view.own
                if kl_scale:
                    later = (kl_scale * self.before[m][i][1]).astype(np.float32)
                    batch = replace(batch, advantages=batch.advantages - later)
                passes, candidates = view.before(), self.passes.candidates()
                reduce_in_backward(self.policy, not gathers_once or i == len(mini.micro_batches) - 1)
                with span("forward", micro_batch=i):
                    logprobs, entropy = self.policy(batch, features, load, balance, candidates)
                passes = view.after(passes, logprobs, candidates)
                logprobs = logprobs if candidates is None else logprobs[:, 0]
                start = old[m][i] if old[m] else logprobs.detach() if m == 0 else None
                loss, part = micro_batch_loss(
                    logprobs, entropy, start, passes, batch, self.algorithm, mini.denominator, self.loss, version
                )
                with span("backward", micro_batch=i):
                    (loss * self.mesh.size).backward()  # FSDP2 averages gradients; the loss is a sum over ranks
                if not self.mesh.reports:
                    continue
                part.add("actor/loss", loss.detach(), 0)  # a sum over micro-batches and ranks: counted in `_optimize`
                sums.merge(part)
                for place, item in enumerate(mini.micro_batches[i]):
                    if item.group in recorded:
                        own = slice(*np.searchsorted(batch.trajectories, (place, place + 1)))
                        trained = logprobs.detach() if start is None else start
                        seen.setdefault(item.group, {})[item.index] = trained[own]
            with span("optimizer", mini_batch=m):
                sums.merge(self._optimize())
            if load is not None:
                sums.merge(self._expert_metrics(load))
        self.before = []
        sums.add("actor/lr", self.scheduler.get_last_lr()[0], 1)
        for name, gib in self.memory.measured().items():
            sums.maximum(name, gib)
        return sums, {group: {i: x.cpu().numpy() for i, x in parts.items()} for group, parts in seen.items()}

    @torch.no_grad()
    def reference_kl(self, groups: Groups, minibatches: Sequence[RankMiniBatch]) -> TurnKl:
        """KL(policy‖reference) of this rank's part of what `update` is about to train on, of the weights as they are, in nats. What
        `update` needs of it stays in `before`."""
        assert self.reference is not None and self.algorithm.kl_penalty_type is not None
        none = {g: [[0.0] * len(t.turns) for t in group.trajectories] for g, group in groups.items()}
        with span("images"):
            self.batches.prepare(groups.values())
        with span("old logprobs"):
            old = self._logprobs_before(groups, minibatches, none, first=0)
        self.before, found = [], {}
        for mini, logprobs in zip(minibatches, old, strict=True):
            self.before.append([])
            for i, (batch, features) in enumerate(self.batches(mini, groups, none)):
                reference = reference_logprobs(self.reference, (batch, features))
                mask = torch.ones_like(reference, dtype=torch.bool)
                kl = divergence(reference, logprobs[i], mask, self.algorithm.kl_penalty_type).double().cpu().numpy()
                turns = [len(groups[item.group].trajectories[item.index].turns) for item in mini.micro_batches[i]]
                later, of_turns = turn_kl(kl, batch, sum(turns))
                self.before[-1].append((logprobs[i], later))
                ends = np.cumsum(turns)
                for item, end, n in zip(mini.micro_batches[i], ends, turns, strict=True):
                    found[item.group, item.index] = of_turns[end - n : end]
        return found

    def _logprobs_before(
        self, groups: Groups, minibatches: Sequence[RankMiniBatch], advantages: Advantages, first: int | None = None
    ) -> list[list[torch.Tensor]]:
        """Logprobs of the weights as they are, for every micro-batch of every mini-batch from the `first` on; [] where no
        pass is needed.

        The first optimizer step starts from these very weights, so its own forward gives them: `auto` makes the pass for the
        mini-batches behind it only, `true` for all. Dropout is for gradients alone, so with it the step's own forward gives no old
        logprobs. Where nothing in the loss needs them (`needs_start`), there is no pass.
        """
        auto = 0 if self.actor.model.is_lora and self.actor.model.lora.dropout else 1
        if first is None:
            first = 0 if self.algorithm.recompute_logprobs == "true" else auto
            first = first if needs_start(self.algorithm) else len(minibatches)
        self.policy.eval()
        with torch.no_grad():
            old = [
                [self.policy(*batch)[0] for batch in self.batches(mini, groups, advantages)] if m >= first else []
                for m, mini in enumerate(minibatches)
            ]
        self.policy.train()
        return old

    def _expert_load(self) -> ExpertLoad | None:
        mixture = self.policy.mixture
        return None if mixture is None else ExpertLoad(len(mixture.layers), mixture.experts, self.mesh.device)

    def _balance(self, groups: Groups, mini: RankMiniBatch, advantages: Advantages) -> torch.Tensor | None:
        """`Routing`'s `balance` for the load-balancing loss; None without one. Its gradient for any token depends on how busy each
        expert is in the whole mini-batch, which a pass without gradients counts."""
        load, weight = self._expert_load(), self.actor.model.router_aux_loss_coef
        if load is None or not weight:
            return None
        with torch.no_grad(), span("expert load"):
            for batch in self.batches(mini, groups, advantages):
                self.policy(*batch, load)
        load.sum_over_ranks()
        return (weight * self.mesh.size * load.balance_gradient()).float()  # FSDP2 averages gradients

    def _expert_metrics(self, load: ExpertLoad) -> MetricSums:
        """Of one mini-batch; its loss among them, which `micro_batch_loss` does not see."""
        sums, weight = MetricSums(), self.actor.model.router_aux_loss_coef
        _, reported, differing = load.tokens.clone()
        sums.add("actor/routing_disagreement", load.differing.clone(), len(load.counts) * reported)
        sums.add("actor/routing_disagreement_tokens", differing, reported)
        load.sum_over_ranks()
        sums.add("actor/expert_load", load.imbalance(), 1)
        if weight:
            loss = load.balance_loss()
            sums.add("actor/router_aux_loss", loss, 1)
            sums.add("actor/loss", weight * loss / self.mesh.size, 0)
        return sums

    def _optimize(self) -> MetricSums:
        """Clip the gradient by its norm over all shards, and take an optimizer step unless that norm is 0 or not finite.

        A gradient of 0 has nothing to teach (no trajectory to train on, or advantages that all tie): a step would still move
        the weights, by momentum and by their decay.
        """
        reshard_all(self.policy)
        norm = self._clip_gradient()
        finite, idle = np.isfinite(norm), norm == 0
        if finite and not idle:
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.scheduler.step()
        # Every rank reports these; only ratios matter, so the equal weights cancel. The loss is summed over ranks.
        sums = MetricSums()
        sums.add("actor/grad_norm", norm, 1)
        sums.add("actor/skipped_steps", float(not finite), 1)
        sums.add("actor/idle_steps", float(idle), 1)
        sums.add("actor/loss", 0.0, 1.0 / self.mesh.size)
        return sums

    @torch.no_grad()
    def _clip_gradient(self) -> float:
        """Clip the gradient by its norm over all shards, and return that norm. Collective."""
        trained, limit = [p for p in self.policy.parameters() if p.requires_grad], self.actor.optim.clip_grad
        whole = [p for p in trained if not isinstance(p, DTensor)]
        if not whole:
            norm = nn.utils.clip_grad_norm_(trained, limit)
            return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        self.mesh.average_gradients(whole)
        sharded = [p for p in trained if isinstance(p, DTensor)]
        norms = []
        for weights in (whole, sharded):
            norm = nn.utils.get_total_norm([p.grad for p in weights if p.grad is not None])
            norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
            norms.append(norm.to(self.mesh.device))  # shards may be in host memory, beside whole weights on the device
        norm = torch.linalg.vector_norm(torch.stack(norms))
        for weights in (whole, sharded):
            nn.utils.clip_grads_with_norm_(weights, limit, norm)
        return float(norm)

    @torch.no_grad()
    def score(self, groups: Groups, mini: RankMiniBatch) -> list[tuple[int, int, float, float]]:
        """Compare the engine's logprobs of trajectories with this policy's, with the images that the engine saw and with blank ones.
        At most one trajectory of a group in a micro-batch: corrupted images are not shared.

        Returns, per trajectory, (group, sampled tokens, Σ|rollout - train|, the same with blank images).
        """
        seeing = self.batches.without_cache()
        blank = replace(seeing.collate, pixels=lambda image: np.zeros_like(seeing.pixels(image)))
        makers = seeing, BatchMaker(self.policy, blank, None, seeing.max_patches)
        groups = {
            g: replace(group, trajectories=tuple(map(group.as_seen, group.trajectories))) for g, group in groups.items()
        }
        no_advantage = {g: [[0.0] * len(t.turns) for t in group.trajectories] for g, group in groups.items()}
        pairs = zip(*(make(mini, groups, no_advantage) for make in makers), strict=True)
        rows = []
        self.policy.eval()
        for pair, items in zip(pairs, mini.micro_batches, strict=True):
            found = [(batch, self.policy(batch)[0].cpu().numpy()) for batch, _ in pair]
            for place, item in enumerate(items):
                where = pair[0][0].trajectories == place
                sums = [float(np.abs(batch.rollout_logprobs - logprobs)[where].sum()) for batch, logprobs in found]
                rows.append((item.group, int(where.sum()), *sums))
        self.policy.train()
        reshard_all(self.policy)
        return rows if self.mesh.reports else []

    def weights(self, dtype: torch.dtype, device: str = "cpu") -> Iterator[tuple[str, torch.Tensor]]:
        """Name (the transformers model's own) and whole value of every weight that the engines need, cast once to `dtype`, on
        `device`. A tied weight appears once. Of a model with adapters, the weights that these change, with them added; or the
        adapters, in float32 and by their own names (`actor.model.lora.sync`). Every rank must exhaust it; on the device `meta`
        one rank alone may."""
        for name, value in whole_tensors(self._sharded_weights(dtype, device)):
            yield name, value.to(device)

    def _sharded_weights(self, dtype: torch.dtype, device: str) -> Iterator[tuple[str, torch.Tensor]]:
        """As `weights`, sharded as the parameters are; on the device `meta` whole."""
        merged = self.actor.model.lora.sync == "merged"
        for name, param, adapter in engine_weights(self.policy.model, merged):
            if not param.requires_grad and adapter is None and not self.frozen_differ:
                continue
            keeps = is_adapter(name) or self.policy.family.stays_float32(name)
            sent = torch.float32 if keeps else dtype
            if device == "meta":
                yield name, torch.empty(shape_of(param), device="meta", dtype=sent)
                continue
            value = dense(param).detach().to(self.mesh.device)  # from host memory, with `fsdp_config.cpu_offload`
            yield name, (with_adapter(value, adapter) if adapter else value).to(sent)

    def parts(self, dtype: torch.dtype) -> Iterator[Part]:
        """This rank's part of each of `weights`, on the rank's device. Every rank must exhaust it."""
        for name, value in self._sharded_weights(dtype, self.mesh.device):
            yield local_part(name, value)

    def stage(self) -> None:
        """Copy this rank's part of a checkpoint to host memory."""
        model = self.actor.model
        self.writer = self.writer or checkpoint.CheckpointWriter()
        self.writer.stage(self.policy, self.optimizer, trained_only=model.is_lora and model.lora.save_lora_only)

    def write(self, folder: str) -> dict[str, str]:
        """Write what was staged, in any thread: `CheckpointWriter.write`."""
        assert self.writer is not None
        return self.writer.write(folder)

    def load(self, folder: str, step: int) -> None:
        """Read the checkpoint of `step`, written on any number of ranks.

        Frozen weights may have been trained before: the engines, which have those of `rollout.model.model_path`, are then
        sent them, too. The reference remains the model at that path, so it encodes images itself.
        """
        before = self._frozen_fingerprint()
        checkpoint.load(folder, dist.get_rank(), self.policy, self.optimizer)
        self.scheduler = self._schedule(done=step)
        differ = torch.tensor(int(self._frozen_fingerprint() != before))
        dist.all_reduce(differ, dist.ReduceOp.MAX)
        self.frozen_differ = bool(differ)
        if self.batches.cache is not None:
            self.batches.cache.clear()
            if self.frozen_differ and self.reference not in (None, self.policy):
                self.batches = self.batches.without_cache()

    def _frozen_fingerprint(self) -> int:
        """Of this rank's part of the weights that are not trained."""
        frozen = (p.detach() for p in self.policy.parameters() if not p.requires_grad)
        return fingerprint(p.to_local() if isinstance(p, DTensor) else p for p in frozen)
