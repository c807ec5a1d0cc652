"""Five thousand rows, two in a hundred damaged in each of thirteen ways: exactly those are lost, each for its reason."""

import asyncio
import base64
import io
import json
import math
import os
import struct
import zlib
from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from summaries import values

from rlinf_vl.config import load_config
from rlinf_vl.data.bad_rows import BadRows, TooManyBadRows
from rlinf_vl.rollout.pool.worker import RolloutRank
from rlinf_vl.rollout.submission import Task

pytestmark = pytest.mark.integration

N_ROWS, EVERY = 5000, 50
TOO_LONG = "prompt too long"
DAMAGE = {
    "truncated": "image can't be decoded",
    "text": "not an image",
    "bomb": "image too large",
    "narrow": "image too narrow",
    "outside": "path leaves the dataset's folder",
    "missing": "image file can't be read",
    "url": "image not fetched",
    "more placeholders": "placeholders and images disagree",
    "fewer placeholders": "placeholders and images disagree",
    "no answer": "answer missing",
    "nan": "answer unusable",
    "prompt": "prompt unusable",
    "long": TOO_LONG,
}
"""Damage → the kind that it is counted under. Row i has the damage of number i % EVERY, if there is one."""


def encode(image, format="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def pictures():
    """Good ones of every variety that data sets hold."""
    rng = np.random.default_rng(0)
    noise = [Image.fromarray(rng.integers(0, 256, (20 + i, 48, 3), np.uint8)) for i in range(40)]
    exif = Image.Exif()
    exif[0x0112] = 6
    return [
        *(
            encode(image, format)
            for image, format in zip(noise, ["PNG", "JPEG", "WEBP", "GIF"] * 10, strict=True)
        ),
        encode(noise[0], "GIF", save_all=True, append_images=noise[1:3]),
        encode(noise[0], "JPEG", exif=exif),
        encode(noise[0].convert("RGBA")),
        encode(noise[0].convert("CMYK"), "JPEG"),
        encode(noise[0].convert("P")),
        encode(Image.fromarray(rng.integers(0, 2**16, (20, 30), np.uint16))),
        *(
            encode(Image.new("RGB", size))
            for size in [(1, 1), (1, 200), (200, 1), (15, 3000), (3, 5)]
        ),
    ]


def bomb():
    def chunk(kind, data):
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 30_000, 30_000, 8, 2, 0, 0, 0))
    return (
        b"\x89PNG\r\n\x1a\n"
        + header
        + chunk(b"IDAT", zlib.compress(bytes(1000)))
        + chunk(b"IEND", b"")
    )


