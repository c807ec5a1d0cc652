"""One rank of the actor group: a Ray actor that holds its shard of the policy and trains what it is told to."""

import logging
import socket
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from rlinf_vl.actor import checkpoint
from rlinf_vl.actor.batches import BatchMaker, RankMiniBatch
from rlinf_vl.actor.fsdp import (
    make_optimizer,
    make_scheduler,
    reshard_all,
    shard,
    weight_shapes,
    whole_weights,
)
from rlinf_vl.actor.offload import Offload
from rlinf_vl.actor.update import LossSettings, update
from rlinf_vl.config.schema import AlgorithmConfig, Config
from rlinf_vl.models.families import family_of
from rlinf_vl.models.loading import DTYPES, freeze_vision, load_model, vocab_size
from rlinf_vl.models.policy import PolicyModel
from rlinf_vl.models.processing import PixelCache, Processor
from rlinf_vl.models.vision_cache import VisionCache
from rlinf_vl.observe.spans import flush_spans, profiler, record_spans, span
from rlinf_vl.packing.collator import Collator
from rlinf_vl.runtime.ray_process import own_process, where
from rlinf_vl.runtime.run_folder import run_folder
from rlinf_vl.transport import SENDERS
from rlinf_vl.transport.broadcast import BroadcastSender, WeightGroup
from rlinf_vl.transport.buckets import fingerprint
from rlinf_vl.transport.groups import fetch_surviving
from rlinf_vl.transport.sender import Sender
from rlinf_vl.types import Group, MicroBatch, Prices

log = logging.getLogger(__name__)


def loss_settings(algorithm: AlgorithmConfig) -> LossSettings:
    """The loss that `algorithm.*` asks for."""
    return LossSettings(
        aggregation=algorithm.loss_agg_func,
        clip_low=algorithm.clip_ratio_low,
        clip_high=algorithm.clip_ratio_high,
        clip_c=algorithm.clip_ratio_c,
        kl_beta=algorithm.kl_beta,
        kl_estimator=algorithm.kl_penalty_type,
        entropy_bonus=algorithm.entropy_bonus,
        tis_clip=algorithm.importance_sampling_clip if algorithm.importance_sampling_fix else None,
        tis_level=algorithm.importance_sampling_level,
        old_logprobs=algorithm.recompute_logprobs,
    )


