"""A cluster of another version is named in one message, in Ray's own words for it, whatever else goes wrong is passed on."""

import sys

import pytest
import ray
from ray._private.utils import check_version_info

from rlinf_vl.errors import ConfigError
from rlinf_vl.runtime.launch import _explain_versions


@pytest.mark.parametrize("python", ["3.9.2", sys.version.split()[0]])
def test_a_cluster_of_another_version_is_named_with_the_way_out(python):
    with pytest.raises(ConfigError) as caught, _explain_versions("10.0.0.1:6379"):
        check_version_info({"ray_version": "2.9.0", "python_version": python}, "node 10.0.0.2")
    said = str(caught.value)
    assert f"the cluster at 10.0.0.1:6379 was started with Ray 2.9.0 on Python {python}" in said
    assert (
        f"this run has Ray {ray.__version__} on Python {sys.version.split()[0]} ({sys.executable})"
        in said
    )
    assert (
        f"RLINF_VL_PYTHON={sys.executable} bash ray_utils/start_ray.sh" in said
        and "Traceback" not in said
    )


def test_other_errors_are_passed_on():
    with pytest.raises(RuntimeError, match="no disk"), _explain_versions("10.0.0.1:6379"):
        raise RuntimeError("no disk")
