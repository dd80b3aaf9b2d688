"""What a test lacks skips it on somebody's machine, and fails it in CI, for every marker and every way to skip."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REAL = Path(__file__).parents[2] / "conftest.py"
MARKERS = ("docker", "bubblewrap", "model", "data", "camel")

CONFTEST = f"""
import importlib.util
spec = importlib.util.spec_from_file_location("real_conftest", {str(REAL)!r})
real = importlib.util.module_from_spec(spec)
spec.loader.exec_module(real)
assert set(real.NEEDS) == set({MARKERS!r})
real.NEEDS = {{marker: (lambda: False, f"no {{marker}} here") for marker in real.NEEDS}}
globals().update((name, hook) for name, hook in vars(real).items() if name.startswith("pytest_"))
"""

LACKING = "\n".join(f"@pytest.mark.{marker}\ndef test_{marker}(): pass\n" for marker in MARKERS)

TESTS = f"""
import pytest

{LACKING}
@pytest.mark.skipif(True, reason="by condition")
def test_condition(): pass

def test_body(): pytest.skip("in the body")

@pytest.fixture
def lacking(): pytest.skip("in a fixture")

def test_fixture(lacking): pass

def test_that_lacks_nothing(): pass
"""


def outcomes(folder: Path, ci: str) -> tuple[dict[str, int], str]:
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_all.py").write_text(TESTS)
    (folder / "test_module.py").write_text("import pytest\npytest.importorskip('a_module_that_is_not_there')\n")
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n" + "".join(f"  {marker}: x\n" for marker in MARKERS))
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "CI": ci}, capture_output=True, text=True, timeout=100
    )
    said = done.stdout + done.stderr
    summary = done.stdout.splitlines()[-1] if done.stdout else ""
    return {word: int(n) for n, word in re.findall(r"(\d+) (\w+)", summary)}, said


@pytest.mark.slow
def test_what_a_test_lacks_skips_it(tmp_path):
    counts, said = outcomes(tmp_path, "")
    assert (counts["passed"], counts["skipped"]) == (1, len(MARKERS) + 4), said
    assert not counts.keys() & {"failed", "errors", "error"}


@pytest.mark.slow
def test_in_ci_it_fails_it(tmp_path):
    counts, said = outcomes(tmp_path, "true")
    assert counts["passed"] == 1, said
    assert "skipped" not in counts, said
    assert counts["failed"] + counts["errors"] == len(MARKERS) + 4
    for reason in (*(f"no {marker} here" for marker in MARKERS), "by condition", "in the body", "in a fixture"):
        assert f"skipped in CI: {reason}" in said
