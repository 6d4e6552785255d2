"""``trace export``: what other tools find in its files, and what it refuses."""

from __future__ import annotations

import json
import sys
import types
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tensortrace.cli import main
from tensortrace.cli.export.npz import member_name
from tensortrace.tracer.types import Kind, Mesh, Placement, Shard
from tests.levels import with_statistics_only
from tests.simulated import Program
from tests.synthetic import write_trace

WHOLE = np.arange(12, dtype=np.float32).reshape(4, 3)
PARAM = {"kind": Kind.PARAM, "microbatch": None, "slot": "model", "name": "w"}
MESHES = {"tp": Mesh(("tp",), (2,), (0, 1))}


class Wrong(Program):
    """The learning rate is doubled from step 1 on."""

    def position(self, step: int) -> int:
        return step if step == 0 else step + 3


@pytest.fixture
def halves(tmp_path: Path) -> Path:
    """Two ranks that hold two rows each of a bfloat16 parameter, twice the same, and rows of their own."""

    def rank(number: int) -> list[tuple[dict[str, object], np.ndarray]]:
        shard = Shard("tp", (number,), (Placement("shard", dim=0),), (4, 3))
        part = WHOLE[2 * number : 2 * number + 2]
        of_w = PARAM | {"shard": shard, "dtype": "bfloat16"}
        given = {"kind": Kind.INPUT, "name": "(root)", "slot": "in.0"}
        given["shard"] = Shard("tp", (number,), (Placement("replicate"),), (2,))
        own = {"name": "fc"}  # of one sample, and of no known layout
        return [
            (given, np.arange(2)), (own, np.full(2, number, np.float32)),
            (of_w, part), (of_w | {"step": 1}, part),
        ]  # fmt: skip

    return write_trace(tmp_path / "t", [rank(0), rank(1)], meshes=MESHES)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("runs")
    return Program(steps=2).write(folder / "a"), Wrong(steps=2).write(folder / "b")


_SLICES = ("input (root) in.0", "activation fc out", "param w model", "param w model")


def export(*arguments: object) -> int:
    return main.run(["export", *map(str, arguments)])


def test_safetensors_hold_global_tensors_in_their_dtype(halves: Path, tmp_path: Path) -> None:
    out = tmp_path / "w.safetensors"
    assert export(halves, "-o", out, "--format", "safetensors", "--kind", "param") == 0
    found = load_file(out)
    assert sorted(found) == [
        "0/-/param/w/model/0",
        "1/-/param/w/model/0",
    ]  # the second is stored by reference
    for tensor in found.values():
        assert torch.equal(tensor, torch.from_numpy(WHOLE).to(torch.bfloat16))
    with safe_open(out, "np") as file:
        assert file.metadata() == {"made by": "tensortrace export", "trace": str(halves), "tensors": "global"}


def test_local_tensors_are_those_of_each_rank(halves: Path, tmp_path: Path) -> None:
    out = tmp_path / "w.safetensors"
    selected = ("--name", "w", "--step", "1", "--rank", "1", "--local")
    assert export(halves, "-o", out, "--format", "safetensors", *selected) == 0
    ((key, tensor),) = load_file(out).items()
    assert key == "rank1/1/-/param/w/model/0"
    assert tensor.tolist() == WHOLE[2:].tolist()


def test_dtypes_that_safetensors_lacks_are_told(tmp_path: Path) -> None:
    value = np.array([1 + 2j, 3 - 4j], "c16")
    path = write_trace(tmp_path / "t", [[(PARAM | {"dtype": "complex128"}, value)]])
    assert export(path, "-o", tmp_path / "c", "--format", "safetensors") == 0
    key = "0/-/param/w/model/0"
    assert load_file(tmp_path / "c")[key].tolist() == [[1, 2], [3, -4]]
    with safe_open(tmp_path / "c", "np") as file:
        assert file.metadata()[f"dtype of {key}"] == "complex128"


def test_npz_holds_bfloat16_as_float32_and_says_so(halves: Path, tmp_path: Path) -> None:
    out = tmp_path / "w.npz"
    assert export(halves, "-o", out, "--format", "npz") == 0
    with np.load(out, allow_pickle=False) as found:
        assert found["0/-/param/w/model/0"].dtype == np.float32
        assert found["0/-/param/w/model/0"].tolist() == WHOLE.tolist()
        about = json.loads(str(found["__about__"]))
    assert about["dtypes"]["0/-/param/w/model/0"] == "bfloat16"


