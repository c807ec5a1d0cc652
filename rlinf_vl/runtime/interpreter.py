"""The interpreter of a cluster's workers: the run's own, whichever Python ran `ray start`.

Ray's messages are pickles, so run and cluster must have one version of Ray and of Python; everything else (torch, SGLang)
comes from the run's environment, which must lie at the same path on every node.
"""

import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rlinf_vl.errors import ConfigError

#: Seconds that each node has to start a worker: a first import of Ray from a shared disk takes its time.
WORKER_S = 120.0

#: Ray's runtime_env for a job whose workers run this interpreter. A shell reads it.
RUNTIME_ENV = {"py_executable": shlex.quote(sys.executable)}


@contextmanager
def explain_versions(address: str) -> Iterator[None]:
    """Turn Ray's complaint, while it connects, about a cluster of another version into a ConfigError with the way out."""
    try:
        yield
    except RuntimeError as error:
        versions = re.findall(r"Ray: (\S+)\s+Python: (\S+)", str(error))
        if not str(error).startswith("Version mismatch") or len(versions) != 2:
            raise
        (ray_there, python_there), (ray_here, python_here) = versions
        raise ConfigError(
            f"cluster.ray_address: the cluster at {address} was started with Ray {ray_there} on Python {python_there}; this "
            f"run has Ray {ray_here} on Python {python_here} ({sys.executable}). Start the cluster with the run's Python: "
            f"RLINF_VL_PYTHON={sys.executable} bash ray_utils/start_ray.sh on every node; or the run with the cluster's"
        ) from None


def check_nodes() -> None:
    """Have every node of the cluster start a worker with the run's interpreter and import this package.

    Raises:
        ConfigError: some can't, by their addresses.
    """

    @ray.remote(num_cpus=0, max_retries=0)
    def start() -> None:  # pickled whole: a node that lacks the package says so itself
        import rlinf_vl  # noqa: F401  # pyright: ignore[reportUnusedImport]

    nodes = {
        start.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote(): node
        for node in ray.nodes()
        if node["Alive"]
    }
    done, absent = ray.wait(list(nodes), num_returns=len(nodes), timeout=WORKER_S)
    problems = {ref: f"no worker within {WORKER_S:g} s" for ref in absent}
    for ref in done:
        try:
            ray.get(ref)
        except Exception as error:
            problems[ref] = str(error).strip().splitlines()[-1]
    for ref in absent:
        ray.cancel(ref, force=True)
    if problems:
        raise ConfigError(
            *(
                f"node {nodes[ref]['NodeManagerAddress']} can't run {sys.executable}: {why}"
                for ref, why in problems.items()
            ),
            "workers run the run's own interpreter: its environment and this checkout must lie at the same path on every node",
        )
