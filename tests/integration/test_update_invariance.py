"""One training step of a `Trainer`, real FSDP2 over gloo: loss, gradient norm and new weights are the same however it is laid out,
and equal those of the plain reference in tests/plain_step.py."""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from plain_step import LR, Layout, groups_of, plain_reference
from tiny import MEMBERS, pixels, tiny_policy
from trained_step import assert_same, trained_step

from rlinf_vl.models.families import FAMILIES


@pytest.fixture(scope="module")
def run(processes):
    """(layout, kind) → (metrics, new weights, cached features by image)."""
    return partial(trained_step, processes)


@pytest.fixture(scope="module", params=[1, 2], ids=["", "each row on 2 ranks"])
def run_shared(request, processes):
    """`run`, and the same with twice the ranks, of which each two share their rows."""

    def go(layout: Layout, kind: str = "mixed"):
        sharing = replace(layout, ranks=layout.ranks * request.param, context=request.param)
        return trained_step(processes, sharing, kind)

    return go


def seen(context: int, shard: int):
    """What a rank reads from its mesh."""
    from rlinf_vl.actor.mesh import Mesh

    mesh = Mesh.make("cpu", context=context, shard=shard)
    return (
        mesh.data_rank,
        mesh.size,
        mesh.ranks.mesh_dim_names,
        mesh.sharding.mesh_dim_names,
        tuple(mesh.sharding.shape),
    )


def test_the_mesh_says_which_share_a_rank_trains_on(processes):
    found = processes.run(4, seen, 2, 2)
    assert [data_rank for data_rank, *_ in found] == [0, 0, 1, 1], (
        "ranks that share trajectories have one number"
    )
    assert {tuple(layout) for _, *layout in found} == {
        (4, ("data", "context"), ("replicate", "shard"), (2, 2))
    }
    assert [data_rank for data_rank, *_ in processes.run(4, seen, 1, 4)] == [0, 1, 2, 3]


BASE = Layout()


@pytest.fixture(scope="module")
def references():
    cache = {}

    def get(layout: Layout, kind: str = "mixed"):
        plain = (layout.minibatches, layout.aggregation, layout.kl_beta, layout.train_tower, layout.tis_clip,
                 layout.tis_level, layout.rejection, layout.old_policy,
                 layout.old_logprobs == "false", layout.dtype, layout.loss, layout.credit,
                 layout.discount, layout.state_weight, layout.family, layout.lora, layout.quantization, layout.replay,
                 layout.balance, str(layout.sizes), layout.adv, layout.placement, layout.papo, layout.teacher,
                 layout.labelled, layout.privileged, layout.tis_normalize, kind)  # fmt: skip
        if plain not in cache:
            cache[plain] = plain_reference(layout, kind)
        return cache[plain]

    return get


