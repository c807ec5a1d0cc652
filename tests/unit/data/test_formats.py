"""Rows as the documentation of other systems shows them, recognised by their columns and read."""

import base64
import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from rlinf_vl.config import load_config
from rlinf_vl.data.dataset import ProblemDataset
from rlinf_vl.data.formats import FORMATS, RECOGNISED, RowFormat
from rlinf_vl.data.tables import read_table, rows_of_pictures, typed_columns
from rlinf_vl.data.unusable import RowError
from rlinf_vl.types import ImageRef, Problem


def png(color: str) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (6, 4), color).save(buffer, "PNG")
    return buffer.getvalue()


RED, BLUE = png("red"), png("blue")


def uri(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


#: Made as the named page or script makes them.
ROWS: dict[str, dict[str, Any]] = {
    # verl, examples/data_preprocess/geo3k.py
    "verl": {
        "data_source": "hiyouga/geometry3k",
        "prompt": [{"role": "user", "content": "<image>Find x. Put it in \\boxed{}."}],
        "images": [{"bytes": RED, "path": None}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "3"},
        "extra_info": {"split": "train", "index": 0, "answer": "3", "question": "<image>Find x."},
    },
    # SkyRL, docs/tutorials/vision_language_rl and examples/train/geometry3k/geometry_3k_dataset.py
    "openai": {
        "prompt": [
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": uri(RED)}},
                    {"type": "text", "text": "Find x. Put it in \\boxed{}."},
                ],
            }
        ],
        "env_class": "geometry3k",
        "reward_spec": {"method": "rule", "ground_truth": "3"},
        "extra_info": {"split": "train", "index": 0, "problem": "Find x.", "answer": "3"},
    },
    # EasyR1 and RLinf: hiyouga/geometry3k
    "rlinf": {
        "problem": "<image>Find x. Put it in \\boxed{}.",
        "images": [{"bytes": RED, "path": None}],
        "answer": "3",
    },
    # OpenRLHF, examples/scripts/train_vlm_math_hybrid_engine.sh
    "openrlhf": {
        "prompt": [
            {
                "role": "user",
                "content": [
                    {"type": "image"},
                    {"type": "text", "text": "Find x. Put it in \\boxed{}."},
                ],
            }
        ],
        "images": ["RED.png"],
        "label": "3",
    },
    # TRL, examples/scripts/grpo_vlm.py
    "trl": {
        "problem": "Find x. Put it in \\boxed{}.",
        "solution": "3",
        "prompt": [
            {"role": "system", "content": "Think."},
            {"role": "user", "content": "Find x. Put it in \\boxed{}."},
        ],
        "image": {"bytes": RED, "path": None},
    },
}
#: What else of the row reaches environments and rewards.
COLUMNS = {
    "verl": {"data_source", "ability", "reward_model", "extra_info"},
    "openai": {"env_class", "reward_spec", "extra_info"},
    "rlinf": set(),
    "openrlhf": {"label"},
    "trl": {"problem", "solution"},
}


def open_rows(path: Path, rows: list[dict[str, Any]], **keys: Any) -> ProblemDataset:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("\n".join(json.dumps(row) for row in rows))
    return ProblemDataset([str(path)], "train", RowFormat(**keys))


def said(problem: Problem) -> list[str]:
    return [part.get("text", "IMAGE") for part in problem.messages[-1]["content"]]


@pytest.mark.parametrize("declared", [False, True])
@pytest.mark.parametrize("name", ROWS)
def test_a_documented_row_becomes_a_problem(tmp_path: Path, name: str, declared: bool) -> None:
    (tmp_path / "RED.png").write_bytes(RED)
    (problem,) = open_rows(
        tmp_path / "rows.parquet", [ROWS[name]], **({"format": name} if declared else {})
    )
    assert said(problem) == ["IMAGE", "Find x. Put it in \\boxed{}."]
    assert (
        problem.images == (ImageRef.of(RED),)
        and problem.answer == "3"
        and problem.env_class is None
    )
    assert set(problem.columns) == COLUMNS[name]
    if "extra_info" in problem.columns:
        assert problem.columns["extra_info"] == ROWS[name]["extra_info"]


