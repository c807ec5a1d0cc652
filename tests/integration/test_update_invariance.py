"""One training step, real FSDP2 over gloo: loss, gradient norm and new weights are the same however it is laid out, and equal
a plain single-process reference written here on transformers' own unpacked forward."""

import math
import socket
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp
from tiny import IMAGE_ID, MERGE, PAD, banned, group, pixels, tiny_model, transformers_logprobs

from rlinf_vl.types import GroupSummary

LR = 0.05


@dataclass(frozen=True)
class Layout:
    ranks: int = 1
    budget: int = 400
    size: int | None = None
    pad: bool = False
    checkpointing: bool = False
    reentrant: bool = False
    minibatches: int = 1
    aggregation: str = "token-mean"
    kl_beta: float = 0.0
    train_tower: bool = True
    old_logprobs: str = "auto"
    share: bool = True
    cache: bool | None = None  # None: where the tower is frozen
    reshard: bool = True


def groups_of(kind: str):
    rng = np.random.default_rng(3)
    shapes = {
        "mixed": [[(2, 3)], [], [(1, 1), (3, 2), (2, 2)], []],
        "text": [[], [], [], []],
        "one image": [[(2, 2)], [], [], []],
    }[kind]
    lengths = [[5, 12, 1], [4, 6, 9], [7, 3, 3], [2, 20, 8]]
    return [group(rng, s, n, name=f"g{i}") for i, (s, n) in enumerate(zip(shapes, lengths, strict=True))]


def settings_of(layout: Layout):
    from rlinf_vl.actor.update import LossSettings

    return LossSettings(
        aggregation=layout.aggregation,
        clip_low=0.2,
        clip_high=0.28,
        clip_c=3.0,
        kl_beta=layout.kl_beta,
        kl_estimator="k3",
        entropy_bonus=0.01,
        tis_clip=2.0,
        tis_level="token",
        old_logprobs=layout.old_logprobs,
    )


def train(rank: int, layout: Layout, kind: str, port: int, out) -> None:
    """One rank's step; rank 0 reports."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from rlinf_vl.actor.batches import BatchMaker
    from rlinf_vl.actor.fsdp import shard, whole_weights
    from rlinf_vl.actor.update import update
    from rlinf_vl.controller.step_plan import plan_step
    from rlinf_vl.models.families import family_of
    from rlinf_vl.models.loading import freeze_vision, use_packed_attention
    from rlinf_vl.models.policy import PolicyModel
    from rlinf_vl.models.vision_cache import VisionCache
    from rlinf_vl.packing.collator import Collator

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=layout.ranks)
    family, mesh = family_of("qwen3_vl"), init_device_mesh("cpu", (layout.ranks,))

    def policy_of(seed: int, frozen: bool):
        model = use_packed_attention(tiny_model(seed), family).requires_grad_(not frozen)
        if frozen and not layout.train_tower:  # a frozen tower is the reference's too: they start from one checkpoint
            copied = tiny_model(0).get_submodule(family.vision_tower).state_dict()
            model.get_submodule(family.vision_tower).load_state_dict(copied)
        if not layout.train_tower:
            freeze_vision(model, family)
        policy = PolicyModel(model, family, banned(), temperature=0.7, chunk=6)
        checkpointing = layout.checkpointing and not frozen
        return shard(
            policy,
            mesh,
            param_dtype="fp32",
            reduce_dtype="fp32",
            reshard_after_forward=layout.reshard,
            gradient_checkpointing=checkpointing,
            use_reentrant=layout.reentrant,
        ).train(not frozen)

    policy = policy_of(0, False)
    reference = policy_of(9, True) if layout.kl_beta else None
    groups = groups_of(kind)
    plan = plan_step(
        [GroupSummary.of(g) for g in groups],
        ranks=layout.ranks,
        n_minibatches=layout.minibatches,
        budget=layout.budget,
        micro_batch_size=layout.size,
        normalize_advantages=True,
        aggregation=layout.aggregation,
        share_prompts=layout.share,
    )
    collate = Collator(family, IMAGE_ID, MERGE, None, PAD, layout.budget if layout.pad else None, layout.share)
    cached = layout.cache if layout.cache is not None else not layout.train_tower
    make = BatchMaker(policy, collate, pixels, VisionCache(2**20, "cpu") if cached else None, max_patches=20)
    mine = {i.group: groups[i.group] for m in plan.minibatches for items in m[rank].micro_batches for i in items}
    make.prepare(mine.values())

    minis = [make.minibatch(m[rank], mine, plan.advantages) for m in plan.minibatches]
    optimizer = torch.optim.SGD([p for p in policy.parameters() if p.requires_grad], lr=LR)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    sums = update(
        policy, reference, optimizer, scheduler, minis, settings_of(layout), world_size=layout.ranks, max_grad_norm=1e9
    )
    weights = {name: value.numpy() for name, value in whole_weights(policy, torch.float32)}
    out.put((rank, sums.state(), weights if rank == 0 else None))
    dist.barrier()
    dist.destroy_process_group()


def serve(rank: int, jobs, out) -> None:
    """A rank's process: takes (layout, kind, port) until it is told None."""
    while (job := jobs.get()) is not None:
        layout, kind, port = job
        try:
            train(rank, layout, kind, port, out)
        except BaseException as error:
            out.put((rank, repr(error), None))
            raise