class ActorRank:
    """The rank itself; `ActorWorker` is the same as a Ray actor."""

    def __init__(self, config: Config, model_path: str, device: str, rank: int, world_size: int) -> None:
        own_process(config.cluster.cpu_threads, device)
        torch.manual_seed(config.runner.seed)
        self.config, self.model_path, self.device = config, model_path, device
        self.rank, self.world_size = rank, world_size
        self.groups: dict[int, Group] = {}
        self._recorded: dict[int, dict[int, np.ndarray]] = {}
        record_spans(run_folder(config), f"actor {rank}")

    @ray.method(concurrency_group="health")
    def heartbeat(self) -> bool:
        """That it answers says that the process lives and runs."""
        return True

    @ray.method(concurrency_group="health")
    def process(self) -> tuple[str, int]:
        """(node id, process id) of this rank."""
        return where()

    def address(self) -> tuple[str, int]:
        """This node's address and a port that was free a moment ago, for the process group's rendezvous."""
        with socket.socket() as s:
            s.bind(("", 0))
            return ray.util.get_node_ip_address(), s.getsockname()[1]

    def start(self, host: str, port: int, total_steps: int) -> Prices:
        """Join the process group, load the checkpoint and shard it, for a run of `total_steps`. Collective.

        Returns what things cost in this model, for the planner.
        """
        if self.device == "cuda":
            torch.cuda.set_device(0)  # each actor sees its own GPU only: `own_process`
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if self.device == "cuda" else "gloo",
            init_method=f"tcp://{host}:{port}",
            rank=self.rank,
            world_size=self.world_size,
            timeout=timedelta(minutes=30),
        )
        config, fsdp = self.config, self.config.actor.fsdp_config
        self.family = family_of(config.rollout.model.model_type)
        self.processor = Processor(
            self.model_path,
            self.family,
            min_pixels=config.data.image_min_pixels,
            max_pixels=config.data.image_max_pixels,
            trust_remote_code=config.rollout.model.trust_remote_code,
        )
        self.mesh = init_device_mesh(self.device, (self.world_size,))
        self.policy = self._load_sharded(frozen=False).train()
        self.reference = self._load_sharded(frozen=True).eval() if config.algorithm.kl_beta > 0 else None
        optim = config.actor.optim
        self.optimizer = make_optimizer(
            self.policy,
            lr=optim.lr,
            betas=(optim.adam_beta1, optim.adam_beta2),
            eps=optim.adam_eps,
            weight_decay=optim.weight_decay,
        )
        self.memory = Offload(self.policy, self.optimizer, self.reference, self.device)
        self.total_steps, self.frozen_differ = total_steps, False
        self.scheduler = self._schedule(done=0)
        cache = None  # a frozen tower's features; a trained one runs in every micro-batch
        if config.actor.model.freeze_vision_tower:
            cache = VisionCache(int(config.actor.vision_cache_gb * 2**30), self.device)
        self.make = self._batch_maker(cache)
        log.info("rank %d of %d ready on %s, %s", self.rank, self.world_size, self.device, fsdp.mixed_precision)
        return self.family.prices(self.policy.model.config, not config.actor.model.freeze_vision_tower)

    def _schedule(self, done: int) -> Any:
        """The learning rate of the config, after so many steps of the run."""
        optim, minibatches = self.config.actor.optim, self.config.algorithm.n_minibatches
        return make_scheduler(
            self.optimizer,
            optim.lr_scheduler,
            warmup=optim.lr_warmup_steps,
            total=self.total_steps * minibatches,
            min_ratio=optim.min_lr_ratio,
            done=done * minibatches,
        )

    def _batch_maker(self, cache: VisionCache | None) -> BatchMaker:
        config = self.config
        return BatchMaker(
            self.policy,
            Collator(
                family=self.family,
                image_token_id=self.processor.image_token_id,
                merge_size=self.processor.merge_size,
                pixels=None,
                pad_id=self.processor.pad_id,
                pad_to=None if config.actor.model.variable_seq_lengths else config.runner.max_tokens_per_mbs,
                share_prompts=config.actor.share_prompts,
            ),
            PixelCache(self.processor.pixels) if cache is None else self.processor.pixels,
            cache,
            max_patches=config.runner.max_tokens_per_mbs * self.processor.merge_size**2,
        )

    def _load_sharded(self, frozen: bool) -> PolicyModel:
        config, fsdp = self.config, self.config.actor.fsdp_config
        # A reference never changes, so it is kept as it computes; what is trained has master weights in float32.
        dtype = DTYPES[fsdp.mixed_precision.param_dtype] if frozen else torch.float32
        model = load_model(
            self.model_path, self.family, dtype, trust_remote_code=config.rollout.model.trust_remote_code
        )
        if frozen:
            model.requires_grad_(False)
        elif config.actor.model.freeze_vision_tower:
            freeze_vision(model, self.family)
        policy = PolicyModel(
            model,
            self.family,
            self.processor.banned_ids(vocab_size(model)),
            temperature=config.algorithm.sampling_params.temperature,
            chunk=config.actor.logprob_chunk_tokens,
        )
        if not fsdp.cpu_offload:
            policy.to(self.device)
        return shard(
            policy,
            self.mesh,
            param_dtype=fsdp.mixed_precision.param_dtype,
            reduce_dtype=fsdp.mixed_precision.reduce_dtype,
            cpu_offload=fsdp.cpu_offload,
            reshard_after_forward=fsdp.reshard_after_forward,
            gradient_checkpointing=fsdp.gradient_checkpointing and not frozen,
            use_reentrant=fsdp.gradient_checkpointing_use_reentrant,
        )

    def fetch_groups(self, groups: dict[int, ray.ObjectRef]) -> list[int]:
        """Fetch these groups from the object store, for `score` and `update`. Not collective. A fetched group outlives the
        rollout worker that made it. Returns the groups that are lost with their worker."""
        self.groups = {}
        with span("fetch groups"):
            self.groups = fetch_surviving(groups)
        return sorted(groups.keys() - self.groups.keys())

    def update(
        self,
        step: int,
        minibatches: Sequence[RankMiniBatch],
        advantages: dict[int, tuple[float, ...]],
        recorded: frozenset[int] = frozenset(),
    ) -> dict:
        """Train on this rank's mini-batches, whose groups it has fetched, and release the groups. Collective.

        Args:
            step: its number, for traces.
            advantages: advantage of each trajectory of those groups.
            recorded: groups for which `recorded_logprobs` will be called.

        Returns:
            The state of a `MetricSums`, this rank's part.
        """
        chosen: dict[int, dict[int, torch.Tensor]] = {}

        def record(m: int, i: int, batch: MicroBatch, logprobs: torch.Tensor) -> None:
            for place, item in enumerate(minibatches[m].micro_batches[i]):
                if item.group in recorded:
                    own = slice(*np.searchsorted(batch.trajectories, (place, place + 1)))
                    chosen.setdefault(item.group, {})[item.index] = logprobs[own]

        profile = self.config.runner.profile
        profiled = step in profile.steps and self.rank in profile.ranks
        with profiler(run_folder(self.config), step, self.rank) if profiled else nullcontext():
            with span("images", step=step):
                self.make.prepare(self.groups.values())
            sums = update(
                self.policy,
                self.reference,
                self.optimizer,
                self.scheduler,
                [self.make.minibatch(mini, self.groups, advantages) for mini in minibatches],
                loss_settings(self.config.algorithm),
                world_size=self.world_size,
                max_grad_norm=self.config.actor.optim.clip_grad,
                on_logprobs=record if recorded else None,
            )
        self.groups = {}
        self._recorded = {group: {i: x.cpu().numpy() for i, x in parts.items()} for group, parts in chosen.items()}
        return sums.state()

    def recorded_logprobs(self) -> dict[int, dict[int, np.ndarray]]:
        """By group and place, float32 [sampled tokens]: this rank's logprobs in the last `update`, of what is recorded."""
        return self._recorded

    @torch.no_grad()
    def score(self, mini: RankMiniBatch) -> list[tuple[int, int, float, float]]:
        """Compare the engine's logprobs of trajectories, whose groups this rank has fetched, with this policy's, as they are and
        with blank images. Collective.

        Returns, per trajectory, (group, sampled tokens, Σ|rollout - train|, the same with blank images).
        """
        no_advantage = {g: (0.0,) * len(group.trajectories) for g, group in self.groups.items()}
        see, blank = (
            BatchMaker(self.policy, self.make.collate, pixels, None, 0)
            for pixels in (self.make.pixels, lambda image: np.zeros_like(self.make.pixels(image)))
        )
        out = []
        batches = zip(
            *(make.batches(mini, self.groups, no_advantage) for make in (see, blank)),
            mini.micro_batches,
            strict=True,
        )
        for (seen, _), (unseen, _), items in batches:
            differences = [
                np.abs(batch.rollout_logprobs - self.policy(batch)[0].cpu().numpy()) if items else self.policy(batch)
                for batch in (seen, unseen)
            ]
            for segment, item in enumerate(items):
                where = seen.trajectories == segment
                sums = [float(d[where].sum()) for d in differences]
                out.append((item.group, int(where.sum()), *sums))
        reshard_all(self.policy)
        return out

    def set_weight_sync(self, way: str, bucket_bytes: int) -> None:
        """How `offer_weights` and those after it send the trainable weights, cast once to the engine's dtype. Collective."""
        dtype = DTYPES[self.config.rollout.model.precision]

        def gather(device: str) -> Iterator[tuple[str, torch.Tensor]]:
            return whole_weights(self.policy, dtype, device, frozen=self.frozen_differ)

        def shapes() -> Iterator[tuple[str, torch.Tensor]]:
            return weight_shapes(self.policy, dtype, frozen=self.frozen_differ)

        self.sender: Sender = SENDERS[way](gather, shapes, self.rank, self.world_size, self.device, bucket_bytes)

    def join_weight_group(self, group: WeightGroup) -> None:
        """Rank 0, with `broadcast`: open the group that the engines join, in place of the one before."""
        assert isinstance(self.sender, BroadcastSender)
        self.sender.join(group)

    def offer_weights(self, check: bool) -> list[Any]:
        """The first step of a sync (`rlinf_vl.transport.sender`); collective, like the others."""
        with torch.no_grad(), span("gather weights"):
            return self.sender.offer(check)

    def deliver_weights(self) -> None:
        """The second step: send what was offered, while the workers take it."""
        with torch.no_grad(), span("send weights"):
            self.sender.deliver()

    def release_weights(self) -> None:
        """The third step: all workers have the weights."""
        self.sender.release()

    def spare_weights(self) -> list[ray.ObjectRef]:
        """The weights sent last, as buckets in the object store."""
        return self.sender.spare()

    def release_memory(self, parts: Sequence[str]) -> None:
        """As `Offload.release`."""
        self.memory.release(parts)

    def restore_memory(self) -> None:
        """As `Offload.restore`."""
        self.memory.restore()

    def save(self, folder: str) -> None:
        """Write this rank's part of a checkpoint. Collective."""
        with span("save"):
            checkpoint.save(Path(folder), self.rank, self.policy, self.optimizer)

    def load(self, folder: str, step: int) -> None:
        """Read the checkpoint of `step`, written on any number of ranks. Collective.

        Frozen weights may have been trained before: the engines, which have those of `rollout.model.model_path`, are then
        sent them, too. The reference remains the model at that path, so it encodes images itself.
        """
        before = self._frozen_fingerprint()
        checkpoint.load(Path(folder), self.rank, self.policy, self.optimizer)
        self.scheduler = self._schedule(done=step)
        differ = torch.tensor(int(self._frozen_fingerprint() != before))
        dist.all_reduce(differ, dist.ReduceOp.MAX)
        self.frozen_differ = bool(differ)
        if self.make.cache is not None:
            self.make.cache.clear()
            if self.frozen_differ and self.reference is not None:
                self.make = self._batch_maker(None)

    def _frozen_fingerprint(self) -> int:
        """Of this rank's part of the weights that are not trained."""
        frozen = (p.detach() for p in self.policy.parameters() if not p.requires_grad)
        return fingerprint(p.to_local() if isinstance(p, DTensor) else p for p in frozen)

    def stop(self) -> None:
        """Leave the process group, and write out the spans."""
        if dist.is_initialized():
            dist.destroy_process_group()
        flush_spans()


ActorWorker = ray.remote(concurrency_groups={"health": 1})(ActorRank)  # pyright: ignore[reportCallIssue]  # an option that Ray's overloads lack
