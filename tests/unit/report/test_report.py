"""The report's Python half: what is read, what is left out and said, what is escaped. A browser's half is in tests/e2e."""

import base64
import gzip
import hashlib
import html
import io
import json
import re
import struct
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tiny
from PIL import Image, ImageDraw
from summaries import changed
from unit.observe.conversations import make_conversations

from rlinf_vl.errors import RunError
from rlinf_vl.extras.eval.figures import evaluation
from rlinf_vl.observe.metrics_file import flatten
from rlinf_vl.observe.progress import RunProgress
from rlinf_vl.observe.status import StatusFile
from rlinf_vl.tools.report.build import ASSETS, MATH_SCRIPT, build_report
from rlinf_vl.tools.report.run_files import read_run
from rlinf_vl.types import GroupSummary

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\u2028\u202e{{ 7*7 }}<!--\\boxed{4}"
COLORS = ("#b3261e", "#1a5fb4", "#26734d", "#8a5a00", "#6d3a9c")


def make_run(
    folder: Path, steps=6, groups=4, samples=4, problems=12, val_every=3, text="The area is", seed=0
) -> Path:
    """A run's folder as training leaves it: every file, three validations or more, pictures of rectangles."""
    rng = np.random.default_rng(seed)
    (folder / "images").mkdir(parents=True)
    (folder / "trajectories").mkdir()
    images = [_picture(folder, p) for p in range(problems)]
    lines = []
    for step in range(steps + 1):
        skill = 0.25 + 0.6 * step / steps
        row = {"step": step}
        rows = []
        if step:
            chosen = rng.choice(problems, groups)
            for g, p in enumerate(chosen):
                rows += [
                    _trajectory(rng, step, "train", g, p, s, skill, images, text)
                    for s in range(samples)
                ]
            row |= _metrics(rng, step, skill)
        if step % val_every == 0:
            rows += [
                _trajectory(rng, step, "val", p, p, 0, skill, images, text) for p in range(problems)
            ]
            row |= {"val/accuracy": skill, "val/problems": 152, "time/validate": 0.6}
        lines.append(json.dumps(row))
        if rows:
            pq.write_table(
                pa.Table.from_pylist(rows),
                folder / f"trajectories/step_{step}.parquet",
                compression="zstd",
            )
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "config.yaml").write_text(
        f"runner:\n  experiment_name: {folder.name}\n  max_steps: {steps}\n  seed: {seed}\nalgorithm:\n  kl_beta: 0.0\n"
    )
    git = {"commit": "6f1d0c9e2ab4", "branch": "main", "dirty": False}
    (folder / "environment.json").write_text(
        json.dumps({"git": git, "python": "3.11", "packages": {"torch": "2.11"}})
    )
    event = {
        "time": 1.7e9,
        "step": 2,
        "kind": "worker_replaced",
        "message": "rollout worker 0 died; started again",
    }
    (folder / "events.jsonl").write_text(json.dumps(event) + "\n")
    bad = {
        "step": 0,
        "split": "train",
        "kind": "too_long",
        "id": "row-17",
        "reason": "prompt has 900 tokens, 512 allowed",
    }
    (folder / "bad_rows.jsonl").write_text(json.dumps(bad) + "\n")
    (folder / "baselines.json").write_text(
        json.dumps({"constant_answer": 0.13, "blank_images": 0.16})
    )
    return folder


