"""Compare installed packages with those of the environment's installation, and pick a torchvision.

`requirements/install.sh` runs this file with `python -P` before the package is installed, so it
imports the standard library only.
"""

import re
import sys
from importlib.metadata import distributions
from pathlib import Path
from typing import NamedTuple

#: File in an environment with the options of `requirements/install.sh`, and the versions that it
#: installed.
STAMP = ".rlinf_vl"
#: Packages whose versions are recorded there.
RECORDED = (
    "torch",
    "torchvision",
    "transformers",
    "ray",
    "sglang",
    "torch_memory_saver",
    "peft",
    "accelerate",
    "datasets",
    "pyarrow",
    "numpy",
    "pandas",
    "pillow",
    "safetensors",
    "tokenizers",
    "huggingface_hub",
    "hydra-core",
    "omegaconf",
    "tensorboard",
    "math-verify",
)
_PREFIX = "version."
_WHEELS = "https://download.pytorch.org/whl"


class Moved(NamedTuple):
    """A package whose version differs from the one that its environment was made with.

    A version "none" means that it is not installed.
    """

    name: str
    recorded: str
    installed: str

    def __str__(self) -> str:
        return f"{self.name} {self.recorded} → {self.installed}"


def installed_version(name: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    return next((distribution.version for distribution in distributions(name=name)), None)


def recorded_versions(stamp: Path) -> dict[str, str]:
    """Read the versions of an environment's installation; none if `install.sh` did not make it."""
    # Who installed by pip alone has no record to compare with.
    if not stamp.is_file():
        return {}
    pairs = (line.partition("=") for line in stamp.read_text(encoding="utf-8").splitlines())
    return {
        name.removeprefix(_PREFIX): version
        for name, _, version in pairs
        if name.startswith(_PREFIX)
    }


def moved_packages(stamp: Path) -> list[Moved]:
    """List the packages that have another version than the environment was made with.

    A torchvision that was added since is one of them if it does not fit torch: transformers fails
    where it can't be imported.
    """
    recorded = recorded_versions(stamp)
    packages = (
        Moved(name, version, installed_version(name) or "none")
        for name, version in recorded.items()
    )
    moved = [package for package in packages if package.recorded != package.installed]
    torch, torchvision = installed_version("torch"), installed_version("torchvision")
    if (
        torch
        and torchvision
        and "torchvision" not in recorded
        and not torchvision_fits(torch, torchvision)
    ):
        # "none" shows that the installation did without it.
        moved.append(Moved("torchvision", "none", torchvision))
    return moved


def torchvision_fits(torch: str, torchvision: str) -> bool:
    """Return whether a torchvision was built for this torch.

    torch 2.N goes with torchvision 0.(N+15), and both are of one CUDA or of none.
    """
    minor, build = _minor(torch), torch.partition("+")[2]
    same_build = (
        not re.fullmatch(r"cpu|cu\d+|rocm[\d.]+", build) or torchvision.partition("+")[2] == build
    )
    return minor is None or (torchvision.startswith(f"0.{minor + 15}.") and same_build)


def torchvision_arguments(torch: str | None) -> list[str]:
    """Return the arguments of `pip` that install the torchvision for this torch, and no torch."""
    minor = _minor(torch or "")
    if minor is None:
        return ["install", "--no-deps", "torchvision"]
    build = (torch or "").partition("+")[2]
    index = ["--index-url", f"{_WHEELS}/{build}"] if build else []  # PyPI has one build only
    return ["install", "--no-deps", *index, f"torchvision==0.{minor + 15}.*"]


def torchvision_command() -> str:
    """Return the command that adds torchvision to this environment and leaves its torch alone."""
    *options, requirement = torchvision_arguments(installed_version("torch"))
    return " ".join(["python -m pip", *options, f"'{requirement}'"])


def _minor(torch: str) -> int | None:
    """Return the N of torch 2.N; None for another form."""
    match = re.match(r"2\.(\d+)", torch)
    return int(match[1]) if match else None


def main(verb: str, stamp: str) -> None:
    """Print what `install.sh` asks for, one item a line.

    Args:
        verb: record: lines for the stamp. moved: packages with their recorded and their installed
            version. torchvision: arguments for pip; none if the installed torchvision fits.
    """
    if verb == "record":
        versions = {name: installed_version(name) for name in RECORDED}
        lines = [f"{_PREFIX}{name}={version}" for name, version in versions.items() if version]
    elif verb == "moved":
        lines = [" ".join(package) for package in moved_packages(Path(stamp))]
    else:
        torch, torchvision = installed_version("torch"), installed_version("torchvision")
        fits = torch and torchvision and torchvision_fits(torch, torchvision)
        lines = [] if fits else torchvision_arguments(torch)
    print("\n".join(lines))


if __name__ == "__main__":
    main(*sys.argv[1:])
