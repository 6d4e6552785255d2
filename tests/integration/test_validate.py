"""``trace validate`` on a small repository: what it finds, what it leaves alone, what it refuses."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tensortrace.cli.main import run
from tests import harness

MODEL = """
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.b(torch.relu(self.a(x)))


def penalty(model):
    return 1e-2 * sum((p**2).sum() for p in model.parameters())
"""
HARMLESS = (
    "return self.b(torch.relu(self.a(x)))",
    "hidden = self.a(x).relu()\n        return self.b(hidden)",
)
HARMFUL = ("(p**2).sum()", "(p.detach() ** 2).sum()")

TRAIN = """
import json, os, time
import torch
import torch.distributed as dist
from torch import nn
from own.model import Net, penalty

torch.manual_seed(0)
world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
if world > 1:
    dist.init_process_group("gloo")
net = Net()
model = nn.parallel.DistributedDataParallel(net) if world > 1 else net
rate = json.load(open("rate.json")) if os.path.exists("rate.json") else 0.1
optimizer = torch.optim.SGD(net.parameters(), lr=rate)
for step in range(2):
    if step and os.path.exists(os.environ.get("WAIT", "")):
        time.sleep(200)
    x, y = torch.randn(8, 8), torch.randint(4, (8,))
    x, y = x[rank::world], y[rank::world]
    optimizer.zero_grad()
    (nn.functional.cross_entropy(model(x), y) + penalty(net)).backward()
    optimizer.step()
open("left behind", "w").write(str(net.a.weight.sum().item()))
if world > 1:
    dist.destroy_process_group()
"""


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=A User", "-c", "user.email=user@example.org"]
    done = subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True, text=True)
    return done.stdout


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository on ``main``, with a branch that changes one line harmlessly and one that drops a term."""
    root = tmp_path_factory.mktemp("repository") / "project"
    (root / "own").mkdir(parents=True)
    git(root, "init", "--quiet", "--initial-branch", "main")
    (root / "own" / "__init__.py").write_text("")
    (root / "own" / "model.py").write_text(MODEL)
    (root / "train.py").write_text(TRAIN)
    (root / ".gitignore").write_text("ignored/\n")
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--message", "base")
    for branch, (old, new) in {"harmless": HARMLESS, "harmful": HARMFUL}.items():
        git(root, "switch", "--quiet", "--create", branch, "main")
        assert old in MODEL
        (root / "own" / "model.py").write_text(MODEL.replace(old, new))
        git(root, "commit", "--quiet", "--all", "--message", branch)
    git(root, "switch", "--quiet", "main")
    return root


def fingerprint(root: Path) -> str:
    """Return a digest of every file of a checkout and of its index, and what git says of it."""
    hasher = hashlib.sha256(git(root, "--no-optional-locks", "status", "--porcelain").encode())
    hasher.update(git(root, "branch", "--all", "--verbose").encode())
    hasher.update(git(root, "worktree", "list").encode())
    files = [path for path in sorted(root.rglob("*")) if path.is_file() and ".git" not in path.parts]
    for path in (*files, root / ".git" / "index", root / ".git" / "HEAD"):
        hasher.update(f"{path} {path.stat().st_mtime_ns}\n".encode() + path.read_bytes())
    return hasher.hexdigest()


def validate(root: Path, *words: str) -> harness.Finished:
    return harness.run([str(harness.BIN / "trace"), "validate", "--base", "main", *words], folder=root)


def test_harmless_is_equivalent_harmful_is_named_and_the_checkout_is_untouched(
    repository: Path, tmp_path: Path
) -> None:
    before = fingerprint(repository)
    run = ["--format", "json", "-o", str(tmp_path / "kept"), "--", "python", "train.py"]
    good = validate(repository, "--feature", "harmless", *run)
    bad = validate(repository, "--feature", "harmful", *run)
    assert fingerprint(repository) == before
    assert (good.exit_code, bad.exit_code) == (0, 1), good.errors + bad.errors
    told = json.loads(good.output)
    (cell,) = told["cells"]
    assert told["verdict"] == "equivalent"
    assert cell["compared"] == cell["bitwise_equal"] > 0
    assert [run["role"] for run in cell["runs"]] == ["base-1", "base-2", "feature"]
    assert (cell["tags"]["model"], cell["tags"]["world_size"], cell["tags"]["steps"]) == ("Net", 1, 2)
    (cell,) = json.loads(bad.output)["cells"]
    assert [run["reused"] for run in cell["runs"]] == [True, True, False]  # the base is not run again
    first = json.loads(Path(cell["diff"]).read_text())["first_divergent"]
    # the penalty's gradient, 2e-2·p, is gone from every parameter, and the loss is as it was
    assert (first["step"], first["kind"]) == (0, "local_grad")
    assert sorted(os.listdir(tmp_path / "kept")) == ["run"]


