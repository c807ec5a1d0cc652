"""Everything else is in pyproject.toml, which can't say that the package brings the examples along."""

from setuptools import find_namespace_packages, setup

EXAMPLES = "rlinf_vl.config.examples"

setup(
    packages=[*find_namespace_packages(include=["rlinf_vl*"]), EXAMPLES],
    package_dir={EXAMPLES: "examples"},
)