LAYOUTS = [
    pytest.param(BASE, id="one row"),
    pytest.param(replace(BASE, ranks=2), id="2 ranks"),
    pytest.param(replace(BASE, budget=80), id="several micro-batches"),
    pytest.param(replace(BASE, size=1), id="one trajectory a row"),
    pytest.param(replace(BASE, ranks=2, budget=120, pad=True), id="padded rows"),
    pytest.param(replace(BASE, ranks=2, budget=120, checkpointing=True), id="checkpointing"),
    pytest.param(replace(BASE, checkpointing=True, reentrant=True), id="reentrant checkpointing"),
    pytest.param(replace(BASE, minibatches=2), id="2 mini-batches"),
    pytest.param(replace(BASE, ranks=2, minibatches=2, budget=90), id="2 mini-batches on 2 ranks"),
    pytest.param(
        replace(BASE, ranks=2, minibatches=2, budget=90, checkpointing="selective"),
        id="all at once",
    ),
    pytest.param(
        replace(BASE, minibatches=2, old_logprobs="true"), id="a pass for all old logprobs"
    ),
    pytest.param(replace(BASE, old_logprobs="true"), id="a pass that one step does not need"),
    pytest.param(
        replace(BASE, ranks=2, budget=80, minibatches=2, reshard=False),
        id="weights kept gathered",
    ),
    pytest.param(
        replace(BASE, ranks=2, budget=80, minibatches=2, one_unit=True), id="one FSDP unit"
    ),
    pytest.param(
        replace(BASE, ranks=3, train_tower=False, one_unit=True),
        id="one FSDP unit, frozen tower",
    ),
    pytest.param(
        replace(BASE, ranks=4, budget=80, minibatches=2, shard=2),
        id="2 copies of the weights on 4 ranks",
    ),
    pytest.param(
        replace(BASE, ranks=2, shard=1, reshard=False),
        id="a copy of the weights on each of 2 ranks",
    ),
    pytest.param(replace(BASE, share=False), id="repeated prompts"),
    pytest.param(replace(BASE, ranks=2, budget=90, share=False), id="repeated prompts on 2 ranks"),
    pytest.param(replace(BASE, budget=60), id="groups split over micro-batches"),
    pytest.param(
        replace(BASE, ranks=2, train_tower=False, budget=80, kl_beta=0.1),
        id="features, split, reference",
    ),
    pytest.param(
        replace(BASE, ranks=2, train_tower=False, cache=False),
        id="frozen tower without its cache",
    ),
    pytest.param(replace(BASE, ranks=2, train_tower=False), id="frozen tower"),
    pytest.param(replace(BASE, ranks=2, kl_beta=0.1), id="reference KL"),
    pytest.param(
        replace(BASE, ranks=2, budget=90, aggregation="seq-mean-token-mean"),
        id="sequence means",
    ),
    pytest.param(
        replace(BASE, ranks=2, budget=90, aggregation="seq-mean-token-sum"), id="sequence sums"
    ),
    pytest.param(
        replace(BASE, ranks=2, budget=90, aggregation="seq-mean-token-sum-norm"),
        id="sequence sums over a length",
    ),
    pytest.param(replace(BASE, ranks=2, budget=90, minibatches=2, loss="cispo"), id="CISPO"),
    pytest.param(replace(BASE, ranks=2, budget=90, minibatches=2, loss="sapo"), id="SAPO"),
    pytest.param(replace(BASE, ranks=2, budget=90, minibatches=2, loss="gmpo"), id="GMPO"),
    pytest.param(replace(BASE, ranks=2, budget=60, minibatches=2, loss="kl_cov"), id="KL-Cov"),
    pytest.param(replace(BASE, ranks=2, budget=60, minibatches=2, loss="clip_cov"), id="Clip-Cov"),
    pytest.param(
        replace(BASE, ranks=2, budget=60, minibatches=2, tis_normalize="batch"), id="mean weights"
    ),
    pytest.param(
        replace(BASE, ranks=2, budget=60, tis_level="sequence", tis_normalize="group"),
        id="mean weights of groups",
    ),
    pytest.param(replace(BASE, ranks=2, budget=90, minibatches=2, loss="dppo_tv"), id="DPPO"),
    pytest.param(
        replace(BASE, ranks=2, budget=90, minibatches=2, loss="gspo_token"), id="GSPO-token"
    ),
    pytest.param(replace(BASE, ranks=2, budget=90, adv="reinforce_plus_plus"), id="REINFORCE++"),
]


