"""Which SGLang this package is made for. It is not imported by this, and neither is torch."""

from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

#: The oldest version that is taken, and the one that the tests run with (`doctor` says so of a newer one). Before it, a GPU
#: engine launches a kernel per banned id and request, and engines that start at once race for ports.
OLDEST = "0.5.23"


def require_sglang() -> None:
    """ImportError, with what to do about it, where SGLang is not installed or too old."""
    way_out = (
        f"run 'bash requirements/install.sh --sglang {OLDEST}' and use its environment (.venv-sglang), or set "
        "rollout.rollout_backend=torch"
    )
    try:
        found = version("sglang")
    except PackageNotFoundError:
        raise ImportError(f"rollout.rollout_backend: sglang is not installed here; {way_out}") from None
    if Version(found) < Version(OLDEST):
        raise ImportError(
            f"rollout.rollout_backend: sglang {found} is installed here, and {OLDEST} or newer is needed; {way_out}"
        )
