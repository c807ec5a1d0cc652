"""Python that a run's folder brings along is executed by none of its readers unless its user says so."""

import json
import pickle
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from omegaconf import OmegaConf
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

import rlinf_vl
from rlinf_vl.__main__ import main
from rlinf_vl.config import save_config
from rlinf_vl.config.load import parse_config
from rlinf_vl.errors import ConfigError, RunError
from rlinf_vl.extras.eval.config import evaluation_config
from rlinf_vl.extras.export.export import export_checkpoint, refuse_pickled_code
from rlinf_vl.extras.export.run_code import code_of_run
from rlinf_vl.models.families import family_of
from rlinf_vl.models.loading import load_model
from rlinf_vl.runtime.checkpoints import save_checkpoint

FAMILY = """
from pathlib import Path
from rlinf_vl.models.families import FAMILIES
FAMILY = FAMILIES["qwen3_vl"]
Path({marker!r}).write_text("executed")
"""


@pytest.fixture
def marker(tmp_path):
    return tmp_path / "executed"


@pytest.fixture
def overrides(toy_folder, marker, tmp_path):
    """Those of a run with a family of its own, in a file that is gone from the disk afterwards."""
    (tmp_path / "family.py").write_text(FAMILY.format(marker=str(marker)))
    return [
        f"rollout.model.model_path={toy_folder}",
        f"rollout.model.model_type={tmp_path / 'family.py'}:FAMILY",
    ]


@pytest.fixture
def folder(overrides, toy_folder, tmp_path):
    """A run's folder with a checkpoint, whose config.yaml brings along the text of that family."""
    config = parse_config("toy-grpo-cpu", overrides)
    model = load_model(str(toy_folder), family_of("auto", toy_folder), torch.float32)
    state = {f"model.{name}": value for name, value in model.state_dict().items()}

    def write(to):
        dcp.save({"model": state}, checkpoint_id=to, no_dist=True)
        return {}

    save_config(config, tmp_path / "run/config.yaml")
    save_checkpoint(tmp_path / "run", 2, write, {"step": 2}, keep_last=-1)
    (tmp_path / "run/metrics.jsonl").write_text(json.dumps({"step": 1, "reward/mean": 0.5}) + "\n")
    (tmp_path / "family.py").unlink()
    return tmp_path / "run"


def readers(folder, output, toy_folder):
    """What loads the model of a folder, by name."""
    own = f"rollout.model.model_path={toy_folder}"
    return {
        "load_policy": lambda: rlinf_vl.load_policy(folder, device="cpu"),
        "load_policy of a Run": lambda: rlinf_vl.load_policy(rlinf_vl.Run(folder), device="cpu"),
        "Run.model_path": lambda: rlinf_vl.Run(folder).model_path,
        "export": lambda: export_checkpoint(folder, output),
        "eval": lambda: evaluation_config("toy-grpo-cpu", [own, f"checkpoint={folder}"], 1, ()),
    }


@pytest.mark.slow
def test_nothing_that_loads_a_folders_model_runs_its_code(folder, marker, toy_folder, tmp_path):
    for name, read in readers(folder, tmp_path / "out", toy_folder).items():
        with pytest.raises(
            ConfigError, match=r"model_type names '.*family.py:FAMILY' .*add --trust-run-code"
        ) as refused:
            read()
        assert str(folder / "config.yaml") in str(refused.value), name
        assert not marker.exists(), name


@pytest.mark.parametrize(
    ("name", "origin"),
    [
        ("/a/b/family.py:F", "runner.code_files"),
        ("b/family.py:F", "runner.code_files"),
        ("/b/family.py:F", "a module or file of this machine"),
        ("installed.family:F", "a module or file of this machine"),
    ],
)
def test_the_origin_that_is_named_is_of_what_loading_executes(name, origin):
    """A path of a run's folder counts as a whole, unless loading, too, looks for its end."""
    config = {
        "rollout": {"model": {"model_type": name}},
        "runner": {"code_files": {"/a/b/family.py": "F = 1"}},
    }
    executed = code_of_run(OmegaConf.create(config))
    assert executed == [f"rollout.model.model_type names {name!r} ({origin})"]


@pytest.mark.slow
def test_the_verbs_refuse_with_exit_code_2(folder, marker, toy_folder, tmp_path, capsys):
    own = f"rollout.model.model_path={toy_folder}"
    for command in (
        ["export", str(folder), str(tmp_path / "out")],
        ["eval", "toy-grpo-cpu", own, f"checkpoint={folder}"],
    ):
        assert main(command) == 2
        assert "--trust-run-code" in capsys.readouterr().err
    assert not marker.exists()


