"""What must stay light: control and the supervisor hold no torch."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["app.policies.tasks", "evergreen.up", "evergreen.status", "evergreen.cli"])
def test_a_light_process_does_not_import_torch(module: str) -> None:
    code = f"import sys, {module}; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
