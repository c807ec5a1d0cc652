"""No rank ever has the whole model in memory: the most that each of four ranks takes while a mixture is loaded, synced and saved,
and a process that exports it. Its weights arrive everywhere to the bit.

`RLINF_VL_MIXTURE_LAYERS` makes the mixture deeper: 8 layers have 0.3 GB, 52 have 2 GB. `RLINF_VL_SPARSE_LAYERS` likewise the
checkpoint with the shapes of Qwen3-VL-235B-A22B, which takes no disk: 13 of its 94 layers have 65 GB.
"""

import ctypes
import json
import os
import pickle
from importlib import resources
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from peak_memory import PeakOfMemory
from safetensors import safe_open
from tiny import tiny_config
from torch.distributed.tensor import DTensor
from transformers import AutoConfig

from rlinf_vl.config import save_config
from rlinf_vl.config.load import parse_config
from rlinf_vl.models.families import FAMILIES
from rlinf_vl.models.partial import weight_groups
from rlinf_vl.models.saving import save_model
from rlinf_vl.runtime.checkpoints import save_checkpoint

pytestmark = pytest.mark.integration
FAMILY = FAMILIES["qwen3_vl_moe"]
RANKS = 4
BUCKET_BYTES = 2**24
#: Of allocators and threads.
SLACK = 2**24


def sizes_of(folder: str) -> tuple[int, int]:
    """(bytes of a checkpoint's weights, of its largest layer)"""
    by_layer, total = {}, 0
    for name, value in stored(folder):
        total += value.nbytes
        if ".layers." in name:
            layer = name.split(".layers.")[1].split(".")[0]
            by_layer[layer] = by_layer.get(layer, 0) + value.nbytes
    return total, max(by_layer.values())


