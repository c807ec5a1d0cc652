"""A per-token column is added in one place, where a token is sampled: trainer, trajectory file and report have it."""

import numpy as np
import pyarrow.parquet as pq
import tiny
from tokenizers import Tokenizer, models

from rlinf_vl.models.families import family_of
from rlinf_vl.observe.trajectories import TrajectoryStore
from rlinf_vl.packing.collator import Collator, Member
from rlinf_vl.tools.report.trajectories import ImageStore, encode_trajectories, read_trajectories
from rlinf_vl.types import Sample


def test_a_column_noted_with_a_sample_arrives_everywhere(tmp_path):
    rng = np.random.default_rng(0)
    noted = [rng.random(n).astype(np.float32) for n in (4, 2)]
    samples = [
        Sample(
            np.full(len(x), 5, np.int32),
            -x,
            np.zeros(len(x), np.int32),
            "stop",
            columns={"entropy": x},
        )
        for x in noted
    ]
    group = tiny.answered(tiny.request(rng, [(2, 2)]), samples)
    everything = np.concatenate(noted)

    collate = Collator(family_of("qwen3_vl"), tiny.IMAGE_TOKENS, tiny.pixels, tiny.PAD)
    batch = collate([Member(group, 0, [0.0]), Member(group, 1, [0.0])], run_vision=True)
    assert np.array_equal(batch.columns["entropy"], everything)

    words = {f"w{i}": i for i in range(tiny.VOCAB)}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(tmp_path / "tokenizer.json"))
    store = TrajectoryStore(tmp_path / "run", str(tmp_path), "<|image_pad|>", 10**9)
    store.add(1, "train", group)
    store.write(1)
    rows = pq.read_table(tmp_path / "run/trajectories/step_1.parquet").to_pylist()
    assert np.array_equal(np.concatenate([row["entropy"] for row in rows]), everything)

    sections, notes = bytearray(), []
    table = read_trajectories(tmp_path / "run", 10**9, notes)
    shown = encode_trajectories(
        table, tmp_path / "run", sections, ImageStore(sections, 10**9), notes
    )
    ((name, place),) = shown["token_columns"]  # of which a token's tooltip shows one line each
    assert name == "entropy" and notes == []
    assert np.array_equal(
        np.frombuffer(sections, np.float32, place["count"], place["at"]), everything
    )