# An id begins with that of `run_shared`, which is empty without sharing.
@pytest.mark.sample(
    "-one row",
    "-one trajectory a row",
    "each row on 2 ranks-padded rows",
    "each row on 2 ranks-reentrant checkpointing",
    "each row on 2 ranks-all at once",
    "-a pass for all old logprobs",
    "-weights kept gathered",
    "-one FSDP unit, frozen tower",
    "-2 copies of the weights on 4 ranks",
    "each row on 2 ranks-repeated prompts on 2 ranks",
    "each row on 2 ranks-features, split, reference",
    "-sequence means",
    "each row on 2 ranks-sequence sums over a length",
    "-CISPO",
    "each row on 2 ranks-REINFORCE++",
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout_does_not_change_the_step(layout, run_shared, references):
    assert_same(run_shared(layout), references(layout))


#: Layers that slide: in Gemma 3 beside images that see themselves, and beside M-RoPE.
WINDOWS = {
    "gemma3": {"family": "gemma3"},
    "qwen2_5_vl": {
        "family": "qwen2_5_vl",
        "sizes": {
            "text": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
        },
    },
}


@pytest.mark.sample(
    "-gemma3-2 ranks",
    "each row on 2 ranks-gemma3-all at once",
    "-gemma3-features, split, reference",
    "each row on 2 ranks-qwen2_5_vl-groups split over micro-batches",
)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", WINDOWS)
def test_no_layout_changes_the_step_of_layers_that_slide(name, layout, run_shared, references):
    layout = replace(layout, **WINDOWS[name])
    assert_same(run_shared(layout, "tiles"), references(layout, "tiles"))


@pytest.mark.sample("turns, sequences")
@pytest.mark.parametrize("adv", ["grpo", "reinforce_plus_plus"])
@pytest.mark.parametrize(
    "layout", [replace(BASE, minibatches=2), replace(BASE, ranks=2, budget=90, minibatches=2)]
)
@pytest.mark.parametrize("kind", ["turns, sequences", "errors"])
def test_kl_in_the_reward_is_that_of_all_ranks(kind, layout, adv, run, references):
    layout = replace(layout, adv=adv, placement="reward", kl_beta=0.3, train_tower=False)
    assert_same(run(layout, kind), references(layout, kind))


@pytest.mark.parametrize("lora", ["", "language"])
def test_a_frozen_tower_that_never_runs_has_no_gradients_to_keep(lora, run):
    """Of text alone: FSDP2 looks for gradients, to keep them in `reduce_dtype` until the last micro-batch."""
    for one_unit in (False, True):
        metrics, *_ = run(
            replace(BASE, dtype="bf16", train_tower=False, lora=lora, budget=80, one_unit=one_unit),
            "text",
        )
        assert metrics["actor/grad_norm"] > 0


PAPO, TEACHER = (0.05, 0.03), (0.7, 0.5, 0)


@pytest.mark.sample(
    "PAPO, split",
    "teacher, split",
    "teacher's top 5",
    "two teachers, split",
    "a teacher that sees more, split",
    "everything at once",
    "corrupted images, by sequence",
)
@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        pytest.param(replace(BASE, papo=PAPO), "mixed", id="PAPO"),
        pytest.param(
            replace(BASE, papo=PAPO, ranks=2, budget=80, minibatches=2, share=False),
            "mixed",
            id="PAPO, split",
        ),
        pytest.param(
            replace(BASE, papo=PAPO, ranks=2, checkpointing=True, reshard=False),
            "gaps",
            id="PAPO, kept gathered",
        ),
        pytest.param(
            replace(BASE, papo=(0.05, 0.0), ranks=2, train_tower=False, budget=80),
            "mixed",
            id="PAPO without entropy",
        ),
        pytest.param(replace(BASE, teacher=TEACHER), "mixed", id="teacher"),
        pytest.param(
            replace(BASE, teacher=TEACHER, ranks=2, budget=80, minibatches=2),
            "turns",
            id="teacher, split",
        ),
        pytest.param(
            replace(BASE, teacher=(1.0, 0.0, 5), ranks=2, budget=80, train_tower=False),
            "mixed",
            id="teacher's top 5",
        ),
        pytest.param(
            replace(BASE, teacher=TEACHER, labelled=True, ranks=2, budget=80, minibatches=2),
            "turns sequences",
            id="two teachers, split",
        ),
        pytest.param(
            replace(BASE, teacher=TEACHER, labelled=True, ranks=2, context=2),
            "mixed",
            id="two teachers, each row on 2 ranks",
        ),
        pytest.param(
            replace(BASE, teacher=TEACHER, privileged=True, ranks=2, budget=80, minibatches=2),
            "mixed",
            id="a teacher that sees more, split",
        ),
        pytest.param(
            replace(BASE, teacher=TEACHER, privileged=True, ranks=2, context=2, share=False),
            "errors",
            id="a teacher that sees more, each row on 2 ranks",
        ),
        pytest.param(
            replace(BASE, teacher=(1.0, 0.5, 5), privileged=True, labelled=True, budget=80),
            "mixed",
            id="two teachers that see more, top 5",
        ),
        pytest.param(
            replace(BASE, teacher=(1.0, 0.5, 5), labelled=True, size=2, train_tower=False),
            "mixed",
            id="two teachers' top 5",
        ),
        pytest.param(
            replace(BASE, teacher=(1.0, 1.0, 999), checkpointing=True),
            "mixed",
            id="all of the teacher's",
        ),
        pytest.param(
            replace(BASE, teacher=TEACHER, papo=PAPO, kl_beta=0.1, ranks=2, budget=90),
            "one image",
            id="everything at once",
        ),
        pytest.param(replace(BASE, ranks=2, budget=80), "corrupted", id="corrupted images"),
        pytest.param(
            replace(BASE, tis_level="sequence", minibatches=2),
            "corrupted",
            id="corrupted images, by sequence",
        ),
    ],
)
def test_further_passes_are_laid_out_like_the_policys(layout, kind, run, references):
    assert_same(run(layout, kind), references(layout, kind))


