"""Decoding of video files by PyAV: a few frames, evenly over the video, and their times.

A file is read twice. The first pass reads its packets without decoding them, and so knows the time
of every frame, and which frames can be decoded without earlier ones. The second pass seeks to the
last of those before each sampled frame, so that it decodes a small part of a long video. AVI files
have no times of presentation: where frames are stored in another order than they are shown, the
second pass decodes from the start and counts. At most one frame is held besides the sampled ones,
which are scaled at once. Both passes are bounded in time, since files may be hostile.
"""

import time
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from PIL import Image

from rlinf_vl.data.unusable import ImageError

#: Largest area of a frame, that of 4096 × 4096: a decoder holds up to 17 frames of 1.5 bytes a
#: pixel. The ratio of the sides is bounded as that of images is.
MAX_FRAME_PIXELS = 4096 * 4096
MAX_ASPECT_RATIO = 200
#: Longest video, and the longest time for each pass, in seconds.
MAX_SECONDS = 4 * 3600
PASS_SECONDS = 60.0
#: Fewest frames that are sampled of a video, if it has as many: as many as transformers samples.
MIN_FRAMES = 4
#: Area of a frame if data.video.max_pixels is null.
MAX_KEPT_PIXELS = 1_000_000
#: Containers that are opened, by their names in FFmpeg. Others, such as playlists, read further
#: files and hosts.
CONTAINERS = (
    "mov,mp4,m4a,3gp,3g2,mj2",
    "matroska,webm",
    "avi",
    "mpegts",
    "mpeg",
    "flv",
    "ogg",
    "asf",
    "gif",
)
#: Share of a container's stated duration that must be there.
_COMPLETE = 0.9

NOT_A_VIDEO = "not a video"
TOO_LARGE = "video too large"
TOO_LONG = "video too long"
TRUNCATED = "video truncated"
UNDECODABLE = "video can't be decoded"
UNKNOWN_CODEC = (
    "a video of a codec that can't be decoded here; convert it, as in "
    "`ffmpeg -i IN -c:v libx264 OUT.mp4`"
)


class SampledFrame(NamedTuple):
    """A frame, upright and scaled, and its time from the video's start in seconds."""

    image: Image.Image
    seconds: float


class _Packets(NamedTuple):
    """The packets of a video's frames.

    Attributes:
        times: presentation times in units of the stream's time base, sorted.
        keys: those of the frames that can be decoded without earlier ones, sorted.
        seeks: the decoding times of the same frames, by which containers seek.
        start: the decoding time of the first packet.
        counted: whether the n-th decoded frame has the n-th time, whatever the file says of it.
    """

    times: list[int]
    keys: list[int]
    seeks: list[int]
    start: int
    counted: bool


class _Deadline:
    """The end of the time that a pass over a file may take."""

    def __init__(self) -> None:
        self._end = time.monotonic() + PASS_SECONDS

    def check(self) -> None:
        """Raise ImageError if the time is up."""
        if time.monotonic() > self._end:
            raise ImageError(
                TOO_LARGE,
                f"a video that can't be read in {PASS_SECONDS:g} s; store it shorter or smaller",
            )


def frame_count(frames: int, seconds: float, fps: float, max_frames: int) -> int:
    """Return how many frames are sampled of a video of `frames` frames and this duration.

    It is the rule of transformers' Qwen3-VL: ⌊duration · fps⌋, at least `MIN_FRAMES`, at most
    `max_frames` and not more than there are.
    """
    # What a product of decimals lacks of a whole number is rounding: 0.29 s at 100.
    return max(1, min(max(int(seconds * fps + 1e-6), MIN_FRAMES), max_frames, frames))


def sampled_indices(frames: int, count: int) -> list[int]:
    """Return the indices of `count` of `frames` frames, evenly from the first to the last."""
    return np.linspace(0, frames - 1, count).round().astype(int).tolist()


def sample_video(
    file: BinaryIO,
    *,
    fps: float,
    max_frames: int,
    min_pixels: int | None,
    max_pixels: int | None,
) -> list[SampledFrame]:
    """Decode frames of a video, evenly from its first to its last (`frame_count`).

    Args:
        file: the video, of one of `CONTAINERS`; it must be seekable.
        fps: frames to sample of a second.
        max_frames: the largest number of frames.
        min_pixels: the smallest area of a frame.
        max_pixels: the largest area of a frame; None for `MAX_KEPT_PIXELS`.

    Raises:
        ImageError: it is no video, or is truncated, damaged, too long or too large, or its codec is
            unknown.
    """
    import av
    from av.error import FFmpegError

    # Without protocols and other containers, a file can't name further files.
    options = {"format_whitelist": ",".join(CONTAINERS), "protocol_whitelist": "none"}
    try:
        with av.open(file, options=options, metadata_errors="replace") as container:
            stream = _video_stream(container)
            packets = _packets(container, stream)
            base = stream.time_base
            seconds = float(_duration(packets.times, base, stream.average_rate))
            count = frame_count(len(packets.times), seconds, fps, max_frames)
            chosen = [packets.times[i] for i in sampled_indices(len(packets.times), count)]
            decoder, frames = _Frames(container, stream, packets), []
            for pts in chosen:
                image = _upright(decoder.at(pts))
                size = fitted_size(*image.size, min_pixels, max_pixels)
                # A stream may change its size; the frames of a clip have one.
                image = resized(image, frames[0].image.size if frames else size)
                frames.append(SampledFrame(image, float((pts - packets.times[0]) * base)))
            return frames
    except FFmpegError as error:
        raise _cause(error) from error