def _picture(folder: Path, problem: int) -> str:
    image = Image.new("RGB", (48, 48), "#f4f1e8")
    draw = ImageDraw.Draw(image)
    draw.rectangle(
        [8, 8, 8 + 8 * (1 + problem % 4), 8 + 8 * (1 + problem // 4 % 4)], fill=COLORS[problem % 5]
    )
    for at in range(0, 48, 8):
        draw.line([at, 0, at, 48], fill="#c9c5b8")
        draw.line([0, at, 48, at], fill="#c9c5b8")
    data = io.BytesIO()
    image.save(data, "PNG")
    name = f"images/{hashlib.sha256(data.getvalue() + bytes([problem % 256])).hexdigest()[:16]}.png"
    (folder / name).write_bytes(data.getvalue())
    return name


def _metrics(rng, step: int, skill: float) -> dict[str, float | None]:
    noise = rng.normal(0, 0.02)
    return {
        "reward/mean": skill + noise,
        "reward/std": (skill * (1 - skill)) ** 0.5,
        "reward/zero_std_groups": int(4 * skill),
        "actor/entropy": 0.4 / step**0.5,
        "actor/ref_kl": 0.002 * step,
        "actor/grad_norm": None if step == 2 else 0.6 + noise,
        "actor/loss": noise,
        "actor/rollout_train_kl": 1e-6 * noise,
        "actor/rollout_train_k3": 1e-12 * noise**2,
        "actor/rollout_train_abs_diff_mean": 1e-4 * (1 + abs(noise)),
        "actor/rollout_train_abs_diff_max": 1e-2 * (1 + abs(noise)),
        "actor/tis_mean": 1 - 1e-16 * step,
        "actor/tis_ess": 1 - 1e-8 * (step % 2),
        "actor/tis_clip_fraction": 0.0,
        "rollout/response_length_mean": 13 + noise,
        "rollout/response_length_max": 24,
        "rollout/truncated": 0.1 / step,
        "rollout/tokens_per_second": 9000 + 1000 * noise,
        "actor/tokens_per_second": 30000 + 9000 * noise,
        "packing/fill": 0.6,
        "time/step": 2.0,
        "time/generate": 0.7,
        "time/train": 0.5 + abs(noise),
        "time/sync": 0.1,
    }


def _trajectory(rng, step, split, group, problem, sample, skill, images, text) -> dict:
    truth = (1 + problem % 4) * (1 + problem // 4 % 4)
    correct = bool(rng.random() < skill)
    value = truth if correct else int(rng.integers(1, 20))
    tokens = [
        *re.findall(r"\s*\S+", text),
        " of",
        " the",
        " rectangle",
        ":",
        " \\boxed{",
        str(value),
        "}",
        "<|im_end|>",
    ]
    n = len(tokens)
    rollout = -rng.exponential(0.3, n)
    failed = split == "train" and rng.random() < 0.01
    return {
        "step": step,
        "split": split,
        "group_id": f"{split}-{step}-{group}",
        "problem_id": f"toy-{problem}",
        "sample": sample,
        "prompt": "<|im_start|>user\n<|vision_start|>"
        + "<|image_pad|>" * 9
        + "<|vision_end|>What is the area?<|im_end|>\n",
        "response": "".join(tokens),
        "answer": str(truth),
        "images": [images[problem]],
        "tokens": tokens,
        "response_ids": rng.integers(0, 500, n).tolist(),
        "response_mask": [True] * n,
        "rollout_logprobs": rollout.tolist(),
        "train_logprobs": (rollout + rng.normal(0, 0.02, n)).tolist() if split == "train" else None,
        "advantage": float(rng.normal()) if split == "train" else None,
        "reward": float(correct),
        "reward_parts": json.dumps({"answer": float(correct), "format": 1.0}),
        "correct": None if failed else correct,
        "error": "engine: request timed out after 60 s" if failed else None,
        "finish_reason": "length" if rng.random() < 0.05 else "stop",
        "weight_versions": [max(0, step - 1)] * n,
    }


def unpack(page: Path) -> tuple[dict, bytes]:
    """What the page's script finds: the header, and the arrays behind it."""
    block = re.search(
        r'<script type="text/plain" id="data">([^<]*)</script>', page.read_text(encoding="utf-8")
    )[1]
    data = gzip.decompress(base64.b64decode(block))
    size = struct.unpack("<I", data[:4])[0]
    return json.loads(data[4 : 4 + size]), data[4 + size :]


def column(header: dict, arrays: bytes, name: str, run: int = 0) -> list:
    reference = header["runs"][run]["trajectories"][name]
    if "table" in reference:
        index = _array(arrays, reference["index"])
        return [None if i < 0 else reference["table"][i] for i in index]
    return _array(arrays, reference).tolist()


def _array(arrays: bytes, reference: dict) -> np.ndarray:
    return np.frombuffer(arrays, "<" + reference["type"], reference["count"], reference["at"])


def test_a_report_holds_the_curves_and_every_trajectory_of_the_run(tmp_path):
    run = make_run(tmp_path / "toy")
    page = build_report([run])
    assert page == run / "report.html"
    header, arrays = unpack(page)
    stored = pa.concat_tables(
        [pq.read_table(run / f"trajectories/step_{step}.parquet") for step in range(7)],
        promote_options="permissive",
    ).to_pylist()
    assert sorted(column(header, arrays, "response")) == sorted(row["response"] for row in stored)
    assert column(header, arrays, "tokens") == [token for row in stored for token in row["tokens"]]
    logprobs = [x for row in stored for x in row["train_logprobs"] or [np.nan] * len(row["tokens"])]
    np.testing.assert_allclose(column(header, arrays, "train_logprobs"), logprobs, rtol=1e-6)
    assert header["runs"][0]["metrics"]["val/accuracy"][0] == [0, 3, 6]
    assert header["runs"][0]["metrics"]["val/accuracy_error"][1][0] == pytest.approx(
        (0.25 * 0.75 / 152) ** 0.5
    )
    assert header["runs"][0]["metrics"]["actor/grad_norm"][1][1] is None
    assert header["runs"][0]["metrics"]["time/other"][1][0] == pytest.approx(0.7, abs=0.1)
    assert header["runs"][0]["baselines"] == {"constant answer": 0.13, "blank images": 0.16}
    text = page.read_text()
    for shown in ("6f1d0c9e2ab4", "row-17", "rollout worker 0 died", "85.0 %", "± 2.9 %", "6 of 6"):
        assert shown in text


def test_each_image_is_stored_once(tmp_path):
    run = make_run(tmp_path / "toy", problems=3)
    header, arrays = unpack(build_report([run]))
    assert len(header["images"]) == 3
    images = [_array(arrays, image["data"]).tobytes() for image in header["images"]]
    assert sorted(images) == sorted(file.read_bytes() for file in (run / "images").iterdir())
    assert len(set(column(header, arrays, "images"))) == 3


def column_of_first_image(run: Path) -> str:
    return pq.read_table(run / "trajectories/step_0.parquet")["images"][0].as_py()[0]


def test_a_page_cannot_fetch_and_its_policy_names_exactly_its_own_scripts_and_style(tmp_path):
    text = build_report([make_run(tmp_path / "toy", steps=2)]).read_text()
    policy = html.unescape(re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1])
    assert (
        policy.startswith("default-src 'none'") and "unsafe" not in policy and "http" not in policy
    )
    scripts = re.findall(r'<script(?: type="module")?>(.*?)</script>', text, re.DOTALL)
    styles = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    hashes = {
        f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'"
        for s in scripts + styles
    }
    assert set(re.findall(r"'sha256-[^']*'", policy)) == hashes and len(hashes) == 4
    markup = re.sub(r"<(script|style)[^>]*>.*?</\1>", "", text, flags=re.DOTALL)
    assert not re.search(r"\b(src|href)=(?!\"#)", markup) and "url(" not in "".join(styles)
    assert not re.search(r"\s(style|on\w+)=", markup)


def test_hostile_texts_are_data_wherever_they_come_from(tmp_path):
    run = make_run(tmp_path / "toy", steps=2)
    rows = pq.read_table(run / "trajectories/step_1.parquet").to_pylist()
    rows[0] |= dict.fromkeys(
        ("prompt", "response", "answer", "error", "problem_id", "reward_parts"), HOSTILE
    )
    rows[0]["tokens"][0] = HOSTILE
    pq.write_table(pa.Table.from_pylist(rows), run / "trajectories/step_1.parquet")
    (run / "events.jsonl").write_text(json.dumps({"step": 1, "kind": HOSTILE, "message": HOSTILE}))
    (run / "bad_rows.jsonl").write_text(json.dumps({"id": HOSTILE, "reason": HOSTILE + "\ud800"}))
    (run / "environment.json").write_text(json.dumps({HOSTILE: HOSTILE}))
    (run / "baselines.json").write_text(json.dumps({HOSTILE: 0.5}))
    (run / "config.yaml").write_text(json.dumps({"runner": {"experiment_name": HOSTILE}}))
    page = build_report([run])
    text = page.read_text(encoding="utf-8").replace(
        (ASSETS / MATH_SCRIPT).read_text(encoding="utf-8"), ""
    )
    assert (
        "alert(1)</script>" not in text
        and "<img" not in text
        and "<!--" not in text
        and "{{ 7*7 }}" in text
    )
    assert text.count("<script") == text.count("</script>") == 4
    header, arrays = unpack(page)
    assert HOSTILE in column(header, arrays, "response") and HOSTILE in column(
        header, arrays, "tokens"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["config.yaml", "environment.json", "baselines.json", "metrics.jsonl"]
)
def test_a_missing_or_broken_file_is_said_and_the_rest_is_shown(tmp_path, name):
    run = make_run(tmp_path / "toy", steps=2)
    for content in ("{torn: [", "", "[1, 2]", "\x00\xff"):
        (run / name).write_text(content)
        assert build_report([run]).exists()
    (run / name).write_text("{torn: [")
    assert name in html.unescape(
        build_report([run]).read_text().split("Not everything is here")[1].split("</ul>")[0]
    )
    (run / name).unlink()
    header, _ = unpack(build_report([run]))
    assert header["runs"][0]["trajectories"]["count"] == 2 * 16 + 12


def test_a_run_that_is_still_going_has_torn_last_lines_and_a_torn_parquet_file(tmp_path):
    run = make_run(tmp_path / "toy")
    for name in ("metrics.jsonl", "events.jsonl", "bad_rows.jsonl"):
        with (run / name).open("a") as file:
            file.write('{"step": 7, "reward/me')
    torn = run / "trajectories/step_6.parquet"
    torn.write_bytes(torn.read_bytes()[:-100])
    (run / "trajectories/step_7.parquet").write_bytes(b"")
    run_folder = read_run(run)
    assert run_folder.step == 6 and run_folder.notes == [
        f"{name}: 1 torn line left out."
        for name in ("metrics.jsonl", "events.jsonl", "bad_rows.jsonl")
    ]
    text = build_report([run]).read_text()
    for name in ("step_6.parquet", "step_7.parquet"):
        assert f"{name} could not be read" in text


def test_a_run_that_failed_or_was_killed_says_why(tmp_path):
    run = make_run(tmp_path / "toy", steps=2)
    assert read_run(run).state == ""
    try:
        with RunProgress(StatusFile(run)):
            raise RunError("data.max_bad_rows: too many.\nRepair <them>.")
    except RunError:
        pass
    page = build_report([run]).read_text()
    assert (
        "<b>Failed</b> at step 2 of 2: <span>data.max_bad_rows: too many.\nRepair &lt;them&gt;.</span></p>"
        in page
    )
    (run / "status.json").write_text(
        json.dumps(
            json.loads((run / "status.json").read_text())
            | {"state": "running", "pid": 2**22, "phase": "train"}
        )
    )
    page = build_report([run]).read_text()
    assert (
        "<b>Ended without a word</b>" in page
        and "phase train" in page
        and "<b>Running</b>" not in page
    )


def test_an_alarm_that_is_over_says_so_at_the_top(tmp_path):
    run = make_run(tmp_path / "toy", steps=2)
    events = [(1, "groups_tied", "they tie"), (2, "groups_tied_over", "it held in step 1")]
    lines = [{"step": step, "kind": kind, "message": text} for step, kind, text in events]
    (run / "events.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    (alarm,) = read_run(run).alarms
    assert alarm["over"] == "it held in step 1"
    again = {"step": 9, "kind": "groups_tied", "message": "they tie again"}
    (run / "events.jsonl").write_text("\n".join(map(json.dumps, [*lines, again])) + "\n")
    (alarm,) = read_run(run).alarms
    assert (alarm["step"], alarm["over"]) == (9, "")
    page = build_report([run]).read_text()
    assert "<b>Alarm: groups tied</b>, step 9: <span>they tie again" in page


def test_a_folder_that_is_no_run_is_refused(tmp_path):
    with pytest.raises(ValueError, match="nothing is not a run's folder"):
        build_report([tmp_path / "nothing"])
    with pytest.raises(ValueError, match="no metrics.jsonl"):
        build_report([tmp_path])
    with pytest.raises(ValueError, match="at least one"):
        build_report([])


def test_columns_may_be_missing_null_and_of_other_integer_types(tmp_path):
    run = make_run(tmp_path / "toy", steps=2)
    pq.write_table(
        pa.table({"step": pa.array([1, 1], pa.int64()), "group_id": [7, 7], "tokens": [["a", "b"], None],
                  "rollout_logprobs": [[-0.5], None], "correct": pa.array([None, None], pa.null())}),
        run / "trajectories/step_1.parquet",
    )  # fmt: skip
    header, arrays = unpack(build_report([run]))
    first = column(header, arrays, "group_id").index("7")
    offset = column(header, arrays, "offsets")[first]
    assert np.isnan(column(header, arrays, "reward")[first]) and np.isnan(
        column(header, arrays, "correct")[first]
    )
    assert column(header, arrays, "rollout_logprobs")[offset] == -0.5
    assert np.isnan(column(header, arrays, "rollout_logprobs")[offset + 1])


def test_images_outside_the_run_missing_or_no_images_are_left_out_and_said(tmp_path):
    run = make_run(tmp_path / "toy", steps=2)
    (tmp_path / "secret.png").write_bytes((run / column_of_first_image(run)).read_bytes())
    (run / "images/text.png").write_text("no image")
    rows = pq.read_table(run / "trajectories/step_1.parquet").to_pylist()
    rows[0]["images"] = [
        "../secret.png",
        str(tmp_path / "secret.png"),
        "images/gone.png",
        "images/text.png",
    ]
    pq.write_table(pa.Table.from_pylist(rows), run / "trajectories/step_1.parquet")
    page = build_report([run])
    header, arrays = unpack(page)
    at = column(header, arrays, "image_offsets")
    first = column(header, arrays, "step").index(1)
    assert column(header, arrays, "images")[at[first] : at[first + 1]] == [-1, -1, -1, -1]
    text = html.unescape(page.read_text())
    for note in (
        "2 images left out: outside the run's folder",
        "1 image left out: missing",
        "1 image left out: not an",
    ):
        assert note in text


def test_an_image_of_many_bytes_keeps_its_pixels_and_loses_bytes(tmp_path):
    run = make_run(tmp_path / "toy", steps=1, problems=1)
    noise = np.random.default_rng(0).integers(0, 256, (900, 1200, 3), np.uint8)
    Image.fromarray(noise).save(run / column_of_first_image(run), "PNG")
    header, arrays = unpack(build_report([run]))
    assert (
        header["images"][0]["size"] == [1200, 900]
        and header["images"][0]["data"]["count"] < 1_000_000
    )
    assert Image.open(io.BytesIO(_array(arrays, header["images"][0]["data"]).tobytes())).size == (
        1200,
        900,
    )


def test_beyond_the_limit_whole_groups_are_left_out_evenly_and_validation_last(tmp_path):
    run = make_run(tmp_path / "toy", steps=20, val_every=10)
    page = build_report([run], max_bytes=200 * 1220)
    header, arrays = unpack(page)
    splits, steps = column(header, arrays, "split"), column(header, arrays, "step")
    assert splits.count("val") == 3 * 12 and 100 < splits.count("train") <= 164
    kept = [step for step, split in zip(steps, splits, strict=True) if split == "train"]
    assert min(kept) == 1 and max(kept) == 20 and len(set(kept)) == 20
    groups = column(header, arrays, "group_id")
    assert all(
        groups.count(group) == 4
        for group, split in zip(groups, splits, strict=True)
        if split == "train"
    )
    assert (
        f"{320 - splits.count('train')} of 320 training trajectories left out" in page.read_text()
    )
    header, arrays = unpack(build_report([run], max_bytes=20 * 1220))
    assert column(header, arrays, "split").count("val") <= 20


def test_beyond_the_limit_of_tokens_and_image_bytes(tmp_path):
    run = make_run(tmp_path / "toy", steps=10)
    page = build_report([run], max_bytes=100_000, max_image_bytes=300)
    header, arrays = unpack(page)
    assert (
        len(column(header, arrays, "tokens")) <= 11 * 100_000 // 1220
        and "training trajectories left out" in page.read_text()
    )
    assert "images left out: there is room for" in page.read_text()


def test_two_runs_share_a_file_named_after_both(tmp_path):
    a, b = make_run(tmp_path / "a" / "toy"), make_run(tmp_path / "b" / "toy", seed=1)
    page = build_report([a, b])
    assert page == a / "report-vs-toy.html"
    header, arrays = unpack(page)
    assert [run["name"] for run in header["runs"]] == ["toy", "toy (2)"]
    assert (
        len(header["images"]) == 12
        and len(column(header, arrays, "response", run=1)) == 6 * 16 + 3 * 12
    )
    differences = page.read_text().split("<h3>Differences</h3>")[1].split("</table>")[0]
    assert "runner.seed" in differences and "kl_beta" not in differences
    assert build_report([a, b], tmp_path / "both.html") == tmp_path / "both.html"


def test_flatten():
    assert flatten({"a": {"b": None, "c": {}}, "d": [1], "e": "x"}) == {
        "a.b": "null",
        "a.c": "{}",
        "d": "[1]",
        "e": "x",
    }


@pytest.mark.slow
def test_a_hundred_steps_take_seconds(tmp_path):
    run = make_run(tmp_path / "toy", steps=100, groups=16, samples=6, problems=76, val_every=10)
    start = time.perf_counter()
    page = build_report([run])
    assert time.perf_counter() - start < 20
    assert unpack(page)[0]["runs"][0]["trajectories"]["count"] == 100 * 96 + 11 * 76
    assert page.stat().st_size < 20e6


def test_a_file_whose_footer_is_whole_and_a_column_is_not_is_left_out(tmp_path):
    run = make_run(tmp_path / "toy", steps=2)
    file = run / "trajectories/step_1.parquet"
    columns = pq.ParquetFile(file).metadata.row_group(0)
    prompt = next(
        c for c in map(columns.column, range(columns.num_columns)) if c.path_in_schema == "prompt"
    )
    data = bytearray(file.read_bytes())
    data[prompt.data_page_offset : prompt.data_page_offset + prompt.total_compressed_size] = (
        b"\xff" * prompt.total_compressed_size
    )
    file.write_bytes(data)
    page = build_report([run])
    assert unpack(page)[0]["runs"][0]["trajectories"]["count"] == 16 + 12
    assert "step_1.parquet could not be read" in page.read_text()


def test_a_conversation_is_in_the_report_without_repeated_placeholders(tmp_path):
    run = make_conversations(tmp_path / "talk", steps=3)
    header, arrays = unpack(build_report([run]))
    stored = pa.concat_tables(
        [pq.read_table(run / f"trajectories/step_{step}.parquet") for step in range(4)],
        promote_options="permissive",
    ).to_pylist()
    assert column(header, arrays, "messages") == [row["messages"] for row in stored]
    offsets, tokens = column(header, arrays, "offsets"), column(header, arrays, "tokens")
    assert "<|image_pad|>" in tokens and len(tokens) < sum(len(row["tokens"]) for row in stored)
    for i, (row, found) in enumerate(zip(stored, column(header, arrays, "turns"), strict=True)):
        own = tokens[offsets[i] : offsets[i + 1]]
        for turn, shown in zip(
            json.loads(row["turns"])["turns"], json.loads(found)["turns"], strict=True
        ):
            assert own[shown["start"] : shown["end"]] == row["tokens"][turn["start"] : turn["end"]]
    for text in ("{", "[1]", '{"turns": [{"start": 10000000}]}', '{"turns": 7}'):
        rows = [row | {"turns": text} for row in stored if row["step"] == 1]
        pq.write_table(pa.Table.from_pylist(rows), run / "trajectories/step_1.parquet")
        header, arrays = unpack(build_report([run]))
        assert text in column(header, arrays, "turns")


def test_one_turn_runs_have_their_messages_which_are_shown_as_bubbles(tmp_path):
    run = make_run(tmp_path / "toy", steps=1)
    rows = pq.read_table(run / "trajectories/step_1.parquet").to_pylist()
    turns = {
        "sequences": [0],
        "turns": [{"start": 0, "end": 11, "finish_reason": "stop", "reward": 1.0}],
    }
    rows = [
        row | {"turns": json.dumps(turns), "messages": '[[{"role": "user", "content": ["?"]}]]'}
        for row in rows
    ]
    pq.write_table(pa.Table.from_pylist(rows), run / "trajectories/step_1.parquet")
    header, arrays = unpack(build_report([run]))
    texts = column(header, arrays, "messages")
    assert texts.count('[[{"role": "user", "content": ["?"]}]]') == len(rows)
    assert header["runs"][0]["trajectories"]["messages"]["table"] == [rows[0]["messages"]], (
        "each text once"
    )


def test_many_images_become_small_and_the_latest_are_kept(tmp_path):
    run = make_run(tmp_path / "toy", steps=1, problems=12, val_every=9)
    rows = pq.read_table(run / "trajectories/step_1.parquet").to_pylist()
    rng = np.random.default_rng(0)
    for k, row in enumerate(rows):
        Image.fromarray(rng.integers(0, 256, (100, 150, 3), np.uint8)).save(run / f"images/{k}.png")
        row["images"] = [f"images/{k}.png"]
    pq.write_table(pa.Table.from_pylist(rows), run / "trajectories/step_1.parquet")
    header, arrays = unpack(build_report([run], max_image_bytes=500_000))
    kinds = [
        header["images"][k]["type"] if k >= 0 else None
        for k in column(header, arrays, "images")[-16:]
    ]
    pngs = kinds.count("image/png")
    assert 4 < pngs < 10 and kinds == ["image/webp"] * (16 - pngs) + ["image/png"] * pngs
    header, arrays = unpack(build_report([run], max_image_bytes=120_000))
    assert [k >= 0 for k in column(header, arrays, "images")[-16:]].index(True) > 5


def test_the_figures_of_an_evaluation_are_in_its_report(tmp_path):
    run = make_run(tmp_path / "toy", steps=1)
    assert 'class="card evaluation"' not in build_report([run]).read_text()
    summary = GroupSummary.of(tiny.group(np.random.default_rng(0), [(1, 2)], [3, 4]), tiny.IMAGE_ID)
    made = evaluation([changed(summary, correct=(True, False))], 2, {"category": [HOSTILE]})
    (run / "eval.json").write_text(json.dumps(made))
    page = build_report([run]).read_text()
    assert (
        "pass@2" in page
        and "0.500" in page
        and html.escape(HOSTILE)[:30] in page
        and "alert(1)</script>" not in page
    )
    for broken in ("{", "[]", '{"pass@1": 3}', '{"tables": {}}'):
        (run / "eval.json").write_text(broken)
        page = build_report([run]).read_text()
        assert 'class="card evaluation"' not in page and "eval.json" in page


@pytest.mark.parametrize(
    ("state", "reason", "figures", "sentence"),
    [
        (
            "failed",
            "every episode failed\nTraceback",
            {},
            "The run failed at step 3: every episode failed. No event was",
        ),
        ("gone", "", {}, "The run ended without a word at step 3. No event was"),
        (
            "done",
            "",
            {"rollout/errors": 8, "val/errors": 1},
            "No event was recorded, but 9 answers failed",
        ),
        ("done", "", {}, "Nothing happened beside the steps"),
    ],
)
def test_a_run_without_events_says_whether_that_is_good(tmp_path, state, reason, figures, sentence):
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 3, **figures}) + "\n")
    started = {
        "pid": 1,
        "host": "elsewhere",
        "started": 0.0,
        "time": 1.0,
        "step": 3,
        "phase": "train",
    }
    (tmp_path / "status.json").write_text(json.dumps({"state": state, "reason": reason, **started}))
    page = html.unescape(build_report([tmp_path]).read_text(encoding="utf-8"))
    assert sentence in page
    assert ("Nothing happened" in page) == (state == "done" and not figures)


def test_four_runs_are_a_table_with_what_was_tried(tmp_path):
    runs = [make_run(tmp_path / name, steps=2, seed=seed) for seed, name in enumerate("abcd")]
    (runs[2] / "status.json").write_text(
        json.dumps({"state": "failed", "reason": "out of memory", "step": 2})
    )
    page = html.unescape(build_report(runs).read_text(encoding="utf-8"))
    summary = page[page.index('<section id="summary"') : page.index('<section id="curves"')]
    assert summary.count("<tr>") == 5 and 'class="card run' not in summary
    assert '<th scope="col" class="number">runner.seed</th>' in summary, (
        "what differs between the runs"
    )
    assert "runner.experiment_name" not in summary
    assert "c: Failed" in summary and "out of memory" in summary