LORA = replace(BASE, lora="language", kl_beta=0.1)


@pytest.mark.sample("2 ranks, split", "2 copies on 4 ranks")
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(LORA, id="one row"),
        pytest.param(
            replace(LORA, ranks=2, budget=90, minibatches=2, checkpointing="selective"),
            id="2 ranks, split",
        ),
        pytest.param(
            replace(LORA, ranks=4, budget=80, shard=2, lora="all-linear"), id="2 copies on 4 ranks"
        ),
        pytest.param(
            replace(LORA, lora="all-linear", checkpointing=True, reshard=False), id="tower"
        ),
        *(
            pytest.param(
                replace(
                    LORA, family=family, ranks=2, budget=90, checkpointing=True, lora="all-linear"
                ),
                id=family,
            )
            for family in FAMILIES
            if MEMBERS[family][1]
        ),
    ],
)
def test_adapters_train_alike_and_the_reference_is_the_model_without_them(layout, run, references):
    assert_same(run(layout), references(layout))


@pytest.mark.sample("2 ranks, split")
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(replace(LORA, quantization="nf4"), id="one row"),
        pytest.param(
            replace(LORA, quantization="nf4", ranks=2, budget=90, checkpointing=True),
            id="2 ranks, split",
        ),
    ],
)
def test_adapters_on_nf4_weights_train_alike(layout, run, references):
    pytest.importorskip("bitsandbytes")
    assert_same(run(layout), references(layout))


MIXTURE = replace(BASE, family="qwen3_vl_moe", replay=True, train_tower=False)
BALANCED = replace(MIXTURE, replay=False, balance=0.3)