def _duration(times: list[int], base: Fraction, rate: Fraction | None) -> Fraction:
    """Return how long the frames of these times are shown, in seconds.

    The last frame is shown as long as the mean one. Times may be rounded, in Matroska to
    milliseconds: within that, the stream's rate says it exactly.
    """
    count = len(times)
    seconds = (times[-1] - times[0]) * base * Fraction(count, max(1, count - 1))
    if rate and count > 1 and abs(count / rate - seconds) <= 2 * base:
        return count / rate
    return seconds


def fitted_size(
    width: int, height: int, min_pixels: int | None, max_pixels: int | None
) -> tuple[int, int]:
    """Return the size of a frame scaled into the bounds of its area, its ratio kept."""
    largest = MAX_KEPT_PIXELS if max_pixels is None else max_pixels
    area = width * height
    scale = min(1.0, (largest / area) ** 0.5)
    if min_pixels is not None and area < min_pixels:
        scale = (min_pixels / area) ** 0.5
    if scale == 1:
        return width, height
    # Rounded inwards, so that the area stays within the bounds.
    round_side = np.floor if scale < 1 else np.ceil
    return max(1, int(round_side(width * scale))), max(1, int(round_side(height * scale)))


def resized(image: Image.Image, size: tuple[int, int]) -> Image.Image:
    """Return the image scaled to (width, height); itself if that is its size."""
    return image if image.size == size else image.resize(size, Image.Resampling.BICUBIC)


def _video_stream(container: Any) -> Any:
    """Return the first stream of moving pictures, checked by what its header says.

    Raises:
        ImageError: there is none, or it is too long, too large or of an unknown codec.
    """
    import av
    from av.stream import Disposition

    pictures = Disposition.attached_pic
    streams = [s for s in container.streams.video if not s.disposition & pictures]
    if not streams:
        kinds = ", ".join(sorted({s.type for s in container.streams})) or "none"
        raise ImageError(NOT_A_VIDEO, f"a file without a video stream; its streams are {kinds}")
    stream = streams[0]
    if stream.codec_context is None:
        raise ImageError(UNDECODABLE, UNKNOWN_CODEC)
    if container.duration is not None:
        _check_seconds(container.duration / av.time_base)
    _check_frame(stream.codec_context.width, stream.codec_context.height)
    # One thread: several workers of one machine read videos at once.
    stream.thread_count = 1
    return stream


def _check_seconds(seconds: float) -> None:
    if seconds > MAX_SECONDS:
        raise ImageError(
            TOO_LONG,
            f"a video of {seconds / 3600:.1f} hours; at most {MAX_SECONDS // 3600} hours are "
            "accepted: cut it into parts",
        )


def _check_frame(width: int, height: int) -> None:
    if width * height > MAX_FRAME_PIXELS or max(width, height) > MAX_ASPECT_RATIO * max(
        1, min(width, height)
    ):
        raise ImageError(
            TOO_LARGE,
            f"a video of {width} × {height} pixels; at most {MAX_FRAME_PIXELS:,} pixels and a "
            f"ratio of {MAX_ASPECT_RATIO} are accepted",
        )


def _packets(container: Any, stream: Any) -> _Packets:
    """Read the times of all frames, without decoding them.

    Raises:
        ImageError: there are no frames, or the file ends before its header says.
    """
    import av

    deadline = _Deadline()
    times, keys, end = [], [], Fraction(0)
    start = None
    for packet in container.demux():
        deadline.check()
        if packet.size == 0:  # the mark of a stream's end
            continue
        pts = packet.dts if packet.pts is None else packet.pts
        if packet.is_corrupt:
            raise ImageError(TRUNCATED, "a truncated video: a frame's data ends too early")
        if pts is None:
            continue
        end = max(end, (pts + (packet.duration or 0)) * packet.time_base)
        if packet.stream_index != stream.index or packet.is_discard:
            continue
        times.append(pts)
        dts = pts if packet.dts is None else packet.dts
        start = dts if start is None else start
        if packet.is_keyframe:
            keys.append((pts, dts))
    if start is None:
        raise ImageError(NOT_A_VIDEO, "a video without frames")
    # A decoder that holds no frame back shows frames in the order in which they are stored.
    counted = "avi" in container.format.name.split(",") and stream.codec_context.has_b_frames
    times = sorted(times) if counted else sorted(set(times))
    seconds = float((times[-1] - times[0]) * stream.time_base)
    _check_seconds(seconds)
    if container.duration is not None:
        stated = container.duration / av.time_base
        # Matroska's duration is the time of the end, however late the first frame is.
        is_end = "matroska" in container.format.name
        present = float(end) - (0 if is_end else (container.start_time or 0) / av.time_base)
        if present < _COMPLETE * stated - 1:
            raise ImageError(
                TRUNCATED, f"a truncated video: it ends after {present:.1f} s of {stated:.1f} s"
            )
    keys = [] if counted else sorted(keys)
    keys = keys or [(times[0], start)]
    return _Packets(times, [pts for pts, _ in keys], [dts for _, dts in keys], start, counted)


