"""What a start on a GPU would meet, as far as a machine without one can see it."""

import json
import os
import re
import subprocess
import sys
from importlib.metadata import files
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny_tiles import write_internvl
from transformers import AutoConfig

from rlinf_vl.config.schema import ClusterConfig
from rlinf_vl.engines.sglang.engine import SglangEngine
from rlinf_vl.engines.sglang.machine import CUDA_MAJOR, cuda_environment
from rlinf_vl.engines.sglang.ports import BLOCK, PortBlock
from rlinf_vl.engines.sglang.settings import (
    ATTENTION_BACKENDS,
    EMBEDDINGS_MB,
    PROCESSORS,
    Settings,
)
from rlinf_vl.models.families import family_at, family_of
from rlinf_vl.runtime.launch import _actor_environment

pytestmark = pytest.mark.integration


def unresolved(library, environment):
    """Libraries that the loader does not find for `library` under these variables. Its cache, which holds a system's own
    CUDA, is left out: many machines have none."""
    (loader,) = {*Path("/lib64").glob("ld-linux-*.so.*")} or {*Path("/lib").glob("ld-linux-*.so.*")}
    # List the libraries instead of running.
    environment = environment | {"LD_TRACE_LOADED_OBJECTS": "1"}
    done = subprocess.run(
        [loader, "--inhibit-cache", library], env=environment, capture_output=True, text=True
    )
    return set(re.findall(r"(\S+) => not found", done.stdout))


def test_the_memory_savers_library_resolves_under_our_environment_and_not_without_it(monkeypatch):
    """SGLang starts its scheduler under LD_PRELOAD of it; without libcudart on the loader's path that ends with code 127."""
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    name = f"torch_memory_saver_hook_mode_preload_cu{CUDA_MAJOR}.abi3.so"
    hook = next(file.locate() for file in files("torch_memory_saver") or () if file.name == name)
    driver, runtime = "libcuda.so.1", f"libcudart.so.{CUDA_MAJOR}"
    assert unresolved(hook, dict(os.environ)) - {driver} == {runtime}
    assert unresolved(hook, os.environ | cuda_environment(shared_gpu=True)) <= {driver}


def test_an_engine_that_could_not_compile_its_kernels_is_refused_before_it_starts(
    toy, tmp_path, monkeypatch
):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    with pytest.raises(
        RuntimeError, match=f"nvcc.* is not at {tmp_path}/bin/nvcc; install the CUDA 13 toolkit"
    ):
        settings = Settings(model_path=toy.path, context_length=64, max_running=1, device="cuda")
        image_tokens = toy.processor.image_tokens
        SglangEngine(
            settings,
            family_of("qwen3_vl"),
            banned=toy.banned,
            pixels=toy.pixels,
            image_tokens=image_tokens,
        )


@pytest.fixture(scope="module")
def on_an_h100(toy, tmp_path_factory):
    """By kind of run: the arguments that SGLang ends with on an H100, and the environment of its processes."""
    nvidia_smi = tmp_path_factory.mktemp("bin") / "nvidia-smi"
    nvidia_smi.write_text("#!/bin/sh\necho 81559\n")
    nvidia_smi.chmod(0o755)
    kinds = {
        "split": {},
        "collocated": {"shared_gpu": True},
        "wakes empty": {"shared_gpu": True, "wakes_empty": True, "tp_size": 4},
        "deterministic": {"deterministic": True},
        "tensor parallel": {"tp_size": 2},
        "expert parallel": {"tp_size": 4, "ep_size": 4},
        "data-parallel attention": {"tp_size": 4, "attn_dp_size": 2, "shared_gpu": True},
        "left to SGLang": {},
    }
    cases = {}
    for kind, change in kinds.items():
        settings = Settings(
            model_path=toy.path, context_length=512, max_running=256, device="cuda", **change
        )
        arguments, environment = settings.server_arguments(kv_tokens=0), settings.environment()
        environment["PATH"] = os.pathsep.join([str(nvidia_smi.parent), environment["PATH"]])
        cases[kind] = arguments, environment | _actor_environment(ClusterConfig())
    ports = PortBlock()
    ports.close()
    cases["data-parallel attention"][0].update(ports.arguments)
    del (
        cases["left to SGLang"][0]["mm_feature_transport"],
        cases["left to SGLang"][1]["SGLANG_VLM_CACHE_SIZE_MB"],
    )
    cases["misspelt"] = cases["split"][0] | {"enable_memory_savers": True}, {}
    program = Path(__file__).with_name("pretended_h100.py")
    # Of the CPU's engine.
    ours = {name: value for name, value in os.environ.items() if not name.startswith("SGLANG_")}
    done = subprocess.run(
        [sys.executable, program], input=json.dumps(cases), env=ours, capture_output=True, text=True
    )
    assert not done.returncode, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