def stored(folder):
    """Yield name and value of each weight of a checkpoint, mapped from its files."""
    for file in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(file, "pt") as weights:
            for name in weights.keys():  # noqa: SIM118
                yield name, weights.get_tensor(name)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory) -> str:
    """The folder of a mixture in bfloat16, random, which was never whole in memory either."""
    path = tmp_path_factory.mktemp("mixture")
    text = {
        "num_hidden_layers": int(os.environ.get("RLINF_VL_MIXTURE_LAYERS", 8)),
        "num_experts": 32,
        "hidden_size": 512,
        "moe_intermediate_size": 384,
        "mlp_only_layers": [],
    }
    config = tiny_config("qwen3_vl_moe", text=text, tie=False)
    with torch.device("meta"):
        model = FAMILY.model_class.from_config(config, dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(0)

    def random(names):
        for name in names:
            shape = model.get_parameter(name).shape
            yield name, torch.randn(shape, generator=generator).mul_(0.02).bfloat16()

    save_model(model, FAMILY, path, read=random, max_file_bytes=2**26)
    return str(path)


def load(folder: str, dtype: torch.dtype):
    """This rank's policy, sharded; the most bytes meanwhile; and those of its shards."""
    import numpy as np

    from rlinf_vl.actor.mesh import Mesh
    from rlinf_vl.config.schema import FsdpConfig
    from rlinf_vl.models.policy import PolicyModel
    from rlinf_vl.models.shards import load_shards

    mesh = Mesh.make("cpu")
    dist.barrier()
    with PeakOfMemory() as memory:
        model, shards = load_shards(folder, FAMILY, dtype, mesh.sharding)
        banned = np.zeros(model.config.get_text_config().vocab_size, bool)
        policy = PolicyModel(model, FAMILY, banned, temperature=1.0, chunk=None)
        policy.shards = shards
        policy = mesh.shard(policy, FsdpConfig())
    local = [p.to_local() if isinstance(p, DTensor) else p for p in policy.parameters()]
    return policy, memory.peak, sum(value.nbytes for value in local)


def load_and_sync(folder: str, target: str) -> dict[str, int]:
    """Bytes of this rank: its shards, and the most that it took to load, and to sync by each strategy; its part of the snapshot
    that a late worker would get is written to `target`."""
    from rlinf_vl.actor import mesh
    from rlinf_vl.weights import delta, object_store, shared_memory
    from rlinf_vl.weights.broadcast import BroadcastSender
    from rlinf_vl.weights.delta import DeltaSender
    from rlinf_vl.weights.shard import local_part

    # Memory of freed tensors goes back at once (M_MMAP_THRESHOLD): what is measured is in use.
    ctypes.CDLL(None).mallopt(-3, 2**16)
    policy, peak, shards = load(folder, torch.bfloat16)
    named = dict(policy.model.named_parameters())
    sent_bytes = []  # Ray's store would take more time than all the rest
    delta.put = object_store.put = lambda value: sent_bytes.append(value.nbytes)
    shared_memory.places_of = lambda device, n: ("here",)
    mesh.GATHERED_BYTES = BUCKET_BYTES

    def gather(device):
        for name, value in mesh.whole_tensors((n, p.detach()) for n, p in named.items()):
            yield name, value.to(device)

    def parts():
        for name, value in named.items():
            yield local_part(name, value.detach())

    taken = {"shards": shards, "load": peak}
    senders = (shared_memory.SharedMemorySender, BroadcastSender, DeltaSender)
    for kind in senders:
        made = kind(gather, parts, dist.get_rank(), RANKS, "cpu", BUCKET_BYTES)
        for version, checks in ((1, kind is not DeltaSender), (2, False)):
            dist.barrier()
            with torch.no_grad(), PeakOfMemory() as memory:
                made.offer(version, checks)
                made.deliver([])
                made.release()
            taken[f"{kind.__name__} {version}"] = memory.peak
        assert made.snapshot_version == 2
        taken[f"{kind.__name__} copy"] = made.copy.nbytes
        with open(f"{target}/{kind.__name__}-{dist.get_rank()}", "wb") as file:
            pickle.dump(list(made.copy.deltas()), file)
    return taken


def test_ranks_load_and_sync_within_their_shards_and_two_layers(processes, mixture, tmp_path):
    from rlinf_vl.weights.changes import patches

    total, layer = sizes_of(mixture)
    results = processes.run(RANKS, load_and_sync, mixture, str(tmp_path))
    for taken in results:
        print({name: f"{size / 2**20:.0f} MiB" for name, size in taken.items()})
        shards = taken["shards"]
        assert shards < 1.05 * total / RANKS
        assert taken["load"] <= shards + 2 * layer
        for name, size in taken.items():
            if name.endswith((" 1", " 2")):
                assert size <= shards + 2 * layer, name
            elif name.endswith("copy"):
                assert size <= shards
    weights = dict(stored(mixture))
    for kind in ("SharedMemorySender", "BroadcastSender", "DeltaSender"):
        deltas = []
        for rank in range(RANKS):
            deltas += pickle.loads((tmp_path / f"{kind}-{rank}").read_bytes())
        seen = set()
        for bucket in patches(deltas, "cpu"):
            for name, patch in bucket.items():
                for engine_name, value in FAMILY.engine_names(name, patch.masked("cpu")):
                    assert torch.equal(value, weights[engine_name]), name
                    seen.add(engine_name)
        assert seen == weights.keys()


def save(folder: str, target: str) -> tuple[int, int, int]:
    """(bytes of this rank's shards in float32, the most that copying them takes, and that writing them takes)"""
    from rlinf_vl.actor.checkpoint import CheckpointWriter

    policy, _, shards = load(folder, torch.float32)
    writer = CheckpointWriter()
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    with PeakOfMemory() as staging:
        writer.stage(policy, optimizer)
    with PeakOfMemory() as writing:
        writer.write(target)
    return shards, staging.peak, writing.peak


def export(run: str, target: str, max_file_bytes: int) -> int:
    """The most bytes that an export takes."""
    from rlinf_vl.extras.export.export import export_checkpoint

    with PeakOfMemory() as memory:
        export_checkpoint(Path(run), Path(target), "bf16", max_file_bytes=max_file_bytes)
    return memory.peak


def test_checkpoints_take_the_shards_once_more_and_exports_two_layers_and_a_file(
    processes, mixture, tmp_path, monkeypatch
):
    total, layer = sizes_of(mixture)
    config = parse_config("toy-grpo-cpu", [f"rollout.model.model_path={mixture}"])
    save_config(config, tmp_path / "run/config.yaml")

    def write(target) -> dict[str, str]:
        for shards, staged, written in processes.run(RANKS, save, mixture, str(target)):
            print(f"{shards / 2**20:.0f} MiB: {staged / 2**20:.0f}, {written / 2**20:.0f}")
            assert staged <= 1.05 * shards + SLACK
            assert written <= 2 * layer
        return {}

    save_checkpoint(tmp_path / "run", 1, write, {"step": 1}, keep_last=-1)
    file_bytes = 2**26
    run, exported = str(tmp_path / "run"), str(tmp_path / "export")
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(2**17))  # what is freed goes back at once
    with get_context("spawn").Pool(1) as pool:  # the ranks' memory may be freed and not given back
        peak = pool.apply(export, (run, exported, file_bytes))
    print(f"export {peak / 2**20:.0f} MiB of {total / 2**20:.0f}, layer {layer / 2**20:.0f}")
    assert layer / 2 < peak <= 2 * layer + file_bytes + SLACK
    weights = dict(stored(mixture))
    names = set()
    for name, value in stored(tmp_path / "export"):
        assert torch.equal(value, weights[name]), name
        names.add(name)
    assert names == weights.keys()


