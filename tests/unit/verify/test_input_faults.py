"""Faults in the inputs of a step, against transformers' chat template and image processor, on the toy's own files."""

from dataclasses import replace

import numpy as np
import pytest
from recorded_step import tiny_run

from rlinf_vl.models.families import family_of
from rlinf_vl.models.processing import Processor
from rlinf_vl.observe.replay_file import PlannedMiniBatch, RecordedStep
from rlinf_vl.rollout.episode.renderer import Renderer
from rlinf_vl.tools.verify.prove.problems import answered
from rlinf_vl.tools.verify.prove.prompts import Picture
from rlinf_vl.tools.verify.replay.inputs import input_traces
from rlinf_vl.tools.verify.replay.run import Replay
from rlinf_vl.tools.verify.replay.subject import Subject, subject_of
from rlinf_vl.types import Request, Sample, SamplingParams


@pytest.fixture(scope="module")
def step(toy_folder) -> RecordedStep:
    """A step with one group about two pictures of different sizes."""
    processor = Processor(toy_folder, family_of("auto", toy_folder))
    pictures = [Picture(0).ref, Picture(1).ref]
    parts = [{"type": "image_url", "image_url": {"url": picture.url}} for picture in pictures]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": "area?"}]}]
    ids, grids = Renderer(processor).prompt(messages, pictures)
    request = Request(ids, tuple(pictures), grids, SamplingParams(), (0,))
    sample = Sample(ids[-3:], np.full(3, -1, np.float32), np.zeros(3, np.int32), "stop")
    return RecordedStep(
        1, "", (answered(request, [sample], "g0"),), (PlannedMiniBatch((((0, 0),),), 3),), (((0.5,),),),
        messages={0: messages}, model_path=str(toy_folder), is_whole=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def subject(step) -> Subject:
    return subject_of(step, tiny_run())


def changed(step: RecordedStep, change) -> RecordedStep:
    """The step with its only sequence changed."""
    (group,) = step.groups
    (trajectory,) = group.trajectories
    sequence = change(trajectory.sequences[0])
    longer = len(sequence.ids) - len(trajectory.sequences[0].ids)
    turn = trajectory.turns[0]
    turn = replace(turn, start=turn.start + longer, end=turn.end + longer)
    trajectory = replace(trajectory, sequences=(sequence,), turns=(turn,))
    prefix = group.prefix_length + longer
    return replace(step, groups=(replace(group, trajectories=(trajectory,), prefix_length=prefix),))


def with_token(place: int):
    """A sequence in which the token at `place` stands twice."""

    def change(sequence):
        arrays = {
            name: np.insert(array, place, array[place]) for name, array in sequence.arrays().items()
        }
        return replace(sequence, **arrays)

    return change


def wrong_grid(sequence):
    (first, (t, h, w)), second = sequence.images
    return replace(sequence, images=((first, (t, w, h)), second))


def swapped(sequence):
    (first, first_grid), (second, second_grid) = sequence.images
    return replace(sequence, images=((second, first_grid), (first, second_grid)))


def test_sound_inputs_are_those_of_transformers(step, subject):
    ours, reference = input_traces(subject, step)
    assert [q.stage_name for q in ours] == [
        "prompt ids",
        "images",
        "image grids",
        "placeholders",
        "pixels",
    ]
    for quantity in ours:
        for owner, values in ours.get(quantity).items():
            np.testing.assert_allclose(values, reference.get(quantity)[owner], atol=1e-5)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (wrong_grid, "image grids"),
        (swapped, "images"),
        (with_token(0), "prompt ids"),  # begin of text, repeated
    ],
    ids=["wrong grid", "swapped images", "repeated first token"],
)
def test_a_fault_of_the_prompt_is_named(step, subject, change, named):
    outcome = Replay(subject, tiny_run())(changed(step, change))
    assert outcome.first is not None and str(outcome.first.quantity) == named
    assert outcome.first.sides == ("run", "transformers")


def test_a_placeholder_too_many_is_named_without_messages(step, subject):
    place = int(np.flatnonzero(subject.image_tokens.mask(step.groups[0].prefix))[0])
    outcome = Replay(subject, tiny_run())(changed(replace(step, messages={}), with_token(place)))
    assert outcome.first is not None and str(outcome.first.quantity) == "placeholders"
    assert outcome.first.values == (
        float(subject.image_tokens.mask(step.groups[0].prefix).sum()) + 1,
        float(subject.image_tokens.mask(step.groups[0].prefix).sum()),
    )


def test_other_pixels_are_named(step, subject):
    brighter = replace(subject, pixels=lambda image: subject.pixels(image) + 0.01)
    outcome = Replay(brighter, tiny_run())(step)
    assert outcome.first is not None and str(outcome.first.quantity) == "pixels"
