"""The estimate of a step: its closed forms, and what may only make it longer or shorter."""

from dataclasses import replace

import pytest
from tiny import tiny_config

from rlinf_vl.config.load import parse_config
from rlinf_vl.config.placement import placement_of
from rlinf_vl.models.shapes import Mixture
from rlinf_vl.preflight.decoding import (
    EngineShape,
    Lengths,
    generate_seconds,
    running_at_once,
    step_seconds,
)
from rlinf_vl.preflight.gpu_kinds import GPU_KINDS, kind_of_size
from rlinf_vl.preflight.model import Model
from rlinf_vl.preflight.rates import rates_of
from rlinf_vl.preflight.step_time import PHASES, estimate_step, usual_lengths
from rlinf_vl.preflight.traffic import Exchange, Grid

FLAGSHIP = "qwen3-vl-2b-grpo-fsdp-geo3k"
H100 = rates_of(GPU_KINDS["h100"])
DENSE = EngineShape(28, 2048, 2, 1_720_000_000, 0, None, 28 * 2 * 8 * 128 * 2)
MIXED = EngineShape(48, 2048, 2, 10**9, 29 * 10**9, Mixture(tuple(range(48)), 128, 8), 98304)


def test_lengths_have_their_mean_and_longest():
    for mean, longest in ((500, 2048), (1024, 2048), (2000, 2048)):
        lengths = Lengths(100, 0, mean, longest).quantiles(4000)
        assert lengths.mean() == pytest.approx(mean, rel=0.01)
        assert longest * 0.9 < lengths.max() <= longest
        assert (lengths[1:] >= lengths[:-1]).all()


def test_a_step_of_decoding_reads_weights_and_keys():
    """Twice the bytes beside what a step takes anyway, in twice the time; two GPUs read half each."""
    fixed = H100.decode_step_s + 28 * H100.decode_layer_s + 8 * H100.decode_row_s
    short, long = (step_seconds(DENSE, H100, 1, 8, context) - fixed for context in (0, 10**5))
    assert short == pytest.approx(2 * DENSE.dense / H100.decode_memory)
    assert long - short == pytest.approx(8 * 10**5 * DENSE.kv_token / H100.decode_memory)
    # One token reads its eight experts, many tokens all of them.
    assert MIXED.weight_bytes(1) == pytest.approx(2 * MIXED.active)
    assert MIXED.weight_bytes(10**4) == pytest.approx(2 * (MIXED.dense + MIXED.experts))
    assert step_seconds(MIXED, H100, 2, 64, 0) < step_seconds(MIXED, H100, 1, 64, 0)


def test_equal_responses_take_as_many_steps_as_they_have_tokens():
    shape = EngineShape(2, 64, 2, 10**6, 0, None, 0)
    lengths = Lengths(0.0, 0.0, 100.0, 100.0)
    common = dict(gpus=1, group_size=8, lengths=lengths)
    at_once = generate_seconds(shape, H100, groups=4, slots=32, **common)
    in_two = generate_seconds(shape, H100, groups=4, slots=16, **common)
    assert at_once == pytest.approx(100 * step_seconds(shape, H100, 1, 32, 50) + 4 * H100.group_s)
    assert in_two == pytest.approx(200 * step_seconds(shape, H100, 1, 16, 50) + 4 * H100.group_s)


def test_the_cache_bounds_what_runs():
    lengths = Lengths(800, 400, 1000, 2000)
    assert running_at_once(256, 10**7, lengths, 8) == 256
    assert running_at_once(256, 16000, lengths, 8) == 10  # prompts are shared by eight
    assert running_at_once(256, 0, lengths, 8) == 1


def test_groups_of_ranks_cross_nodes_by_their_stride():
    grid = Grid(16, 16, context=2, expert=4, per_node=8)
    assert not Exchange("all-to-all", 4, 1, 1, 1).crosses_nodes(grid)
    assert Exchange("all-gather", 4, 4, 1, 1).crosses_nodes(grid)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Model:
    folder = tmp_path_factory.mktemp("tiny")
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "vocab_size": 8192, "head_dim": 128}
    tiny_config(text=sizes).save_pretrained(folder)
    return Model(parse_config(FLAGSHIP), str(folder))


def estimated(model, *overrides, gpus=8, nodes=1, kv_tokens=500_000, rates=H100):
    config = parse_config(FLAGSHIP, overrides)
    placement = placement_of(config, (gpus,) * nodes)
    return estimate_step(config, model, placement, rates, usual_lengths(config), kv_tokens)


def test_what_makes_a_step_longer(model):
    plain = estimated(model)
    assert set(plain.phases) == set(PHASES) and min(plain.phases.values()) >= 0
    assert plain.total == pytest.approx(sum(plain.phases.values()) + plain.overhead)
    more = estimated(model, nodes=2)
    assert more.phases["generate"] < plain.phases["generate"]
    assert more.total < plain.total < 2 * more.total
    offloaded = estimated(model, "actor.enable_offload=true")
    assert offloaded.phases["wake"] > plain.phases["wake"]
    assert estimated(model, kv_tokens=20_000).phases["generate"] > plain.phases["generate"]
    reference = estimated(model, "algorithm.kl_beta=0.01")
    assert reference.phases["logprobs"] > 2 * plain.phases["logprobs"]
    # Four mini-batches: the first starts from the weights that its own forward has.
    always = estimated(model, "algorithm.recompute_logprobs='true'")
    assert always.phases["logprobs"] == pytest.approx(4 / 3 * plain.phases["logprobs"])


