"""Clips: their patches, prompts and positions against transformers' processors and `get_rope_index`."""

import json
import shutil
from functools import cache

import numpy as np
import pytest
import torch
from clips import SIZES, clip, picture, transformers_inputs, user
from PIL import Image
from sglang_toy import write_member
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from rlinf_vl.data.clips import clip_of, clip_ref, is_clip
from rlinf_vl.models.families import family_of
from rlinf_vl.models.image_processor import QwenImages
from rlinf_vl.models.processing import Processor
from rlinf_vl.models.video_processor import Qwen2Videos, Qwen3Videos
from rlinf_vl.rollout.episode.observation import Observation
from rlinf_vl.rollout.episode.renderer import Renderer
from rlinf_vl.tools.verify.prove.reference import behind_clips

FAMILIES = ("qwen3_vl", "qwen2_5_vl", "qwen3_5")
#: Frames, height and width of videos: pairs and odd numbers, small and large, long and narrow.
VIDEOS = [(2, 64, 96), (3, 224, 160), (5, 40, 30), (8, 333, 517), (32, 100, 80), (7, 720, 1280)]
#: Settings of a checkpoint's file.
SETTINGS = [
    {},
    {"size": {"shortest_edge": 4096, "longest_edge": 20480}},
    {"cap_pixels_per_frame": True},
    {"min_pixels": 3136, "max_pixels": 50000, "image_mean": [0.1, 0.2, 0.3]},
]


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    @cache
    def make(family):
        folder = tmp_path_factory.mktemp(family)
        write_member(family, SIZES[family], folder)
        return folder

    return make


@pytest.fixture(scope="module")
def processor_of(folder_of):
    return cache(lambda family: Processor(folder_of(family), family_of(family)))


