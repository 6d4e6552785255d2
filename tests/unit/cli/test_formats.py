"""What continuous integration reads of a result, from hand-made results."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token

from tensortrace.cli.formats.compared import of_comparison, of_resume
from tensortrace.cli.formats.github import AT_MOST, MESSAGE, SUMMARY_BYTES, TITLE, append_summary, github
from tensortrace.cli.formats.junit import junit
from tensortrace.cli.formats.markdown import LIMIT, markdown
from tensortrace.cli.formats.replayed import of_forced, of_replay
from tensortrace.cli.formats.source_files import finder
from tensortrace.cli.formats.validated import of_validation
from tensortrace.diff.result import Coverage, Missing, Result
from tensortrace.diff.resume import ResumeResult
from tensortrace.replay.forced import Faulty, Forced
from tensortrace.replay.result import Replay
from tensortrace.replay.validate.result import CellResult, Validation
from tests.unit.cli.samples import DIVERGENT, EQUIVALENT, INCOMPLETE, LR, TOKEN_WEIGHT, where

replace = msgspec.structs.replace

FEW = {"heading_open", "hr", "html_block", "html_inline", "link_open", "image", "s_open", "em_open"}
"""What our Markdown never has: a name in a trace made it where it is there."""


def tokens(text: str) -> list[Token]:
    """Return the Markdown's tokens, those inside paragraphs too."""
    found = MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(text)
    return [inner for token in found for inner in (token, *(token.children or ()))]


def cases(text: str) -> dict[str, str]:
    """Return the state of each test case: the tag of what is in it, or ``passed``."""
    suite = ElementTree.fromstring(text).find("testsuite")  # noqa: S314  # of our own
    assert suite is not None
    return {
        case.attrib["name"]: case[0].tag if len(case) else "passed"
        for case in suite.iter("testcase")
    }  # fmt: skip


def annotations(text: str) -> list[str]:
    """Return the workflow commands that come before the runner is told to stop obeying them."""
    return text.split("::stop-commands::")[0].splitlines()


def nowhere(source: str) -> None:
    return None


def hostile_result(text: str) -> Result:
    place = where(text, text, text)
    finding = replace(
        TOKEN_WEIGHT, where=place, text=text, dtype_a=text, source=text, inputs=(text,), evidence=(text,)
    )
    missing = Missing("a", text, text, 1, (place,), counts_as_incomplete=True)
    cause = replace(DIVERGENT.causes[0], code=text, text=text, equals=text, evidence=(text,))
    side = replace(DIVERGENT.a, path=text, ended=text, problems=(text,))
    return replace(
        DIVERGENT, headline=text, first_divergent=finding, origins=(finding, replace(finding, text="")),
        causes=(cause,), a=side, policy=text, notes=(text,), hints=(text,),
        coverage=Coverage(1, 0, {text: 1}, (missing,), complete=False),
    )  # fmt: skip


def test_markdown_begins_with_the_verdict_and_the_headline() -> None:
    first = markdown(of_comparison(DIVERGENT)).splitlines()[0]
    assert first == r"**DIVERGENT**: the loss weighs tokens differently (scale.token\_ratio)"


@pytest.mark.parametrize(
    "part",
    [
        "measured 0.75 = tokens of rank 0 over the mean per rank: 6/8",
        "| 0 | 0 | 0.3535 | 3.536e5 | loss cross\\_entropy weight | train\\_gpt.py:88 |",
        "- rank 0: 8 valid tokens, weight 0.125",
        "1,204 boundaries, 803 bitwise equal: 4 input, 600 activation, 600 param",
        "```sh\ntrace show runs/b --step 0 --kind loss --name cross_entropy --values\n```",
    ],
)
def test_markdown_has_cause_table_evidence_coverage_and_command(part: str) -> None:
    assert part in markdown(of_comparison(DIVERGENT))


def test_a_table_of_markdown_says_how_many_rows_are_left_out() -> None:
    many = tuple(replace(LR, where=where("param", f"p{n}", "model")) for n in range(30))
    text = markdown(of_comparison(replace(DIVERGENT, origins=(TOKEN_WEIGHT, *many))))
    assert "21 more in the JSON document" in text  # 31 origins, 10 rows
    assert "p8 model" in text
    assert "p9 model" not in text


HOSTILE = (
    "<script>alert(1)</script> <img src=x> [a](javascript:b) ![i](http://e/x.png) http://evil/ www.evil.com "
    "@everyone #1 **b** __u__ ~~s~~ `c` | cell | $x$ &amp; \\| \\` \n# h\n- l\n1. n\n```\nfence\n---\n"
)


def test_a_hostile_name_makes_no_markup_and_notifies_nobody() -> None:
    text = markdown(of_comparison(hostile_result(HOSTILE)))
    assert not {token.type for token in tokens(text)} & FEW
    outside_code = " ".join(token.content for token in tokens(text) if token.type == "text")
    assert "@everyone" not in outside_code
    assert "<script>alert(1)</script>" in outside_code  # shown, not obeyed