def test_every_format_is_recognised_by_what_its_example_has() -> None:
    for name, row in ROWS.items():
        assert RowFormat().for_columns(row).format == name
    # The rows of seeds://N, which have no answer.
    assert RowFormat().for_columns({"problem", "seed"}).format == "seeds"
    # Those of verifiers://NAME, which name their environment.
    named = {"problem": "?", "answer": "4", "verifiers": {"source": "words", "index": 0}}
    assert RowFormat().for_columns(named).format == "verifiers"
    assert (
        set(FORMATS)
        == {*ROWS, "folder", "seeds", "sharegpt", "verifiers"}
        == {name for name, _ in RECOGNISED}
    )
    # As published sets have further ones.
    ours = {
        "problem",
        "answer",
        "images",
        "messages",
        "prompt",
        "label",
    }
    assert RowFormat().for_columns(ours).prompt_key == "problem"


def test_a_declared_key_goes_before_a_format(tmp_path: Path) -> None:
    rows = [ROWS["trl"] | {"answer": "4", "other": BLUE}]
    (found,) = open_rows(
        tmp_path / "rows.parquet", rows, answer_key="solution", image_keys=["other"]
    )
    assert found.answer == "3" and found.images == (ImageRef.of(BLUE),)
    (text,) = open_rows(tmp_path / "text.parquet", rows, image_keys=[])
    assert text.images == () and text.answer == "4"
    nested = [{"problem": "1 + 1?", "meta": {"answers": {"short": "2"}}}]
    (deep,) = open_rows(
        tmp_path / "deep.jsonl", nested, answer_key="meta.answers.short", image_keys=[]
    )
    assert deep.answer == "2" and deep.columns == {"meta": nested[0]["meta"]}


def test_without_a_format_a_column_of_ours_is_missed(tmp_path: Path) -> None:
    for row, reason in (
        ({"question": "1 + 1?", "answer": "2"}, "data.prompt_key: column 'problem'"),
        ({"problem": "1 + 1?", "answer": "2"}, "data.image_keys: column 'images'"),
    ):
        with pytest.raises(ValueError, match=reason):
            open_rows(tmp_path / "rows.jsonl", [row])
    with pytest.raises(ValueError, match="data.answer_key: column 'reward_model'"):
        open_rows(tmp_path / "rows.jsonl", [ROWS["trl"] | {"image": "a.png"}], format="verl")


def messages(*contents: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content} for content in contents]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": uri(RED)}},
        {"type": "image_url", "image_url": uri(RED)},
        {"type": "image_url", "image_url": {"url": "RED.png", "detail": "high"}},
        {"type": "image", "image": uri(RED)},
        {"type": "image", "image": "RED.png", "text": None},
        {"type": "image", "image": "FILE"},
        {"type": "image", "url": "RED.png"},
        {"type": "image", "path": "RED.png", "image": ""},
        {"type": "image", "base64": base64.b64encode(RED).decode()},
    ],
)
def test_images_of_messages_stand_where_they_are(tmp_path: Path, part: dict[str, Any]) -> None:
    (tmp_path / "RED.png").write_bytes(RED)
    part = {
        key: f"file://{tmp_path}/RED.png" if value == "FILE" else value
        for key, value in part.items()
    }
    row = {
        "prompt": messages(
            [{"type": "text", "text": "Look: "}, part, {"type": "text", "text": " Well?"}]
        )
    }
    (found,) = open_rows(
        tmp_path / "rows.jsonl", [row | {"reward_spec": {"method": "rule", "ground_truth": "3"}}]
    )
    assert said(found) == ["Look: ", "IMAGE", " Well?"] and found.images == (ImageRef.of(RED),)


def test_images_of_messages_and_of_columns_stand_side_by_side(tmp_path: Path) -> None:
    content = [{"type": "image", "image": uri(BLUE)}, {"type": "text", "text": "and <image>?"}]
    row = {"prompt": json.dumps(messages(content)), "images": [uri(RED)], "answer": "3"}
    (found,) = open_rows(tmp_path / "rows.jsonl", [row])
    assert said(found) == ["IMAGE", "and ", "IMAGE", "?"]
    assert found.images == (ImageRef.of(BLUE), ImageRef.of(RED)), (
        "and chat messages may be written as JSON"
    )


