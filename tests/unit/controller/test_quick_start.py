"""What the processes of a run import: each only what it needs, since transformers and FSDP take seconds."""

import json
import subprocess
import sys

import pytest

from rlinf_vl.config import load_config
from rlinf_vl.controller.trajectory_writer import image_token
from rlinf_vl.models.families import family_of


@pytest.mark.slow
@pytest.mark.parametrize(
    ("imported", "slow"),
    [
        ("rlinf_vl.controller.remote_writer", {"torch", "transformers", "datasets"}),
        (
            "rlinf_vl.driver.supervise",
            {"transformers", "sympy", "torch.distributed.fsdp", "datasets", "pandas"},
        ),
        (
            "rlinf_vl.extras.sft.supervise",
            {"transformers", "sympy", "torch.distributed.fsdp", "datasets", "pandas"},
        ),
        (
            "rlinf_vl.extras.eval.evaluate",
            {"transformers", "sympy", "torch.distributed.fsdp", "datasets", "pandas"},
        ),
        ("rlinf_vl.tools.memory.automatic", {"torch", "transformers"}),
        ("rlinf_vl.extras.toy.checkpoint", {"torch", "transformers"}),
    ],
)
def test_it_starts_without_what_takes_seconds_to_import(imported, slow):
    command = f"import sys, {imported}; sys.exit(', '.join({slow} & set(sys.modules)) or 0)"
    done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_placeholder_of_images_is_the_checkpoints(toy_folder):
    """Told from config.json, without the family; which says the same."""
    from transformers import AutoTokenizer

    found = image_token(load_config("toy-grpo-cpu"), str(toy_folder))
    assert found == json.loads((toy_folder / "config.json").read_text())["image_token_id"]
    family = family_of("auto", toy_folder)
    assert (
        AutoTokenizer.from_pretrained(toy_folder).convert_ids_to_tokens(found) == family.image_token
    )


def test_a_checkpoint_that_does_not_say_has_its_familys_placeholder(tmp_path):
    from tiny import tiny_model

    tiny_model(family="qwen3").config.save_pretrained(tmp_path)
    assert image_token(load_config("toy-grpo-cpu"), str(tmp_path)) == family_of("qwen3").image_token
