"""A run's parts, started and started again, with a pool and learners in memory."""

import io
import json
import signal

import pytest
from rich.console import Console
from unit.controller.fakes import FakeLearner, FakePool, FakeRun, fake_config

from rlinf_vl.config.placement import Placement
from rlinf_vl.driver import ray_parts, restarts
from rlinf_vl.driver.ray_parts import RayParts
from rlinf_vl.driver.restarts import TooManyRestarts
from rlinf_vl.driver.supervise import supervise
from rlinf_vl.observe.progress import RunProgress
from rlinf_vl.runtime.launch import Reservation
from rlinf_vl.runtime.nodes import WorkerPlacement
from rlinf_vl.runtime.ray_process import ActorsLost
from rlinf_vl.runtime.stop_request import Interrupted, StopRequest

PLACEMENT = Placement(actor=(0, 1), engines=((0,),), nodes=(2,))
RESERVATION = Reservation(
    "cpu", actor=({}, {}), rollout=(WorkerPlacement({}),), placement=PLACEMENT
)


class FakeSync:
    """`WeightSync`. `strike(version)` is called in each sync, which is `busy` for ever if that raises."""

    strike = staticmethod(lambda version: None)

    def __init__(self, way, learner, pool, **_):
        assert way.name == (
            "shared_memory" if len(learner.ranks) == 2 else "object_store"
        ) and learner.told == ["start"]
        self.learner, self.pool, self.busy = learner, pool, False

    def begin(self, version): ...

    def __call__(self, version):
        self.busy = True
        self.strike(version)
        self.pool.weight = self.learner.weight
        self.pool.versions.append(version)
        self.busy = False
        return {}


class Started:
    """A run from its begin, and everybody who took part."""

    def __init__(
        self, monkeypatch, folder, *overrides, strike=lambda step: None, sync=lambda version: None
    ):
        self.folder, self.stop = folder, StopRequest()
        self.config = fake_config(folder, *overrides)
        self.pool, self.learners = FakePool(), []
        self.strike = strike
        monkeypatch.setattr(ray_parts, "RolloutPool", lambda *_, **__: self.pool)
        for module in (ray_parts, restarts):
            monkeypatch.setattr(module, "ActorGroup", self.learner)
        monkeypatch.setattr(FakeSync, "strike", staticmethod(sync))
        monkeypatch.setattr(ray_parts, "WeightSync", FakeSync)
        monkeypatch.setattr(restarts, "find_lost", lambda seats: [])

    def learner(self, _config, _path, _device, seats):
        self.learners.append(FakeLearner(self.strike))
        self.learners[-1].ranks = list(seats)
        return self.learners[-1]

    def __call__(self):
        progress = RunProgress(console=Console(file=io.StringIO()))
        parts = RayParts(self.config, "", self.folder, progress, self.stop, RESERVATION)
        with parts:
            return supervise(parts)

    def events(self):
        path = self.folder / "events.jsonl"
        return [
            (row["kind"], row["step"]) for row in map(json.loads, path.read_text().splitlines())
        ]


def once(*steps):
    """Strikes in each of these steps, one time each."""
    left = list(steps)

    def strike(step):
        if step in left:
            left.remove(step)
            raise ActorsLost(f"actor rank 1 died in {step}")

    return strike