@pytest.mark.sample(
    "-replay, split, 2 mini-batches",
    "-replay, adapters",
    "each row on 2 ranks-balance, split",
    "each row on 2 ranks-both, delta nets",
)
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(replace(MIXTURE, kl_beta=0.1), id="replay, a reference that routes itself"),
        pytest.param(
            replace(MIXTURE, ranks=2, budget=80, minibatches=2, checkpointing="mlp"),
            id="replay, split, 2 mini-batches",
        ),
        pytest.param(
            replace(MIXTURE, budget=90, checkpointing=True, reentrant=True), id="replay, reentrant"
        ),
        pytest.param(replace(LORA, family="qwen3_vl_moe", replay=True), id="replay, adapters"),
        pytest.param(BALANCED, id="balance"),
        pytest.param(
            replace(BALANCED, ranks=2, budget=80, minibatches=2, checkpointing=True),
            id="balance, split",
        ),
        pytest.param(replace(BALANCED, share=False, size=1), id="balance, repeated prompts"),
        pytest.param(
            replace(
                BALANCED, ranks=2, budget=120, pad=True, checkpointing="selective", reentrant=True
            ),
            id="balance, padded, reentrant",
        ),
        pytest.param(
            replace(BALANCED, family="qwen3_5_moe", ranks=2, replay=True), id="both, delta nets"
        ),
    ],
)
def test_mixtures_of_experts_train_as_the_formulas_say(layout, run_shared, references):
    ours, expected = run_shared(layout), references(layout)
    assert_same(ours, expected)
    metrics = ours[0]
    assert 1 < metrics["actor/expert_load"] <= 4  # of 8 experts, 2 a token
    assert ("actor/router_aux_loss" in metrics) == (layout.balance > 0)
    if layout.replay:  # random experts agree with a router's one time in 28
        assert (
            0.9
            < metrics["actor/routing_disagreement"]
            <= metrics["actor/routing_disagreement_tokens"]
            <= 1
        )


@pytest.mark.parametrize("kind", ["text", "one image"])
@pytest.mark.parametrize("train_tower", [True, False])
def test_a_rank_without_images_neither_hangs_nor_differs(kind, train_tower, run, references):
    layout = replace(BASE, ranks=2, size=3, train_tower=train_tower)
    assert_same(run(layout, kind), references(layout, kind))


@pytest.mark.sample("sequence weights, split", "the same, 2 steps")
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(replace(BASE, tis_level="sequence"), id="sequence weights"),
        pytest.param(
            replace(BASE, ranks=2, budget=80, tis_level="sequence"), id="sequence weights, split"
        ),
        pytest.param(
            replace(BASE, ranks=2, budget=80, tis_level="geometric"), id="geometric weights"
        ),
        pytest.param(replace(BASE, tis_clip=None), id="no weights"),
        pytest.param(
            replace(BASE, ranks=2, budget=80, tis_clip=None, old_logprobs="false"),
            id="the engine's logprobs",
        ),
        pytest.param(
            replace(BASE, ranks=2, minibatches=2, tis_clip=None, old_logprobs="false"),
            id="the same, 2 steps",
        ),
    ],
)
def test_the_engines_logprobs_enter_the_step_as_the_formulas_say(layout, run, references):
    assert_same(run(layout), references(layout))


SPLIT = replace(BASE, ranks=2, budget=90, kl_beta=0.1)


@pytest.mark.sample(
    "tokens and a veto, split", "sequences, one row on 2 ranks", "old logprobs between"
)
@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        pytest.param(replace(BASE, rejection=("token", 0.2, 0.9, None)), "mixed", id="tokens"),
        pytest.param(
            replace(SPLIT, rejection=("token", 0.05, 4.0, 0.01), minibatches=2, aggregation="seq-mean-token-mean"),
            "errors and gaps",
            id="tokens and a veto, split",
        ),
        pytest.param(
            replace(SPLIT, rejection=("sequence", 1e-4, 2.0, None), tis_level="sequence", context=2), "mixed",
            id="sequences, one row on 2 ranks",
        ),
        pytest.param(
            replace(SPLIT, rejection=("geometric", 0.25, 0.5, None), tis_clip=None, credit="turn", loss="gspo"), "turns",
            id="means of turns",
        ),
        pytest.param(
            replace(SPLIT, rejection=("token", 0.2, 0.9, None), tis_clip=None, old_policy="sampler", minibatches=2), "mixed",
            id="tokens, old logprobs the engine's",
        ),
        pytest.param(
            replace(SPLIT, old_policy="interpolated", minibatches=2, tis_clip=0.7), "gaps", id="old logprobs between"
        ),
    ],
)  # fmt: skip
def test_rejection_and_old_policies_enter_the_step_as_the_formulas_say(
    layout, kind, run, references
):
    metrics, *_ = trained = run(layout, kind)
    assert_same(trained, references(layout, kind))
    assert layout.rejection[0] is None or 0.1 < metrics["actor/rejected_tokens"] < 0.9


