"""What check-data finds in data whose faults are known, and what it writes."""

import html
import io
import json
import re

import numpy as np
import pytest
from PIL import Image
from rich.console import Console
from transformers import AutoTokenizer

from rlinf_vl.__main__ import main
from rlinf_vl.tools.check.data.main import _lines
from rlinf_vl.tools.check.data.summary import _spread

HOSTILE = "</pre><script>alert(1)</script>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Seven pictures of 40 × 48, one of them damaged, and rows of train and val that name them."""
    folder = tmp_path_factory.mktemp("data")
    noise = np.random.default_rng(0).integers(0, 256, (7, 40, 48, 3), np.uint8)
    for k, pixels in enumerate(noise):
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "PNG")
        (folder / f"{k}.png").write_bytes(buffer.getvalue()[: 2000 if k == 6 else None])

    def write(name, *rows):
        lines = (
            json.dumps({"problem": p, "images": [f"{i}.png" for i in im], "answer": a})
            for p, im, a in rows
        )
        (folder / name).write_text("\n".join(lines))

    write(
        "train.jsonl",
        ("<image>What is it?", [0], "A"),
        ("<image>What is  IT?", [0], "A"),  # the first again, spaces and case aside
        ("<image>What is it?", [0], "B"),  # the first again, with another answer
        ("<image>What is it?", [1], "A"),
        ("<image><image>Which one?", [2, 3], "A"),
        ("<image>What is it?", [6], "A"),
        ("<image><image>What is it?", [4], "A"),
        (HOSTILE, [], "A"),
        ("word " * 200, [], "A"),
        ("What is 1 + 1?", [], None),
        ("What is this?", [], r"\boxed{6"),
    )
    write(
        "val.jsonl",
        ("<image>what is it?", [1], "A"),  # row 3 of train
        ("<image>How many?", [3], "2"),  # an image of row 4
        ("<image>What is it?", [5], "2"),  # a text of row 0
        ("<image>How large?", [5], "2"),
    )
    return folder


@pytest.fixture(scope="module")
def found(folder, toy_folder):
    page = folder / "out/page.html"
    overrides = [
        f"data.train_data_paths=[{folder}/train.jsonl]",
        f"data.val_data_paths=[{folder}/val.jsonl]",
        f"rollout.model.model_path={toy_folder}",
        "data.max_prompt_length=128",
        "data.rollout_batch_size=4",
        "data.max_bad_rows=0.5",
    ]
    assert main(["check-data", "toy-grpo-cpu", *overrides, "--output", str(page)]) == 0
    return json.loads(page.with_suffix(".json").read_text())


@pytest.mark.slow
def test_bad_rows_have_the_reasons_of_training(found):
    train = found["splits"]["train"]
    assert (train["rows"], train["usable"], train["bad"]["rows"]) == (11, 6, 4)
    assert {bad["row"]: (bad["id"], bad["kind"]) for bad in train["bad"]["all"]} == {
        5: ("train:5", "image can't be decoded"),
        6: ("train:6", "placeholders and images disagree"),
        9: ("train:9", "answer missing"),
        10: ("train:10", "answer unusable"),
    }
    assert [long["row"] for long in train["too_long"]] == [8]
    assert found["splits"]["val"]["bad"]["rows"] == 0 and found["refused"] == []


def test_doubles_contradictions_and_overlap_are_found_by_text_and_image(found):
    train = found["splits"]["train"]
    assert train["duplicates"] == {"rows": [[0, 1, 2]], "images": [[0, 1, 2]]}
    assert train["contradictions"] == [[0, 1, 2]]
    assert found["overlap"] == {"rows": [[0, 3]], "images": [[1, 4]], "texts": [[2, 0]]}
    said = " ".join(found["problems"])
    assert "3 rows ask what another one asks, and have another answer" in said
    assert "val: 1 rows stand in train" in said and "val: 1 rows show an image of train" in said


def test_tokens_are_those_of_the_chat_template_and_of_the_pixels(found, toy_folder):
    tokenizer = AutoTokenizer.from_pretrained(toy_folder)
    said = [{"role": "user", "content": [{"type": "text", "text": "word " * 200}]}]
    text = tokenizer.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
    longest = len(tokenizer(text, add_special_tokens=False)["input_ids"])
    tokens = found["splits"]["train"]["tokens"]
    assert tokens["prompt"]["max"] == longest == found["splits"]["train"]["too_long"][0]["tokens"]
    size = json.loads((toy_folder / "preprocessor_config.json").read_text())
    unit = size["patch_size"] * size["merge_size"]
    of_one = (round(40 / unit)) * round(48 / unit)
    assert (tokens["images"]["min"], tokens["images"]["max"]) == (of_one, 2 * of_one)
    budgets = {
        b["value"]: b["dropped"] for b in found["splits"]["train"]["budgets"]["max_prompt_length"]
    }
    assert budgets[128] == 1 and budgets[max(budgets)] == 0 and len(budgets) > 3


def test_images_and_answers_are_counted(found):
    train = found["splits"]["train"]
    assert train["images"]["per_row"] == {"0": 2, "1": 5, "2": 1} and train["images"]["in_all"] == 7
    assert train["images"]["distinct"] == 5 and train["images"]["width"]["median"] == 48
    assert train["answers"] == {"distinct": 2, "most_common": [["A", 5], ["B", 1]]}


