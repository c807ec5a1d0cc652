"""The command line: `rlinf-vl <verb>`.

Only modules that every verb needs are imported here: a mistake in a config is reported within a
second, without torch or Ray.
"""

import logging
import os
import select
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress

from rlinf_vl.errors import ConfigError, RunError, missing_package, reason_of

try:
    from rlinf_vl.cli.parser import parse
    from rlinf_vl.cli.verbs import VERBS, run_verb
    from rlinf_vl.observe.progress import setup_logging
    from rlinf_vl.runtime.stop_request import StopRequest
except ModuleNotFoundError as error:  # in a Python that is not the environment's
    if text := missing_package(error):
        sys.exit(f"error: {text}")
    raise

log = logging.getLogger("rlinf_vl")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb, and return the exit code: 0 on success, 2 for a mistake of the user, 1 for a
    failure."""
    try:
        try:
            return _main(argv)
        finally:
            sys.stdout.flush()
    except BrokenPipeError as error:
        poll = select.poll()
        poll.register(sys.stdout, select.POLLERR)
        # The reader has gone, as `head` does: the end that a shell's own commands have.
        if poll.poll(0):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 128 + signal.SIGPIPE
        # It was another pipe that broke.
        with suppress(BrokenPipeError):
            print(f"error: {error}", file=sys.stderr)
        return 1


def _main(argv: Sequence[str] | None) -> int:
    """Run one verb, and return the exit code."""
    # For module:Name in a config: 'python -m' searches this folder, a console command doesn't.
    sys.path.append(os.getcwd())
    arguments = parse(argv)
    user_errors = (ConfigError, *VERBS[arguments.verb].mistakes)
    arguments.stop_request = stop_request = StopRequest()
    setup_logging()
    # Both signals unwind, so that nothing is left running.
    stop_request.install()
    try:
        return run_verb(arguments)
    except BrokenPipeError:
        raise
    except ModuleNotFoundError as error:
        text = missing_package(error)
        if text is None:
            raise
        print(f"error: {text}", file=sys.stderr)
        return 1
    # An OSError names the file that can't be read or written: it needs no traceback.
    except (*user_errors, RunError, OSError) as error:
        print(
            f"error: {reason_of(error) if isinstance(error, ConfigError | RunError) else error}",
            file=sys.stderr,
        )
        return 2 if isinstance(error, user_errors) else 1
    except KeyboardInterrupt:
        return 128 + (stop_request.number or signal.SIGINT)


if __name__ == "__main__":
    sys.exit(main())