def test_pil_features_of_datasets_are_read_wherever_they_stand(tmp_path: Path) -> None:
    picture = Image.open(io.BytesIO(RED))
    part = {
        "type": datasets.Value("string"),
        "text": datasets.Value("string"),
        "image": datasets.Image(),
    }
    features = datasets.Features(
        {
            "prompt": datasets.List(
                {"role": datasets.Value("string"), "content": datasets.List(part)}
            ),
            "images": datasets.List(datasets.Image()),
            "solution": datasets.Value("string"),
        }
    )
    content = [
        {"type": "image", "text": None, "image": picture},
        {"type": "text", "text": "Is it <image>?", "image": None},
    ]
    table = {"prompt": [messages(content)], "images": [[picture]], "solution": ["3"]}
    made = datasets.Dataset.from_dict(table, features=features)
    made.save_to_disk(str(tmp_path / "saved"))
    made.to_parquet(str(tmp_path / "rows.parquet"))
    for path in ("saved", "rows.parquet"):
        (found,) = ProblemDataset([str(tmp_path / path)], "train")
        assert said(found) == ["IMAGE", "Is it ", "IMAGE", "?"] and len(found.images) == 2


def test_messages_may_differ_in_shape_and_images_be_mappings(tmp_path: Path) -> None:
    system = {"role": "system", "content": "Think."}
    (tmp_path / "RED.png").write_bytes(RED)
    rows = [
        {
            "prompt": [system, *messages([{"type": "image"}, {"type": "text", "text": "Find x."}])],
            "images": [{"image": uri(RED)}],
        },
        {
            "prompt": messages("<image>Find x."),
            "images": [{"image": f"file://{tmp_path}/RED.png", "max_pixels": 99}],
        },
    ]
    for found in open_rows(
        tmp_path / "rows.jsonl", [row | {"reward_model": {"ground_truth": "3"}} for row in rows]
    ):
        assert said(found) == ["IMAGE", "Find x."] and found.images == (ImageRef.of(RED),)


def test_answers_that_no_grader_reads_are_what_the_row_says(tmp_path: Path) -> None:
    prompt = messages("1 + 1?")
    rows = [
        {"prompt": prompt, "reward_model": {"style": "rule", "ground_truth": ["2", "two"]}},
        {"prompt": prompt, "reward_model": {"style": "model", "ground_truth": None}},
        {"prompt": prompt, "reward_model": {"style": "rule", "ground_truth": None}},
    ]
    found = open_rows(tmp_path / "rows.jsonl", rows)
    assert (found[0].answer, found[1].answer) == ('["2", "two"]', "")
    with pytest.raises(RowError, match="column 'reward_model.ground_truth' is empty"):
        found[2]
    # SkyRL, examples/visgym.
    stub = {
        "prompt": messages("placeholder"),
        "env_class": "visgym",
        "visgym_env_id": "maze_2d/easy",
    }
    (ticket,) = open_rows(tmp_path / "stub.parquet", [stub])
    assert ticket.answer == "" and ticket.columns == {
        "env_class": "visgym",
        "visgym_env_id": "maze_2d/easy",
    }


def test_an_environment_of_skyrls_rows_is_played_if_there_is_one_of_that_name(
    tmp_path: Path, caplog: Any
) -> None:
    rows = [
        ROWS["openai"] | {"env_class": name} for name in ("text2sql", "maze", "mine.py:Mine", None)
    ]
    found = open_rows(tmp_path / "rows.parquet", rows, environments=("maze",))
    assert [problem.env_class for problem in found] == [None, "maze", "mine.py:Mine", None]
    assert "'text2sql', which is none of ours: they are played in rollout.env_class" in caplog.text


