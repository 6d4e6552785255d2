"""``trace pack`` and the replay of what it packs, on simulated runs whose mistake is known."""

from __future__ import annotations

import getpass
import json
import runpy
import shutil
import socket
import zipfile
from pathlib import Path

import numpy as np
import pytest

from tensortrace.cli.main import run
from tensortrace.replay import replay_case
from tensortrace.replay.packed import unpacked
from tensortrace.tracer.manifest import read_rank_manifest, replace_manifest
from tensortrace.tracer.reader import Trace, check
from tensortrace.tracer.types import Environment, Kind, RankManifest
from tests.simulated import Program
from tests.synthetic import write_trace


class Means(Program):
    """A mean of each rank's mean."""

    def token_weight(self, counts: dict[tuple[int, int], int], rank: int, microbatch: int) -> float:
        own = sum(count for (r, _), count in counts.items() if r == rank)
        return 1 / own


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    folder = tmp_path_factory.mktemp("pair")
    return (
        str(Program(steps=1, rows=4).write(folder / "one")),
        str(
            Means(ranks=2, steps=1, rows=4).write(
                folder / "two", command=("python", "/home/somebody/train.py")
            )
        ),
    )


@pytest.fixture(scope="module")
def packed(pair: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the pair as it is packed without options, and the test that goes with it beside."""
    folder = tmp_path_factory.mktemp("packed")
    assert run(["pack", *pair, "-o", str(folder / "case.zip"), "--pytest", str(folder / "test_case.py")]) == 0
    return folder / "case.zip"


def case_of(path: Path) -> dict[str, object]:
    with zipfile.ZipFile(path) as archive:
        found: dict[str, object] = json.loads(archive.read("case.json"))
    return found


def test_a_packed_pair_replays_to_its_verdict_without_the_traces(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b, case = (str(tmp_path / name) for name in ("a", "b", "case.zip"))
    Program(steps=1, rows=4).write(Path(a))
    Means(ranks=2, steps=1, rows=4).write(Path(b))
    assert run(["diff", a, b, "-q"]) == 1
    headline = capsys.readouterr().out
    assert run(["pack", a, b, "-o", str(case)]) == 0
    assert "states: divergent at step 0, microbatch 0: loss cross_entropy weight" in capsys.readouterr().out
    assert Path(case).stat().st_size < 20_000
    shutil.rmtree(a)
    shutil.rmtree(b)
    assert run(["replay", str(case), "-q"]) == 0
    assert capsys.readouterr().out == headline + (
        "as stated: the verdict, its place and its cause are those of the case\n"
    )


def test_the_page_inside_says_what_fails_on_what_and_how_to_see_it(
    packed: Path,
) -> None:
    with zipfile.ZipFile(packed) as archive:
        page = archive.read("README.md").decode()
        names = archive.namelist()
    assert names[:2] == ["README.md", "case.json"]
    for said in ("mean of local means", "trace replay case.zip", "(one): 1 rank", "(two): 2 ranks",
                 '"scale.token_ratio"', "boundaries"):  # fmt: skip
        assert said in page


def test_the_traces_inside_are_whole_traces(packed: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(packed) as archive:
        archive.extractall(tmp_path / "out")
    for side in "ab":
        assert list(check(tmp_path / "out" / side)) == []
    assert run(["diff", str(tmp_path / "out" / "a"), str(tmp_path / "out" / "b"), "-q"]) == 1


def test_without_minimising_every_boundary_is_kept(pair: tuple[str, str], tmp_path: Path) -> None:
    assert run(["pack", *pair, "-o", str(tmp_path / "case.zip"), "--no-minimise"]) == 0
    with unpacked(tmp_path / "case.zip") as (folder, case):
        for side, path, packed in zip("ab", pair, case.traces, strict=True):
            ours, theirs = Trace.open(folder / side), Trace.open(path)
            for kept, rank in zip(ours.ranks, theirs.ranks, strict=True):
                assert [(e.key, e.digest, e.stats) for e in kept.entries] == [
                    (e.key, e.digest, e.stats) for e in rank.entries
                ]
            assert packed.boundaries == packed.recorded


def test_another_verdict_exits_with_1_and_says_in_what(
    packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stated = case_of(packed)
    expected = stated["expected"]
    assert isinstance(expected, dict)
    expected["first"] |= {"step": 1, "name": "nll_loss"}
    expected["causes"] = ["scale.other"]
    with zipfile.ZipFile(packed) as old, zipfile.ZipFile(tmp_path / "x.zip", "w") as new:
        for name in old.namelist():
            new.writestr(name, json.dumps(stated) if name == "case.json" else old.read(name))
    capsys.readouterr()
    assert run(["replay", str(tmp_path / "x.zip"), "--format", "json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["schema"] == "tensortrace.case/1"
    assert document["reproduced"] is False
    assert document["deviations"] == [
        "place: step 0, microbatch 0: loss cross_entropy weight, stated: step 1, microbatch 0: loss nll_loss "
        "weight",
        "cause: scale.token_ratio, stated: scale.other",
    ]
    assert document["outcome"]["schema"] == "tensortrace.diff/1"
    assert document["outcome"]["a"]["path"] == "a"
    assert run(["replay", str(tmp_path / "x.zip")]) == 1
    assert "NOT AS STATED" in capsys.readouterr().out


def test_a_single_trace_is_packed_with_what_its_replay_says(
    pair: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["pack", pair[1], "-o", str(tmp_path / "case.zip"), "--objective", "mean"]) == 0
    assert run(["replay", str(tmp_path / "case.zip"), "-q"]) == 0
    assert "MISMATCH at step 0, microbatch 0: loss cross_entropy weight" in capsys.readouterr().out
    found = replay_case(tmp_path / "case.zip")
    assert found.found.causes[:1] == ("scale.token_ratio",)
    assert found.case.asked.objective == "mean"


def test_what_agrees_is_packed_whole(pair: tuple[str, str], tmp_path: Path) -> None:
    assert run(["pack", pair[0], "-o", str(tmp_path / "case.zip")]) == 0
    found = replay_case(tmp_path / "case.zip")
    assert (found.reproduced, found.found.verdict, found.case.minimised) == (True, "agrees", False)


def test_a_case_that_does_not_fit_is_refused_with_what_is_largest(
    pair: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["pack", *pair, "-o", str(tmp_path / "case.zip"), "--max-size", "3K", "--no-minimise"]
    assert run(arguments) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "expected at most 3,072" in line
    assert "b/rank00001/seg000000.safetensors.zst" in line
    assert list(tmp_path.iterdir()) == []


def test_what_exists_is_not_replaced_unasked(
    pair: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "case.zip").write_text("mine")
    arguments = ["pack", *pair, "-o", str(tmp_path / "case.zip"), "--no-minimise"]
    assert run(arguments) == 2
    assert "exists" in capsys.readouterr().err
    assert (tmp_path / "case.zip").read_text() == "mine"
    assert run([*arguments, "--force"]) == 0
    assert replay_case(tmp_path / "case.zip")


@pytest.mark.parametrize(
    "arguments", [["{a}", "--exact"], ["{a}", "{b}", "--objective", "mean"], ["{a}", "{a}", "{b}"], []]
)
def test_options_that_make_no_sense_are_refused(
    arguments: list[str], pair: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [text.format(a=pair[0], b=pair[1]) for text in arguments]
    assert run(["pack", *given, "-o", str(tmp_path / "case.zip")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_options_of_the_diff_go_into_the_case(pair: tuple[str, str], tmp_path: Path) -> None:
    """Everything that differs is declared, so that what the case states is equivalence."""
    (tmp_path / "rules.toml").write_text('# mine\n[[expect]]\nkind = "loss"\nname = "*"\nslot = "weight"\n')
    options = ["--expect", str(tmp_path / "rules.toml"), "--expect", "local_grad * grad reason='as meant'"]
    assert (
        run(["pack", *pair, "-o", str(tmp_path / "case.zip"), *options, "--kinds", "loss,local_grad,input"])
        == 0
    )
    (tmp_path / "rules.toml").unlink()
    found = replay_case(tmp_path / "case.zip")
    assert found.reproduced
    assert found.outcome.declared is not None  # type: ignore[union-attr]
    assert [rule.rule for rule in found.outcome.declared.rules] == [  # type: ignore[union-attr]
        "loss * weight", "local_grad * grad",
    ]  # fmt: skip


def test_the_test_that_is_written_passes_and_fails_where_the_verdict_is_another(
    packed: Path, tmp_path: Path
) -> None:
    test = tmp_path / "tests" / "test_case.py"
    test.parent.mkdir()
    shutil.copy(packed, tmp_path / "my case.zip")
    assert run(["replay", str(tmp_path / "my case.zip"), "--pytest", str(test)]) == 0
    runpy.run_path(str(test))["test_my_case"]()
    test.write_text(test.read_text().replace("scale.token_ratio", "scale.other"))
    with pytest.raises(AssertionError, match="mean of local means"):
        runpy.run_path(str(test))["test_my_case"]()


def test_a_test_can_be_written_of_a_case_that_somebody_sent(packed: Path, tmp_path: Path) -> None:
    shutil.copy(packed, tmp_path / "case.zip")
    assert run(["replay", str(tmp_path / "case.zip"), "--pytest", str(tmp_path / "test.py")]) == 0
    assert (tmp_path / "test.py").read_text() == packed.with_name("test_case.py").read_text()


def wide(folder: Path, sign: float) -> str:
    """Return a trace of a module whose output has the sign of its input, or the other one by mistake."""
    values = np.random.default_rng(0).normal(size=(6, 20_000)).astype(np.float32)
    ids = np.arange(6, dtype=np.int64).reshape(6, 1)
    tensors = [
        ({"kind": Kind.INPUT, "name": "(root)", "slot": "in.0"}, ids),
        ({"name": "(root)", "slot": "in.0", "producers": (0,)}, ids),
        ({"name": "m", "slot": "in.0", "producers": (1,)}, values),
        ({"name": "m", "slot": "out", "producers": (2,)}, sign * values + np.float32(0)),
    ]
    return str(write_trace(folder, [tensors]))


def test_of_a_large_tensor_only_a_part_is_kept_that_says_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    traces = [wide(tmp_path / "a", 1.0), wide(tmp_path / "b", -1.0)]
    assert run(["diff", *traces, "-q"]) == 1
    headline = capsys.readouterr().out
    assert run(["pack", *traces, "-o", str(tmp_path / "case.zip"), "--redact"]) == 0
    found = replay_case(tmp_path / "case.zip")
    assert (found.reproduced, found.found.causes[0]) == (True, "value.sign")
    assert " ".join(headline.split()) == found.found.headline.replace("divergent", "DIVERGENT")
    assert (tmp_path / "case.zip").stat().st_size < 40_000 < 6 * 20_000 * 4
    whole = Trace.open(traces[1]).ranks[0]
    with unpacked(tmp_path / "case.zip") as (folder, case):
        [rank] = Trace.open(folder / "b").ranks
        [kept] = [rank.read(entry) for entry in rank.entries if entry.slot == "out"]
        assert kept.nbytes < 16 << 10
        everything = whole.read(whole.entries[3])
        [[row, column]] = np.argwhere(everything == kept[0, 0])
        there = everything[row : row + len(kept), column : column + kept.shape[1]]
        np.testing.assert_array_equal(kept, there)
        assert [packed.cut for packed in case.traces] == [1, 1]  # values of its input are left out
        assert "only a part of 1 more" in (folder / "README.md").read_text()


MARK = "hunter2"


def contents(folder: Path) -> bytes:
    return b"\n".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())


def marked(path: str, folder: Path) -> Path:
    """Return a copy of a trace that tells, in every way there is, who recorded it where."""
    root = shutil.copytree(path, folder / MARK)
    for file in root.glob("rank*/rank.json"):
        manifest = read_rank_manifest(file)
        told = Environment(
            versions={"torch": "2.13.0", "platform": f"Linux-{MARK}"}, variables={"SLURM_JOB_ID": MARK},
            command=("python", f"/home/{MARK}/train.py"), commit=MARK, flags={"start.init-from": MARK},
        )  # fmt: skip
        replace_manifest(file, replaced(manifest, told))
    return root


def replaced(manifest: RankManifest, told: Environment) -> RankManifest:
    import msgspec

    return msgspec.structs.replace(manifest, host=MARK, pid=31337, environment=told)


def test_redacting_leaves_nothing_that_tells_who_recorded_it_where(
    pair: tuple[str, str], tmp_path: Path
) -> None:
    traces = [str(marked(path, tmp_path / side)) for side, path in zip("ab", pair, strict=True)]
    for name, option in (("as-it-is", []), ("redacted", ["--redact"])):
        assert run(["pack", *traces, "-o", str(tmp_path / f"{name}.zip"), "--no-minimise", *option]) == 0
        with zipfile.ZipFile(tmp_path / f"{name}.zip") as archive:
            archive.extractall(tmp_path / name)
    assert MARK.encode() in contents(tmp_path / "as-it-is")
    left = contents(tmp_path / "redacted")
    for told in (MARK, "31337", "somebody", socket.gethostname(), f"/{getpass.getuser()}/", str(tmp_path)):
        assert told.encode() not in left, told
    assert b"2.13.0" in left
    assert b"removed on request: environment variables, command lines" in left
    assert replay_case(tmp_path / "redacted.zip").found == replay_case(tmp_path / "as-it-is.zip").found


def test_tokens_are_replaced_each_by_the_same_other_one(pair: tuple[str, str], tmp_path: Path) -> None:
    options = ["--redact-inputs", "--no-minimise"]
    assert run(["pack", *pair, "-o", str(tmp_path / "case.zip"), *options]) == 0
    pairs: dict[int, set[int]] = {}
    with unpacked(tmp_path / "case.zip") as (folder, case):
        for side, path in zip("ab", pair, strict=True):
            for new, old in zip(Trace.open(folder / side).ranks, Trace.open(path).ranks, strict=True):
                for mine, theirs in zip(new.entries, old.entries, strict=True):
                    if mine.kind == Kind.INPUT or mine.slot == "target":
                        both = zip(np.ravel(old.read(theirs)), np.ravel(new.read(mine)), strict=True)
                        for was, is_now in both:
                            pairs.setdefault(int(was), set()).add(int(is_now))
                    elif "int" not in mine.dtype:
                        assert mine.digest == theirs.digest
    assert all(len(others) == 1 for others in pairs.values())
    others = [next(iter(found)) for found in pairs.values()]
    assert len(set(others)) == len(others)
    assert pairs[-100] == {-100}
    assert sum(next(iter(found)) != was for was, found in pairs.items()) > len(pairs) / 2
    assert any("token ids" in text for text in case.removed)
