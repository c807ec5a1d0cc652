"""M-RoPE positions against transformers' own `get_rope_index`."""

import numpy as np
import pytest
import torch
from tiny import IMAGE_ID, IMAGE_TOKENS, MERGE, prompt, tiny_model

from rlinf_vl.models.image_tokens import mrope_positions


@pytest.mark.parametrize("shapes", [[], [(1, 1)], [(2, 3)], [(3, 1), (1, 4), (2, 2)]])
@pytest.mark.parametrize("seed", [0, 1])
def test_same_as_transformers(shapes, seed):
    rng = np.random.default_rng(seed)
    grids = [np.array([1, h * MERGE, w * MERGE]) for h, w in shapes]
    ids = prompt(rng, grids, 4)
    stacked = np.array(grids, np.int64).reshape(len(grids), 3)
    ours = mrope_positions(ids, stacked, IMAGE_TOKENS)
    theirs, _ = tiny_model().model.get_rope_index(
        torch.from_numpy(ids)[None].long(),
        mm_token_type_ids=torch.from_numpy(ids == IMAGE_ID)[None].int(),
        image_grid_thw=torch.from_numpy(stacked) if shapes else None,
    )
    assert (ours[1:] == theirs[:, 0].numpy()).all()
    assert (ours[0] == np.arange(len(ids))).all()


def test_two_images_side_by_side():
    ids = np.array([5, IMAGE_ID, IMAGE_ID, IMAGE_ID, IMAGE_ID, 6])
    grids = np.array([[1, 2, 4], [1, 4, 2]])
    ours = mrope_positions(ids, grids, IMAGE_TOKENS)
    assert ours[1].tolist() == [0, 1, 1, 3, 3, 5]
    assert ours[2].tolist() == [0, 1, 1, 3, 4, 5]
    assert ours[3].tolist() == [0, 1, 2, 3, 3, 5]


def test_placeholders_that_disagree_are_refused():
    with pytest.raises(ValueError, match="3 image placeholder ids for 1 images"):
        mrope_positions(np.array([IMAGE_ID] * 3), np.array([[1, 4, 4]]), IMAGE_TOKENS)
    with pytest.raises(ValueError, match="interrupted"):
        ids = np.array([IMAGE_ID, 5, IMAGE_ID])
        mrope_positions(ids, np.array([[1, 2, 4]]), IMAGE_TOKENS)
