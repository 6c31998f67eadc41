"""Nothing in src/ can run what it reads: no pickle, no YAML, no eval, no shell."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src" / "conquiet"

MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "yaml", "telnetlib"}
CALLS = {
    *("eval", "exec", "compile", "__import__", "os.system", "os.popen", "os.execv", "os.execvp"),
    *("subprocess.getoutput", "subprocess.getstatusoutput", "tempfile.mktemp"),
    *("hashlib.md5", "hashlib.sha1", "ssl._create_unverified_context"),
    *("torch.load", "numpy.load", "np.load", "pandas.read_pickle", "pd.read_pickle"),
}


BETWEEN_DRIVER_AND_EXECUTORS = {"lake/tasks.py pickle"}
"""Tasks and their results, inside Spark's own pickled closures; never data of a broker or lake."""


def _name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_name(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def offences(source: str) -> list[tuple[int, str]]:
    """Lines and names of what is forbidden in a module."""
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        elif isinstance(node, ast.Call):
            given = {keyword.arg: keyword.value for keyword in node.keywords}
            marked = given.get("usedforsecurity")  # a digest as a name, as Redis has it of scripts
            is_name = isinstance(marked, ast.Constant) and marked.value is False
            if _name(node.func) in CALLS and not is_name:
                found.append((node.lineno, _name(node.func)))
            for keyword in node.keywords:
                is_true = isinstance(keyword.value, ast.Constant) and keyword.value.value is True
                if keyword.arg == "shell" and not (
                    isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                ):
                    found.append((node.lineno, "shell="))
                if keyword.arg == "allow_pickle" and is_true:
                    found.append((node.lineno, "allow_pickle"))
                if keyword.arg in ("verify", "check_hostname") and not is_true:
                    found.append((node.lineno, f"{keyword.arg}="))
            continue
        elif isinstance(node, ast.Attribute) and node.attr == "CERT_NONE":
            found.append((node.lineno, "CERT_NONE"))
            continue
        else:
            continue
        found += [(node.lineno, name) for name in names if name.partition(".")[0] in MODULES]
    return found


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("import pickle", "pickle"),
        ("from yaml import load", "yaml"),
        ("import cloudpickle as safe", "cloudpickle"),
        ("eval('1')", "eval"),
        ("import os\nos.system('ls')", "os.system"),
        ("run('ls', shell=True)", "shell="),
        ("run('ls', shell=chosen)", "shell="),
        ("get(url, verify=False)", "verify="),
        ("context.verify_mode = ssl.CERT_NONE", "CERT_NONE"),
    ],
)
def test_an_offence_is_found(source, what) -> None:
    assert [name for _, name in offences(source)] == [what]


def test_there_is_none() -> None:
    files = sorted(SRC.rglob("*.py"))
    assert len(files) > 200
    found = [
        f"{path.relative_to(SRC)}:{line} {name}"
        for path in files
        for line, name in offences(path.read_text())
        if f"{path.relative_to(SRC)} {name}" not in BETWEEN_DRIVER_AND_EXECUTORS
    ]
    assert found == []