def test_readers_of_texts_run_nothing(folder, marker, capsys):
    assert main(["report", str(folder)]) == 0
    main(["watch", str(folder), "--once"])
    main(["timeline", str(folder)])
    assert not marker.exists()


@pytest.mark.slow
def test_with_consent_it_runs(folder, marker, tmp_path):
    assert main(["export", str(folder), str(tmp_path / "out"), "--trust-run-code"]) == 0
    assert marker.exists() and (tmp_path / "out/model.safetensors").is_file()
    rlinf_vl.load_policy(rlinf_vl.Run(folder, trust_run_code=True), device="cpu").close()
    rlinf_vl.load_policy(folder, device="cpu", trust_run_code=True).close()


@pytest.mark.slow
def test_an_evaluation_that_names_the_same_code_itself_needs_no_consent(
    folder, overrides, marker, toy_folder, tmp_path
):
    (tmp_path / "family.py").write_text(FAMILY.format(marker=str(marker)))
    named = [*overrides, f"checkpoint={folder}"]
    assert evaluation_config("toy-grpo-cpu", named, 1, ())[1] is not None
    (tmp_path / "family.py").write_text("import os\nFAMILY = os.sep\n")
    with pytest.raises(ConfigError, match="--trust-run-code"):
        evaluation_config("toy-grpo-cpu", named, 1, ())


def test_a_folder_can_not_allow_the_code_of_its_base_model(folder, toy_folder, tmp_path):
    config = parse_config("toy-grpo-cpu", ["rollout.model.trust_remote_code=true"])
    config.rollout.model.model_path = str(toy_folder)
    save_config(config, folder / "config.yaml")
    with pytest.raises(ConfigError, match="trust_remote_code is true .the Python files of"):
        export_checkpoint(folder, tmp_path / "out")


class Planted:
    """An object whose unpickling writes a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (exec, (f"open({str(self.path)!r}, 'w').write('executed')",))


def test_weights_whose_metadata_would_run_code_are_refused(folder, marker, tmp_path):
    actor = folder / "checkpoints/global_step_2/actor"
    refuse_pickled_code(actor)
    (actor / ".metadata").write_bytes(pickle.dumps(Planted(marker)))
    with pytest.raises(RunError, match="would run builtins.exec"):
        refuse_pickled_code(actor)
    with pytest.raises(ConfigError):
        rlinf_vl.load_policy(folder, device="cpu")
    assert not marker.exists()
    dcp.save(
        {"model": {"model.weight": Planted(marker)}},
        checkpoint_id=tmp_path / "pickled",
        no_dist=True,
    )
    with pytest.raises(RunError, match="is a pickled object, and not a tensor"):
        refuse_pickled_code(tmp_path / "pickled")


class ByAttribute:
    """Pickled as an attribute of a class, as Python 3.11.0 to 3.11.3 pickle members of enumerations."""

    def __init__(self, owner, name):
        self.attribute = owner, name

    def __reduce__(self):
        return (getattr, self.attribute)


def test_members_of_enumerations_are_read_by_name_and_nothing_else_is(folder):
    """Debian's Python 3.11.2 writes every checkpoint so."""
    path = folder / "checkpoints/global_step_2/actor/.metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.storage_meta = ByAttribute(_MEM_FORMAT_ENCODING, "TORCH_CONTIGUOUS_FORMAT")
    path.write_bytes(pickle.dumps(metadata))
    refuse_pickled_code(path.parent)
    for owner, name in ((_MEM_FORMAT_ENCODING, "mro"), (dict, "fromkeys"), (torch.Size, "numel")):
        metadata.storage_meta = ByAttribute(owner, name)
        path.write_bytes(pickle.dumps(metadata))
        with pytest.raises(RunError, match=r"would run builtins\.(getattr|dict)"):
            refuse_pickled_code(path.parent)


def test_python_of_a_models_folder_is_executed_on_demand_alone(toy_folder, marker, tmp_path):
    copy = tmp_path / "own"
    shutil.copytree(toy_folder, copy)
    (copy / "mine.py").write_text(
        "from pathlib import Path\n"
        "from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration\n\n\n"
        "class Mine(Qwen3VLConfig):\n    pass\n\n\n"
        "class MyModel(Qwen3VLForConditionalGeneration):\n    config_class = Mine\n\n\n"
        f"Path({str(marker)!r}).write_text('executed')\n"
    )
    files = {"AutoConfig": "mine.Mine", "AutoModelForImageTextToText": "mine.MyModel"}
    config = json.loads((copy / "config.json").read_text()) | {"auto_map": files}
    (copy / "config.json").write_text(json.dumps(config))
    rlinf_vl.load_policy(copy)
    assert not marker.exists()
    rlinf_vl.load_policy(copy, trust_run_code=True)
    assert marker.read_text() == "executed"
