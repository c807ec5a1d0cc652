"""Videos in an agent's calls: those of the row are known again, and its own are sampled like a row's."""

import base64

import pytest

from rlinf_vl.config.schema.data import VideoConfig
from rlinf_vl.data.clips import clip_of
from rlinf_vl.data.formats import RowFormat
from rlinf_vl.data.rows import row_to_problem
from rlinf_vl.extras.agents.chat import ChatError, parse_chat
from rlinf_vl.extras.agents.contract import AgentTask
from rlinf_vl.extras.video.rows import to_clip_ref
from rlinf_vl.types import IMAGE_URL_PREFIX
from tests.video_files import video

SETTINGS = VideoConfig(fps=4.0, max_frames=6)
ROW = {"problem": "<video>Which way?", "answer": "left", "videos": [video(12)]}


def parsed(known, *parts):
    body = {"model": "m", "messages": [{"role": "user", "content": list(parts)}]}
    return parse_chat(body, known, SETTINGS)


def part(url):
    return {"type": "video_url", "video_url": {"url": url}}


def uri(data, kind="mp4"):
    return f"data:video/{kind};base64,{base64.b64encode(data).decode()}"


def test_the_rows_video_goes_to_the_agent_and_back():
    problem = row_to_problem(ROW, "d:0", RowFormat(video=SETTINGS).for_columns(ROW))
    (clip,) = problem.images
    task = AgentTask(problem, 0, 0)
    assert len(task.images) == len(clip_of(clip).frames) > 1
    known = {clip.url: clip}
    for parts in (task.messages[0]["content"], [part(clip.url)]):
        chat = parsed(known, *parts)
        assert chat.images == {clip.url: clip}
        assert chat.messages[0]["content"][0] == part(clip.url)


def test_a_video_of_the_agents_own_is_sampled_by_the_settings():
    data = video(30, container="webm", codec="libvpx")
    chat = parsed({}, part(uri(data, "webm")))
    clip = to_clip_ref(data, root=None, settings=SETTINGS)
    assert chat.images == {clip.url: clip} and len(clip_of(clip).frames) == 4


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        (uri(b"none"), "a video that can't be read"),
        (uri(b"rlinf_vl clip 1\n" + bytes(40)), "a damaged clip"),
        ("/etc/passwd", "is no data URI; nothing is fetched"),
        (f"{IMAGE_URL_PREFIX}0", "is no video of the problem"),
    ],
)
def test_an_unusable_one_is_refused(url, reason):
    with pytest.raises(ChatError, match=reason):
        parsed({}, part(url))
