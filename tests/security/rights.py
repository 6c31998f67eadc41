"""The grants and ACLs of docs/security.md, as they stand there."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
ONCE, OF_OUTBOX, OF_EVENTS = re.findall(r"```sql\n(.*?)```", PAGE, re.DOTALL)
ROLES = re.findall(r"CREATE ROLE (\w+)", ONCE)
ACLS = {
    line.split()[2]: line.split()[3:]
    for line in PAGE.splitlines()
    if line.startswith("ACL SETUSER")
}