def test_images_stand_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures/RED.png").write_bytes(RED)
    row = {"problem": "Find x.", "images": ["RED.png"], "answer": "3"}
    absolute = row | {"images": [str(tmp_path / "pictures/RED.png")]}
    path = tmp_path / "rows/rows.jsonl"
    found = open_rows(path, [row, absolute], image_root=str(tmp_path / "pictures"))
    assert found[0].images == found[1].images == (ImageRef.of(RED),)
    own = open_rows(path, [row, absolute])
    for i, kind in enumerate(("image file can't be read", "path leaves the dataset's folder")):
        with pytest.raises(RowError) as caught:
            own[i]
        assert caught.value.kind == kind
    assert "name the one that all images are in as data.image_root" in caught.value.reason
    outside = open_rows(
        path, [row | {"images": ["../rows/rows.jsonl"]}], image_root=str(tmp_path / "pictures")
    )
    with pytest.raises(RowError, match="leads out of the dataset's folder"):
        outside[0]


def test_a_table_keeps_what_its_cells_say(tmp_path: Path) -> None:
    (tmp_path / "RED.png").write_bytes(RED)
    (tmp_path / "BLUE.png").write_bytes(BLUE)
    path = tmp_path / "rows.csv"
    path.write_text(
        "\ufeffid,problem,images,answer,level,share,code,note\r\n"
        'a,"Which, of ""these""?\nA or B",RED.png,007,1,0.5,1.0,\r\n'
        'b,Both?,"[""RED.png"", ""BLUE.png""]",None,-2,1e9,2,NA\r\n'
        "c,None?,,5.0,,0.25,3,nan\r\n"
    )
    found = ProblemDataset([str(path)], "train", RowFormat())
    assert [problem.id for problem in found] == ["rows:a", "rows:b", "rows:c"]
    assert [problem.answer for problem in found] == ["007", "None", "5.0"]
    assert [len(problem.images) for problem in found] == [1, 2, 0]
    assert said(found[0]) == ["IMAGE", 'Which, of "these"?\nA or B']
    assert [problem.columns["level"] for problem in found] == [1, -2, None]
    assert [problem.columns["code"] for problem in found] == ["1.0", "2", "3"], (
        "read as written unless all are numbers so written"
    )
    assert [problem.columns["note"] for problem in found] == [None, "NA", "nan"]
    (tmp_path / "pandas.csv").write_text(",problem,answer\n0,x?,2\n1,y?,3\n")
    assert [
        row.columns
        for row in ProblemDataset([str(tmp_path / "pandas.csv")], "train", RowFormat(image_keys=[]))
    ] == [{}, {}]
    for name, text in (
        ("rows.tsv", "problem\tanswer\nA, B; C?\t2\n"),
        ("semicolons.csv", "problem;answer\nA, B?;2\n"),
        ("commas.csv", 'problem,answer,a;b\n"A, B; C?",2,\n'),
        ("comma in a row.csv", "problem;answer\nA, B, C?;2\n"),
    ):
        (tmp_path / name).write_text(text)
        (row,) = ProblemDataset([str(tmp_path / name)], "train", RowFormat(image_keys=[]))
        assert row.answer == "2" and "A, B" in said(row)[0]