# --- the shapes of a model of 235 billion parameters ------------------------------------------------


def write_sparse(folder: Path, layers: int) -> int:
    """Write a checkpoint of zeros with the shapes of Qwen3-VL-235B-A22B's first layers, in the layout of the hub; its bytes.

    Its files have headers, and holes in the place of their data.
    """
    known = json.loads(resources.files("rlinf_vl.models").joinpath("known_models.json").read_text())
    shape = known["Qwen/Qwen3-VL-235B-A22B-Instruct"]
    config = AutoConfig.for_model(
        "qwen3_vl_moe",
        text_config=shape["text_config"] | {"num_hidden_layers": layers},
        vision_config=shape["vision_config"],
        tie_word_embeddings=False,
    )
    config.dtype = "bfloat16"
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = FAMILY.model_class.from_config(config, dtype=torch.bfloat16)
    weight_map, total = {}, 0
    for number, names in enumerate(weight_groups(model, FAMILY)):
        header, offset = {"__metadata__": {"format": "pt"}}, 0
        for name in names:
            for part, value in FAMILY.engine_names(name, model.get_parameter(name)):
                offsets = [offset, offset + value.nbytes]
                header[part] = {
                    "dtype": "BF16",
                    "shape": list(value.shape),
                    "data_offsets": offsets,
                }
                weight_map[part] = f"model-{number:05d}.safetensors"
                offset = offsets[1]
        text_header = json.dumps(header).encode()
        text_header += b" " * (-len(text_header) % 8)
        with open(folder / f"model-{number:05d}.safetensors", "wb") as file:
            file.write(len(text_header).to_bytes(8, "little") + text_header)
            file.truncate(8 + len(text_header) + offset)
        total += offset
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


class CountedFile:
    """A safetensors file whose slices count the bytes that are read of them."""

    read_bytes = 0

    def __init__(self, *args, **options):
        self._file = safe_open(*args, **options)

    def get_slice(self, name):
        return CountedSlice(self._file.get_slice(name))

    def __getattr__(self, name):
        return getattr(self._file, name)

    def __exit__(self, *args):
        return self._file.__exit__(*args)


class CountedSlice:
    def __init__(self, part):
        self._part = part

    def __getitem__(self, index):
        value = self._part[index]
        CountedFile.read_bytes += value.nbytes
        return value

    def __getattr__(self, name):
        return getattr(self._part, name)


def load_as(folder: str, rank: int, ranks: int) -> tuple[int, int, int]:
    """As this rank of so many that are not there: bytes of its shards, the most that it took, and those that it read."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from transformers import modeling_utils

    from rlinf_vl.models.shards import load_shards

    modeling_utils.safe_open = CountedFile
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("shard",))
    with PeakOfMemory() as memory:
        _, shards = load_shards(folder, FAMILY, torch.bfloat16, mesh)
    held = sum(shard.to_local().nbytes for shard in shards.values())
    return held, memory.peak, CountedFile.read_bytes


def test_64_ranks_read_their_own_rows_of_235_billion_parameters_and_no_others(tmp_path):
    layers, ranks = int(os.environ.get("RLINF_VL_SPARSE_LAYERS", 2)), 64
    total = write_sparse(tmp_path, layers)
    used = sum(file.stat().st_blocks * 512 for file in tmp_path.iterdir())
    assert used < 2**24 < total
    with get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for rank in (0, 21, 63):
            held, peak, read = pool.apply(load_as, (str(tmp_path), rank, ranks))
            print(
                f"rank {rank}: {held / 2**20:.0f} MiB of {total / 2**30:.1f} GiB, {peak / 2**20:.0f}"
            )
            assert held <= 1.05 * total / ranks + 2**20
            assert read <= held, "a rank reads what it holds"
            assert peak <= held + 2 * total / layers / ranks + 8 * SLACK
