"""Whatever a newcomer reads first has to run: the examples, and the code in the README."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def run(code_or_file: list[str], cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, *code_or_file], cwd=cwd, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def printed(code: str) -> list[str]:
    """What the comments of an example say that its prints give."""
    return re.findall(r"^ *print\(.*\)\s+#\s*(.*)", code, re.MULTILINE)


def test_there_are_examples():
    names = {path.name for path in EXAMPLES}
    assert {"moe_experts.py", "one_process.py", "post_load_hook.py", "two_processes.py"} <= names


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_runs_and_says_what_its_docstring_promises(path, tmp_path):
    output = run([str(path)], tmp_path)
    expected = path.read_text().split('"""')[1].partition("Prints:\n")[2]
    promised = [line.strip() for line in expected.splitlines() if line.strip()]
    assert promised
    assert [line.strip() for line in output.splitlines()] == promised


def test_python_code_of_the_readme_runs_and_prints_what_it_says(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        promised = printed(block)
        assert promised
        assert run(["-c", block], tmp_path).splitlines() == promised


def test_the_readme_names_commands_that_exist():
    commands = re.findall(r"^\s*(?:\$ )?(scripts/\w+)", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert {"scripts/demo", "scripts/test"} <= set(commands)
    for command in commands:
        assert (ROOT / command).stat().st_mode & 0o111, command
