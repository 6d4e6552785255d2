"""The pytest plugin, in a session of its own: what passes, and how a failure reads."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tensortrace.cli.main import run

pytest_plugins = ["pytester"]

TRAIN = """
import sys
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    optimizer.zero_grad()
    target = torch.randint(2, (3,))
    loss = nn.functional.cross_entropy(model(torch.randn(3, 4)), target)
    (loss * float(sys.argv[1])).backward()
    optimizer.step()
print("trained")
"""


def test_a_failure_says_headline_cause_and_case_in_few_lines(
    pytester: pytest.Pytester, capsys: pytest.CaptureFixture[str]
) -> None:
    pytester.makepyfile(train=TRAIN)
    pytester.makepyfile(
        f"""
        import sys

        def test_pair(trace_run, assert_equivalent):
            good = trace_run([{sys.executable!r}, "train.py", "1"])
            assert assert_equivalent(good, good).verdict == "equivalent"
            assert_equivalent(good, trace_run([{sys.executable!r}, "train.py", "2"]))
        """
    )
    outcome = pytester.runpytest_subprocess("--trace-artifacts", "kept", "-p", "no:cacheprovider")
    outcome.assert_outcomes(failed=1)
    shown = outcome.outlines
    start = next(n for n, line in enumerate(shown) if "test_pair" in line and line.startswith("__"))
    end = next(n for n, line in enumerate(shown) if line.startswith("===") and n > start)
    failure = shown[start + 1 : end]
    assert len(failure) < 15, failure
    assert failure[0].startswith("divergent at step 0, microbatch 0: loss cross_entropy weight: "), failure
    assert any(line.startswith("cause: ") and "[scale." in line for line in failure)
    (case,) = (pytester.path / "kept").glob("*.zip")
    assert any(f"case: kept/{case.name}" in line for line in failure)
    capsys.readouterr()
    assert run(["replay", str(case)]) == 0
    assert "as stated" in capsys.readouterr().out


def test_a_command_is_recorded_and_a_reference_is_kept_with_the_tests(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(train=TRAIN)
    pytester.makepyfile(
        f"""
        import sys

        def test_reference(trace_run, assert_equivalent):
            trace = trace_run([{sys.executable!r}, "train.py", "1"])
            assert "trained" in trace.with_name(trace.name + ".log").read_text()
            assert_equivalent("references/train", trace)

        def test_broken(trace_run):
            trace_run([{sys.executable!r}, "-c", "raise SystemExit('no such data')"])
        """
    )
    first = pytester.runpytest_subprocess("-k", "test_reference", "-p", "no:cacheprovider")
    first.assert_outcomes(failed=1)
    first.stdout.fnmatch_lines(["there is no trace references/train; make it with --trace-update"])
    pytester.runpytest_subprocess("-k", "test_reference", "--trace-update").assert_outcomes(passed=1)
    assert Path(pytester.path / "references" / "train" / "trace.json").is_file()
    again = pytester.runpytest_subprocess("-p", "no:cacheprovider")
    again.assert_outcomes(passed=1, failed=1)
    again.stdout.fnmatch_lines(["*ended with exit code 1", "no such data", "log: *"])
