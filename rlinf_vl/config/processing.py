"""How a run's images and clips are processed, as the keyword arguments of
`rlinf_vl.models.processing.Processor`."""

from typing import TypedDict

from omegaconf import DictConfig

from rlinf_vl.config.schema import Config


class ProcessorOptions(TypedDict, total=False):
    """Bounds of images and frames, in pixels, and whether the checkpoint's own code may run.

    An absent bound is the checkpoint's own.
    """

    min_pixels: int | None
    max_pixels: int | None
    video_min_pixels: int | None
    video_max_pixels: int | None
    trust_remote_code: bool


def processor_options(config: Config | DictConfig) -> ProcessorOptions:
    """Return the options of a run, which everything that shows its model an image must share.

    Another size of an image gives other patches and another number of tokens.
    """
    data = config.data
    return {
        "min_pixels": data.image_min_pixels,
        "max_pixels": data.image_max_pixels,
        "video_min_pixels": data.video.min_pixels,
        "video_max_pixels": data.video.max_pixels,
        "trust_remote_code": config.rollout.model.trust_remote_code,
    }