@pytest.fixture
def undisturbed(monkeypatch, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    Started(monkeypatch, folder)()
    return FakeRun(folder).metrics()


def test_a_run_starts_trains_and_ends_its_parts(monkeypatch, tmp_path, caplog):
    run = Started(monkeypatch, tmp_path)
    with caplog.at_level("INFO"):
        metrics = run()
    assert metrics["val/accuracy"] == FakeRun(tmp_path).rows()[-1]["val/accuracy"]
    assert run.pool.told == ["stop", "close"] and [learner.told for learner in run.learners] == [
        ["start", "stop"]
    ]
    assert json.loads((tmp_path / "baselines.json").read_text()) == {"always 0": 3 / 8}
    assert "training to step 6" in caplog.text and run.stop.graceful


def test_lost_learners_are_replaced_and_the_run_ends_as_if_nothing_had_been(
    monkeypatch, tmp_path, undisturbed
):
    """In step 2 there is no checkpoint yet; in step 5, that of step 3."""
    run = Started(monkeypatch, tmp_path, strike=once(2, 5))
    run()
    assert FakeRun(tmp_path).metrics() == undisturbed
    assert [learner.told for learner in run.learners] == [["start", "kill"]] * 2 + [
        ["start", "stop"]
    ]
    assert run.pool.told == ["forget weights", "forget weights", "stop", "close"]
    assert run.pool.versions == [1, 0, 1, 2, 3, 4, 3, 4, 5, 6]
    assert run.events() == [("actors_restarted", 2), ("actors_restarted", 5), ("resumed", 3)]


def test_engines_that_may_wait_for_weights_are_replaced(monkeypatch, tmp_path, undisturbed):
    run = Started(monkeypatch, tmp_path, sync=once(4))
    run()
    assert run.pool.told == ["forget weights", "replace all", "stop", "close"]
    assert FakeRun(tmp_path).metrics() == undisturbed


def test_a_learner_that_dies_while_it_goes_back_counts_as_another_restart(
    monkeypatch, tmp_path, undisturbed
):
    run = Started(monkeypatch, tmp_path, strike=once(2), sync=once(0))
    run()
    assert run.events() == [("actors_restarted", 2), ("actors_restarted", 0)]
    assert FakeRun(tmp_path).metrics() == undisturbed


@pytest.mark.parametrize("way", ["wait", "shrink"])
def test_a_run_that_has_lost_a_node_waits_or_shrinks(monkeypatch, tmp_path, undisturbed, way):
    """Ray notices it late: when the ranks that start again have waited for a while."""
    run = Started(monkeypatch, tmp_path, f"cluster.on_node_loss={way}", strike=once(5))
    looks = iter([[], [1], [1], [1]])
    monkeypatch.setattr(
        restarts, "find_lost", lambda seats: next(looks, []) if len(seats) == 2 else []
    )
    monkeypatch.setattr(restarts, "POLL_S", 0.0)
    monkeypatch.setattr(FakeLearner, "placed", lambda learner, interrupted: not interrupted())
    run()
    assert FakeRun(tmp_path).metrics() == undisturbed
    told = [learner.told for learner in run.learners]
    assert told == [["start", "kill"], ["kill"], ["start", "stop"]]
    assert len(run.learners[-1].ranks) == {"wait": 2, "shrink": 1}[way]
    kind = {"wait": "node_lost", "shrink": "run_shrunk"}[way]
    assert run.events() == [("actors_restarted", 5), (kind, 5), ("resumed", 3)]


def test_a_run_that_waits_for_a_node_can_be_stopped(monkeypatch, tmp_path):
    run = Started(monkeypatch, tmp_path, strike=once(5))

    def lost(seats):
        run.stop.number = signal.SIGTERM
        return [0, 1]

    monkeypatch.setattr(restarts, "find_lost", lost)
    monkeypatch.setattr(restarts, "POLL_S", 0.0)
    with pytest.raises(Interrupted):
        run()
    assert run.events()[-1] == ("node_lost", 5)


def test_learners_that_keep_dying_end_the_run(monkeypatch, tmp_path):
    monkeypatch.setattr(restarts, "MAX_RESTARTS", 2)
    run = Started(monkeypatch, tmp_path, strike=once(4, 4, 4))
    with pytest.raises(
        TooManyRestarts,
        match="rank 1 died in 4.*2 times before .*global_step_3.*runner.resume_dir=auto",
    ):
        run()
    # No worker is replaced from then on: Ray ends next.
    assert run.pool.told.count("stop") == 0 and run.pool.told[-1] == "close"
    assert len(run.learners) == 3


def test_ranks_that_never_begin_are_killed_and_started_again(monkeypatch, tmp_path, undisturbed):
    lost = iter([ActorsLost("actor rank 0: it did not begin within 300 s")])

    def placed(learner, interrupted):
        for error in lost:
            raise error
        return True

    monkeypatch.setattr(FakeLearner, "placed", placed)
    run = Started(monkeypatch, tmp_path, strike=once(2))
    run()
    assert FakeRun(tmp_path).metrics() == undisturbed
    told = [learner.told for learner in run.learners]
    assert told == [["start", "kill", "kill"], ["kill"], ["start", "stop"]]


def test_restarts_are_counted_anew_from_each_checkpoint(monkeypatch, tmp_path, undisturbed):
    monkeypatch.setattr(restarts, "MAX_RESTARTS", 2)
    run = Started(monkeypatch, tmp_path, strike=once(2, 2, 4, 5))
    run()
    assert FakeRun(tmp_path).metrics() == undisturbed and len(run.learners) == 5


def test_ranks_that_die_while_a_run_starts_are_replaced(monkeypatch, tmp_path, undisturbed):
    starts = iter([ActorsLost("actor rank 0 died")])

    def start(learner, total_steps):
        for lost in starts:
            raise lost
        learner.told.append("start")

    monkeypatch.setattr(FakeLearner, "start", start)
    run = Started(monkeypatch, tmp_path)
    run()
    assert FakeRun(tmp_path).metrics() == undisturbed
    assert [learner.told for learner in run.learners] == [["kill"], ["start", "stop"]]


def test_a_run_that_is_told_to_stop_ends_its_parts(monkeypatch, tmp_path):
    run = Started(
        monkeypatch, tmp_path, strike=lambda step: setattr(run.stop, "number", signal.SIGTERM)
    )
    with pytest.raises(Interrupted):
        run()
    assert run.pool.told == ["stop", "close"] and run.learners[0].told == ["start", "stop"]
    assert run.events()[-1] == ("interrupted", 1)
