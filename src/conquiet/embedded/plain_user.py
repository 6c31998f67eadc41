"""Somebody without rights, for servers that refuse to run as root."""

from __future__ import annotations

import contextlib
import pwd
import subprocess

from conquiet.errors import ConfigError


def plain_user() -> pwd.struct_passwd:
    for name in ("nobody", "postgres"):
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    raise ConfigError("PostgreSQL does not run as root, and no user nobody exists: useradd nobody")


def may_run(user: pwd.struct_passwd, *command: str) -> bool:
    """Ask as that user, rather than work out what modes, groups and ACLs amount to."""
    try:
        run = subprocess.run(
            command,
            cwd="/",
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            user=user.pw_uid,
            group=user.pw_gid,
            extra_groups=[],
        )
    except PermissionError:
        return False
    return run.returncode == 0
