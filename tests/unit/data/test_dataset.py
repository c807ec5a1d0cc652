"""Datasets from real files of every kind: columns, ids, several sources, rows that fail, and the length filter."""

import base64
import io
import json
import logging
import pickle
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from rlinf_vl.data.damage import check_pixels
from rlinf_vl.data.dataset import FilterResult, ProblemDataset
from rlinf_vl.data.formats import RowFormat
from rlinf_vl.data.images import decode, image_size
from rlinf_vl.data.sources import SCANNED, peek
from rlinf_vl.data.unusable import RowError
from rlinf_vl.types import ImageRef, Problem


def png(grey: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("L", (6, 4), grey).save(buffer, format="PNG")
    return buffer.getvalue()


A, B = png(10), png(200)
IMAGES = (ImageRef.of(A), ImageRef.of(B))


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def open_(*paths: Path | str, split: str = "train", **options: Any) -> ProblemDataset:
    return ProblemDataset([str(path) for path in paths], split, RowFormat(**options))


def write(path: Path, rows: list[dict[str, Any]], schema: pa.Schema | None = None) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    match path.suffix:
        case ".parquet":
            pq.write_table(pa.Table.from_pylist(rows, schema), path)
        case ".jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        case ".json":
            path.write_text(json.dumps(rows))
    return path


def rows(*cells: Any, prompt: str = "<image><image>Find x.") -> list[dict[str, Any]]:
    return [{"problem": prompt, "images": cell, "answer": str(i)} for i, cell in enumerate(cells)]


def test_parquet_keeps_encoded_bytes_in_every_representation(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures/a.png").write_bytes(A)
    (tmp_path / "pictures/b.png").write_bytes(B)
    structs = [{"bytes": A, "path": None}, {"bytes": None, "path": "pictures/b.png"}]
    cells = {
        "bytes": [A, B],
        "structs": structs,
        "base64": [
            base64.b64encode(A).decode(),
            "data:image/png;base64," + base64.b64encode(B).decode(),
        ],
        "paths": ["pictures/a.png", "pictures/b.png"],
    }
    for name, cell in cells.items():
        dataset = open_(write(tmp_path / f"{name}.parquet", rows(cell, cell)))
        assert len(dataset) == 2
        assert (
            dataset[1].images == IMAGES
            and dataset[1].id == f"{name}:1"
            and dataset[1].answer == "1"
        ), name


@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_json_rows_with_paths_base64_and_no_image(tmp_path: Path, suffix: str) -> None:
    (tmp_path / "a.png").write_bytes(A)
    path = write(
        tmp_path / f"rows{suffix}",
        [
            {"problem": "Find x.", "images": None, "answer": 3},
            {"problem": "<image>Find x.", "images": ["a.png"], "answer": 4},
            {
                "problem": "<image><image>Find x.",
                "images": ["a.png", base64.b64encode(B).decode()],
                "answer": 5,
            },
        ],
    )
    dataset = open_(path)
    assert [p.images for p in (dataset[0], dataset[1], dataset[2])] == [(), IMAGES[:1], IMAGES]
    assert [dataset[i].answer for i in range(3)] == ["3", "4", "5"]


def test_json_columns_of_mixed_types(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Find x."}]}]
    path = write(
        tmp_path / "rows.jsonl",
        [
            {"problem": "Find x.", "images": None, "answer": 3},
            {"problem": chat, "images": base64.b64encode(A).decode(), "answer": "x = 3"},
        ],
    )
    dataset = open_(path)
    assert [dataset[0].answer, dataset[1].answer] == ["3", "x = 3"]
    assert dataset[1].messages[0]["content"][1] == {"type": "text", "text": "Find x."}
    assert dataset[1].images == IMAGES[:1]


def test_hf_images_are_not_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.Image, "decode_example", lambda *_, **__: pytest.fail("decoded"))
    a, b = {"bytes": A, "path": None}, {"bytes": B, "path": "b"}
    cells = [
        {"problem": "<image>" * 3, "images": [a, b], "one": a, "answer": answer}
        for answer in (1, 2)
    ]
    image, text, number = datasets.Image(), datasets.Value("string"), datasets.Value("int64")
    features = datasets.Features(
        {"problem": text, "images": [image], "one": image, "answer": number}
    )
    table = datasets.Dataset.from_list(cells, features=features)
    table.save_to_disk(tmp_path / "saved")
    datasets.DatasetDict({"train": table, "test": table.select([1])}).save_to_disk(
        tmp_path / "parts"
    )
    table.to_parquet(tmp_path / "file.parquet")
    keys = {"image_keys": ["images", "one"]}
    for dataset in (open_(tmp_path / name, **keys) for name in ("saved", "parts", "file.parquet")):
        assert (
            len(dataset) == 2
            and dataset[1].images == (*IMAGES, IMAGES[0])
            and dataset[1].answer == "2"
        )
    assert len(open_(tmp_path / "parts", split="val", **keys)) == 1


def test_a_folder_of_files_is_read_by_its_parts(tmp_path: Path) -> None:
    folder = tmp_path / "geometry"
    for name, n in (
        ("train-00000-of-00002", 2),
        ("train-00001-of-00002", 1),
        ("test-00000-of-00001", 4),
    ):
        write(folder / f"data/{name}.parquet", rows(*[[A, B]] * n))
    train, val = open_(folder), open_(folder, split="val")
    assert (len(train), len(val)) == (3, 4)
    assert train[2].id == "geometry:2" and train[2].images == IMAGES
    write(tmp_path / "only/rows.jsonl", [{"problem": "Find x.", "images": None, "answer": "3"}])
    assert open_(tmp_path / "only", split="val")[0].answer == "3"


def test_the_hub_is_asked_for_the_named_split(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load(name: str, split: str) -> datasets.Dataset:
        asked.append((name, split))
        if "private" in name:
            raise ConnectionError("no network")
        return datasets.Dataset.from_list(rows([A, B]))

    monkeypatch.setattr(datasets, "load_dataset", load)
    dataset = open_("hf://someone/geometry", "hf://someone/geometry:test")
    assert asked == [("someone/geometry", "train"), ("someone/geometry", "test")]
    assert [dataset[i].id for i in range(2)] == ["someone/geometry:0", "someone/geometry-2:0"]
    with pytest.raises(
        ValueError, match="hf://someone/private: can't be loaded from the hub: ConnectionError"
    ):
        open_("hf://someone/private")


def test_several_sources_are_one_dataset_with_unique_ids(tmp_path: Path) -> None:
    first = write(tmp_path / "a/train.parquet", rows([A, B], [B, A]))
    second = write(
        tmp_path / "b/train.jsonl",
        [{"problem": "Find y.", "images": None, "answer": "9", "id": "q7"}],
    )
    third = write(
        tmp_path / "test.parquet",
        [row | {"id": 40 + i} for i, row in enumerate(rows([A, B], [A, B]))],
    )
    dataset = open_(first, second, third)
    assert [dataset[i].id for i in range(len(dataset))] == [
        "train:0",
        "train:1",
        "train-2:q7",
        "test:40",
        "test:41",
    ]
    assert (
        dataset[1].images == IMAGES[::-1] and dataset[2].answer == "9" and dataset[4].answer == "1"
    )
    for i in (5, -1):
        with pytest.raises(IndexError, match=f"row {i} of 5"):
            dataset[i]


def test_repeated_ids_give_way_to_row_numbers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "r.parquet", [row | {"id": 1} for row in rows([A, B], [A, B])])
    with caplog.at_level(logging.WARNING):
        dataset = open_(path)
    assert [dataset[0].id, dataset[1].id] == ["r:0", "r:1"]
    assert "column 'id' has missing or repeated values" in caplog.text


@pytest.mark.slow
def test_a_damaged_line_far_down_is_found_when_the_file_is_loaded(tmp_path: Path) -> None:
    path, good = (
        tmp_path / "rows.jsonl",
        json.dumps({"problem": "q" * 1000, "answer": "1", "images": []}) + "\n",
    )
    n = SCANNED // len(good) + 1
    path.write_text(good * n + '{"problem": \n' + good)
    assert peek(path) == (["problem", "answer", "images"], None), "not seen before a run"
    with pytest.raises(ValueError, match=f"rows.jsonl line {n + 1} is not JSON"):
        open_(path)


def test_bad_rows_are_found_when_asked_for_and_sorted_out_by_the_filter(tmp_path: Path) -> None:
    cells = ([A, B], [A], [A, b"no image"], [A, B], [A, A[:45]], [A, B])
    dataset = open_(write(tmp_path / "rows.parquet", rows(*cells)))
    with pytest.raises(RowError, match="row rows:1: the prompt has 2 <image> and the row 1 images"):
        dataset[1]

    def count(row: int, problem: Problem) -> int:
        assert problem.id == dataset.row_id(row)
        if row == 5:
            raise TypeError("no text")  # what a tokenizer may do
        return {0: 5, 3: 10}.get(row, 4)

    assert dataset.filter_by_length([0, 3], count, 3).too_long == {0: 5, 3: 10}
    result = dataset.filter_by_length(range(6), count, 5)
    assert (
        isinstance(result, FilterResult) and result.kept == {0: "0"} and result.too_long == {3: 10}
    )
    assert {row: (bad.kind, bad.id) for row, bad in result.bad.items()} == {
        1: ("placeholders and images disagree", "rows:1"),
        2: ("not an image", "rows:2"),
        4: ("image can't be decoded", "rows:4"),
        5: ("TypeError", "rows:5"),
    }
    assert "column 'images', image 1" in result.bad[2].reason and result.bad[5].reason == "no text"
    assert dataset.filter_by_length([3], count, 10).kept == {3: "3"}


def test_the_filter_looks_at_the_pixels_of_every_image_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dataset = open_(write(tmp_path / "rows.parquet", rows([A, B], [B, A], [A, A], [A, B])))
    decoded: list[ImageRef] = []

    def watched(ref: ImageRef) -> None:
        decoded.append(ref)
        check_pixels(ref)

    monkeypatch.setattr("rlinf_vl.data.dataset.check_pixels", watched)
    for part in ([0, 1], [2, 3]):
        assert dataset.filter_by_length(part, lambda row, problem: 1, 5).kept.keys() == set(part)
    assert decoded == list(IMAGES)


def test_a_dataset_travels_to_another_process(tmp_path: Path) -> None:
    dataset = pickle.loads(
        pickle.dumps(open_(write(tmp_path / "rows.parquet", rows([A, B])), system_prompt="Think."))
    )
    assert dataset[0].images == IMAGES and dataset[0].messages[0]["role"] == "system"


def test_the_toy_task() -> None:
    train, val = open_("toy"), open_("toy", split="val")
    assert len(train) > len(val) > 0
    assert image_size(val[0].images[0]) == (48, 48) and val[0].id.startswith("toy:")


def test_the_real_data_set(geo3k_dir: Path) -> None:
    dataset = open_(
        geo3k_dir / "train.parquet", geo3k_dir / "test.parquet", prompt_suffix=" Box it."
    )
    assert len(dataset) == 401
    problems = [dataset[i] for i in range(0, 401, 25)]
    assert dataset[0].id == "train:2607"
    for problem in problems:
        (image,) = problem.images
        assert decode(image).size == image_size(image)[::-1]
        first, text = problem.messages[0]["content"]
        assert first == {"type": "image_url", "image_url": {"url": image.url}}
        assert text["text"].endswith(" Box it.") and problem.answer.startswith(r"\boxed{")


def test_a_row_names_its_environment_and_keeps_its_other_columns(tmp_path: Path) -> None:
    (tmp_path / "envs.py").touch()
    cells: list[dict[str, Any]] = [
        {
            "env_class": "maze",
            "env_kwargs": {"size": 4, "slip": None},
            "level": 0.1,
            "extra": {"a": [1, 2]},
            "more": A,
        },
        {
            "env_class": "envs.py:Mine",
            "env_kwargs": {"size": None, "slip": 0.5},
            "level": 2,
            "extra": None,
            "more": None,
        },
        {"env_class": None, "env_kwargs": None, "level": None, "extra": {"a": []}, "more": B},
        {
            "env_class": "elsewhere/envs.py:Mine",
            "env_kwargs": None,
            "level": None,
            "extra": None,
            "more": None,
        },
    ]
    found = open_(
        write(
            tmp_path / "rows.parquet",
            [row | cell for row, cell in zip(rows(*[[A, B]] * 4), cells, strict=True)],
        )
    )
    first, second, third, fourth = found
    assert (first.env_class, first.columns) == (
        "maze",
        {"env_kwargs": {"size": 4}, "level": 0.1, "extra": {"a": [1, 2]}},
    )
    assert (second.env_class, second.columns["env_kwargs"]) == (
        f"{tmp_path}/envs.py:Mine",
        {"slip": 0.5},
    )
    assert third.env_class is None and "env_kwargs" not in third.columns
    assert fourth.env_class == "elsewhere/envs.py:Mine", "not here: perhaps the run's own file"


def test_seeds_are_rows_of_nothing_but_a_number() -> None:
    found = open_("seeds://3", image_keys=())
    assert [problem.id for problem in found] == ["seeds-train:0", "seeds-train:1", "seeds-train:2"]
    assert [problem.answer for problem in found] == ["", "", ""], (
        "a number is no answer to grade against"
    )
    assert [problem.columns["seed"] for problem in found] == [0, 1, 2]
    assert open_("seeds://3")[0].images == ()
    with pytest.raises(ValueError, match="seeds://0 names no number|names no number of rows"):
        open_("seeds://0", image_keys=())