@pytest.mark.slow
def test_matrix_snapshot_copies_and_a_base_of_another_validation(repository: Path, tmp_path: Path) -> None:
    """Every cell has runs of its own; a changed checkout is validated as it stands when that is asked for."""
    model = repository / "own" / "model.py"
    matrix = [
        "--matrix",
        "nproc=1,2",
        "--",
        "torchrun",
        "--standalone",
        "--nproc-per-node",
        "{nproc}",
        "train.py",
    ]
    both = validate(
        repository, "--feature", "harmful", "-o", str(tmp_path / "a"), "--format", "json", *matrix
    )
    told = json.loads(both.output)
    assert both.exit_code == 1
    assert [(cell["name"], cell["verdict"], cell["tags"]["world_size"]) for cell in told["cells"]] == [
        ("nproc=1", "divergent", 1), ("nproc=2", "divergent", 2)
    ]  # fmt: skip
    model.write_text(MODEL.replace(*HARMLESS))
    (repository / "rate.json").write_text("0.5")
    try:
        before = fingerprint(repository)
        refused = validate(repository, "-o", str(tmp_path / "b"), *matrix)
        assert refused.exit_code == 2
        assert "--snapshot" in refused.errors
        snapshot = ["--snapshot", "--reuse-base", str(tmp_path / "a"), "--format", "json"]
        known = validate(repository, *snapshot, "-o", str(tmp_path / "b"), *matrix)
        # the snapshot holds rate.json, which the base does not: another learning rate
        assert known.exit_code == 1, known.output + known.errors
        for cell in json.loads(known.output)["cells"]:
            assert [run["reused"] for run in cell["runs"]] == [True, True, False]
            assert cell["cause"] == "optimizer.hyperparameter"
        copied = validate(repository, "--snapshot", "--copy", "rate.json", "-o", str(tmp_path / "c"), "--",
                          "python", "train.py")  # fmt: skip
        assert copied.exit_code == 0, copied.output + copied.errors
        assert fingerprint(repository) == before
    finally:
        model.write_text(MODEL)
        (repository / "rate.json").unlink()


def stopped(root: Path, folder: Path, by: signal.Signals, flag: Path) -> tuple[int, str]:
    """Send a signal to a validation whose first run records; return how it ended and what it said."""
    command = [
        str(harness.BIN / "trace"),
        "validate",
        "--base",
        "main",
        *RUN,
        "-o",
        str(folder),
        "--",
        *TRAINS,
    ]
    path = os.pathsep.join([str(harness.BIN), os.environ["PATH"]])
    environment = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1", "WAIT": str(flag)}
    errors = folder.with_name("errors")
    with open(errors, "wb") as said:
        running = subprocess.Popen(command, cwd=root, env=environment, start_new_session=True, stderr=said)
        until = time.monotonic() + 100
        while not any(_pids(folder)):
            assert time.monotonic() < until, errors.read_text()
            time.sleep(0.1)
        running.send_signal(by)
        return running.wait(60), errors.read_text()


def _pids(folder: Path) -> list[int]:
    found = (json.loads(path.read_bytes()) for path in folder.glob("run/base-1-*/rank*/rank.json"))
    return [manifest["pid"] for manifest in found if manifest.get("ended") is None]


RUN = ["--feature", "harmless"]
TRAINS = ["python", "train.py"]


def test_interrupted_or_killed_it_goes_on_where_it_stopped(repository: Path, tmp_path: Path) -> None:
    folder, flag = tmp_path / "kept", tmp_path / "wait"
    flag.touch()
    code, said = stopped(repository, folder, signal.SIGINT, flag)
    assert code == 130
    assert said.splitlines()[-1] == "trace: interrupted; run the same command again to go on"
    assert not list(folder.glob("run/*.json"))  # not run, and so no note of how it ended
    shutil.rmtree(folder)
    code, _ = stopped(repository, folder, signal.SIGKILL, flag)
    (left,) = _pids(folder)
    assert code == -signal.SIGKILL
    assert Path(f"/proc/{left}").exists()
    flag.unlink()
    done = validate(repository, *RUN, "-o", str(folder), "--format", "json", "--", *TRAINS)
    assert done.exit_code == 0, done.output + done.errors
    assert not Path(f"/proc/{left}").exists()
    (cell,) = json.loads(done.output)["cells"]
    assert [run["reused"] for run in cell["runs"]] == [False, False, False]
    other = [*RUN, "--reuse-base", str(folder), "-o", str(tmp_path / "other"), "--", *TRAINS]
    refused = harness.run(
        [str(harness.BIN / "trace"), "validate", "--base", "harmful", *other], folder=repository
    )
    assert (refused.exit_code, refused.errors.count("\n")) == (2, 1), refused.errors
    assert f"--reuse-base {folder} holds no finished run of" in refused.errors
    refused = validate(repository, *other, "--another")
    assert (refused.exit_code, refused.errors.count("\n")) == (2, 1), refused.errors
    assert "is a run of another command" in refused.errors


REFUSED = [
    (
        ["--reuse-base", "own", "-o", "{out}", "--feature", "harmless", "--", "python", "train.py"],
        "no run of a base",
    ),
    (["--feature", "nowhere", "-o", "{out}", "--", "python", "train.py"], "'nowhere' is no commit"),
    (["--feature", "harmless", "-o", "kept", "--", "python", "train.py"], "lies in the checkout"),
    (["--feature", "harmless", "-o", "{out}", "--", "python", "train.py", "--data", "<DATA>"], "placeholder"),
    (["--feature", "harmless", "-o", "{out}", "--", "python", "{root}/train.py"], "whatever commit runs"),
    (["--feature", "harmless", "-o", "{out}", "--", "python", "new.py"], "--copy new.py"),
    (["--feature", "harmless", "-o", "{out}", "--matrix", "n=1,2", "--", "python", "train.py"], "has no {n}"),
    (["--feature", "main", "-o", "{out}", "--", "python", "train.py"], "differs from main"),
]


def test_what_cannot_be_validated_is_refused_in_one_line(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (repository / "new.py").write_text("print()")
    monkeypatch.chdir(repository)
    places = {"{out}": str(tmp_path / "o"), "{root}": str(repository)}
    try:
        for words, expected in REFUSED:
            filled = [
                word.replace("{out}", places["{out}"]).replace("{root}", places["{root}"]) for word in words
            ]
            assert run(["validate", "--base", "main", *filled]) == 2, words
            said = capsys.readouterr().err
            assert said.startswith("trace: error: "), said
            assert said.count("\n") == 1, said
            assert expected in said
    finally:
        (repository / "new.py").unlink()