def test_the_page_shows_rows_with_their_pictures_and_loads_nothing(found, folder):
    page = (folder / "out/page.html").read_text()
    assert html.escape(HOSTILE) in page and "<script" not in page
    assert not re.search(r'(?:src|href)="(?!data:image/jpeg;base64,)', page)
    for shelf in (
        "train: image can&#39;t be decoded",
        "train: rows that repeat another",
        "val: usable rows",
    ):
        assert shelf in page
    assert page.count("<img") > 10


def test_data_without_a_config_is_checked_without_tokens(folder, capsys):
    assert (
        main(["check-data", f"{folder}/val.jsonl", "--output", str(folder / "out/val.html")]) == 0
    )
    found = json.loads((folder / "out/val.json").read_text())
    assert (
        found["model"] is None
        and found["splits"]["train"]["usable"] == 4
        and "tokens" not in found["splits"]["train"]
    )
    assert "add rollout.model.model_path=MODEL" in capsys.readouterr().out


def test_what_training_would_refuse_is_exit_code_one(folder, capsys):
    arguments = ["check-data", f"{folder}/train.jsonl", "--output", str(folder / "out/train.html")]
    assert main(arguments) == 1
    assert "rows are bad" in capsys.readouterr().out
    assert main([*arguments, "data.prompt_key=question"]) == 2
    assert "'question'" in capsys.readouterr().err


def test_a_spread_is_of_all_its_values():
    spread = _spread([1, 2, 3, 4, 1000])
    assert (spread["min"], spread["median"], spread["max"], spread["mean"]) == (1, 3, 1000, 202.0)
    assert sum(spread["histogram"]["counts"]) == 5 and spread["histogram"]["edges"][-1] == 1000
    assert np.allclose(
        np.diff(np.log(spread["histogram"]["edges"][1:])), np.log(1000) / 24, rtol=0.2
    )
    assert _spread([]) is None and sum(_spread([7, 7])["histogram"]["counts"]) == 2


def test_each_data_set_has_its_page_and_progress_is_told_outside_a_terminal(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        rows = (json.dumps({"problem": f"{name} {n}?", "answer": "A"}) for n in range(40))
        (tmp_path / name / "train.jsonl").write_text("\n".join(rows))
    pages = []
    for name in ("a", "b", "a"):
        check = [
            "check-data",
            f"{name}/train.jsonl",
            "data.image_keys=[]",
            "runner.output_dir=out",
            "--workers",
            "1",
        ]
        assert main(check) == 0
        told = capsys.readouterr()
        pages.append(re.search(r"out/check-data/(\S+) has pictures", told.out)[1])
        assert told.err.splitlines()[0] == "checking 40 rows"
    assert pages == ["train.html", "train-2.html", "train.html"]
    assert "a 39?" in (tmp_path / "out/check-data/train.html").read_text()


def test_a_line_of_progress_for_each_tenth():
    out = io.StringIO()
    advance = _lines(1000, Console(file=out))
    for _ in range(40):
        advance(25)
    lines = out.getvalue().splitlines()
    assert lines[:3] == [
        "checking 1000 rows",
        "checking rows: 100 of 1000",
        "checking rows: 200 of 1000",
    ]
    assert len(lines) == 10


def test_conversations_to_imitate_are_counted_whole(tmp_path, toy_folder, capsys):
    """By `runner.seq_length`, with the answers in them; rows that sft would refuse are bad."""
    answers = ("short", "long " * 60, "")
    question = {"role": "user", "content": "How many?", "name": "ann"}
    rows = [
        {"messages": [question, {"role": "assistant", "content": answer}]} for answer in answers
    ]
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)))
    page = tmp_path / "page.html"
    overrides = [
        f"data.train_data_paths=[{data}]",
        "data.val_data_paths=[]",
        "data.sample_val=false",
        "data.image_keys=[]",
        f"rollout.model.model_path={toy_folder}",
        "data.max_prompt_length=16",
        "data.rollout_batch_size=1",
        "data.max_bad_rows=0.5",
    ]
    assert main(["check-data", "toy-sft-cpu", *overrides, "--output", str(page)]) == 0
    figures = json.loads(page.with_suffix(".json").read_text())
    train = figures["splits"]["train"]
    assert figures["limits"]["length"] == {
        "of": "conversation",
        "key": "runner.seq_length",
        "value": 128,
    }
    assert (train["usable"], [long["row"] for long in train["too_long"]]) == (1, [1])
    assert [bad["row"] for bad in train["bad"]["all"]] == [2]
    assert train["unused_keys"] == {"name": 1}
    tokenizer = AutoTokenizer.from_pretrained(toy_folder)
    text = tokenizer.apply_chat_template(rows[0]["messages"], tokenize=False)
    n_tokens = len(tokenizer(text.rstrip(), add_special_tokens=False)["input_ids"])
    assert train["tokens"]["conversation"]["min"] == n_tokens
    page_text = capsys.readouterr().out
    assert "conversation longer than 128 tokens" in page_text
    assert "! train: 'name' of 1 rows is neither used nor passed on" in page_text
