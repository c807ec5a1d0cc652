"""Conversations to imitate: which tokens carry loss, and what a chat template must not do to them."""

import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlinf_vl.config.imitation import imitation_config
from rlinf_vl.errors import ConfigError
from rlinf_vl.extras.sft.demonstrations import Demonstrations, imitated_trajectory, try_rows
from rlinf_vl.extras.toy.drawings import toy_rows
from rlinf_vl.models.families import family_of
from rlinf_vl.models.processing import Processor
from rlinf_vl.rollout.episode.observation import Observation
from rlinf_vl.rollout.episode.renderer import Renderer

IMAGES = [row["images"][0]["bytes"] for row in toy_rows("val")[:3:2]]
#: Two pictures, three answers; the second one is not imitated, the first spells a special token.
MESSAGES = [
    {"role": "system", "content": "Count."},
    {"role": "user", "content": "<image>What is the area?", "weight": None},
    {"role": "assistant", "content": "3*6=18 <|im_end|> \\boxed{18}", "weight": None},
    {"role": "user", "content": "and <image>?", "weight": None},
    {"role": "assistant", "content": "no idea", "weight": 0},
    {"role": "user", "content": "wrong, again", "weight": None},
    {"role": "assistant", "content": "2*4=8", "weight": 1},
]


@pytest.fixture
def demonstrations(tmp_path, toy_folder):
    def make(*conversations, template: str | None = None, seq_length: int = 256) -> Demonstrations:
        rows = [{"messages": m, "images": [{"bytes": b} for b in IMAGES]} for m in conversations]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
        config = imitation_config(
            "toy-sft-cpu",
            [
                f"data.train_data_paths=[{tmp_path / 'rows.parquet'}]",
                "data.val_data_paths=[]",
                "data.sample_val=false",
                f"rollout.model.model_path={toy_folder}",
                f"runner.seq_length={seq_length}",
                "data.max_prompt_length=32",
            ],
            (),
        )
        made = Demonstrations(config, str(toy_folder))
        made.config = config  # pyright: ignore[reportAttributeAccessIssue]
        if template is not None:
            made._renderer._tokenizer.chat_template = template
        return made

    return make


@pytest.fixture(scope="module")
def renderer(toy_folder):
    return Renderer(Processor(toy_folder, family_of("qwen3_vl")))


def text_of(renderer, ids) -> str:
    return renderer._tokenizer.decode(ids.tolist(), skip_special_tokens=False)


def test_loss_is_on_the_imitated_answers_and_their_ends_alone(demonstrations, renderer):
    group = demonstrations(MESSAGES).group("train", 0, "g")
    (trajectory,) = group.trajectories
    (sequence,) = trajectory.sequences
    answers = [text_of(renderer, sequence.ids[turn.start : turn.end]) for turn in trajectory.turns]
    assert answers == ["3*6=18 <|im_end|> \\boxed{18}<|im_end|>", "2*4=8<|im_end|>"]
    expected = np.zeros(len(sequence.ids), bool)
    for turn in trajectory.turns:
        expected[turn.start : turn.end] = True
    assert np.array_equal(sequence.loss_mask, expected)
    # The spelled token is text: only the last of each answer's ids is the stop token.
    for turn in trajectory.turns:
        ids = sequence.ids[turn.start : turn.end]
        assert (np.flatnonzero(ids == renderer.processor.stop_ids[0]) == len(ids) - 1).all()
    n_images = renderer.processor.image_tokens(np.array([g for _, g in sequence.images])).sum()
    assert (sequence.ids == renderer.processor.image_token_id).sum() == n_images
    assert [image.data for image, _ in sequence.images] == IMAGES


