"""A user's loss, advantage and tracker are called once before a run: what fails there is refused in a sentence."""

import pytest

from rlinf_vl.config import load_config
from rlinf_vl.driver import entry
from rlinf_vl.errors import ConfigError
from rlinf_vl.tools.check.trial import algorithm_problems, tracker_problems

CODE = """
import torch
def good(inputs): return -inputs.ratio() * inputs.advantages
def weighs(inputs): return -inputs.ratio() * inputs.advantages * (1 + inputs.columns["novelty"])
def mean(inputs): return (-inputs.ratio() * inputs.advantages).mean()
def detached(inputs): return -inputs.advantages
def roots(inputs): return -inputs.ratio() * (inputs.advantages - 2).sqrt()
def misspells(inputs): return -inputs.ration() * inputs.advantages
def six(logprobs, old_logprobs, advantages, segment_ids, clip_low, clip_high):
    return -(logprobs - old_logprobs).exp() * advantages

def centred(rewards, group_ids, tokens):
    sums = torch.zeros(2).index_add(0, group_ids, rewards.float())
    return rewards - (sums / torch.bincount(group_ids))[group_ids]
def by_difficulty(inputs):
    inputs.log("hard", [row["level"] > 3 for row in inputs.columns])
    return [row["level"] * r for row, r in zip(inputs.columns, inputs.rewards.tolist())]
def by_turn(inputs): return inputs.turn_rewards[inputs.turn_tokens > 0]
def by_token(inputs): return [r.expand(int(n)) for r, n in zip(inputs.rewards, inputs.tokens)]
def short_by_one(inputs): return [r.expand(int(n) - 1) for r, n in zip(inputs.rewards, inputs.tokens)]
def forgets(inputs): return inputs.reward
def of_groups(rewards, group_ids, tokens): return rewards.unique()
def divides(rewards, group_ids, tokens):
    return torch.cat([r / r.std() for r in rewards.split(4)])

class Lines:
    def __init__(self, run): self.file = (run.folder / "lines").open("w")
    def log(self, step, metrics): self.file.write(f"{step} {metrics['reward/mean']:.2f}")
    def log_samples(self, step, split, samples): pass
    def close(self): self.file.close()
class Asks(Lines):
    def log(self, step, metrics): self.run_id += 1
def opens(run): return Lines(run)
def asks(run): return Asks(run)
"""


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    file = tmp_path_factory.mktemp("code") / "mine.py"
    file.write_text(CODE)
    return load_config("toy-grpo-cpu", [f"algorithm.loss_type={file}:good"])


def code(config, name: str) -> str:
    """A name of the user's file as a config has it."""
    (path,) = config.runner.code_files
    return f"{path}:{name}"


@pytest.mark.parametrize(
    ("key", "name", "expected"),
    [
        *(("loss_type", name, "") for name in ("good", "weighs", "six")),
        ("loss_type", "mean", "must return the loss of each token, a tensor of shape (8,); returned ()"),
        ("loss_type", "detached", "its result has no gradient: compute it from inputs.logprobs"),
        ("loss_type", "roots", "its values or gradients are not finite"),
        ("loss_type", "misspells", "AttributeError: 'LossInputs' object has no attribute 'ration'"),
        *(("adv_type", name, "") for name in ("grpo", "centred", "by_difficulty", "by_turn", "by_token")),
        ("adv_type", "short_by_one", "must return 8 numbers, one for each trajectory, or a list with a tensor"),
        ("adv_type", "forgets", "AttributeError: 'EstimatorInputs' object has no attribute 'reward'"),
        ("adv_type", "of_groups", "must return 8 finite numbers, one for each reward; returned"),
        ("adv_type", "divides", "must return 8 finite numbers, one for each reward; returned"),
    ],
)  # fmt: skip
def test_a_loss_and_an_advantage_are_called_on_two_answers(
    config, monkeypatch, key, name, expected
):
    monkeypatch.setattr(config.algorithm, key, name if name == "grpo" else code(config, name))
    text = "".join(algorithm_problems(config))
    assert expected in text and bool(expected) == bool(text), text
    assert not text or text.startswith(f"algorithm.{key}: ") and "failed on two answers" in text


def test_a_check_refuses_them_before_anything_else_is_tried(config, monkeypatch):
    monkeypatch.setattr(config.algorithm, "loss_type", code(config, "mean"))
    with pytest.raises(ConfigError, match="algorithm.loss_type: .*mine.py:mean failed on two"):
        entry.rehearse(config)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("opens", ""), ("asks", "failed: AttributeError: 'Asks' object has no attribute 'run_id'")],
)
def test_a_tracker_is_opened_written_to_and_closed(config, monkeypatch, name, expected):
    monkeypatch.setattr(
        config.runner.logger, "logger_backends", ["tensorboard", code(config, name)]
    )
    text = "".join(tracker_problems(config))
    assert expected in text and bool(expected) == bool(text), text