def test_the_beginning_of_a_table_has_its_whole_rows_alone(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text('a,b\n1,é\n"3,\n3",4\n5,6\n')
    whole = {"a": ["1", "3,\n3", "5"], "b": ["é", "4", "6"]}
    assert (size := path.stat().st_size) == 22
    assert read_table(path) == read_table(path, size) == read_table(path, size + 1) == whole
    for limit in range(5, size):  # the last row that begins within the limit may be cut
        table = read_table(path, limit)
        n = len(table["a"])
        assert table == {name: cells[:n] for name, cells in whole.items()}
        assert {9: 0, 18: 1, 21: 2}.get(limit, n) == n
    path.write_text('a,b\n"x"y,2\n')
    with pytest.raises(ValueError, match="line 2 can't be read"):
        read_table(path)
    path.write_text("a,,c\n1,2,3\n\n4,5,6\n")
    assert read_table(path) == {"a": ["1", "4"], "c": ["3", "6"]}, "an index, an empty line"
    path.write_text("a,b\n1,2,3\n4,5\n" + "6,7\n" * 9)
    assert read_table(path, 20)["a"][0] == "4", "a row of another length is left out of a beginning"


def test_columns_are_numbers_where_all_their_cells_are() -> None:
    for cells, values in (
        (["1", "-2"], [1, -2]),
        (["1", ""], [1, None]),
        (["1", "x"], ["1", "x"]),
        (["x", "1"], ["x", "1"]),
        (["1", "007"], ["1", "007"]),
        (["1", "0.5"], ["1", "0.5"]),
        (["0.5", "1.5"], [0.5, 1.5]),
        (["0.5", "5.0"], ["0.5", "5.0"]),
        (["nan"], ["nan"]),
        (["0.5", "inf"], ["0.5", "inf"]),
        (["", ""], [None, None]),
    ):
        table = typed_columns({"a": cells})
        assert table == {"a": values}
        assert list(map(type, table["a"])) == list(map(type, values)), cells


def test_which_file_of_a_folder_has_the_rows(tmp_path: Path) -> None:
    def rows_among(*names: str) -> Path | dict[str, list[str]] | None:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        for name in names:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
        found = rows_of_pictures(folder, "val")
        return found.relative_to(folder) if isinstance(found, Path) else found

    assert rows_among("a.png", "x.csv") == Path("x.csv")
    assert rows_among("a.png", "x.csv", "y.csv") is None
    assert rows_among("a.png", "x.csv", "val.csv") == Path("val.csv")
    assert rows_among("a.png", "test.csv", "val.csv", "metadata.csv") == Path("metadata.csv")
    assert rows_among("a.png", "sub/x.csv") is None
    assert rows_among("a.txt", "x.csv") is None
    assert rows_among("a.png", "x.csv/y.txt") is None
    assert rows_among("b.JPG", "red/a.png", "note.txt") == {
        "file_name": ["b.JPG", "red/a.png"],
        "label": ["", "red"],
    }
    assert rows_among("train/a.png", "val/red/b.png") == {
        "file_name": ["val/red/b.png"],
        "label": ["red"],
    }


def test_a_folder_of_images_and_a_file_that_says_more_of_each(tmp_path: Path) -> None:
    for split, data in (("train", RED), ("test", BLUE)):
        (tmp_path / "parts" / split).mkdir(parents=True)
        (tmp_path / "parts" / split / "1.png").write_bytes(data)
        row = {"file_name": "1.png", "problem": f"{split}?", "answer": "3", "level": 2}
        (tmp_path / "parts" / split / "metadata.jsonl").write_text(json.dumps(row))
    for split, data in (("train", RED), ("val", BLUE)):
        (found,) = ProblemDataset([str(tmp_path / "parts")], split)
        assert found.images == (ImageRef.of(data),) and found.columns == {"level": 2}
    (tmp_path / "mine/pictures").mkdir(parents=True)
    (tmp_path / "mine/pictures/1.png").write_bytes(RED)
    (tmp_path / "mine/questions.csv").write_text("problem,image,answer\nWhat?,pictures/1.png,A\n")
    (found,) = ProblemDataset([str(tmp_path / "mine")], "train")
    assert found.images == (ImageRef.of(RED),) and found.id == "mine:0"
    (tmp_path / "mine/val.csv").write_text("problem,image,answer\nWhat now?,pictures/1.png,A\n")
    (found,) = ProblemDataset([str(tmp_path / "mine")], "val")
    assert said(found) == ["IMAGE", "What now?"]


def test_folders_named_after_what_they_show_are_asked_about(tmp_path: Path) -> None:
    for name, data in (("red", RED), ("blue", BLUE)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.png").write_bytes(data)
    found = ProblemDataset([str(tmp_path)], "train", RowFormat(prompt_variants=["What color?"]))
    assert [(problem.answer, said(problem)) for problem in found] == [
        ("blue", ["IMAGE", "What color?"]),
        ("red", ["IMAGE", "What color?"]),
    ]
    (tmp_path / "data").mkdir()
    pq.write_table(pa.table({"problem": ["x?"], "answer": ["3"]}), tmp_path / "data/train.parquet")
    assert ProblemDataset([str(tmp_path)], "train", RowFormat(image_keys=[]))[0].answer == "3", (
        "rows go before pictures beside them"
    )
    shutil.rmtree(tmp_path / "data")
    with pytest.raises(ValueError, match="data.prompt_variants: ") as refused:
        ProblemDataset([str(tmp_path)], "train")
    advice = re.search(r"as in (\S+\['.*'\])", str(refused.value))[1]
    config = load_config(
        "toy-grpo-cpu",
        [f"data.train_data_paths=[{tmp_path}]", f"data.val_data_paths=[{tmp_path}]", advice],
    )
    taken = ProblemDataset(config.data.train_data_paths, "train", RowFormat.of(config.data))
    assert said(taken[0]) == ["IMAGE", "What is this?"], "the advice is taken by every check"


def test_images_beyond_a_limit_are_left_out_and_counted(tmp_path: Path) -> None:
    row = {
        "prompt": messages("<image> and <image><image>.", "And <image>, <image>?"),
        "images": [uri(RED), uri(BLUE)] * 2 + [uri(RED)],
    }
    row |= {"answer": "3"}

    def shown(**limits: int) -> tuple[list[list[str]], list[ImageRef], int]:
        (found,) = open_rows(tmp_path / "rows.jsonl", [row], **limits)
        texts = [
            [part.get("text", "IMAGE") for part in message["content"]] for message in found.messages
        ]
        return texts, list(found.images), found.dropped_images

    red, blue = ImageRef.of(RED), ImageRef.of(BLUE)
    assert shown()[1:] == ([red, blue, red, blue, red], 0)
    assert shown(max_images_per_message=1) == (
        [["IMAGE", " and ", "."], ["And ", "IMAGE", ", ", "?"]],
        [red, blue],
        3,
    )
    assert shown(max_images_per_sample=4)[1:] == ([red, blue, red, blue], 1)
    assert shown(max_images_per_message=2, max_images_per_sample=3)[1:] == ([red, blue, blue], 2)


def test_a_question_in_several_wordings(tmp_path: Path) -> None:
    rows = [{"problem": "<image>Find x.", "images": [uri(RED)], "answer": "3"}]
    found = open_rows(
        tmp_path / "rows.jsonl",
        rows,
        prompt_variants=["Look: {problem}", "{problem} Think."],
        prompt_suffix=" Now.",
    )
    assert said(found[0]) == ["IMAGE", "Look: Find x. Now."], (
        "an image that stands first stays first"
    )
    assert [said(found.problem(0, draw)) for draw in (0, 1, 2, 2**63 + 1)] == [
        ["IMAGE", f"{text} Now."]
        for text in ("Look: Find x.", "Find x. Think.", "Look: Find x.", "Find x. Think.")
    ]
    longest = max(len("Look: Find x. Now."), len("Find x. Think. Now."))
    assert found.filter_by_length(
        [0], lambda _, problem: len(said(problem)[1]), longest - 1
    ).too_long == {0: longest}


def test_rows_without_images_and_without_a_level_are_told_apart(tmp_path: Path) -> None:
    rows = [
        {"problem": "x", "images": [uri(RED)], "answer": "3", "meta": {"level": level}}
        for level in ("2", "1.5", "hard", None)
    ]
    rows.append({"problem": "x", "images": [], "answer": "3", "meta": {"level": "1"}})
    found = open_rows(tmp_path / "rows.jsonl", rows).filter_by_length(
        range(5), lambda *_: 1, 1, image_only=True, level_key="meta.level"
    )
    assert {row: facts.level for row, facts in found.facts.items()} == {0: 2.0, 1: 1.5}
    assert found.text_only == {4: "rows:4"}
    assert [(row.id, row.kind) for row in found.bad.values()] == [
        (f"rows:{i}", "curriculum unusable") for i in (2, 3)
    ]
    assert "column 'meta.level' holds 'hard', not a number" in found.bad[2].reason
