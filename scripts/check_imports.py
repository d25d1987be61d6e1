"""Checks who imports whom: `weightsync` never names `megamoe_adapter`, and importing either stays light.

python scripts/check_imports.py      # exit code 1 and the offending lines, else the seconds that the imports take
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Loaded inside the functions that need them, since most processes need none of them.
LAZY = {"httpx", "starlette", "uvicorn", "typer", "rich", "prometheus_client"}
LAZY |= {"transformers", "triton", "vllm", "deep_gemm"}

PROBE = """
import json, sys, time
import torch
before, start = set(sys.modules), time.perf_counter()
import {package}
print(json.dumps([time.perf_counter() - start, sorted({{m.partition(".")[0] for m in set(sys.modules) - before}}),
                  torch.cuda.is_initialized()]))
"""


def imports_of_adapter(path: Path) -> Iterator[int]:
    """Lines of a file of weightsync that import megamoe_adapter, or name it in a string that could be imported."""
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        elif isinstance(node, ast.Call):
            names = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
        if any(name.partition(".")[0] == "megamoe_adapter" for name in names):
            yield node.lineno


def main() -> int:
    """Runs the checks and returns the exit code."""
    problems = [
        f"{path.relative_to(ROOT)}:{line}: weightsync must not import megamoe_adapter"
        for path in sorted((ROOT / "weightsync").rglob("*.py"))
        for line in imports_of_adapter(path)
    ]
    for package in ("weightsync", "megamoe_adapter"):
        probe = subprocess.run(
            [sys.executable, "-c", PROBE.format(package=package)], cwd=ROOT, capture_output=True, text=True, timeout=120
        )
        if probe.returncode:
            problems.append(f"import {package} fails:\n{probe.stderr}")
            continue
        seconds, loaded, cuda = json.loads(probe.stdout)
        heavy = sorted(LAZY.intersection(loaded))
        problems += [f"import {package} loads {name}; import it where it is used" for name in heavy]
        if cuda:
            problems.append(f"import {package} initialises CUDA")
        print(f"import {package}: {seconds:.3f} s more than import torch")
    print("\n".join(problems), file=sys.stderr, end="\n" if problems else "")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
