"""The grants and ACLs of docs/security.md, as they stand there."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "security.md").read_text()
ONCE, OF_OUTBOX, OF_EVENTS = re.findall(r"```sql\n(.*?)```", PAGE, re.DOTALL)
ROLES = re.findall(r"CREATE ROLE (\w+)", ONCE)


def acls(page: str) -> dict[str, list[str]]:
    """The rights of each user of Redis on a page; a line may go on after a backslash."""
    lines = page.replace("\\\n", " ").splitlines()
    return {line.split()[2]: line.split()[3:] for line in lines if line.startswith("ACL SETUSER")}


ACLS = acls(PAGE) | {"kombu": acls((DOCS / "celery.md").read_text())["worker"]}