@pytest.mark.sample("errors and gaps")
@pytest.mark.parametrize("kind", ["errors", "gaps", "errors and gaps"])
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(replace(BASE, aggregation="seq-mean-token-mean"), id="one row"),
        pytest.param(
            replace(BASE, ranks=2, budget=80, tis_level="geometric"),
            id="geometric weights on 2 ranks",
        ),
        pytest.param(
            replace(BASE, ranks=2, budget=90, share=False, minibatches=2),
            id="repeated prompts, 2 mini-batches",
        ),
        pytest.param(
            replace(BASE, ranks=2, train_tower=False, aggregation="seq-mean-token-sum"),
            id="frozen tower",
        ),
    ],
)
def test_only_sampled_tokens_of_sound_trajectories_count(layout, kind, run, references):
    assert_same(run(layout, kind), references(layout, kind))


SEQUENCES = replace(BASE, aggregation="seq-mean-token-mean", tis_level="geometric", tis_clip=1.2)
BY_TURN = replace(SEQUENCES, credit="turn", discount=0.5)
BY_STATE = replace(SEQUENCES, state_weight=0.7, discount=0.5, tis_level="sequence")


@pytest.mark.sample(
    "turns, split, 2 mini-batches", "ratios of turns, 2 mini-batches", "states, split"
)
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(SEQUENCES, id="trajectories"),
        pytest.param(BY_TURN, id="turns"),
        pytest.param(
            replace(BY_TURN, ranks=2, budget=90, minibatches=2), id="turns, split, 2 mini-batches"
        ),
        pytest.param(
            replace(BY_TURN, aggregation="seq-mean-token-sum", share=False),
            id="sums of turns, repeated prompts",
        ),
        pytest.param(
            replace(BY_TURN, minibatches=2, loss="gspo", size=1),
            id="ratios of turns, 2 mini-batches",
        ),
        pytest.param(BY_STATE, id="states"),
        pytest.param(
            replace(BY_STATE, ranks=2, budget=80, train_tower=False, kl_beta=0.1),
            id="states, split",
        ),
        pytest.param(
            replace(BY_STATE, aggregation="token-mean", old_logprobs="false", tis_clip=None),
            id="states, tokens",
        ),
    ],
)
def test_turns_are_credited_as_the_formulas_say(layout, run, references):
    assert_same(run(layout, "turns"), references(layout, "turns"))


@pytest.mark.sample("-trees split over 2 ranks", "each row on 2 ranks-delta nets, split")
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(replace(BASE, budget=400), id="one row"),
        pytest.param(replace(BASE, ranks=2, budget=150), id="trees split over 2 ranks"),
        pytest.param(
            replace(BY_TURN, ranks=2, budget=150, share=False),
            id="repeated prompts, credit by turn",
        ),
        pytest.param(replace(BASE, family="qwen3_5", budget=400), id="delta nets"),
        pytest.param(replace(BASE, family="qwen3_5", ranks=2, budget=150), id="delta nets, split"),
        pytest.param(
            replace(
                BASE, family="qwen3_5", ranks=2, budget=150, checkpointing=True, reentrant=True
            ),
            id="delta nets, split, reentrant",
        ),
    ],
)
def test_a_trajectory_of_several_sequences_is_trained_once(layout, run_shared, references):
    assert_same(run_shared(layout, "turns in sequences"), references(layout, "turns in sequences"))


SIX = {
    "text": {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 8}
}