def test_names_of_members_stay_where_a_zip_is_unpacked(tmp_path: Path) -> None:
    names = ("..", "../../etc/x", "C:\\x", "/root", "." * 9, "é" * 4000)
    tensors = [(PARAM | {"name": name, "slot": "../m"}, WHOLE + n) for n, name in enumerate(names)]
    path = write_trace(tmp_path / "t", [tensors])
    assert export(path, "-o", tmp_path / "n.npz", "--format", "npz") == 0
    with zipfile.ZipFile(tmp_path / "n.npz") as archive:
        members = archive.namelist()
    assert len(set(members)) == len(names) + 1
    for member in members:
        assert not member.startswith("/")
        assert not {"\\", ":"} & set(member)
        assert not {"..", "."} & set(member.split("/"))
        assert len(member.encode()) < 65_535
    assert member_name("0/-/param/w/model/0") == "0/-/param/w/model/0"


def test_chrome_has_a_track_for_each_rank_in_the_order_of_events(halves: Path, tmp_path: Path) -> None:
    out = tmp_path / "t.json"
    assert export(halves, "-o", out, "--format", "chrome") == 0
    document = json.loads(out.read_text())
    assert "no times" in document["otherData"]["time"]
    slices = [event for event in document["traceEvents"] if event.get("cat")]
    assert [(e["pid"], e["ts"], e["name"]) for e in slices] == [
        (rank, event, name) for rank in (0, 1) for event, name in enumerate(_SLICES)
    ]
    first = slices[2]["args"]
    assert (first["dtype"], first["shape"]) == ("bfloat16", [2, 3])
    assert first["norm"] == pytest.approx(np.linalg.norm(WHOLE[:2]))
    spans = [e for e in document["traceEvents"] if e["ph"] == "X" and e["pid"] == 0 and e["tid"] == 0]
    assert [(e["name"], e["ts"], e["dur"]) for e in spans] == [
        ("step 0", 0, 3), ("step 1", 3, 1)
    ]  # fmt: skip