@pytest.fixture(scope="module")
def run():
    """(layout, kind) → (metrics, weights after the step), by two processes that live as long as the module."""
    from rlinf_vl.observe.metrics import MetricSums

    context = mp.get_context("spawn")
    out, jobs = context.Queue(), [context.Queue(), context.Queue()]
    processes = [context.Process(target=serve, args=(r, jobs[r], out), daemon=True) for r in range(2)]
    for p in processes:
        p.start()

    def go(layout: Layout, kind: str = "mixed"):
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = s.getsockname()[1]
        for rank in range(layout.ranks):
            jobs[rank].put((layout, kind, port))
        results = sorted((out.get(timeout=120) for _ in range(layout.ranks)), key=lambda r: r[0])
        for _, state, _ in results:
            assert not isinstance(state, str), state
        return MetricSums.merged(state for _, state, _ in results).compute(), results[0][2]

    yield go
    for queue in jobs:
        queue.put(None)
    for p in processes:
        p.join(timeout=20)
        p.kill()


def plain_reference(layout: Layout, kind: str = "mixed"):
    """The same step in one process: transformers' own forward a trajectory at a time, formulas written out, SGD by hand."""
    model, reference = tiny_model(0), tiny_model(9)
    if not layout.train_tower:
        reference.model.visual.load_state_dict(model.model.visual.state_dict())
    groups = groups_of(kind)
    settings = settings_of(layout)
    tower = {id(p) for p in model.model.visual.parameters()}
    trained = {n: p for n, p in model.named_parameters() if layout.train_tower or id(p) not in tower}
    with torch.no_grad():
        start = {(g.id, i): transformers_logprobs(model, g, i, 0.7) for g in groups for i in range(3)}
    losses, norms = [], []
    for part in np.array_split(np.arange(len(groups)), layout.minibatches):
        members = [(groups[k], i) for k in part for i in range(3)]
        tokens = sum(len(g.trajectories[i].ids) for g, i in members)
        loss = 0.0
        for g, i in members:
            rewards = np.array([t.reward for t in g.trajectories])
            std = rewards.std(ddof=1)
            adv = 0.0 if std == 0 else (rewards[i] - rewards.mean()) / (std + 1e-6)
            logp = transformers_logprobs(model, g, i, 0.7)
            old = start[g.id, i] if layout.minibatches > 1 else logp.detach()
            rollout = torch.from_numpy(g.trajectories[i].logprobs)
            weight = torch.clamp((old - rollout).exp(), max=2.0)
            ratio = (logp - old).exp()
            token = torch.maximum(-adv * ratio, -adv * ratio.clamp(0.8, 1.28))
            if adv < 0:
                token = torch.minimum(token, torch.tensor(-adv * 3.0))
            token = token * weight - settings.entropy_bonus * entropy_of(model, g, i)
            if layout.kl_beta:
                with torch.no_grad():
                    ref = transformers_logprobs(reference, g, i, 0.7)
                token = token + layout.kl_beta * ((ref - logp).exp() - 1 - (ref - logp))
            if layout.aggregation == "token-mean":
                loss = loss + token.sum() / tokens
            else:
                per_sequence = token.mean() if layout.aggregation == "seq-mean-token-mean" else token.sum()
                loss = loss + per_sequence / len(members)
        grads = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        norms.append(math.sqrt(sum(float((g.double() ** 2).sum()) for g in grads if g is not None)))
        losses.append(float(loss.detach()))
        with torch.no_grad():
            for p, g in zip(trained.values(), grads, strict=True):
                if g is not None:
                    p -= LR * g
    return np.mean(losses), np.mean(norms), {n: p.detach().numpy() for n, p in trained.items()}


