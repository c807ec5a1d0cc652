"""Rows that a run uses: bad and long ones are left out, and too few are refused with the keys to change."""

import io

import pytest
from rich.console import Console

from rlinf_vl.config import load_config
from rlinf_vl.controller.dataset_plan import DatasetPlan, find_usable_rows
from rlinf_vl.data.bad_rows import TooManyBadRows
from rlinf_vl.data.dataset import FilterResult, RowFacts
from rlinf_vl.data.unusable import BadRow
from rlinf_vl.errors import ConfigError
from rlinf_vl.observe.progress import RunProgress
from rlinf_vl.observe.status import StatusFile

BAD, LONG = {1: BadRow("not an image", "t:1", "3 bytes")}, {3: 90, 7: 70}


class Pool:
    """Workers that find rows `bad` and `long` of the training split."""

    def __init__(
        self, train: int = 12, val: int | None = 5, *, bad=BAD, long=LONG, cut=None
    ) -> None:
        self.rows = {"train": train} | ({} if val is None else {"val": val})
        self.bad, self.long, self.cut = bad, long, cut or {}

    def start(self) -> dict[str, int]:
        return self.rows

    def filter_rows(self, split, rows, progress) -> FilterResult:
        progress(len(rows))
        if split == "val":
            return FilterResult({row: f" {row % 2}" for row in rows})
        return FilterResult(
            {row: "1" for row in rows if row not in self.bad | self.long},
            self.long,
            self.bad,
            self.cut,
        )


def found(tmp_path, pool: Pool, *overrides: str) -> DatasetPlan:
    sizes = [
        "data.rollout_batch_size=4",
        "algorithm.n_minibatches=1",
        "data.max_bad_rows=0.1",
        "runner.max_epochs=3",
    ]
    config = load_config(
        "toy-grpo-cpu", [*sizes, "runner.max_steps=-1", "data.shuffle=false", *overrides]
    )
    progress = RunProgress(StatusFile(tmp_path), console=Console(file=io.StringIO()))
    return find_usable_rows(config, tmp_path, pool, progress)  # pyright: ignore[reportArgumentType]


@pytest.mark.slow
def test_bad_and_long_rows_are_left_out(tmp_path):
    data = found(tmp_path, Pool())
    assert data.sampler.next_rows(4) == (0, [0, 2, 4, 5]) and data.val_rows == [0, 1, 2, 3, 4]
    assert data.answers == {"0": 3, "1": 2} and data.total_steps == 6
    assert (
        data.bad_rows.counts() == {"train": 1, "val": 0}
        and '"id": "t:1"' in data.bad_rows.path.read_text()
    )


@pytest.mark.slow
def test_steps_and_validation_rows_are_limited_by_the_config(tmp_path):
    data = found(tmp_path, Pool(), "runner.max_steps=5", "data.val_samples=2")
    assert data.total_steps == 5 and data.val_rows == [0, 1]
    assert found(tmp_path, Pool(val=None), "data.val_samples=2").val_rows == []


def test_too_many_bad_rows_stop_the_run(tmp_path):
    with pytest.raises(TooManyBadRows, match="1 of the 12 rows of train are bad"):
        found(tmp_path, Pool(), "data.max_bad_rows=0.05")


@pytest.mark.slow
def test_too_few_rows_are_refused_with_the_keys_to_change(tmp_path):
    with pytest.raises(ConfigError) as caught:
        found(tmp_path, Pool(train=6, long={0: 90, 3: 70, 5: 80}), "data.max_bad_rows=1")
    limit = load_config("toy-grpo-cpu").data.max_prompt_length
    assert str(caught.value) == (
        "data.train_data_paths: of 6 rows 2 can be used; data.rollout_batch_size=4 needs more. 1 are bad (see "
        f"bad_rows.jsonl); 3 have prompts of 70 to 90 tokens, above data.max_prompt_length={limit}: raise that, and "
        "runner.seq_length, or set data.overlong=cut; or lower data.rollout_batch_size"
    )


@pytest.mark.slow
def test_long_prompts_are_told_with_their_rows_and_stop_the_run_where_they_may_not_be(
    tmp_path, caplog
):
    caplog.set_level("INFO")
    limit = load_config("toy-grpo-cpu").data.max_prompt_length
    cut = {3: (90, 1), 7: (70, 0)}
    data = found(tmp_path, Pool(long={}, cut=cut))
    assert data.counts == {"data/overlong_rows": 2} and 3 in data.sampler.next_rows(4)[1]
    told = f"train: 12 rows, 2 longer than data.max_prompt_length={limit} and cut to it, 1 of them without some of their images"
    assert f"{told} (row 3 has 90 tokens, row 7 has 70 tokens), 1 bad" in caplog.text
    assert found(tmp_path, Pool()).counts["data/overlong_rows"] == 2
    assert "(row 3 has 90 tokens, row 7 has 70 tokens), 1 bad" in caplog.text
    with pytest.raises(ConfigError) as caught:
        found(tmp_path, Pool(train=20, long=dict.fromkeys(range(2, 9), 600)), "data.overlong=error")
    assert str(caught.value) == (
        f"data.overlong: error, and in data.train_data_paths 7 longer than data.max_prompt_length={limit} "
        "(row 2 has 600 tokens, row 3 has 600 tokens, row 4 has 600 tokens, row 5 has 600 tokens, row 6 has 600 tokens, and 2 more)"
        "; "
        "raise data.max_prompt_length (and runner.seq_length), or set data.overlong to drop or cut"
    )


def test_what_is_left_out_on_request_is_counted_and_sources_have_their_shares(tmp_path, caplog):
    caplog.set_level("INFO")

    class Mixed(Pool):
        def filter_rows(self, split, rows, progress) -> FilterResult:
            kept = {row: "1" for row in rows if row % 4}
            unused = {5: ("name",), 9: ("name", "column depth")}
            facts = {
                row: RowFacts(row // 10, -row, row == 7, unused_keys=unused.get(row, ()))
                for row in kept
            }
            return FilterResult(
                kept, facts=facts, text_only={row: f"t:{row}" for row in rows if row not in kept}
            )

    limits = ["data.image_only_mode=true", "data.max_images_per_sample=2"]
    two = ["data.train_data_paths=[toy,toy]", "data.weights=[3,1]", "data.curriculum_key=answer"]
    data = found(tmp_path, Mixed(20), *limits, *two)
    assert data.counts == {
        "data/overlong_rows": 0,
        "data/text_only_rows": 5,
        "data/dropped_images": 1,
    }
    assert data.sampler.next_rows(4)[1] == [9, 7, 19, 6], "the small levels of both first"
    assert (
        "train: 5 rows without an image are left out (data.image_only_mode): t:0, t:4, t:8, t:12, t:16"
        in caplog.text
    )
    assert "train: 1 images of 1 rows are beyond data.max_images_per_*" in caplog.text
    for name, n_rows in (("name", 2), ("column depth", 1)):
        line = f"train: '{name}' of {n_rows} rows is neither used nor passed on"
        assert caplog.text.count(line) == 1
    with pytest.raises(
        ConfigError,
        match="data.weights: 1 for source 2 of data.train_data_paths, of which no row can be used",
    ):
        found(tmp_path, Mixed(8), *two)
    with pytest.raises(
        ConfigError,
        match="of 4 rows 3 can be used.*1 have no image, and data.image_only_mode is true",
    ):
        found(tmp_path, Mixed(4), *limits)
