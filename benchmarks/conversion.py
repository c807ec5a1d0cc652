"""What `convert-config` makes of other systems' configs: python benchmarks/conversion.py FILE…

A row for each file: keys mapped, dropped, refused, unknown; settings written; whether the schema and its rules accept them, apart
from files and packages that are not on this machine. Exits with 1 if a key is unknown or a config is not accepted.
"""

import re
import sys
from collections import Counter
from pathlib import Path

from rlinf_vl.errors import ConfigError
from rlinf_vl.tools.convert.convert import KINDS, convert_file
from rlinf_vl.tools.convert.main import to_do
from rlinf_vl.tools.convert.render import render

#: Problems of the machine, not of the config.
OF_THE_MACHINE = re.compile(r"no (file|folder) ['\"]|is not installed")


def main(files: list[Path]) -> int:
    totals: dict[str, Counter[str]] = {}
    bad = 0
    print(
        f"| file | system | keys | {' | '.join(KINDS)} | written | accepted |\n|{'---|' * (len(KINDS) + 5)}"
    )
    for file in files:
        try:
            made = convert_file(file)
        except ConfigError as error:
            print(f"| {file.name} | – | {error} |")
            bad += 1
            continue
        problems = [one for one in to_do(render(made, file.name)) if not OF_THE_MACHINE.search(one)]
        counts = Counter({kind: len(made.of(kind)) for kind in KINDS})
        totals.setdefault(made.system, Counter()).update(
            counts | {"keys": len(made.outcomes), "files": 1}
        )
        row = [str(counts[kind]) for kind in KINDS]
        accepted = "yes" if not problems else "; ".join(problems)
        print(
            f"| {file.name} | {made.system} | {len(made.outcomes)} | {' | '.join(row)} | {len(made.settings)} | {accepted} |"
        )
        for outcome in made.of("unknown"):
            print(f"  unknown: {outcome.key}={outcome.value}", file=sys.stderr)
        bad += bool(problems or made.of("unknown"))
    for system, counts in totals.items():
        row = [str(counts[kind]) for kind in KINDS]
        print(
            f"| **all {counts['files']}** | {system} | {counts['keys']} | {' | '.join(row)} | | |"
        )
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main([Path(name) for name in sys.argv[1:]]))