def test_schedules_ahead_hide_the_shorter_part(model):
    split = "cluster.component_placement={actor: 0-3, rollout: 4-7}"
    sync = estimated(model, split)
    ahead = estimated(model, split, "runner.schedule=one_step_off")
    train = sum(sync.phases[name] for name in ("images", "logprobs", "train"))
    hidden = min(train, sync.phases["generate"])
    assert sync.total - ahead.total == pytest.approx(hidden)


def test_phases_at_once_take_longer_on_shared_cores(model):
    """Two of two cores, each 1.2 times as slow: the shorter phase's part of both is 20 % longer."""
    split = "cluster.component_placement={actor: 0, rollout: 1}"
    two_cores = replace(H100, cores=2, full_slowdown=1.2)
    sync = estimated(model, split, gpus=2, rates=two_cores)
    ahead = estimated(model, split, "runner.schedule=one_step_off", gpus=2, rates=two_cores)
    assert sync.contention == 0
    train = sum(sync.phases[name] for name in ("images", "logprobs", "train"))
    short = min(train, sync.phases["generate"])
    assert ahead.contention == pytest.approx(0.2 * short)
    # The process that records takes its share of the two cores.
    busy = replace(two_cores, record_s=2 * sync.phases["generate"])
    recorded = estimated(model, split, "runner.schedule=one_step_off", gpus=2, rates=busy)
    both = 1.2 * (sync.phases["generate"] + train) + 2 * sync.phases["generate"]
    longer = max(sync.phases["generate"], train)
    assert longer + recorded.contention == pytest.approx(both / 2)
    # A local run does one thing after the other.
    local = ("cluster.backend=local", "runner.schedule=one_step_off")
    assert estimated(model, split, *local, gpus=2).contention == pytest.approx(short)
    # Ranks that compute at once are neighbours in every schedule.
    ranks = "cluster.component_placement={actor: 0-1, rollout: 0}"
    slowed = estimated(model, ranks, gpus=2, rates=two_cores)
    alone = estimated(model, ranks, gpus=2)
    assert slowed.phases["train"] == pytest.approx(1.2 * alone.phases["train"])


def test_processes_beyond_the_cores_take_turns():
    rates = replace(H100, cores=2, full_slowdown=1.2)
    assert [rates.slowdown(busy) for busy in (1, 2, 4)] == pytest.approx([1, 1.2, 2.4])
    assert H100.slowdown(4) == 1


def test_auto_is_synced_as_a_run_would(model):
    split = "cluster.component_placement={actor: 0, rollout: 1}"
    two_cores = replace(H100, cores=2, changes=1e9)

    def sync(*overrides, rates):
        return estimated(model, split, *overrides, gpus=2, rates=rates).phases["sync"]

    assert sync(rates=two_cores) == sync("rollout.weight_sync=delta", rates=two_cores)
    assert sync(rates=H100) == sync("rollout.weight_sync=broadcast", rates=H100)
    # A value in two bytes seldom changes, one in four nearly always.
    trained, every = model.weights.trained, model.weights.engine_elements
    for precision, nbytes, share in (("bf16", 2, 0.06), ("fp32", 4, 1)):
        seconds = sync(f"rollout.model.precision={precision}", rates=two_cores)
        whole, changed = nbytes * every, share * nbytes * min(trained, every)
        assert seconds == pytest.approx(H100.sync_s + whole / H100.host + changed / 1e9)


def test_an_engine_computes_running_responses_anew_with_each_update(model):
    split = "cluster.component_placement={actor: 0-3, rollout: 4-7}"
    ahead = ("runner.schedule=async", "data.rollout_batch_size=2048", split)
    keeps = estimated(model, *ahead, "rollout.kv_after_update=keep")
    recomputes = estimated(model, *ahead)
    assert recomputes.phases["generate"] > keeps.phases["generate"]


def test_micro_batches_of_a_number_of_trajectories(model):
    """As many of them, each with its operations, as there are trajectories for."""
    filled = estimated(model)
    by_number = ("runner.enable_dynamic_batch_size=false", "actor.micro_batch_size=1")
    assert estimated(model, *by_number).phases["train"] > filled.phases["train"]


def test_the_traces_work_is_that_of_the_products(model):
    """Twice the multiply-adds of each weight and token forward, four times backward, and forward again in recomputation."""
    tokens = 4096
    trace = model.step(tokens)
    weights = model.weights.trained  # the head's among them, which is the embedding as well
    # Norms have no products.
    assert trace.forward.products == pytest.approx(2 * weights * tokens, rel=0.01)
    blocks = weights - model.weights.root
    again = trace.work.products - 3 * trace.forward.products
    # A part of the head, too, in whose chunks logits are made again.
    assert 2 * blocks * tokens <= 1.01 * again <= 2 * weights * tokens
    heads = 2 * 4 * 128
    assert trace.forward.per_pair == 4 * heads
    assert trace.work.per_pair == (4 + 4 + 10) * heads


def test_kinds_go_by_size():
    assert kind_of_size(80).name == "h100" and kind_of_size(141).name == "h200"
    assert GPU_KINDS["h200"].memory > GPU_KINDS["h100"].memory


@pytest.mark.parametrize("mode", ["full", "none"])
def test_traces_of_a_few_layers_tell_those_of_many(tmp_path, mode):
    """Exactly, at the numbers of tokens that are traced."""
    tiny_config(
        "qwen3_vl_moe", text={"num_hidden_layers": 9, "mlp_only_layers": []}
    ).save_pretrained(tmp_path)
    model = Model(parse_config(FLAGSHIP), str(tmp_path))
    whole = model.step(3072, mode=mode)
    model.interpolates = True
    assert model._trace_by_layers(3072, mode) == whole
