"""Fixtures of the tests of whole diffs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.judged import Judge, judge_in


@pytest.fixture
def judge(tmp_path: Path) -> Judge:
    """Return what diffs simulated programs in a folder of the test's own."""
    return judge_in(tmp_path)
