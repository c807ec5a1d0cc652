"""Which SGLang this package is made for. It is not imported by this, and neither is torch."""

import ast
import importlib.util
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

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


def server_argument_names() -> set[str]:
    """Names of SGLang's server arguments, read in its sources: importing it takes half a minute. Empty where it isn't installed,
    or a newer one has them elsewhere."""
    spec = importlib.util.find_spec("sglang")
    names = set()
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for file in Path(folder).glob("srt/arg_groups/fields/*.py"):
            for node in ast.parse(file.read_text("utf-8")).body:
                fields = node.body if isinstance(node, ast.ClassDef) else ()
                names |= {
                    f.target.id for f in fields if isinstance(f, ast.AnnAssign) and isinstance(f.target, ast.Name)
                }
    return names
