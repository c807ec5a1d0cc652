"""Puts generated tables into a page, between the marks that bear their names."""

import re
from collections.abc import Mapping


def with_tables(page: str, tables: Mapping[str, str]) -> str:
    """Return the page with each table between its `<!-- name -->` and `<!-- /name -->`."""
    for name, table in tables.items():
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        marked = f"{begin}\n\n{table}\n\n{end}"
        page = re.sub(f"{begin}.*?{end}", lambda _, marked=marked: marked, page, flags=re.DOTALL)
    return page
