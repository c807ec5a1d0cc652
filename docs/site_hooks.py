"""What mkdocs is told beside mkdocs.yml: links to files of the repository, which is not part of the site."""

import re
from typing import Any

#: [text](../path): a link out of docs/, as a file browser follows it.
OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)\s]+)\)")


def on_page_markdown(markdown: str, config: Any, **_: Any) -> str:
    """Point such links at `repo_url`, if mkdocs.yml has one; otherwise leave their text, which names the file."""
    root = config.repo_url and f"{config.repo_url.rstrip('/')}/blob/HEAD"
    return OUTSIDE.sub(lambda link: f"[{link[1]}]({root}/{link[2]})" if root else link[1], markdown)