def entropy_of(model, g, i):
    """Entropy at each response position, from transformers' logits through every candidate's logprob."""
    import tiny

    t = g.trajectories[i]
    ids = torch.tensor(np.concatenate([g.prompt_ids, t.ids]), dtype=torch.int64)[None]
    inputs = {}
    if g.images:
        inputs = {
            "pixel_values": torch.from_numpy(np.concatenate([tiny.pixels(x) for x in g.images])),
            "image_grid_thw": torch.from_numpy(g.image_grids.astype(np.int64)),
            "mm_token_type_ids": (ids == IMAGE_ID).int(),
        }
    model.model.rope_deltas = None
    logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), **inputs).logits[0].float() / 0.7
    logits = logits[len(g.prompt_ids) - 1 : -1][:, torch.from_numpy(~banned())]
    return torch.distributions.Categorical(logits=logits).entropy()


def assert_same(ours, theirs):
    metrics, weights = ours
    loss, norm, expected = theirs
    assert metrics["actor/loss"] == pytest.approx(loss, abs=1e-5, rel=1e-5)
    assert metrics["actor/grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert set(weights) == set(expected)
    for name, value in weights.items():
        np.testing.assert_allclose(value, expected[name], atol=1e-5 * LR * max(1.0, norm), rtol=1e-6, err_msg=name)


BASE = Layout()


@pytest.fixture(scope="module")
def references():
    cache = {}

    def get(layout: Layout, kind: str = "mixed"):
        plain = (layout.minibatches, layout.aggregation, layout.kl_beta, layout.train_tower, kind)
        if plain not in cache:
            cache[plain] = plain_reference(layout, kind)
        return cache[plain]

    return get


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(BASE, id="one row"),
        pytest.param(replace(BASE, ranks=2), id="2 ranks"),
        pytest.param(replace(BASE, budget=80), id="several micro-batches"),
        pytest.param(replace(BASE, size=1), id="one trajectory a row"),
        pytest.param(replace(BASE, ranks=2, budget=120, pad=True), id="padded rows"),
        pytest.param(replace(BASE, ranks=2, budget=120, checkpointing=True), id="checkpointing"),
        pytest.param(replace(BASE, checkpointing=True, reentrant=True), id="reentrant checkpointing"),
        pytest.param(replace(BASE, minibatches=2), id="2 mini-batches"),
        pytest.param(replace(BASE, ranks=2, minibatches=2, budget=90), id="2 mini-batches on 2 ranks"),
        pytest.param(replace(BASE, ranks=2, minibatches=2, budget=90, checkpointing=True), id="all at once"),
        pytest.param(replace(BASE, minibatches=2, old_logprobs="true"), id="a pass for all old logprobs"),
        pytest.param(replace(BASE, old_logprobs="true"), id="a pass that one step does not need"),
        pytest.param(replace(BASE, ranks=2, budget=80, minibatches=2, reshard=False), id="weights kept gathered"),
        pytest.param(replace(BASE, share=False), id="repeated prompts"),
        pytest.param(replace(BASE, ranks=2, budget=90, share=False), id="repeated prompts on 2 ranks"),
        pytest.param(replace(BASE, budget=60), id="groups split over micro-batches"),
        pytest.param(
            replace(BASE, ranks=2, train_tower=False, budget=80, kl_beta=0.1), id="features, split, reference"
        ),
        pytest.param(replace(BASE, ranks=2, train_tower=False, cache=False), id="frozen tower without its cache"),
        pytest.param(replace(BASE, ranks=2, train_tower=False), id="frozen tower"),
        pytest.param(replace(BASE, ranks=2, kl_beta=0.1), id="reference KL"),
        pytest.param(replace(BASE, ranks=2, budget=90, aggregation="seq-mean-token-mean"), id="sequence means"),
        pytest.param(replace(BASE, ranks=2, budget=90, aggregation="seq-mean-token-sum"), id="sequence sums"),
    ],
)
def test_layout_does_not_change_the_step(layout, run, references):
    assert_same(run(layout), references(layout))


@pytest.mark.parametrize("kind", ["text", "one image"])
@pytest.mark.parametrize("train_tower", [True, False])
def test_a_rank_without_images_neither_hangs_nor_differs(kind, train_tower, run, references):
    layout = replace(BASE, ranks=2, size=3, train_tower=train_tower)
    assert_same(run(layout, kind), references(layout, kind))
