"""Certificates that nobody vouches for."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests import needs


def certificate(directory: Path, names: str) -> tuple[Path, Path]:
    """A self-signed one for these names (`IP:127.0.0.1,DNS:db.example`), and its key."""
    key, made = directory / "key.pem", directory / "certificate.pem"
    command = [
        *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
        *("-keyout", str(key), "-out", str(made), "-subj", "/CN=any"),
        *("-addext", f"subjectAltName={names}"),
    ]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError as error:
        needs.missing("openssl", error)
    return made, key