def smooth_frames(rng, n, height, width):
    """Frames that are not noise alone: resizing changes them little."""
    coarse = rng.integers(0, 256, (n, max(2, height // 8), max(2, width // 8), 3), dtype=np.uint8)
    return [
        Image.fromarray(frame).resize((width, height), Image.Resampling.BICUBIC) for frame in coarse
    ]


# --- patches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("kind", [Qwen2Videos, Qwen3Videos])
def test_patches_are_those_of_transformers(kind, settings, tmp_path):
    pytest.importorskip("torchvision", reason="transformers' video processors need it")
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(settings))
    reference = {Qwen2Videos: Qwen2VLVideoProcessor, Qwen3Videos: Qwen3VLVideoProcessor}[kind]
    theirs, ours = reference.from_pretrained(tmp_path), kind(tmp_path)
    for n, height, width in VIDEOS:
        frames = smooth_frames(np.random.default_rng(n), n, height, width)
        video = torch.from_numpy(np.stack([np.asarray(f) for f in frames])).permute(0, 3, 1, 2)
        out = theirs(videos=[video], do_sample_frames=False, return_tensors="pt")
        assert ours.grid(n, height, width) == tuple(out["video_grid_thw"][0].tolist())
        assert np.array_equal(ours.patches(frames), out["pixel_values_videos"].numpy())


@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("kind", [Qwen2Videos, Qwen3Videos])
def test_a_still_video_has_the_patches_of_its_frame(kind, n, folder_of):
    """As transformers' image processor cuts it, once a temporal patch, where nothing is resized."""
    folder = folder_of("qwen3_vl")
    frame = Image.fromarray(np.random.default_rng(0).integers(0, 256, (48, 32, 3), dtype=np.uint8))
    expected = QwenImages(folder).patches(frame)
    videos = kind(folder, 32 * 32, 192 * 192)
    patches = videos.patches([frame] * n)
    t, h, w = videos.grid(n, 48, 32)
    assert (t, h, w) == ((n + 1) // 2, 6, 4)
    np.testing.assert_allclose(patches, np.tile(expected, (t, 1)), atol=1e-5)


@pytest.mark.parametrize("kind", [Qwen2Videos, Qwen3Videos])
def test_frames_are_resized_within_their_bounds(kind, folder_of):
    folder, side = folder_of("qwen3_vl"), 8
    for n, height, width in VIDEOS:
        _, h, w = kind(folder, max_pixels=64 * 64).grid(n, height, width)
        assert h * w * side**2 <= 64 * 64
        _, h, w = kind(folder, min_pixels=160 * 160).grid(n, height, width)
        assert h * w * side**2 >= 160 * 160
        unbound = kind(folder).grid(n, height, width)
        assert kind(folder, 1, 2**40).grid(n, height, width) == unbound
    with pytest.raises(ValueError, match="data.video.min_pixels: 4096 is above .*max_pixels, 100"):
        kind(folder, 4096, 100)


# --- prompts ----------------------------------------------------------------------------------------------------------


def test_times_stand_before_each_pair_of_frames(processor_of):
    """In the mean of the pair's times, the last frame repeated where it has no pair."""
    processor = processor_of("qwen3_vl")
    shown = clip(np.random.default_rng(0), 5, interval=1.3)
    ids, grids = Renderer(processor).prompt([user("Look:", shown, "Now?")], (shown,))
    text = processor.tokenizer.decode(ids)
    t, h, w = grids[0].tolist()
    assert t == 3
    pads = "<|video_pad|>" * (h * w // 4)
    times = Qwen3VLProcessor._calculate_timestamps(None, [0, 13, 26, 39, 52], 10, 2)
    # A text of its own, since the template's marks of vision stay around all.
    runs = "".join(f"<{time:.1f} seconds><|vision_start|>{pads}<|vision_end|>" for time in times)
    assert f"Look:<|vision_start|>{runs}<|vision_end|>Now?" in text
    assert "<0.7 seconds>" in text and "<5.2 seconds>" in text


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen2_5_vl"])
def test_prompts_are_those_of_transformers(family, processor_of, folder_of):
    """Ids, pixels and grids of a conversation with pictures and videos, by the combined processor."""
    pytest.importorskip("torchvision", reason="transformers' video processors need it")
    from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor

    kinds = {
        "qwen3_vl": (Qwen3VLProcessor, Qwen3VLVideoProcessor),
        "qwen2_5_vl": (Qwen2_5_VLProcessor, Qwen2VLVideoProcessor),
    }
    folder, processor = folder_of(family), processor_of(family)
    combined, videos = kinds[family]
    theirs = combined(
        image_processor=Qwen2VLImageProcessorPil.from_pretrained(folder),
        tokenizer=processor.tokenizer,
        video_processor=videos.from_pretrained(folder),
        chat_template=processor.tokenizer.chat_template,
    )
    rng = np.random.default_rng(1)
    images = (clip(rng, 3), picture(rng, 64, 48), clip(rng, 8, 90, 70, 0.25), picture(rng))
    messages = [user("See:", images[0], "and", images[1], "then ", images[2], images[3], "Which?")]
    ids, _ = Renderer(processor).prompt(messages, images)
    clips = [clip_of(image) for image in images if is_clip(image)]
    frames = [np.stack([np.asarray(_decoded(frame)) for frame in c.frames]) for c in clips]
    text = processor.tokenizer.apply_chat_template(
        [user_as_transformers(messages[0])], tokenize=False, add_generation_prompt=True
    )
    out = theirs(
        text=[text],
        images=[_decoded(image.data) for image in images if not is_clip(image)],
        videos=[torch.from_numpy(f).permute(0, 3, 1, 2) for f in frames],
        video_metadata=[
            {
                "fps": 1 / c.timestamps[1],
                "total_num_frames": len(c.frames),
                "frames_indices": list(range(len(c.frames))),
            }
            for c in clips
        ],
        do_sample_frames=False,
        return_tensors="pt",
    )
    assert out["input_ids"][0].tolist() == ids.tolist()
    inputs = transformers_inputs(processor, ids, images)
    for name in ("pixel_values", "pixel_values_videos", "image_grid_thw", "video_grid_thw"):
        assert torch.equal(inputs[name], out[name]), name
    assert torch.equal(inputs["mm_token_type_ids"], out["mm_token_type_ids"])
    if family == "qwen2_5_vl":
        seconds = torch.as_tensor(out["second_per_grid_ts"])
        torch.testing.assert_close(inputs["second_per_grid_ts"], seconds)


def _decoded(data):
    import io

    return Image.open(io.BytesIO(data)).convert("RGB")


def user_as_transformers(message):
    parts = [
        {"type": p["type"].removesuffix("_url")} if p["type"] != "text" else p
        for p in message["content"]
    ]
    return message | {"content": parts}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversation_goes_on_with_videos(family, processor_of):
    """The next prompt begins with all ids so far; what a user writes is no placeholder."""
    processor = processor_of(family)
    renderer, rng = Renderer(processor), np.random.default_rng(2)
    first, second = clip(rng, 4), clip(rng, 7, interval=2.0)
    start = Observation((user("<|video_pad|> is", first, "?"),), (first,))
    ids, grids = renderer.prompt(start.messages, start.images)
    answer = np.array([5, 6, 7, processor.stop_ids[0]], np.int32)
    later = Observation((user(picture(rng), second, "And now?"),), (picture(rng), second))
    later = Observation((user(later.images[0], second, "And now?"),), later.images)
    history = np.concatenate([ids, answer])
    longer, all_grids = renderer.follow(history, start, [(answer, later)])
    assert np.array_equal(longer[: len(history)], history)
    assert all_grids[:, 0].tolist() == [2, 1, 4] and np.array_equal(all_grids[:1], grids)
    tokens = processor.image_tokens
    assert int(tokens.mask(longer).sum()) == tokens(all_grids).sum()
    assert int((longer == tokens.video_id).sum()) == tokens(all_grids[[0, 2]]).sum()


def test_a_conversation_to_imitate_shows_videos(processor_of):
    processor = processor_of("qwen3_vl")
    renderer, rng = Renderer(processor), np.random.default_rng(3)
    images = (clip(rng, 3), clip(rng, 2))
    messages = [
        user(images[0], "What?"),
        {"role": "assistant", "content": "boxed"},
        user("And", images[1], "?"),
        {"role": "assistant", "content": "4"},
    ]
    ids, spans, grids = renderer.conversation(messages, images, [1, 3])
    assert grids[:, 0].tolist() == [2, 1] and len(spans) == 2
    prompt, _ = renderer.prompt(messages[:1], images[:1])
    assert np.array_equal(ids[: spans[0][0]], prompt)


def test_videos_and_pictures_stand_where_the_messages_show_them(processor_of):
    rng = np.random.default_rng(4)
    shown, image = clip(rng, 2), picture(rng)
    with pytest.raises(
        ValueError, match=r"1 <\|image_pad\|> for 1 images, 1 <\|video_pad\|> for 1"
    ):
        Renderer(processor_of("qwen3_vl")).prompt([user(shown, image)], (image, shown))
    with pytest.raises(ValueError, match=r"0 <\|video_pad\|> for 1 videos, which take 1"):
        Renderer(processor_of("qwen2_5_vl")).prompt([user("no video")], (shown,))


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_a_model_without_videos_refuses_them(folder_of, tmp_path):
    shown = clip(np.random.default_rng(0), 2)
    folder = folder_of("qwen3_vl")
    with pytest.raises(
        ValueError, match="a video for a model of type qwen3, .*its frames as images"
    ):
        Processor(folder, family_of("qwen3")).grid(shown)
    # A checkpoint whose config names an id that its tokenizer does not have.
    copy = shutil.copytree(folder, tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"video_token_id": 10**6}))
    with pytest.raises(ValueError, match="but the tokenizer in .* has no placeholder for one"):
        Processor(copy, family_of("qwen3_vl")).grid(shown)


# --- positions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("interval", [0.04, 0.5, 1.7])
@pytest.mark.parametrize("family", FAMILIES)
def test_positions_are_those_of_transformers_but_behind_clips(
    family, interval, processor_of, folder_of
):
    processor, member = processor_of(family), family_of(family)
    model = member.model_class.from_pretrained(folder_of(family)).model
    rng = np.random.default_rng(5)
    for frames in ((2,), (3, 32), (5, 16, 2)):
        images = []
        for n in frames:
            images += [clip(rng, n, interval=interval), picture(rng, 64, 48)]
        images = (*images, images[0])
        ids, grids = Renderer(processor).prompt(
            [user("See", *images[:2], "and", *images[2:], "now")], images
        )
        inputs = transformers_inputs(processor, ids, images)
        for name in ("pixel_values", "pixel_values_videos"):
            inputs.pop(name)
        expected, _ = model.get_rope_index(**inputs)
        is_video = torch.from_numpy(ids == processor.image_tokens.video_id)
        expected = behind_clips(expected, is_video)
        tokens = processor.image_tokens.with_times(images)
        ours = member.positions(ids.astype(np.int64), grids, tokens)
        assert np.array_equal(ours[1:], expected[:, 0].numpy())
        # The published rule: each token behind a clip is behind all of its tokens.
        for end in np.flatnonzero(is_video[:-1] & ~is_video[1:]) + 1:
            assert (ours[1:, end] == ours[1:, :end].max() + 1).all()


def test_the_time_of_a_video_counts(processor_of):
    """Qwen2.5-VL's t advances by seconds: frames further apart have positions further apart."""
    processor, rng = processor_of("qwen2_5_vl"), np.random.default_rng(6)
    steps = []
    for interval in (0.25, 1.0):
        image = clip(rng, 8, interval=interval)
        ids, grids = Renderer(processor).prompt([user(image)], (image,))
        tokens = processor.image_tokens.with_times([image])
        t = family_of("qwen2_5_vl").positions(ids.astype(np.int64), grids, tokens)[1]
        at_video = t[ids == processor.image_tokens.video_id]
        steps.append((at_video.max() - at_video.min()) // 3)
    assert steps == [2, 8]  # 4 positions a second, 2 frames a patch


def test_a_clip_of_one_frame_is_one_patch_long(processor_of):
    for family in FAMILIES:
        frame = clip_of(clip(np.random.default_rng(7), 2)).frames[0]
        image = clip_ref([frame], [3.0])
        processor = processor_of(family)
        ids, grids = Renderer(processor).prompt([user(image)], (image,))
        assert grids[0, 0] == 1 and len(processor.pixels(image)) == grids.prod()
        tokens = processor.image_tokens
        assert (ids == tokens.video_id).sum() == tokens(grids)[0]
        family_of(family).positions(ids.astype(np.int64), grids, tokens.with_times([image]))