def test_a_pipe_in_a_name_makes_no_cell() -> None:
    result = replace(DIVERGENT, origins=(replace(TOKEN_WEIGHT, where=where(name="a|b\\|c")),))
    result = replace(result, first_divergent=result.origins[0])
    found = [token.type for token in tokens(markdown(of_comparison(result)))]
    assert found.count("td_open") == found.count("th_open") == 6


texts = st.text(st.characters(codec=None), max_size=80) | st.text("`*_[]()<>|#@!-+=.:/1 \\\n~$&", max_size=60)


@settings(max_examples=60, deadline=None)
@given(texts)
def test_whatever_a_trace_says_stays_text(name: str) -> None:
    summary = of_comparison(hostile_result(name))
    assert not {token.type for token in tokens(markdown(summary))} & FEW
    assert "loss" not in cases(junit(summary))  # it parses: its only kinds are the hostile one and coverage
    for line in annotations(github(summary, nowhere)):
        assert re.fullmatch(r"::(error|warning) title=[^:,\r\n]*::[^\r\n]*", line)


def test_markdown_fits_a_comment_whatever_the_result_holds() -> None:
    huge = replace(hostile_result("<" * 5000), notes=("@" * 5000,) * 500)
    text = markdown(of_comparison(huge))
    assert len(text) <= LIMIT
    assert "more in the JSON document: too long to stand here" in text
    assert "```sh\ntrace show " in text


def test_junit_has_a_case_for_each_kind_and_one_for_coverage() -> None:
    receiver = replace(LR, where=where("activation"))
    result = replace(DIVERGENT, receivers=(receiver,), receivers_total=1)
    assert cases(junit(of_comparison(result))) == {
        "input": "passed",
        "activation": "skipped",
        "param": "passed",
        "loss": "failure",
        "schedule": "failure",
        "coverage": "passed",
    }


def test_junit_counts_what_it_holds_and_tells_the_headline_where_the_first_failed() -> None:
    suite = ElementTree.fromstring(junit(of_comparison(DIVERGENT))).find("testsuite")  # noqa: S314
    assert suite is not None
    counts = [suite.attrib[name] for name in ("tests", "failures", "errors", "skipped")]
    assert counts == ["6", "2", "0", "0"]
    failure = suite.find("testcase[@name='loss']/failure")
    assert failure is not None
    assert failure.attrib["message"] == DIVERGENT.headline
    assert "measured 0.75" in (failure.text or "")


def test_what_is_missing_fails_the_coverage_alone() -> None:
    found = cases(junit(of_comparison(INCOMPLETE)))
    assert found == {"param": "passed", "coverage": "failure"}
    assert set(cases(junit(of_comparison(EQUIVALENT))).values()) == {"passed"}


def test_github_annotates_the_line_of_the_first_divergent_boundary(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "train_gpt.py").write_text("")
    first, second = annotations(github(of_comparison(DIVERGENT), finder(tmp_path, tmp_path)))
    assert first.startswith(
        "::error file=src/train_gpt.py,line=88,title=step 0%2C microbatch 0%3A loss cross_entropy weight::"
        "the loss weighs tokens differently (scale.token_ratio)%0Acause scale.token_ratio: "
    )
    assert second.startswith("::error title=step 2%3A schedule optimizer.0.group.1 lr::0.001 against 0.002")


def test_github_gets_a_warning_for_what_is_missing_and_a_notice_for_equivalence() -> None:
    assert annotations(github(of_comparison(INCOMPLETE), nowhere)) == [
        "::warning title=not compared::24 param only in a: rank 1 of b ended before"
    ]
    assert annotations(github(of_comparison(EQUIVALENT), nowhere)) == [
        "::notice title=equivalent::nothing diverges"
    ]


def test_github_gets_no_more_than_it_shows_and_nothing_longer() -> None:
    long = replace(LR, where=where("param", "p" * 9000, "model" * 900), text="é%\n" * 9000)
    lines = annotations(
        github(of_comparison(replace(DIVERGENT, origins=(TOKEN_WEIGHT, *[long] * 40))), nowhere)
    )
    assert len(lines) == AT_MOST
    for line in lines:
        title, message = re.fullmatch("::error title=(.*?)::(.*)", line).groups()  # type: ignore[union-attr]
        assert len(title.replace("%25", "%")) <= TITLE
        assert len(message.replace("%0A", "\n").replace("%25", "%")) <= MESSAGE


def test_the_runner_obeys_no_line_of_the_text() -> None:
    result = replace(DIVERGENT, notes=("::add-mask::a",), headline="::error::x")
    _, word, rest = re.split(r"::stop-commands::(\w{32})\n", github(of_comparison(result), nowhere))
    assert rest.endswith(f"\n::{word}::\n")
    assert "trace show runs/b" in rest


