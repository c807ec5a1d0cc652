"""Opens the parts of a run where the config says: on Ray, or in this process."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlinf_vl.config.parts import load_part
from rlinf_vl.config.schema import Config
from rlinf_vl.controller.protocols import StepProgress
from rlinf_vl.driver.parts import Parts
from rlinf_vl.runtime.stop_request import StopRequest


@contextmanager
def parts_of(
    config: Config,
    model_path: str,
    run_dir: Path,
    progress: StepProgress,
    stop: StopRequest,
    *,
    learns: bool = True,
    keep_ray: bool = False,
) -> Iterator[Parts]:
    """Yield the parts of a run, as `cluster.backend` says: in this process, or on Ray, which is
    started and in which machines are reserved.

    Args:
        learns: whether there will be ranks.
        keep_ray: see `ray_cluster`.

    Raises:
        ConfigError: the run can't be had on these machines.
    """
    if config.cluster.backend == "local":
        # It imports torch, which a run with Ray does not need here; a run without Ray needs no Ray.
        from rlinf_vl.driver.local.parts import LocalParts

        with LocalParts(config, model_path, run_dir, progress, stop) as parts:
            yield parts
        return
    from rlinf_vl.driver.ray_parts import RayParts
    from rlinf_vl.runtime.launch import ray_cluster, reserve

    progress.phase("starting Ray")
    with (
        ray_cluster(config, keep_ray) as options,
        reserve(config, learns, options) as reservation,
    ):
        # Ray has installed a handler of its own.
        stop.install_again()
        if learns:
            load_part("settle-memory")(config, model_path, reservation)
        with RayParts(config, model_path, run_dir, progress, stop, reservation) as parts:
            yield parts
