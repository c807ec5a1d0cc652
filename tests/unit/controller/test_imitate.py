"""The loop of supervised training on readers and a learner in memory: the same numbers after a stop, a loss or a resume."""

import math
import signal

import pytest
from unit.controller.fakes import FakeLearner, FakeRun, number, summary

from rlinf_vl.controller.loop import TooManyBadSteps
from rlinf_vl.data.bad_rows import TooManyBadRows
from rlinf_vl.data.unusable import BadRow
from rlinf_vl.errors import RunError
from rlinf_vl.extras.sft.imitate import imitate
from rlinf_vl.runtime.ray_process import ActorsLost
from rlinf_vl.runtime.stop_request import Interrupted

SKIPPED = {"actor/skipped_steps": 1.0, "actor/grad_norm": math.inf}


class FakeReaders:
    """Answers in memory; groups of the names in `unreadable` come as records of bad rows."""

    restarts = turnover = 0

    def __init__(self, unreadable: frozenset[str] = frozenset()) -> None:
        self.unreadable = unreadable
        self.begun: list[tuple[str, dict[str, int]]] = []
        self.alive: set[str] = set()

    def begin(self, split, rows):
        self.begun.append((split, dict(rows)))
        return split, rows

    def result(self, pending):
        split, rows = pending
        self.alive |= rows.keys() - self.unreadable
        return [
            BadRow("image missing", f"{split}:{row}", "no file x.png")
            if name in self.unreadable
            else (summary(name, f"{split}:{row}", [0.0], tokens=[6 + row]), f"{name} of {row}")
            for name, row in rows.items()
        ]

    def release(self, summaries):
        gone = {s.id for s in summaries}
        assert gone <= self.alive, f"released twice: {gone - self.alive}"
        self.alive -= gone

    def entries(self):
        return []


class FakeImitator(FakeLearner):
    """Also has a loss on rows that it does not train on, which depends on the rows and on its weight."""

    def total_loss(self, minibatch):
        items = [item for rank in minibatch for items in rank.micro_batches for item in items]
        rows = sorted(self.fetched[item.group].split()[-1] for item in items)
        return sum(number(row, self.weight) for row in rows), len(items)


class Sft(FakeRun):
    def __init__(self, run_dir, *overrides, readers=None, learner=None) -> None:
        super().__init__(run_dir, *overrides, learner=learner or FakeImitator())
        self.readers = readers or FakeReaders()

    def train(self):
        return imitate(
            self.config,
            self.readers,
            self.learner,
            self.data,
            self.run_dir,
            self.stop,
            log=self.log,
        )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    run = Sft(tmp_path_factory.mktemp("undisturbed"))
    run.train()
    return run


def test_each_row_of_an_epoch_is_trained_once_and_nothing_stays_stored(undisturbed):
    trained = [rows for split, rows in undisturbed.readers.begun if split == "train"]
    assert [list(rows) for rows in trained][0] == [f"train-1-{k}" for k in range(4)]
    rows = [row for batch in trained for row in batch.values()]
    assert len(rows) == len(set(rows)) == 6 * 4
    assert not undisturbed.readers.alive
    assert undisturbed.checkpoints() == [3, 6]
    metrics = undisturbed.metrics()
    assert [step for step in metrics if "val/loss" in metrics[step]] == [0, 2, 4, 6]
    assert all(metrics[step]["val/tokens"] == 8 for step in (0, 2, 4, 6))


@pytest.mark.parametrize("step", range(1, 7))
def test_a_run_that_is_stopped_and_resumed_has_the_metrics_of_one_that_was_not(
    undisturbed, tmp_path, step
):
    def strike(now):
        if now == step:
            run.stop.number = signal.SIGTERM

    run = Sft(tmp_path, learner=FakeImitator(strike))
    if step < 6:
        with pytest.raises(Interrupted):
            run.train()
        assert run.checkpoints()[-1] == step
    else:
        run.train()
    again = Sft(tmp_path)
    again.train()
    assert again.metrics() == undisturbed.metrics()
    assert again.learner.weight == undisturbed.learner.weight


@pytest.mark.parametrize("step", range(1, 7))
def test_a_run_whose_learner_is_lost_goes_back_and_ends_the_same(undisturbed, tmp_path, step):
    def strike(now):
        if now == step:
            raise ActorsLost("actor rank 1 died")

    run = Sft(tmp_path, learner=FakeImitator(strike))
    with pytest.raises(ActorsLost):
        run.train()
    run.learner = FakeImitator()
    run.train()
    assert run.metrics() == undisturbed.metrics()


def test_conversations_that_died_with_their_reader_are_read_again_in_place(undisturbed, tmp_path):
    learner = FakeImitator()
    learner.lost = [[], [], [1, 3]]  # two batches of the validation, then step 1
    run = Sft(tmp_path, learner=learner)
    run.train()
    lost = [rows for _, rows in run.readers.begun if len(rows) == 2]
    (first,) = [rows for _, rows in run.readers.begun if "train-1-0" in rows]
    assert lost == [{name: first[name] for name in ("train-1-1", "train-1-3")}]
    assert run.events("groups_lost") == [("groups_lost", 1)]
    assert run.metrics() == undisturbed.metrics()


def test_a_row_that_can_not_be_read_any_more_is_recorded_and_left_out(tmp_path):
    readers = FakeReaders(frozenset({"train-2-1"}))
    run = Sft(tmp_path, "data.max_bad_rows=0.1", readers=readers)
    run.train()
    assert [len(groups) for groups in run.learner.trained] == [4, 3, 4, 4, 4, 4]
    (row,) = run.rows("bad_rows")
    assert (row["step"], row["split"], row["reason"]) == (2, "train", "no file x.png")
    assert run.metrics()[2]["data/bad_rows"] == 1 and not readers.alive


@pytest.mark.parametrize(
    "names, error, message",
    [
        ({"train-2-0", "train-2-1"}, TooManyBadRows, "2 of the 40 rows of train are bad"),
        ({f"train-2-{k}" for k in range(4)}, RunError, "step 2: none of 4 rows can be read"),
    ],
)
def test_too_many_rows_that_can_not_be_read_end_the_run(tmp_path, names, error, message):
    share = 0.04 if error is TooManyBadRows else 1
    readers = FakeReaders(frozenset(names))
    with pytest.raises(error, match=message):
        Sft(tmp_path, f"data.max_bad_rows={share}", readers=readers).train()


def test_gradients_that_are_not_finite_end_the_run(tmp_path):
    run = Sft(tmp_path, learner=FakeImitator(lambda step: SKIPPED if step > 1 else None))
    with pytest.raises(TooManyBadSteps, match="3 steps in a row"):
        run.train()


def test_the_checkpoint_with_the_lowest_loss_is_kept(tmp_path):
    overrides = ["runner.save_interval=2", "runner.keep_best=1", "runner.keep_last=1"]
    run = Sft(tmp_path, *overrides)
    run.train()
    losses = {step: run.metrics()[step]["val/loss"] for step in (2, 4, 6)}
    assert set(run.checkpoints()) == {6, min(losses, key=lambda step: losses[step])}
    assert len(set(losses.values())) == 3