class _Frames:
    """Decodes single frames of a stream, in the order of time."""

    def __init__(self, container: Any, stream: Any, packets: _Packets) -> None:
        self._container = container
        self._stream = stream
        self._packets = packets
        self._deadline = _Deadline()
        self._decoded: Iterator[Any] = iter(())
        self._position: int | None = None  # time of the newest decoded frame
        self._decoder = _alpha_decoder(stream)
        self._count = 0  # frames decoded since the last seek

    def at(self, pts: int) -> Any:
        """Return the frame of this presentation time, which is later than the last call's.

        Raises:
            ImageError: the frame is missing or damaged.
        """
        packets = self._packets
        number = max(0, int(np.searchsorted(packets.keys, pts, side="right")) - 1)
        # Nothing is decoded twice, nor in vain where one can begin at a later frame.
        if self._position is None or packets.keys[number] > self._position:
            self._seek(packets.seeks[number])
        frame = self._next(pts)
        if frame is None or self._position != pts:
            # Containers without an index, such as MPEG-TS, may have gone too far.
            self._seek(packets.start)
            frame = self._next(pts)
        seconds = float((pts - packets.times[0]) * self._stream.time_base)
        if frame is None:
            raise ImageError(TRUNCATED, f"a truncated video: there is no frame at {seconds:.1f} s")
        if frame.is_corrupt:
            raise ImageError(UNDECODABLE, f"a video whose frame at {seconds:.1f} s is damaged")
        return frame

    def _seek(self, dts: int) -> None:
        self._container.seek(dts, stream=self._stream)
        self._count = 0
        self._decoded = self._frames()

    def _frames(self) -> Iterator[Any]:
        """Yield the frames behind the last seek."""
        if self._decoder is None:
            yield from self._container.decode(self._stream)
            return
        self._decoder.flush_buffers()
        for packet in self._container.demux(self._stream):
            yield from self._decoder.decode(packet)

    def _next(self, pts: int) -> Any:
        """Return the next frame at or after this time; None if there is none."""
        for frame in self._decoded:
            self._deadline.check()
            self._position = self._time_of(frame)
            self._count += 1
            if self._position is not None and self._position >= pts:
                return frame
        return None

    def _time_of(self, frame: Any) -> int | None:
        """Return the time of the frame that was decoded last."""
        if self._packets.counted:
            return self._packets.times[min(self._count, len(self._packets.times) - 1)]
        return frame.dts if frame.pts is None else frame.pts


def _alpha_decoder(stream: Any) -> Any:
    """Return a decoder of the transparency of WebM's videos, which FFmpeg's own decoders skip;
    None if the video has none."""
    import av

    name = {"vp8": "libvpx", "vp9": "libvpx-vp9"}.get(stream.codec_context.codec.name)
    if name is None or stream.metadata.get("alpha_mode", stream.metadata.get("ALPHA_MODE")) != "1":
        return None
    decoder = av.CodecContext.create(name, "r")
    decoder.extradata = stream.codec_context.extradata
    return decoder


def _upright(frame: Any) -> Image.Image:
    """Return a decoded frame in RGB, turned as the file says (phones film on their side).

    Transparency is on white, as that of images.
    """
    _check_frame(frame.width, frame.height)
    image = frame.to_image()
    if any(component.is_alpha for component in frame.format.components):
        rgba = Image.fromarray(frame.to_ndarray(format="rgba"))
        white = Image.new("RGBA", rgba.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, rgba).convert("RGB")
    # The rotation is counter-clockwise, as Pillow's is; files only have right angles.
    angle = 90 * round(frame.rotation / 90)
    return image.rotate(angle, expand=True) if angle else image


def _cause(error: Any) -> ImageError:
    """Return the error of a row for one of FFmpeg."""
    from av.error import DecoderNotFoundError

    if isinstance(error, DecoderNotFoundError):
        return ImageError(UNDECODABLE, UNKNOWN_CODEC)
    cause = "it is truncated, damaged or no video"
    return ImageError(UNDECODABLE, f"a video that can't be read ({error.strerror}): {cause}")