def test_the_step_summary_is_added_to_while_there_is_room(tmp_path: Path) -> None:
    path = tmp_path / "summary.md"
    path.write_text("before\n")
    assert append_summary("after\n", path)
    assert path.read_text() == "before\nafter\n\n"
    path.write_bytes(b"x" * SUMMARY_BYTES)
    assert not append_summary("after\n", path)
    assert path.stat().st_size == SUMMARY_BYTES
    assert not append_summary("after\n", tmp_path / "missing" / "summary.md")


@pytest.mark.parametrize(
    "source", ["../secret.py:3", "/etc/passwd:3", "no.py:3", "twice.py:3", "<string>:3", "in.py:0"]
)
def test_a_source_that_is_no_file_of_the_folder_is_not_named(source: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    for name in (
        "secret.py",
        "folder/in.py",
        "folder/x/twice.py",
        "folder/y/twice.py",
        "folder/.hidden/no.py",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    assert finder(folder, folder)(source) is None


def test_a_link_out_of_the_folder_is_not_named(tmp_path: Path) -> None:
    (tmp_path / "out.py").write_text("")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "out.py").symlink_to(tmp_path / "out.py")
    assert finder(folder, folder)("out.py:3") is None
    assert finder(folder, tmp_path)("out.py:3") == (Path("out.py"), 3)


def test_a_resumed_run_has_the_kinds_of_both_parts_and_the_place_of_the_divergent_one() -> None:
    whole = ResumeResult(
        verdict="divergent", headline="divergent after it was resumed at step 3", step=3, before=EQUIVALENT,
        after=DIVERGENT,
    )  # fmt: skip
    summary = of_resume(whole)
    found = cases(junit(summary))
    assert found["before the interruption: param"] == "passed"
    assert found["after the interruption: loss"] == "failure"
    assert markdown(summary).startswith("**DIVERGENT** after it was resumed at step 3\n")
    assert annotations(github(summary, nowhere))[0].startswith("::error title=step 0")


REPLAY = Replay(
    verdict="mismatch", headline="mismatch at step 0: loss", run=DIVERGENT.a, objective=None,
    first_mismatch=TOKEN_WEIGHT, causes=DIVERGENT.causes, mismatches=(TOKEN_WEIGHT,),
    replayed={"loss": 4, "param": 8}, bitwise_equal=3, recomputed=0, not_replayed=(),
    lost=("rank 1: killed",),
)  # fmt: skip


def test_a_replay_fails_in_the_kinds_that_mismatch_and_where_the_trace_is_not_whole() -> None:
    summary = of_replay(REPLAY)
    assert cases(junit(summary)) == {"loss": "failure", "param": "passed", "coverage": "failure"}
    assert "**First mismatch: step 0, microbatch 0: loss cross\\_entropy weight**" in markdown(summary)
    assert [line.split(" ")[0] for line in annotations(github(summary, nowhere))] == ["::error", "::warning"]


def test_a_live_run_has_a_case_for_each_place_that_errs() -> None:
    faulty = Faulty(
        "module", "layers.1", 0.1, None, ("forward",), (0,), TOKEN_WEIGHT, DIVERGENT.causes, (), 1
    )
    result = Forced(
        verdict="mismatch", headline="mismatch in 1 place", recorded=DIVERGENT.a, live=DIVERGENT.b,
        command=("python",), kinds=("inputs",), forced={}, not_forced=(), faulty=(faulty,), compared=9,
        bitwise_equal=8, follow=0,
    )  # fmt: skip
    assert cases(junit(of_forced(result))) == {"layers.1": "failure", "coverage": "passed"}
    assert "| layers.1 | forward | step 0, microbatch 0: loss" in markdown(of_forced(result))
    assert annotations(github(of_forced(result), nowhere))[0].startswith(
        "::error title=layers.1::local means"
    )


def validation(verdict: str) -> Validation:
    cells = tuple(
        CellResult(f"nproc={n}", ("x",), each, f"{each}: what it says", ())  # type: ignore[arg-type]
        for n, each in enumerate(("equivalent", verdict))
    )
    return Validation(
        verdict=verdict, headline=f"{verdict} in 1 of 2 cells", repository="r", base="main",  # type: ignore[arg-type]
        base_commit="a" * 40, feature="HEAD", feature_commit="b" * 40, folder="v", cells=cells,
    )  # fmt: skip


def test_a_validation_has_a_case_a_row_and_an_annotation_for_each_cell() -> None:
    summary = of_validation(validation("divergent"))
    assert cases(junit(summary)) == {"nproc=0": "passed", "nproc=1": "failure"}
    assert [line.split(" ")[0] for line in annotations(github(summary, nowhere))] == ["::notice", "::error"]
    assert "| nproc=1 | divergent |" in markdown(summary)
    assert markdown(summary).startswith("**DIVERGENT** in 1 of 2 cells\n")


def test_a_validation_that_says_nothing_of_the_feature_is_an_error_not_a_failure() -> None:
    assert cases(junit(of_validation(validation("trouble"))))["nproc=1"] == "error"
