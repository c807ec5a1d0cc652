"""Ranks that read their own rows of a checkpoint: they have what transformers loads, they train as with whole weights, and
what they need of host memory while they load."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from peak_memory import PeakOfMemory
from safetensors.torch import load_file, save_file
from tiny import MEMBERS, tiny_config, tiny_model
from torch.distributed.tensor import DTensor

from rlinf_vl.models.families import FAMILIES
from rlinf_vl.models.saving import save_model

#: ranks, ranks that share the weights
MESHES = {"2 ranks": (2, 2), "2 copies on 4 ranks": (4, 2), "3 ranks, uneven": (3, 3)}
#: ranks, ranks that share the weights, ranks that share out experts
EXPERT_MESHES = {
    "2 of 2 ranks": (2, 2, 2),
    "2 of 4 ranks": (4, 4, 2),
    "2 of 2 ranks, 2 copies": (4, 2, 2),
}
STORED = ("for SGLang", "by transformers")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(family, how it is stored) → the folder of a tiny checkpoint."""
    folders = {}

    def folder(family: str, stored: str = STORED[0]) -> str:
        if (family, stored) not in folders:
            path = tmp_path_factory.mktemp(family)
            model = tiny_model(family=family, tie=family == "qwen2_5_vl")
            if stored == "by transformers":
                model.save_pretrained(path)
            else:
                save_model(model, FAMILIES[family], path)
            folders[family, stored] = str(path)
        return folders[family, stored]

    return folder


def read(folder: str, family: str, dtype: torch.dtype, ranks_that_share: int, experts: int = 1):
    """Number of weights that differ from those of transformers' whole model, of buffers too; rows that this rank holds and all."""
    from rlinf_vl.actor.expert_sharding import reading_order
    from rlinf_vl.actor.mesh import Mesh
    from rlinf_vl.models.shards import load_shards

    mesh = Mesh.make("cpu", shard=ranks_that_share, experts=experts)
    expert_rows = mesh.experts and reading_order(mesh.experts)
    model, shards = load_shards(folder, FAMILIES[family], dtype, mesh.sharding, experts=expert_rows)
    whole = FAMILIES[family].model_class.from_pretrained(folder, dtype=dtype)
    weights = dict(model.named_parameters())
    assert weights.keys() == dict(whole.named_parameters()).keys()
    differing, held, total = [], 0, 0
    for name, expected in whole.named_parameters():
        value = shards[name].full_tensor() if name in shards else weights[name]
        if FAMILIES[family].stays_float32(name):
            expected = load_file(f"{folder}/model.safetensors")[name]
        if value.dtype != expected.dtype or not torch.equal(value, expected):
            differing.append(name)
        held += (shards[name].to_local() if name in shards else value).numel()
        total += expected.numel()
    buffers = dict(whole.named_buffers())
    differing += [n for n, b in model.named_buffers() if not torch.equal(b, buffers[n])]
    return differing, held, total