@pytest.mark.sample(
    "trees, credit by turn", "delta nets, experts", "ratios and weights of sequences"
)
@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        pytest.param(
            replace(BASE, ranks=4, context=4), "mixed", id="fewer heads of keys than ranks"
        ),
        pytest.param(
            replace(BASE, ranks=2, context=2, sizes=SIX),
            "mixed",
            id="a head of keys for heads of both ranks",
        ),
        pytest.param(
            replace(BY_TURN, ranks=4, context=2, budget=150),
            "turns in sequences",
            id="trees, credit by turn",
        ),
        pytest.param(
            replace(BASE, ranks=4, context=4, family="qwen3_5", checkpointing="selective"),
            "turns in sequences",
            id="delta nets",
        ),
        pytest.param(
            replace(
                BASE,
                ranks=4,
                context=4,
                family="qwen3_5_moe",
                train_tower=False,
                replay=True,
                balance=0.3,
            ),
            "mixed",
            id="delta nets, experts",
        ),
        pytest.param(
            replace(LORA, ranks=4, context=4, budget=90, lora="all-linear"), "mixed", id="adapters"
        ),
        pytest.param(
            replace(
                BASE,
                ranks=4,
                context=2,
                shard=2,
                minibatches=2,
                budget=90,
                loss="gspo",
                tis_level="sequence",
            ),
            "one image",
            id="ratios and weights of sequences",
        ),
        pytest.param(
            replace(
                BASE,
                teacher=(1.0, 0.0, 5),
                papo=PAPO,
                kl_beta=0.1,
                ranks=2,
                context=2,
                train_tower=False,
            ),
            "mixed",
            id="teacher's top 5, PAPO, reference",
        ),
    ],
)
def test_ranks_that_share_rows(layout, kind, run, references):
    """Each rank has a part of a row's tokens, and in attention and delta nets of its heads."""
    assert_same(run(layout, kind), references(layout, kind))


@pytest.mark.sample("pixels, split", "features, split")
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(replace(BASE, dtype="bf16"), id="pixels"),
        pytest.param(
            replace(BASE, dtype="bf16", ranks=2, budget=90, checkpointing=True), id="pixels, split"
        ),
        pytest.param(replace(BASE, dtype="bf16", train_tower=False), id="features"),
        pytest.param(
            replace(BASE, dtype="bf16", ranks=2, budget=90, train_tower=False, kl_beta=0.1),
            id="features, split",
        ),
    ],
)
def test_bfloat16_steps_differ_by_roundings_only(layout, run, references):
    """Measured: 2.2e-3 in the loss with the reference (whose KL is about 2) and 3e-4 without, 1.1 % in the gradient's norm, 2 % in
    the gradient, however it is laid out."""
    metrics, weights, features = run(layout)
    loss, norm, expected = references(layout)
    assert metrics["actor/loss"] == pytest.approx(loss, abs=4e-3)
    assert metrics["actor/grad_norm"] == pytest.approx(norm, rel=0.015)
    assert set(weights) == set(expected)
    error = math.sqrt(sum(float(((weights[n] - expected[n]) ** 2).sum()) for n in weights))
    assert error < 0.03 * LR * norm
    assert bool(features) != layout.train_tower


@pytest.mark.sample("2")
@torch.no_grad()
@pytest.mark.parametrize("ranks", [1, 2])
def test_bfloat16_trains_on_the_features_that_the_engine_sees(ranks, run):
    """Each image alone, as an engine may prefill it, in the dtype that the engine computes in: bit for bit."""
    policy = tiny_policy(torch.bfloat16)
    _, _, features = run(replace(BASE, dtype="bf16", ranks=ranks, budget=90, train_tower=False))
    images = [image for g in groups_of("mixed") for image in g.images]
    assert {image.hash for image, _ in images} == features.keys()
    for image, grid in images:
        seen = policy.encode(pixels(image), np.array([grid]))
        np.testing.assert_array_equal(
            features[image.hash], torch.stack([seen.tokens, *seen.deepstack]).float()
        )