def damaged_image(damage, k, good):
    """The k-th image of a damage that is of images: bytes, or a path."""
    match damage:
        case "truncated":
            data = good[k % 40]
            return data[: len(data) * (6 + k % 4) // 10]  # what is before the pixels is whole
        case "text":
            return [b"no image", b"", b"%PDF-1.7", bytes(300), b"<svg/>"][k % 5]
        case "bomb":
            return bomb()
        case "narrow":
            return encode(Image.new("L", [(1, 4000), (4000, 1), (2, 401)][k % 3]))
        case "outside":
            absolute = ["/etc/passwd", "file:///etc/passwd"]
            return [
                "../secret.png",
                "link.png",
                "linked/secret.png",
                "images/../../secret.png",
                *absolute,
            ][k % 6]
        case "missing":
            return ["gone.png", "images", "pipe", "gone/a.png", "loop"][k % 5]
        case "url":
            return ["https://example.org/a.png", "http://good@evil/a.png"][k % 2]
    return None


def row(i, good):
    """(problem, image, answer) of row i: an image is bytes or a path."""
    damage, k = damage_of(i), i // EVERY
    image = damaged_image(damage, k, good) or (
        "images/a.png" if i % 7 == 0 else good[(i * 31) % len(good)]
    )
    if damage == "text" and k % 5 == 1:
        image = b""
    problem = f"<image>\nWhat is {i}?" if i % 3 else f"What is {i}?"
    match damage:
        case "more placeholders":
            problem = "<image> and <image>?"
        case "fewer placeholders":
            return "<image>?", [image, image], i
        case "no answer":
            return problem, [image], None
        case "nan":
            return problem, [image], math.nan
        case "prompt":
            problem = [None, "  ", "\n"][k % 3]
        case "long":
            problem = "word " * 700
    return problem, [image], i


def damage_of(i):
    return dict(enumerate(DAMAGE)).get(i % EVERY)


def write(folder, good, n=N_ROWS):
    """Half of the rows as parquet (bytes, numbers), half as lines of JSON (base64, texts)."""
    (folder / "data/images").mkdir(parents=True)
    (folder / "data/images/a.png").write_bytes(good[0])
    (folder / "secret.png").write_bytes(good[0])
    os.symlink(folder / "secret.png", folder / "data/link.png")
    os.symlink(folder, folder / "data/linked")
    os.symlink("loop", folder / "data/loop")
    os.mkfifo(folder / "data/pipe")

    def cell(image):
        return (
            {"bytes": None, "path": image}
            if isinstance(image, str)
            else {"bytes": image, "path": None}
        )

    def text(image):
        return (
            image
            if isinstance(image, str)
            else "data:image/png;base64," + base64.b64encode(image).decode()
        )

    table = [
        (p, [cell(x) for x in images], a) for p, images, a in (row(i, good) for i in range(n // 2))
    ]
    columns = dict(zip(("problem", "images", "answer"), zip(*table, strict=True), strict=True))
    columns["answer"] = pa.array(columns["answer"], pa.float64(), from_pandas=False)
    pq.write_table(pa.table(columns), folder / "data/first.parquet")
    with (folder / "data/second.jsonl").open("w") as file:
        for problem, images, answer in (row(i, good) for i in range(n // 2, n)):
            answer = " " if answer is None else str(answer)
            file.write(
                json.dumps(
                    {"problem": problem, "images": [text(x) for x in images], "answer": answer}
                )
                + "\n"
            )
    return [str(folder / "data/first.parquet"), str(folder / "data/second.jsonl")]


@pytest.fixture(scope="module")
def rank(tmp_path_factory, toy_folder):
    """A rollout worker, with its engine, in this process."""
    paths = write(tmp_path_factory.mktemp("damaged"), pictures())
    config = load_config(
        "toy-grpo-cpu", [f"data.train_data_paths={paths}", "data.val_data_paths=[]"]
    )
    rank = RolloutRank(config, str(toy_folder), "cpu")
    yield rank
    asyncio.run(rank.stop())


@pytest.fixture(scope="module")
def found(rank):
    assert asyncio.run(rank.ready()) == {"train": N_ROWS}
    return asyncio.run(rank.filter_rows("train", range(N_ROWS)))[0]


def test_exactly_the_damaged_rows_are_lost_each_for_its_reason(found):
    kinds = {i: DAMAGE[damage_of(i)] for i in range(N_ROWS) if damage_of(i)}
    assert {i: row.kind for i, row in found.bad.items()} == {
        i: k for i, k in kinds.items() if k != TOO_LONG
    }
    assert list(found.too_long) == [i for i, k in kinds.items() if k == TOO_LONG]
    assert list(found.kept) == [i for i in range(N_ROWS) if i not in kinds]
    names = [f"first:{i}" for i in range(N_ROWS // 2)] + [f"second:{i}" for i in range(N_ROWS // 2)]
    assert all(row.id == names[i] and row.reason for i, row in found.bad.items())


def test_the_run_stops_with_the_table_of_reasons(found, tmp_path):
    bad = BadRows(tmp_path, 0.24, {"train": N_ROWS})
    bad.add("train", found.bad.values())
    bad.check()  # 12 of the 13 kinds, at 2 % each
    with pytest.raises(TooManyBadRows, match="1200 of the 5000 rows of train are bad") as caught:
        strict = BadRows(tmp_path, 0.23, {"train": N_ROWS})
        strict.add("train", found.bad.values())
        strict.check()
    table = strict.table("train")
    assert table in str(caught.value)
    shown = {line[8:].split("  ")[0]: int(line[:6]) for line in table.splitlines()}
    per_kind = N_ROWS // EVERY
    assert shown == {
        kind: n * per_kind for kind, n in Counter(DAMAGE.values()).items() if kind != TOO_LONG
    }
    lines = [json.loads(line) for line in (tmp_path / "bad_rows.jsonl").read_text().splitlines()]
    assert [(x["kind"], x["id"], x["reason"]) for x in lines] == [
        (b.kind, b.id, b.reason) for b in found.bad.values()
    ]


def test_what_is_kept_can_be_answered_and_trained_on(rank, found):
    images = {}
    for i in list(found.kept)[::17]:
        problem = rank.datasets["train"][i]
        group = asyncio.run(rank.player.start_group(problem, (1,), rank.sampling["train"]))
        assert len(group.first_requests) == 1
        images |= {image.hash: image for image in problem.images}
    assert len(images) > 40
    for image in images.values():
        patches = rank.processor.pixels(image)
        assert len(patches) == math.prod(rank.processor.grid(image)) and np.isfinite(patches).all()


def answered(rank, tasks):
    """Summaries by row; groups stay in this process."""

    async def run():
        return {
            summary.id: summary
            async for finished in rank.generate(tasks)
            for summary, _ in finished
        }

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank.store, "put", lambda group, own_images: (group, 0))
        summaries = asyncio.run(run())
    return {task.row: summaries[task.group_id] for task in tasks}


def test_a_bad_row_that_is_asked_for_all_the_same_is_a_group_with_that_reason(rank, found):
    asked = list(found.bad)[1::40] + list(found.too_long)[:1]
    for i, summary in answered(rank, [Task(f"g{i}", "train", i, (1, 2)) for i in asked]).items():
        assert summary.problem_id == rank.datasets["train"].row_id(i)
        row = found.bad.get(i)
        expected = f"{row.kind}: {row.reason}" if row else f"{TOO_LONG}: the prompt has "
        assert len(values(summary, "error")) == 2 and all(
            error.startswith(expected) for error in values(summary, "error")
        )


def test_too_long_prompts_are_bad_where_they_are_not_filtered(rank, found, monkeypatch):
    monkeypatch.setattr(rank.config.data, "filter_prompt_by_length", False)
    result, _ = asyncio.run(
        rank.filter_rows("train", [*list(found.too_long)[:3], *list(found.kept)[:3]])
    )
    assert list(result.kept) == list(found.kept)[:3] and not result.too_long
    assert [
        (row.kind, "data.max_prompt_length is 512" in row.reason) for row in result.bad.values()
    ] == [(TOO_LONG, True)] * 3


def test_images_that_go_bad_while_training_are_counted(tmp_path, toy_folder):
    noise = np.random.default_rng(3).integers(0, 256, (6, 30, 40, 3), np.uint8)
    for i in range(6):
        Image.fromarray(noise[i]).save(tmp_path / f"{i}.png")
    rows = [{"problem": "<image>What?", "images": [f"{i}.png"], "answer": str(i)} for i in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    overrides = [
        f"data.train_data_paths=[{tmp_path}/rows.jsonl]",
        "data.val_data_paths=[]",
        "algorithm.sampling_params.max_new_tokens=4",
    ]
    rank = RolloutRank(load_config("toy-grpo-cpu", overrides), str(toy_folder), "cpu")
    total = asyncio.run(rank.ready())
    found, _ = asyncio.run(rank.filter_rows("train", range(6)))
    assert (list(found.kept), found.too_long, found.bad) == (list(range(6)), {}, {})
    (tmp_path / "1.png").unlink()
    # The header is still whole.
    (tmp_path / "4.png").write_bytes((tmp_path / "4.png").read_bytes()[:900])
    summaries = list(
        answered(rank, [Task(f"g{i}", "train", i, (1, 2)) for i in found.kept]).values()
    )
    asyncio.run(rank.stop())
    record = BadRows(tmp_path, 0.3, total)
    record.add_failed("train", summaries, step=1)
    lines = [json.loads(line) for line in record.path.read_text().splitlines()]
    assert [(line["step"], line["id"], line["kind"]) for line in lines] == [
        (1, "rows:1", "image file can't be read"),
        (1, "rows:4", "image can't be decoded"),
    ]
    with pytest.raises(TooManyBadRows, match="2 of the 6 rows of train"):
        record.check()


def test_a_run_trains_on_exactly_the_rows_that_are_sound(toy_folder, tmp_path):
    """One epoch of some of the rows, through real actors; images that are decoded, tokenized and trained on."""
    from rlinf_vl.driver.backends import parts_of
    from rlinf_vl.driver.supervise import supervise
    from rlinf_vl.observe.progress import RunProgress
    from rlinf_vl.runtime.stop_request import StopRequest

    n = 10 * EVERY
    overrides = [
        f"data.train_data_paths={write(tmp_path, pictures(), n)}",
        "data.val_data_paths=[]",
        "data.rollout_batch_size=37",
        "data.max_bad_rows=0.24",
        "algorithm.group_size=2",
        "algorithm.sampling_params.max_new_tokens=2",
        "runner.max_epochs=1",
        "runner.max_steps=-1",
        "runner.mismatch_check_interval=-1",
        "rollout.weight_sync=object_store",
    ]
    config = load_config("toy-grpo-cpu", overrides)
    model = str(toy_folder)
    with parts_of(config, model, tmp_path, RunProgress(), StopRequest()) as parts:
        metrics = supervise(parts)
    assert metrics["data/bad_rows"] == 120 and metrics["rollout/errors"] == 0
    ledger = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    assert sorted(row for step in ledger for row in step["rows"]) == [
        i for i in range(n) if not damage_of(i)
    ]
    kinds = Counter(
        json.loads(line)["kind"] for line in (tmp_path / "bad_rows.jsonl").read_text().splitlines()
    )
    assert kinds == Counter(
        DAMAGE[d] for i in range(n) if (d := damage_of(i)) and DAMAGE[d] != TOO_LONG
    )