SHARED = ("collocated", "wakes empty", "data-parallel attention")
KINDS = ("split", *SHARED, "deterministic", "tensor parallel", "expert parallel")


@pytest.mark.parametrize("kind", KINDS)
def test_arguments_are_what_we_mean_once_sglang_has_made_its_own_of_them(on_an_h100, kind):
    arguments, environment = on_an_h100[kind]
    expected = {
        "device": "cuda",
        "context_length": 520,
        "mem_fraction_static": 0.6,
        "dtype": "bfloat16",
        "enable_fp32_lm_head": True,
        "enable_memory_saver": kind in SHARED,
        "enable_weights_cpu_backup": kind in SHARED and kind != "wakes empty",
        "enable_deterministic_inference": kind == "deterministic",
        "sampling_backend": "pytorch" if kind == "deterministic" else "flashinfer",
        "rl_on_policy_target": None,  # it would give image prompts plain positions
        "tp_size": {"tensor parallel": 2, "wakes empty": 4}.get(
            kind, 4 if "parallel" in kind else 1
        ),
        "ep_size": 4 if kind == "expert parallel" else 1,
        "attn_dp_size": 2 if kind == "data-parallel attention" else 1,
        "dp_size": 1,  # replicas: they could not be sent weights
        "disable_radix_cache": False,  # a group's prompt is computed once
        "mm_feature_transport": "cpu",
        "mm_preprocess_cache_size_mb": 0,
    }
    assert {name: arguments[name] for name in expected} == expected
    assert environment["SGLANG_VLM_CACHE_SIZE_MB"] == str(EMBEDDINGS_MB)
    assert environment["SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE"] == PROCESSORS


def test_the_deterministic_mode_decodes_by_the_backend_of_its_prompts(on_an_h100):
    """A token that returns in a later turn's prompt has the logprob that it was decoded with. By itself SGLang decodes
    with flashinfer there."""
    arguments = on_an_h100["deterministic"][0]
    assert [arguments[name] for name in ATTENTION_BACKENDS] == ["fa3"] * 3
    assert on_an_h100["split"][0]["decode_attention_backend"] == "flashinfer"


def test_all_ports_of_an_engine_are_of_its_block(on_an_h100):
    arguments = on_an_h100["data-parallel attention"][0]
    first = arguments["nccl_port"] - 1
    addresses = [
        value for value in arguments["ports"].values() if str(value).startswith("tcp://127.0.0.1:")
    ]
    used = [arguments["ports"]["nccl_port"], *(int(a.rsplit(":", 1)[1]) for a in addresses)]
    assert len(set(used)) == len(used) >= 6 and set(used) < set(range(first + 1, first + BLOCK))


def test_the_general_path_reads_no_patches_back_from_the_device(tmp_path):
    """SGLang moves them there first. Tensors without memory stand in for the GPU's: numpy can't read either."""
    from rlinf_vl.engines.sglang.models.general import RlinfVlGeneral

    config = AutoConfig.from_pretrained(write_internvl(tmp_path))
    family = family_at(config)
    with torch.device("meta"):
        model = family.model_class.from_config(config, attn_implementation="sdpa")
    blank, grid = family.blank_image(config)
    items = [
        SimpleNamespace(
            feature=torch.empty(blank.shape, device="meta"), image_grid_thw=torch.from_numpy(grid)
        )
    ]
    engine_model = SimpleNamespace(
        family=family,
        model=model,
        get_input_embeddings=lambda: model.get_input_embeddings(),
    )
    tokens = RlinfVlGeneral.get_image_feature(engine_model, items)
    assert tokens.device.type == "meta" and tokens.ndim == 2


def test_what_these_tests_are_for_is_seen_by_them(on_an_h100):
    """Left to itself SGLang takes 1 GiB of an H100 for pixels; and an argument that it does not know is an error."""
    assert on_an_h100["left to SGLang"][0]["mm_feature_transport"] == "cuda_ipc"
    assert "enable_memory_savers" in on_an_h100["misspelt"]


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_and_engines_share_their_nccl_settings(on_an_h100, kind):
    """They are members of one broadcast group, whose buffers both sides must make alike."""

    def settings(environment):
        return {name: value for name, value in environment.items() if name.startswith("NCCL_")}

    engine, rank = settings(on_an_h100[kind][1]), settings(_actor_environment(ClusterConfig()))
    assert (
        engine.items()
        >= rank.items()
        >= {"NCCL_CUMEM_ENABLE": "0", "NCCL_NVLS_ENABLE": "0"}.items()
    )
    # Of graphs, which the ranks don't capture.
    assert set(engine) - set(rank) <= {"NCCL_GRAPH_REGISTER"}
