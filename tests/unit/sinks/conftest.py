"""A certificate that nobody vouches for."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tests import needs


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    command = [
        *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
        *("-subj", "/CN=receiver", "-addext", "subjectAltName=IP:127.0.0.1"),
        *("-keyout", str(path), "-out", f"{path}.crt"),
    ]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except FileNotFoundError as error:
        needs.missing("openssl", error)
    path.write_text(path.read_text() + Path(f"{path}.crt").read_text())
    return path
