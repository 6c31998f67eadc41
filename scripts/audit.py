"""bandit over src, where SECURITY.md answers each finding; pip-audit over what is installed.

    make audit

Fails if bandit finds more than was answered, or if a package has a known flaw. pip-audit asks a
service for the flaws: where that is out of reach there is no verdict, and that is said.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = Path(sys.executable).parent
ROW = re.compile(r"^\| (?P<rules>B\d{3}[^|]*) \((?P<count>\d+|any number)\) \|", re.MULTILINE)


def answered() -> list[tuple[set[str], int | None]]:
    """Rules of bandit, and how many of their findings SECURITY.md answers."""
    rows = ROW.finditer((ROOT / "SECURITY.md").read_text())
    return [
        (
            set(re.findall(r"B\d{3}", row["rules"])),
            int(row["count"]) if row["count"].isdecimal() else None,
        )
        for row in rows
    ]


def findings() -> list[str]:
    """What bandit says beyond the answers."""
    command = [PROGRAMS / "bandit", "-q", "-r", "src", "-f", "json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    found = json.loads(done.stdout)
    if found["errors"]:
        return [f"bandit could not read {error['filename']}" for error in found["errors"]]
    told = [
        f"{one['filename']}:{one['line_number']} {one['test_id']} {one['issue_text']}"
        for one in found["results"]
        if one["issue_severity"] == "HIGH"
    ]
    counts = Counter(one["test_id"] for one in found["results"])
    answers = answered()
    print(f"bandit: {sum(counts.values())} findings, {len(answers)} answers in SECURITY.md")
    for rules, count in answers:
        here = sum(counts.pop(rule, 0) for rule in rules)
        if count is not None and here > count:
            places = [
                f"{one['filename']}:{one['line_number']}"
                for one in found["results"]
                if one["test_id"] in rules
            ]
            told.append(f"{', '.join(sorted(rules))}: {here}, answered {count}: {places}")
    return told + [f"{rule}: {count}, and no answer" for rule, count in counts.items()]


def flaws() -> list[str] | None:
    """Known flaws of installed packages; None if no service could be asked."""
    [packages] = (ROOT / ".venv" / "lib").glob("python3*/site-packages")
    command = [PROGRAMS / "pip-audit", "--path", packages, "--format", "json", "--timeout", "15"]
    for service in ("pypi", "osv"):
        done = subprocess.run(
            [*command, "--vulnerability-service", service],
            capture_output=True,
            text=True,
            check=False,
        )
        try:
            known = json.loads(done.stdout)["dependencies"]
        except ValueError:  # it could not connect
            continue
        asked = [one for one in known if "vulns" in one]
        ours = {"conquiet"}
        missing = [one["name"] for one in known if "vulns" not in one and one["name"] not in ours]
        if not asked:
            continue
        print(f"pip-audit ({service}): {len(asked)} packages asked about, {len(missing)} unknown")
        return [
            f"{one['name']} {one['version']}: {flaw['id']}, fixed in {flaw['fix_versions']}"
            for one in asked
            for flaw in one["vulns"]
        ]
    return None


def main() -> int:
    told = findings()
    known = flaws()
    if known is None:
        print("pip-audit: NO VERDICT, no advisory service is within reach")
    for line in (*told, *(known or ())):
        print(line)
    return 1 if told or known else 0


if __name__ == "__main__":
    sys.exit(main())
