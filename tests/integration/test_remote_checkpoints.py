"""Checkpoints in an object store: a real S3 server (moto's, on this machine), through fsspec, as a user would name it."""

import hashlib
import os

import pytest
from integration.test_checkpoint_topology import assert_close, go_on, save_after_one
from moto.server import ThreadedMotoServer
from upath import UPath

from rlinf_vl.config import load_config
from rlinf_vl.errors import ConfigError
from rlinf_vl.runtime.checkpoints import (
    CheckpointFailed,
    checkpoint_at,
    checkpoint_home,
    checkpoints,
    damage,
    find_checkpoint,
    folder_at,
    load_state,
    recover_checkpoints,
    save_checkpoint,
)
from rlinf_vl.runtime.run_folder import open_folder
from rlinf_vl.tools.check.inputs import RULES


@pytest.fixture(scope="module")
def bucket():
    """A URL in an empty bucket; the environment says where its server is, to this process and to those it starts."""
    server = ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    before = dict(os.environ)
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    UPath("s3://runs").mkdir()
    yield "s3://runs/of/me"
    os.environ.clear()
    os.environ.update(before)
    server.stop()


def write(folder: str) -> dict[str, str]:
    (folder_at(folder) / "weights").write_text("w")
    return {"weights": hashlib.sha256(b"w").hexdigest()}


def configured(tmp_path, bucket, *overrides):
    own = [
        f"runner.output_dir={tmp_path}",
        "runner.experiment_name=run",
        f"runner.checkpoint_dir={bucket}/{tmp_path.name}",
    ]
    return load_config("toy-grpo-cpu", [*own, *overrides])


def opened(config, tmp_path, checkpoint=None):
    told: list[str] = []
    return open_folder(
        config, tmp_path / "run", checkpoint, lambda step, kind, message: told.append(message)
    ), told


def test_ranks_write_and_read_a_store(bucket, processes, tmp_path):
    home = folder_at(bucket) / "ranks"
    saved = {}

    def ranks(folder: str) -> dict[str, str]:
        saved["ranks"] = processes.run(2, save_after_one, folder, 1, None)
        return {name: digest for digests, *_ in saved["ranks"] for name, digest in digests.items()}

    folder = save_checkpoint(home, 1, ranks, {"step": 1}, keep_last=2)
    assert str(folder) == f"{bucket}/ranks/checkpoints/global_step_1" and not damage(folder)
    ((read, *_),) = processes.run(1, go_on, str(folder / "actor"), 1, None)
    assert_close(read, saved["ranks"][0][1])
    shard = next(path for path in (folder / "actor").iterdir() if path.name.endswith(".distcp"))
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(bytes(content))
    assert damage(folder) == [f"actor/{shard.name} is not as it was written"]


def test_a_runs_checkpoints_lie_in_a_store_and_the_run_elsewhere(bucket, tmp_path):
    config = configured(tmp_path, bucket)
    opened(config, tmp_path)
    home = checkpoint_home(config, tmp_path / "run")
    assert find_checkpoint(home, "auto") is None
    for step in (2, 4, 6):
        accuracies = {2: 0.5, 4: 0.25}
        save_checkpoint(
            home, step, write, {"step": step}, keep_last=1, keep_best=1, accuracies=accuracies
        )
    assert [step for step, _ in checkpoints(home)] == [2, 6]
    assert sorted(path.name for path in (home / "checkpoints").iterdir()) == [
        "global_step_2",
        "global_step_6",
    ]
    assert not (tmp_path / "run/checkpoints").exists()
    newest = find_checkpoint(home, "auto")
    assert load_state(newest) == {"step": 6}
    assert checkpoint_at(tmp_path / "run") == checkpoint_at(home) == newest
    # a resume on another machine, which has no folder yet
    elsewhere = tmp_path / "elsewhere"
    checkpoint, told = opened(config, elsewhere, newest)
    assert checkpoint == newest and not told
    # another run of the same name leaves it alone
    _, told = opened(config, tmp_path)
    assert len(told) == 2 and not checkpoints(home)
    aside = home.with_name("run.previous-1")
    assert [step for step, _ in checkpoints(aside)] == [2, 6] and (aside / "config.yaml").is_file()


def test_damage_in_a_store_is_refused_and_going_back_sets_the_branch_aside(bucket, tmp_path):
    config = configured(tmp_path, bucket)
    opened(config, tmp_path)
    home = checkpoint_home(config, tmp_path / "run")
    first, second = (
        save_checkpoint(home, step, write, {"step": step}, keep_last=-1) for step in (1, 2)
    )
    (second / "actor/weights").write_text("v")
    with pytest.raises(ConfigError, match=f"global_step_2 is damaged .*runner.resume_dir={first}$"):
        find_checkpoint(home, "auto")
    checkpoint = find_checkpoint(home, str(first))
    _, (told,) = opened(config, tmp_path, checkpoint)
    assert "abandoned-1" in told and [step for step, _ in checkpoints(home)] == [1]
    assert [step for step, _ in checkpoints(home / "abandoned-1")] == [2]


def test_what_a_killed_writer_left_in_a_store_is_no_checkpoint_and_goes(bucket, tmp_path):
    home = folder_at(bucket) / tmp_path.name
    save_checkpoint(home, 1, write, {"step": 1}, keep_last=-1)
    (home / "checkpoints/global_step_2/actor/weights").write_text("half")
    assert [step for step, _ in checkpoints(home)] == [1]
    recover_checkpoints(home)
    assert [path.name for path in (home / "checkpoints").iterdir()] == ["global_step_1"]


def test_a_store_that_fails_fails_the_checkpoint_and_refuses_a_resume(bucket, tmp_path):
    home = folder_at("s3://no-such-bucket/run")
    with pytest.raises(
        CheckpointFailed, match="s3://no-such-bucket/run/checkpoints: .*The last good one is none"
    ):
        save_checkpoint(home, 1, write, {"step": 1}, keep_last=1)
    with pytest.raises(
        ConfigError, match="runner.resume_dir: 's3://runs/nothing' is not a complete checkpoint"
    ):
        find_checkpoint(home, "s3://runs/nothing")
    for url, said in {"nix://a/b": "nix", "gs://a/b": "gcsfs"}.items():
        with pytest.raises(ConfigError, match=f"runner.checkpoint_dir: '{url}'.*{said}"):
            load_config("toy-grpo-cpu", [f"runner.checkpoint_dir={url}"], RULES)
    with pytest.raises(
        ConfigError, match="runner.checkpoint_dir: s3://no-such-bucket/run can't be read.* bucket"
    ):
        recover_checkpoints(home)