def test_tensors_of_no_known_layout_are_left_out_and_counted(
    halves: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(halves, "-o", tmp_path / "w", "--format", "npz", "--step", "0") == 0
    told = capsys.readouterr()
    assert "2 tensors, " in told.out
    assert "1 tensor left out: ranks hold parts of no known layout" in told.err
    assert export(halves, "-o", tmp_path / "l", "--format", "npz", "--step", "0", "--local") == 0
    assert "6 tensors, " in capsys.readouterr().out


def test_what_was_not_stored_cannot_be_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    full = write_trace(tmp_path / "full", [[(PARAM, WHOLE)]])
    path = with_statistics_only(full, tmp_path / "t", lambda line: True)
    assert export(path, "-o", tmp_path / "w", "--format", "safetensors") == 2
    assert "values were not stored" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["full", "t"]


class Written:
    """Stands in for TensorBoard's writer, and keeps what it is given."""

    found: list[tuple[str, float, int]]

    def __init__(self, folder: str) -> None:
        Written.found = []
        (Path(folder) / "events.out.tfevents.1").touch()

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.found.append((tag, value, step))

    def close(self) -> None:
        pass


@pytest.fixture
def tensorboard(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("tensorboard.summary")
    module.Writer = Written  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tensorboard", types.ModuleType("tensorboard"))
    monkeypatch.setitem(sys.modules, "tensorboard.summary", module)


@pytest.mark.usefixtures("tensorboard")
def test_tensorboard_gets_the_error_of_each_boundary_over_the_steps(
    runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export(*runs, "-o", tmp_path / "tb", "--format", "tensorboard") == 0
    assert "divergent at step 1" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "tb").iterdir()] == ["events.out.tfevents.1"]
    found = {(tag, step): value for tag, value, step in Written.found}
    rate = "schedule/optimizer.0.group.0/lr"
    assert found["error/" + rate, 0] == 0
    lr = [0.5 * (1 + np.cos(np.pi * at / 20)) for at in (1, 4)]
    assert found["error/" + rate, 1] == pytest.approx(abs(lr[1] - lr[0]) / lr[0])
    assert found["error/param/head.bias/model", -1] == 0
    assert found["ratio/param/head.bias/model", 1] > 0


@pytest.mark.usefixtures("tensorboard")
def test_of_one_trace_tensorboard_gets_loss_norms_and_schedule(
    runs: tuple[Path, Path], tmp_path: Path
) -> None:
    assert export(runs[0], "-o", tmp_path / "tb", "--format", "tensorboard", "--step", "init,0") == 0
    found = {(tag, step): value for tag, value, step in Written.found}
    assert {step for _, step in found} == {-1, 0}
    assert found["run/schedule optimizer.0.group.0 lr", 0] == pytest.approx(1e-2)
    start = Program().initial_params(0)["head.bias"].astype(np.float64)
    assert found["norm/param/head.bias/model", -1] == pytest.approx(np.linalg.norm(start))


def test_a_real_event_file_is_read_by_tensorboard(runs: tuple[Path, Path], tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    selected = ("--kind", "schedule", "--name", "optimizer.0.group.0")
    assert export(*runs, "-o", tmp_path / "tb", "--format", "tensorboard", *selected) == 0
    events = EventAccumulator(str(tmp_path / "tb"))
    events.Reload()
    tags = events.Tags()["tensors"]
    assert "error/schedule/optimizer.0.group.0/lr" in tags
    assert all("/optimizer.0.group.0/" in tag for tag in tags)


def test_wandb_gets_a_run_with_the_training_step(
    runs: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[dict[str, float]] = []
    opened: dict[str, object] = {}
    run = types.SimpleNamespace(define_metric=lambda *_, **__: None, log=logged.append, finish=lambda: None)
    module = types.ModuleType("wandb")
    module.init = lambda **given: opened.update(given) or run  # type: ignore[attr-defined]
    module.errors = types.SimpleNamespace(Error=ValueError)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    assert export(*runs, "-o", tmp_path / "wb", "--format", "wandb", "--kind", "schedule") == 0
    assert [values["training step"] for values in logged] == [0, 1]
    assert opened["dir"] == str(tmp_path / "wb")
    assert opened["config"]["verdict"] == "divergent"  # type: ignore[index]


@pytest.mark.parametrize("tool", ["tensorboard", "wandb"])
def test_a_tool_that_is_not_installed_is_one_line(
    tool: str, runs: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    for name in (tool, f"{tool}.summary"):
        monkeypatch.setitem(sys.modules, name, None)
    assert export(*runs, "-o", tmp_path / "x", "--format", tool) == 2
    told = capsys.readouterr().err
    assert f"pip install 'tensortrace[{tool}]'" in told
    assert len(told.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_what_exists_is_replaced_only_by_force(
    runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "w.npz"
    out.write_text("mine")
    arguments = (runs[0], "-o", out, "--format", "npz", "--name", "head.bias", "--kind", "param")
    assert export(*arguments) == 2
    assert "exists; use another name, or --force" in capsys.readouterr().err
    assert out.read_text() == "mine"
    assert export(*arguments, "--force") == 0
    with np.load(out) as found:
        assert len(found.files) == 4  # init, two steps, and what they are


@pytest.mark.usefixtures("tensorboard")
def test_a_folder_with_other_files_is_never_replaced(
    runs: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (runs[0], "-o", tmp_path / "tb", "--format", "tensorboard", "--force")
    assert export(*arguments) == 0
    assert export(*arguments) == 0
    (tmp_path / "tb" / "thesis.tex").touch()
    assert export(*arguments) == 2
    assert "other files than an export's" in capsys.readouterr().err
    assert (tmp_path / "tb" / "thesis.tex").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("A", "B", "--format", "npz"), "takes one trace"),
        (("A", "B", "--format", "tensorboard", "--rank", "0"), "--rank is of one trace"),
        (("A", "--format", "chrome", "--local"), "--global and --local are for"),
        (("A", "--format", "npz", "--name", "nothing"), "no boundary that matches"),
        (("A", "--format", "chrome", "--name", "nothing"), "no boundary that matches"),
        (("A", "--format", "npz", "--kind", "parm"), "'parm'"),
        (("nowhere", "--format", "npz"), "no such folder"),
    ],
)
def test_what_makes_no_sense_is_one_line_and_leaves_nothing(
    arguments: tuple[str, ...], said: str, runs: tuple[Path, Path], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    given = [str({"A": runs[0], "B": runs[1]}.get(word, word)) for word in arguments]
    assert export(*given, "-o", tmp_path / "out") == 2
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
