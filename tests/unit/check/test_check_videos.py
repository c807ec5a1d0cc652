"""What check-data says of videos: counts, sizes, tokens, reasons of bad ones, and how its page shows them."""

import base64
import html
import io
import json
import re

import pytest
from PIL import Image

from rlinf_vl.__main__ import main
from tests.video_files import sound, video


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("videos")
    files = {
        "long.mp4": video(120),  # 4 s, of which 8 frames are sampled
        "short.webm": video(12, container="webm", codec="libvpx", size=(48, 48)),
        "cut.mp4": video(30)[:1500],
        "sound.mp4": sound(),
    }
    for name, data in files.items():
        (folder / name).write_bytes(data)
    image = io.BytesIO()
    Image.new("RGB", (48, 48)).save(image, "PNG")
    (folder / "a.png").write_bytes(image.getvalue())
    rows = [
        {"problem": "<video>Which way?", "videos": ["long.mp4"]},
        {"problem": "<video>Which way?", "videos": ["long.mp4"]},
        {
            "problem": "<video><image><video>?",
            "videos": ["short.webm", "long.mp4"],
            "images": ["a.png"],
        },
        {"problem": "Which?", "videos": []},
        {"problem": "<video>?", "videos": ["cut.mp4"]},
        {"problem": "<video>?", "videos": ["sound.mp4"]},
        {"problem": "<video>?", "videos": ["gone.mp4"]},
        {"problem": "<video><video>?", "videos": ["long.mp4"]},
    ]
    lines = [json.dumps({"images": [], "answer": "left"} | row) for row in rows]
    (folder / "train.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def page(folder, toy_folder):
    page = folder / "out/page.html"
    overrides = [
        f"data.train_data_paths=[{folder}/train.jsonl]",
        "data.val_data_paths=[]",
        f"rollout.model.model_path={toy_folder}",
        "data.max_bad_rows=0.9",
        "data.rollout_batch_size=2",
    ]
    assert main(["check-data", "toy-grpo-cpu", *overrides, "--output", str(page)]) == 0
    return page


@pytest.mark.slow
def test_videos_are_counted_and_bad_ones_named(page, folder):
    train = json.loads(page.with_suffix(".json").read_text())["splits"]["train"]
    videos = train["videos"]
    assert (videos["in_all"], videos["distinct"]) == (4, 2)
    assert videos["per_row"] == {"0": 1, "1": 2, "2": 1}
    assert (videos["frames"]["min"], videos["frames"]["max"]) == (4, 8)
    assert (videos["width"]["min"], videos["width"]["max"]) == (48, 64)
    assert train["images"]["in_all"] == train["images"]["distinct"] == 1
    assert train["usable"] == 4 and train["duplicates"]["rows"] == [[0, 1]]
    reasons = {bad["row"]: (bad["kind"], bad["reason"]) for bad in train["bad"]["all"]}
    assert list(reasons) == [4, 5, 6, 7]
    assert reasons[4][0] == "video can't be decoded" and "'cut.mp4'" in reasons[4][1]
    assert reasons[5][0] == "not a video" and "its streams are audio" in reasons[5][1]
    assert reasons[6][0] == "video file can't be read"
    assert reasons[7] == (
        "placeholders and videos disagree",
        "the prompt has 2 <video> and the row 1 videos",
    )
    # Of the toy: 3×4 tokens for two frames of 64×48 pixels, 3×3 for those of 48×48 and for a picture.
    tokens = train["tokens"]["images"]
    assert (tokens["min"], tokens["max"]) == (4 * 12, 4 * 12 + 2 * 9 + 9)


def test_the_page_plays_them_and_shows_a_strip(page):
    text = html.unescape(page.read_text())
    assert "Sampled frames of a video" in text and "default-src 'none'" in text
    row = next(part for part in text.split("<article")[1:] if "train:2 " in part)
    addresses = re.findall(r'<img src="([^"]+)"', row)
    pictures = [Image.open(io.BytesIO(base64.b64decode(a.partition(",")[2]))) for a in addresses]
    counts = [getattr(picture, "n_frames", 1) for picture in pictures]
    assert counts == [4, *[1] * 4, 1, 8, *[1] * 8]
    times = re.findall(r"<small>([\d.]+ s)</small>", row)
    assert times[:4] == ["0.00 s", "0.13 s", "0.23 s", "0.37 s"] and len(times) == 12
    assert "video: 8 frames of 64 × 48" in row


def test_the_terminal_says_it(folder, toy_folder, capsys):
    overrides = [
        f"data.train_data_paths=[{folder}/train.jsonl]",
        "data.val_data_paths=[]",
        f"rollout.model.model_path={toy_folder}",
        "data.max_bad_rows=0.9",
        "data.rollout_batch_size=2",
    ]
    main(["check-data", "toy-grpo-cpu", *overrides])
    said = " ".join(capsys.readouterr().out.split())
    assert "videos 4, 2 distinct; rows: 1 with 0, 2 with 1, 1 with 2" in said
    assert "sampled frames" in said
