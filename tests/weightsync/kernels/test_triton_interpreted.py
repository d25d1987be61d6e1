"""The Triton kernels do on a CPU, in Triton's interpreter, what they have to do on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from interpreted_kernels import NO_INTERPRETER


def test_kernels_copy_and_digest_the_right_bytes_in_the_interpreter():
    """In a process of its own, because `TRITON_INTERPRET` counts when triton is first imported."""
    pytest.importorskip("triton", reason="triton is not installed; pip install weightsync[dev]")
    script = Path(__file__).with_name("interpreted_kernels.py")
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-rs", str(script)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    if NO_INTERPRETER in result.stdout:
        pytest.skip(NO_INTERPRETER)
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
    assert "18 passed" in result.stdout, result.stdout[-2000:]
