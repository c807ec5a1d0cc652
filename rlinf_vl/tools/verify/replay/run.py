"""A replay: the three implementations of a recorded step, their bounds, and where they part."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch

from rlinf_vl.config.schema import Config
from rlinf_vl.models.loading import DTYPES
from rlinf_vl.observe.replay_file import RecordedStep
from rlinf_vl.tools.verify.replay.bounds import UNITS, Bounds
from rlinf_vl.tools.verify.replay.compare import Agreement, compare, first_difference
from rlinf_vl.tools.verify.replay.forced import ForcedStep
from rlinf_vl.tools.verify.replay.hooks import split_embeddings
from rlinf_vl.tools.verify.replay.inputs import input_traces
from rlinf_vl.tools.verify.replay.plain import PlainStep, left_out, plain_adamw
from rlinf_vl.tools.verify.replay.quantities import PARTS, Owner, Quantity, Trace
from rlinf_vl.tools.verify.replay.subject import Subject
from rlinf_vl.tools.verify.replay.trained import TrainedStep, process_group
from rlinf_vl.weights.buckets import fingerprint

#: Runs of the plain code with errors.
NUDGES = (1, 2)
#: Names of the implementations, and of what the file says of the run.
PLAIN, TRAINER, ENGINE, RUN = "plain", "trainer", "engine", "run"
TRANSFORMERS = "transformers"
#: Largest difference of a pixel between two image processors' arithmetic, of values within ±2.
PIXEL_BOUND = 1e-5


@dataclass
class Outcome:
    """The outcome of a replay.

    Attributes:
        agreements: each quantity of each pair of sides, in order of computation.
        left_out: settings whose formulas the plain update lacks.
        failures: implementations that raised an error, with its message.
        traces: of each implementation, for whoever looks further.
        run_gap: the largest difference between the logprobs of the run's own engine and trainer;
            None where they were not both recorded.
    """

    agreements: list[Agreement] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    traces: dict[str, Trace] = field(default_factory=dict)
    run_gap: float | None = None

    @property
    def first(self) -> Agreement | None:
        return first_difference(self.agreements)

    @property
    def sound(self) -> bool:
        return self.first is None and not self.failures


class Replay:
    """Replays recorded steps of one model.

    Attributes:
        bounds: by dtype; measured by the first replay, unless they are given.
    """

    def __init__(
        self,
        subject: Subject,
        config: Config,
        bounds: Mapping[torch.dtype, Bounds] | None = None,
    ) -> None:
        self.subject = subject
        self.config = config
        self.left_out = left_out(config)
        self.bounds = dict(bounds or {})

    def __call__(self, step: RecordedStep) -> Outcome:
        """Run a step in all implementations, and compare."""
        outcome = Outcome(left_out=self.left_out)
        ours, reference = input_traces(self.subject, step)
        outcome.agreements = compare(
            (RUN, TRANSFORMERS),
            ours,
            reference,
            lambda quantity, _: 0.0 if quantity.exact else PIXEL_BOUND,
        )
        # With other inputs, every later quantity differs, or can't be computed.
        if outcome.first is not None:
            return outcome
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            with process_group():
                self._run(step, outcome)
        finally:
            torch.set_num_threads(threads)
        outcome.agreements.sort(key=lambda agreement: agreement.quantity)
        return outcome

    def _run(self, step: RecordedStep, outcome: Outcome) -> None:
        config = self.config
        train_dtype = DTYPES[config.actor.fsdp_config.mixed_precision.param_dtype]
        engine_dtype = DTYPES[config.rollout.model.precision]
        with_update = not self.left_out
        trained = TrainedStep(self.subject, step, config)
        engine_trace = trainer_trace = Trace()
        with _noted(outcome, TRAINER):
            trained.start()
        if TRAINER not in outcome.failures:
            with _noted(outcome, ENGINE):
                engine_trace = self._engine(step, trained, engine_dtype)
            with _noted(outcome, TRAINER):
                trained.run(with_update)
            trainer_trace = trained.trace
        for trace in (trainer_trace, engine_trace):
            split_embeddings(trace, self.subject.image_tokens, step)
        routes = {TRAINER: take_routes(trainer_trace), ENGINE: take_routes(engine_trace)}
        plain: dict[str, Trace] = {}
        for side, dtype in ((TRAINER, train_dtype), (ENGINE, engine_dtype)):
            same = side == ENGINE and dtype == train_dtype and not routes[side]
            plain[side] = (
                plain[TRAINER]
                if same
                else self._plain(step, dtype, routes[side], with_update=with_update)
            )
            if dtype not in self.bounds:
                self.bounds[dtype] = Bounds(
                    plain[side],
                    [self._plain(step, dtype, routes[side], n, with_update) for n in NUDGES],
                    dtype,
                )
        self._put_weights(step, plain[ENGINE], engine_dtype)
        run_trace = self._recorded_rollout(step, plain[ENGINE])
        outcome.traces = {
            TRAINER: trainer_trace,
            ENGINE: engine_trace,
            PLAIN: plain[TRAINER],
            RUN: run_trace,
        }
        outcome.run_gap = run_gap(step)
        bounds = self.bounds[train_dtype].of
        outcome.agreements += compare((TRAINER, PLAIN), trainer_trace, plain[TRAINER], bounds)
        outcome.agreements += compare(
            (ENGINE, PLAIN), engine_trace, plain[ENGINE], self.bounds[engine_dtype].of
        )
        outcome.agreements += compare(
            (RUN, PLAIN), run_trace, plain[ENGINE], self.bounds[engine_dtype].of
        )
        outcome.agreements += compare(
            (RUN, PLAIN), self._recorded_training(step), plain[TRAINER], bounds
        )
        outcome.agreements += self._optimizer(trained, trainer_trace)

    def _plain(
        self,
        step: RecordedStep,
        dtype: torch.dtype,
        routes: Mapping[tuple[int, Owner], np.ndarray],
        nudge: int | None = None,
        with_update: bool = True,
    ) -> Trace:
        plain = PlainStep(self.subject, step, self.config, dtype, nudge, routes, with_update)
        trace = plain.run()
        split_embeddings(trace, self.subject.image_tokens, step)
        return trace

    def _engine(self, step: RecordedStep, trained: TrainedStep, dtype: torch.dtype) -> Trace:
        """Run the torch engine with the weights that the trainer sends it."""
        temperature = self.config.algorithm.sampling_params.temperature
        engine = ForcedStep(self.subject, step, temperature, dtype)
        with torch.no_grad():
            sent_weights = list(trained.trainer.weights(dtype))
        names = [
            name
            for name, weight in trained.trainer.policy.model.named_parameters()
            if weight.requires_grad
        ]
        return engine.run(sent_weights, names)

    def _put_weights(self, step: RecordedStep, trace: Trace, dtype: torch.dtype) -> None:
        """Put the weights that an engine must have into a trace."""
        quantity = Quantity.of("engine weights")
        for name, weight in self.subject.weights.items():
            stays_float32 = self.subject.family.stays_float32(name)
            cast = weight.to(torch.float32 if stays_float32 else dtype)
            trace.put(quantity, name, cast.float().numpy())
            if name in step.engine_weights:
                trace.put(quantity, f"{name} (fingerprint)", np.array([fingerprint([cast])]))

    def _recorded_rollout(self, step: RecordedStep, plain: Trace) -> Trace:
        """Return what the run's engine had: its weights, and the logprobs of the tokens that it
        sampled with the weights before the step."""
        trace, quantity = Trace(), Quantity.of("rollout logprobs")
        for name, value in step.engine_weights.items():
            trace.put(Quantity.of("engine weights"), f"{name} (fingerprint)", np.array([value]))
        for owner, computed in plain.get(quantity).items():
            g, i, k = owner
            trajectory = step.groups[int(g)].trajectories[int(i)]
            sequence = trajectory.sequences[int(k)]
            if sequence.logprobs is None or trajectory.corrupted:
                continue
            mask = sequence.loss_mask
            fresh = sequence.versions[mask] == step.version
            trace.put(quantity, owner, np.where(fresh, sequence.logprobs[mask], computed))
        return trace

    def _recorded_training(self, step: RecordedStep) -> Trace:
        """Return what the run's trainer had: old logprobs, and the metrics of the step."""
        trace = Trace()
        for (g, i), logprobs in step.train_logprobs.items():
            trace.put(Quantity.of("old logprobs"), (g, i, 0), logprobs)
        metrics = {"loss": "actor/loss", "gradient norm": "actor/grad_norm"}
        if step.is_whole and len(step.minibatches) == 1 and not step.random_weights:
            for stage, name in metrics.items():
                if name in step.metrics:
                    trace.put(Quantity.of(stage), "", np.array([step.metrics[name]]))
        return trace

    def _optimizer(self, trained: TrainedStep, trace: Trace) -> list[Agreement]:
        """Compare the weights after the step with AdamW by hand on the trainer's own gradient: one
        near 0 has any sign by rounding alone, and AdamW's step has its sign."""
        quantity, expected = Quantity.of("weight after the step"), Trace()
        limits: dict[Owner, float] = {}
        for name, weight, gradient, lr in trained.optimizer_inputs():
            expected.put(quantity, name, plain_adamw(name, weight, gradient, lr, self.config))
            largest = float(np.abs(weight).max(initial=0.0))
            limits[name] = UNITS * 2.0**-23 * largest + 1e-5 * lr
        trained_weights = Trace({quantity: dict(trace.get(quantity))})
        return compare((TRAINER, PLAIN), trained_weights, expected, lambda _, owner: limits[owner])


