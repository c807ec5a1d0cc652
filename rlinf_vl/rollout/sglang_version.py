"""Which SGLang this package is made for. It is not imported by this, and neither is torch."""

from importlib.metadata import PackageNotFoundError, version

#: The version, with its post-releases. Before it, a GPU engine launches a kernel per banned id and request, and engines that
#: start at once race for ports; what comes after it is unknown, and much of what the engine calls is SGLang's own interface.
VERSION = "0.5.23"


def require_sglang() -> None:
    """ImportError, with what to do about it, where SGLang is not installed or of another version."""
    way_out = (
        f"run 'bash requirements/install.sh --sglang {VERSION}' and use its environment (.venv-sglang), or set "
        "rollout.rollout_backend=torch"
    )
    try:
        found = version("sglang")
    except PackageNotFoundError:
        raise ImportError(f"rollout.rollout_backend: sglang is not installed here; {way_out}") from None
    if found.split(".post")[0] != VERSION:
        raise ImportError(
            f"rollout.rollout_backend: sglang {found} is installed here, and {VERSION} is needed; {way_out}"
        )
