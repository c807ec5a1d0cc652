"""A package, so that processes which tests start import these modules and not a `tests` that some library installs."""