@pytest.mark.parametrize("layout", MESHES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", MEMBERS)
@pytest.mark.sample("qwen3_vl-fp32-2 ranks", "qwen3_vl_moe-fp32-3 ranks, uneven")
def test_rows_are_those_that_transformers_loads(processes, saved, family, dtype, layout):
    ranks, shared = MESHES[layout]
    results = processes.run(ranks, read, saved(family), family, dtype, shared)
    for differing, held, total in results:
        assert not differing
        # Weights with fewer rows than ranks, and those in float32, are whole on some.
        assert held < 1.3 * total / shared
    assert sum(held for _, held, _ in results) >= results[0][2] * ranks / shared


def read_mixing(folder: str, family: str, dtype: torch.dtype, ranks_that_share: int):
    """What `read` returns where the rows of experts and of queries follow from all stored rows; and names read together, whole."""
    from rlinf_vl.models import partial, shards

    together = []

    def load_weights(path, made, dtype, names, **options):
        together.append(list(names))
        return partial.load_weights(path, made, dtype, names, **options)

    def converted(model):
        names = {n for n, _ in model.named_parameters() if "q_proj" in n or "experts" in n}
        return names, names

    partial.GROUP_BYTES = 1
    shards.load_weights, shards._converted = load_weights, converted
    return read(folder, family, dtype, ranks_that_share), together


def test_weights_that_mix_rows_are_read_a_block_at_a_time(processes, saved):
    family = "qwen3_5_moe"
    for (differing, held, total), together in processes.run(
        2, read_mixing, saved(family), family, torch.bfloat16, 2
    ):
        assert not differing and held < 1.3 * total / 2
        blocks = [{name.split(".layers.")[1][0] for name in names} for names in together]
        assert blocks == [{"0"}, {"1"}]


@pytest.mark.parametrize("layout", MESHES)
@pytest.mark.parametrize("family", [name for name in MEMBERS if "moe" in name])
def test_experts_as_transformers_saves_them(processes, saved, family, layout):
    ranks, shared = MESHES[layout]
    folder = saved(family, "by transformers")
    for differing, *_ in processes.run(ranks, read, folder, family, torch.float32, shared):
        assert not differing


@pytest.mark.sample("2 of 4 ranks-for SGLang-qwen3_vl_moe")
@pytest.mark.parametrize("family", [name for name in MEMBERS if "moe" in name])
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("layout", EXPERT_MESHES)
def test_ranks_that_share_out_experts_read_their_own(processes, saved, family, stored, layout):
    ranks, shared, experts = EXPERT_MESHES[layout]
    folder = saved(family, stored)
    for differing, held, total in processes.run(
        ranks, read, folder, family, torch.float32, shared, experts
    ):
        assert not differing
        assert held < 1.5 * total / shared


def step(folder: str, family: str, lora: bool, by_shards: bool, target: str, experts: int = 1):
    """One SGD step of the trainer that reads this checkpoint, and a checkpoint of it: (all weights, whole; metrics)."""
    from plain_step import groups_of
    from tiny import IMAGE_ID, banned, tiny_trainer

    from rlinf_vl.actor.expert_sharding import reading_order
    from rlinf_vl.actor.mesh import Mesh
    from rlinf_vl.config.schema import ActorConfig, ActorModelConfig, LoraConfig
    from rlinf_vl.controller.step_plan import plan_step
    from rlinf_vl.models.loading import load_model
    from rlinf_vl.models.policy import PolicyModel
    from rlinf_vl.models.shards import load_shards
    from rlinf_vl.types import GroupSummary

    torch.manual_seed(5)
    mesh = Mesh.make("cpu", experts=experts)
    expert_rows = mesh.experts and reading_order(mesh.experts)

    def load(dtype: torch.dtype) -> PolicyModel:
        shards = {}
        if by_shards:
            model, shards = load_shards(
                folder, FAMILIES[family], dtype, mesh.sharding, experts=expert_rows
            )
        else:
            model = load_model(folder, FAMILIES[family], dtype)
        policy = PolicyModel(model, FAMILIES[family], banned(), temperature=1.0, chunk=None)
        policy.shards = shards
        return policy

    actor = ActorConfig()
    actor.fsdp_config.mixed_precision.param_dtype = "fp32"
    if lora:
        actor.model = ActorModelConfig(
            is_lora=True, lora=LoraConfig(rank=4, target_modules=["all-linear"])
        )
    trainer = tiny_trainer(mesh, load, actor=actor)
    assert not trainer.policy.shards
    parameters = [p for p in trainer.policy.parameters() if p.requires_grad]
    trainer.optimizer = torch.optim.SGD(parameters, lr=0.1)
    groups = groups_of("mixed")
    plan = plan_step(
        [GroupSummary.of(group, IMAGE_ID) for group in groups],
        trainer.algorithm,
        ranks=2,
        budget=400,
        micro_batch_size=None,
        share_prompts=True,
    )
    mine = [ranks[mesh.data_rank] for ranks in plan.minibatches]
    numbers = {item.group for mini in mine for items in mini.micro_batches for item in items}
    sums, _ = trainer.update({n: groups[n] for n in numbers}, mine, plan.advantages)
    weights = {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().numpy()
        for name, p in trainer.policy.named_parameters()
    }
    trainer.stage()
    trainer.write(target)
    return weights, sums.state()


@pytest.mark.parametrize("lora", [False, True], ids=["all weights", "adapters"])
@pytest.mark.parametrize(
    ("family", "experts"), [("qwen3_vl", 1), ("qwen3_5_moe", 1), ("qwen3_5_moe", 2)]
)
@pytest.mark.sample("qwen3_5_moe-2-adapters")
def test_they_train_and_save_as_with_whole_weights(
    processes, saved, tmp_path, family, experts, lora
):
    run = partial(processes.run, 2, step, saved(family), family, lora)
    for name in ("shards", "whole"):
        (tmp_path / name).mkdir()
    by_shards, whole = (
        run(shards, str(tmp_path / name), experts)
        for name, shards in (("shards", True), ("whole", False))
    )
    saved_bytes = [
        sum(file.stat().st_size for file in (tmp_path / name).iterdir())
        for name in ("shards", "whole")
    ]
    assert saved_bytes[0] == pytest.approx(saved_bytes[1], rel=0.01)
    for (weights, metrics), (expected, expected_metrics) in zip(by_shards, whole, strict=True):
        assert metrics == expected_metrics
        assert weights.keys() == expected.keys()
        for name, value in weights.items():
            np.testing.assert_array_equal(value, expected[name], err_msg=name)


def drop_a_weight(folder: str, target: Path) -> str:
    """A copy of the checkpoint without the second layer's output projection; its name."""
    name = "model.language_model.layers.1.self_attn.o_proj.weight"
    weights = load_file(f"{folder}/model.safetensors")
    del weights[name]
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    (target / "config.json").write_bytes((Path(folder) / "config.json").read_bytes())
    return name


def test_a_checkpoint_that_lacks_a_weight_is_refused(processes, saved, tmp_path):
    name = drop_a_weight(saved("qwen3_vl"), tmp_path)
    with pytest.raises(AssertionError, match=f"lacks .*{name}"):
        processes.run(2, read, str(tmp_path), "qwen3_vl", torch.float32, 2)


def peak_of_loading(folder: str, family: str, by_shards: bool) -> tuple[int, int]:
    """(most bytes while the checkpoint is read and sharded, bytes of this rank's shards)"""
    from rlinf_vl.actor import mesh as meshes
    from rlinf_vl.config.schema import FsdpConfig
    from rlinf_vl.models.loading import load_model
    from rlinf_vl.models.policy import PolicyModel
    from rlinf_vl.models.shards import load_shards

    mesh = meshes.Mesh.make("cpu")
    banned = np.zeros(64, bool)

    def policy(path: str):
        shards = {}
        if by_shards:
            model, shards = load_shards(path, FAMILIES[family], torch.float32, mesh.sharding)
        else:
            model = load_model(path, FAMILIES[family], torch.float32)
        made = PolicyModel(model, FAMILIES[family], banned, temperature=1.0, chunk=None)
        made.shards = shards
        return mesh.shard(made, FsdpConfig())

    dist.barrier()
    with PeakOfMemory() as memory:
        made = policy(folder)
    local = [p.to_local() if isinstance(p, DTensor) else p for p in made.parameters()]
    return memory.peak, sum(value.nbytes for value in local)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory) -> tuple[str, int, int]:
    """(folder of a mixture, stored in bfloat16, whose bytes are nearly all its experts'; in float32 all its bytes, 280 MB, and those
    of a layer)"""
    path = tmp_path_factory.mktemp("mixture")
    text = {
        "num_hidden_layers": 8,
        "num_experts": 32,
        "hidden_size": 256,
        "moe_intermediate_size": 352,
    }
    config = tiny_config("qwen3_5_moe", text=text)
    model = FAMILIES["qwen3_5_moe"].model_class.from_config(config)
    sizes = [
        sum(p.nbytes for p in layer.parameters()) for layer in model.model.language_model.layers
    ]
    total = sum(p.nbytes for p in model.parameters())
    save_model(model.bfloat16(), FAMILIES["qwen3_5_moe"], path)
    return str(path), total, max(sizes)


def test_a_rank_needs_memory_for_its_shards_and_two_layers(processes, mixture):
    folder, total, layer = mixture
    for peak, shards in processes.run(4, peak_of_loading, folder, "qwen3_5_moe", True):
        print(f"{peak / 2**20:.0f} MiB, shards {shards / 2**20:.0f}, layer {layer / 2**20:.0f}")
        assert shards < 1.05 * total / 4
        assert peak < shards + 2 * layer
    for peak, _ in processes.run(4, peak_of_loading, folder, "qwen3_5_moe", False):
        # Less than all of it, as looking takes its turns with reading.
        assert peak > 0.6 * total, "the measure sees a model that is read whole"