def test_ids_are_those_of_a_rollout_that_samples_the_answers(demonstrations, renderer):
    """Each prompt that the renderer makes from the sampled ids of earlier turns is how the
    conversation goes on."""
    every = [m | {"weight": 1} if m["role"] == "assistant" else m for m in MESSAGES]
    made = demonstrations(every)
    problem = made.datasets["train"][0]
    trajectory = imitated_trajectory(renderer, problem)
    (sequence,) = trajectory.sequences
    system, *questions = [m for m in problem.messages if m["role"] != "assistant"]
    images = [problem.images[:1], problem.images[1:], ()]
    start = Observation((system, questions[0]), images[0])
    ids, _ = renderer.prompt(start.messages, start.images)
    turns = []
    for k, turn in enumerate(trajectory.turns):
        assert np.array_equal(sequence.ids[: turn.start], ids)
        if k + 1 < len(questions):
            answer = sequence.ids[turn.start : turn.end]
            turns.append((answer, Observation((questions[k + 1],), images[k + 1])))
            ids, _ = renderer.follow(np.concatenate([ids, answer]), start, turns)
    assert len(trajectory.turns) == 3


def test_what_follows_the_last_imitated_answer_is_left_out(demonstrations):
    off = [m | {"weight": 0} if m["role"] == "assistant" else m for m in MESSAGES]
    made = demonstrations([*off[:2], MESSAGES[2], *off[3:]], MESSAGES)
    (short,), (whole,) = (made.group("train", row, "g").sequences for row in (0, 1))
    assert short.loss_mask[-1] and len(short.images) == 1
    assert np.array_equal(whole.ids[: len(short.ids)], short.ids)


def test_a_template_that_shows_no_images_is_refused(demonstrations):
    blind = CHAT.replace("ANSWER", "{{ message.content }}").replace("<|image_pad|>", "")
    result = demonstrations(MESSAGES, template=blind.replace("END", "<|im_end|>")).check(
        "train", [0]
    )
    assert "holds 0 <|image_pad|> for 2 images" in result.bad[0].reason


CHAT = (
    "{%- for message in messages -%}<|im_start|>{{ message.role }}{{ '\n' }}"
    "{%- if message.content is string -%}ANSWER"
    "{%- else -%}{%- for part in message.content -%}"
    "{%- if part.type == 'text' -%}{{ part.text }}{%- else -%}<|image_pad|>{%- endif -%}"
    "{%- endfor -%}{%- endif -%}END{% endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n{% endif -%}"
)


@pytest.mark.parametrize(
    "answer, end, reason",
    [
        ("{{ message.content | trim }}", "<|im_end|>", "changes message 3 "),
        ("{{ message.content }}", "\n", "after message 3, and none of its stop tokens, <.im_end"),
        (
            "{%- if loop.last -%}{{ message.content }}{%- else -%}...{{ message.content }}{%- endif -%}",
            "<|im_end|>",
            None,
        ),
        (
            "{{ message.content if loop.last else message.content.split('=')[-1] }}",
            "<|im_end|>",
            "changes message 3 .*a row of its own, with weight 0 for the answers before",
        ),
        (
            "{%- if messages|length > 6 -%}{{ '~' }}{%- endif -%}{{ message.content }}",
            "<|im_end|>",
            "renders what comes before message 7 in another way",
        ),
    ],
)
def test_a_template_that_does_not_keep_answers_is_refused_by_row(
    demonstrations, answer, end, reason
):
    messages = [
        m | {"content": m["content"] + " "} if m["role"] == "assistant" else m for m in MESSAGES
    ]
    template = CHAT.replace("ANSWER", answer).replace("END", end)
    result = demonstrations(messages, template=template).check("train", [0])
    if reason is None:
        assert list(result.kept) == [0]
        return
    (bad,) = result.bad.values()
    assert bad.id == "rows:0"
    assert re.search(reason, bad.reason), bad.reason


def test_a_long_conversation_is_left_out_and_counted(demonstrations):
    short = [{"role": "user", "content": "<image><image>"}, {"role": "assistant", "content": "1"}]
    made = demonstrations(MESSAGES, short, seq_length=64)
    result = made.check("train", [0, 1])
    assert list(result.kept) == [1] and list(result.too_long) == [0]
    assert result.too_long[0] == len(made.group("train", 0, "g").sequences[0].ids) > 64


def test_a_run_none_of_whose_rows_can_be_imitated_is_refused_before_it_starts(demonstrations):
    made = demonstrations(MESSAGES[:-1])
    with pytest.raises(ConfigError, match="none of 1 rows can be imitated; row rows:0: .*'user'"):
        try_rows(made.config, made.config.rollout.model.model_path)
