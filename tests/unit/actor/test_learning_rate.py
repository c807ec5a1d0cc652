"""The learning rate over a run: warm-up, schedule, and the decay at its end."""

import pytest
import torch

from rlinf_vl.actor.optimizer import make_scheduler
from rlinf_vl.config.schema import OptimConfig


def rates(total: int, done: int = 0, **settings) -> list[float]:
    """Return the learning rate of each step of a run, of which `done` steps were taken before."""
    optim = OptimConfig(lr=2.0, **settings)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=optim.lr)
    schedule = make_scheduler(optimizer, optim, total=total)
    if done:  # as a trainer that loads a checkpoint
        schedule = make_scheduler(optimizer, optim, total=total, done=done)
    made = []
    for _ in range(done, total):
        made.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return made


def test_a_constant_rate_falls_in_the_last_steps():
    made = rates(8, lr_warmup_steps=1, lr_cooldown_steps=4)
    assert made == pytest.approx([1.0, 2.0, 2.0, 2.0, 2.0, 1.5, 1.0, 0.5])
    assert rates(8, 5, lr_warmup_steps=1, lr_cooldown_steps=4) == pytest.approx(made[5:])


def test_it_falls_to_the_smallest_rate_and_no_schedule_is_raised():
    assert rates(4, lr_cooldown_steps=2, min_lr_ratio=0.5) == pytest.approx([2.0, 2.0, 2.0, 1.5])
    linear = rates(6, lr_scheduler="linear")
    assert rates(6, lr_scheduler="linear", lr_cooldown_steps=2) == pytest.approx(linear)


def test_a_run_shorter_than_its_end_never_has_the_peak():
    assert rates(2, lr_warmup_steps=30, lr_cooldown_steps=80)[1] == pytest.approx(2.0 / 80)