def run_gap(step: RecordedStep) -> float | None:
    """Return the largest difference between the run's engine and its trainer in the logprobs of
    tokens that were sampled with the weights before the step; None without such tokens."""
    gaps = []
    for (g, i), train_logprobs in step.train_logprobs.items():
        trajectory = step.groups[g].trajectories[i]
        sequence = trajectory.sequences[0]
        n_trained = int(sequence.loss_mask.sum())
        if sequence.logprobs is None or trajectory.corrupted or len(train_logprobs) != n_trained:
            continue
        gap = np.abs(sequence.logprobs[sequence.loss_mask] - train_logprobs)
        gaps += gap[sequence.versions[sequence.loss_mask] == step.version].tolist()
    return max(gaps, default=None)


def take_routes(trace: Trace) -> dict[tuple[int, Owner], np.ndarray]:
    """Return the experts of a trace by layer and sequence, and put zeros in their place: the plain
    code uses them, and says how much less likely they are than its own."""
    routes = {}
    for quantity in trace:
        if PARTS[quantity.part] == "experts":
            for owner, experts in trace.values[quantity].items():
                routes[quantity.layer, owner] = experts
                trace.values[quantity][owner] = np.zeros(len(experts))
    return routes


@contextmanager
def _noted(outcome: Outcome, side: str) -> Iterator[None]:
    """Note an error of an implementation in the outcome: it is a finding of the replay."""
    try:
        yield
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        outcome.failures[side] = text.strip().splitlines()[0][:400]
