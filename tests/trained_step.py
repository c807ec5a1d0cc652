"""One training step of a `Trainer` as a `Layout` says, on ranks that are processes of their own: real FSDP2 over gloo."""

import importlib
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from adapters import adapter_values
from plain_step import (
    COVARIANCE,
    LABEL,
    LONGEST,
    LR,
    MASK_SEED,
    TEACHER_SEED,
    TEACHER_SEEDS,
    VERSION,
    Layout,
    adapters_of,
    copy_tower,
    groups_of,
    routed,
)
from rank_processes import RankProcesses
from tiny import IMAGE_ID, tiny_policy, tiny_trainer
from torch.distributed.tensor import DTensor, distribute_tensor

from rlinf_vl.types import GroupSummary


def trained_step(processes: RankProcesses, layout: Layout, kind: str = "mixed"):
    """(metrics, new weights, cached features by image)."""
    from rlinf_vl.observe.metrics import MetricSums

    results = processes.run(layout.ranks, train, layout, kind)
    features = {name: value for *_, part in results for name, value in part.items()}
    return MetricSums.merged(state for state, *_ in results).compute(), results[0][1], features


def assert_same(ours, theirs):
    """Assert that a trained step has the loss, gradient norm and new weights of the plain one."""
    metrics, weights, _ = ours
    loss, norm, expected = theirs
    assert metrics["actor/loss"] == pytest.approx(loss, abs=1e-5, rel=1e-5)
    assert metrics["actor/grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert set(weights) == set(expected)
    for name, value in weights.items():
        np.testing.assert_allclose(
            value, expected[name], atol=1e-5 * LR * max(1.0, norm), rtol=1e-6, err_msg=name
        )


def train(layout: Layout, kind: str):
    """One rank's step: its part of the metrics, the whole new weights, the cached features by image."""
    from rlinf_vl.actor import mesh as meshes
    from rlinf_vl.config.presets import with_presets
    from rlinf_vl.config.schema import (
        ActorConfig,
        ActorModelConfig,
        AlgorithmConfig,
        DistillationConfig,
        FsdpConfig,
        MixedPrecisionConfig,
        OptimConfig,
        PapoConfig,
        SamplingConfig,
    )
    from rlinf_vl.config.schema.algorithm import RejectionConfig
    from rlinf_vl.controller.step_plan import plan_step, with_kl

    for name, value in COVARIANCE.get(layout.loss, {}).items():
        setattr(importlib.import_module(f"rlinf_vl.algorithms.losses.{layout.loss}"), name, value)
    meshes.ONE_UNIT = 2**24 if layout.one_unit else 0
    mesh = meshes.Mesh.make(
        "cpu", context=layout.context, shard=layout.shard, experts=layout.experts
    )
    seeds = iter((0, 9))

    def load(dtype: torch.dtype):
        policy = tiny_policy(dtype, seed := next(seeds), 0.7, 6, layout.family, **layout.sizes)
        # A frozen tower is the reference's too: they start from one checkpoint.
        if seed and not layout.train_tower and policy.family.vision_tower:
            trained = tiny_policy(dtype, model_type=layout.family, **layout.sizes)
            copy_tower(trained.model, policy.model)
        return policy

    algorithm = with_presets(
        AlgorithmConfig(
            n_minibatches=layout.minibatches,
            loss_agg_func=layout.aggregation,
            adv_type=layout.adv,
            clip_ratio_low=0.2,
            clip_ratio_high=0.28,
            clip_ratio_c=3.0,
            kl_beta=layout.kl_beta,
            kl_placement=layout.placement,
            sampling_params=SamplingConfig(max_new_tokens=LONGEST),
            entropy_bonus=0.01,
            importance_sampling_fix=layout.tis_clip is not None,
            importance_sampling_clip=layout.tis_clip or 0.0,
            importance_sampling_level=layout.tis_level,
            importance_sampling_normalize=layout.tis_normalize,
            recompute_logprobs=layout.old_logprobs,
            rejection=RejectionConfig(*layout.rejection),
            old_policy=layout.old_policy,
            loss_type=layout.loss,
            credit=layout.credit,
            turn_discount=layout.discount,
            state_advantage_weight=layout.state_weight,
            papo=PapoConfig(*layout.papo),
        )
    )
    teachers = []
    if layout.teacher is not None:
        weight, reward_weight, top_k = layout.teacher
        algorithm.distillation = DistillationConfig(
            "a folder",
            privileged_template="{answer}" if layout.privileged else None,
            weight=weight,
            top_k=top_k,
            reward_weight=reward_weight,
        )

        def load_teacher(seed: int, dtype: torch.dtype):
            return tiny_policy(dtype, seed, 0.7, 6, layout.family, **layout.sizes)

        teachers = [(partial(load_teacher, TEACHER_SEED), ())]
        if layout.labelled:
            algorithm.distillation.teacher_key = LABEL
            teachers = [
                (partial(load_teacher, seed), (label,)) for label, seed in TEACHER_SEEDS.items()
            ]

    fsdp = FsdpConfig(
        gradient_checkpointing=layout.mode,
        gradient_checkpointing_use_reentrant=layout.reentrant,
        reshard_after_forward=layout.reshard,
        mixed_precision=MixedPrecisionConfig(layout.dtype),
    )
    model = ActorModelConfig(
        freeze_vision_tower=not layout.train_tower,
        freeze_router=False,
        router_aux_loss_coef=layout.balance,
    )
    if layout.lora:
        model = ActorModelConfig(is_lora=True, lora=adapters_of(layout))
    replay = "replay" if layout.replay else "off"
    trainer = tiny_trainer(
        mesh,
        load,
        actor=ActorConfig(
            model=model, routing_replay=replay, fsdp_config=fsdp, optim=OptimConfig(clip_grad=1e9)
        ),
        algorithm=algorithm,
        max_tokens=5,  # several calls of a frozen tower
        pad_to=layout.budget if layout.pad else None,
        share_prompts=layout.share,
        teachers=teachers,
        model_type="gemma3" if layout.family == "gemma3" else "qwen3_vl",
    )
    weights = dict(trainer.policy.model.named_parameters())
    for name, value in adapter_values((n, tuple(p.shape)) for n, p in weights.items()).items():
        weight = weights[name].data
        if isinstance(weight, DTensor):
            value = distribute_tensor(value, weight.device_mesh, weight.placements)
        weight.copy_(value)
    trainer.optimizer = torch.optim.SGD(
        [p for p in trainer.policy.parameters() if p.requires_grad], lr=LR
    )
    trainer.scheduler = torch.optim.lr_scheduler.LambdaLR(trainer.optimizer, lambda _: 1.0)
    if layout.cache is False:
        trainer.batches = trainer.batches.without_cache()
    groups = groups_of(kind)
    groups = routed(groups, layout) if layout.replay else groups
    summaries = [GroupSummary.of(g, IMAGE_ID) for g in groups]
    plan = plan_step(
        summaries,
        algorithm,
        ranks=layout.ranks // layout.context,
        budget=layout.budget,
        micro_batch_size=layout.size,
        share_prompts=layout.share,
    )
    minibatches = [ranks[mesh.data_rank] for ranks in plan.minibatches]
    mine = {
        i.group: groups[i.group]
        for mini in minibatches
        for items in mini.micro_batches
        for i in items
    }
    reference_pass = None
    if layout.placement == "reward":
        kl = [None] * layout.ranks
        rank_kl, reference_pass = trainer.reference_kl(mine, minibatches)
        dist.all_gather_object(kl, rank_kl)
        plan = with_kl(
            plan, summaries, algorithm, {key: turns for part in kl for key, turns in part.items()}
        )
    sums, _ = trainer.update(
        mine,
        minibatches,
        plan.advantages,
        reference_pass=reference_pass,
        kl_scale=plan.kl_scale,
        seed=MASK_SEED,
        version=VERSION,
    )
    weights = {name: value.numpy() for name, value in trainer.weights(torch.float32)}
    features = {}
    if cache := trainer.batches.cache:
        for name in {image.hash for g in mine.values() for image, _ in g.images}:
            got = cache.get([name])
            features[name] = torch.stack([got.tokens, *got.deepstack]).float().numpy()
    return sums.state(), weights, features
