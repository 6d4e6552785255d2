"""A live run that is given recorded values: every part that errs by itself is told, and nothing else."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from tensortrace.cli import main
from tests import harness

PROGRAM = harness.TRAINING / "forced.py"

ALL = "1:cut-branch,3:forward,4:forward,6:residual,8:backward,10:detach,11:down"
"""Seven mistakes in one run, two of them in blocks that follow each other."""


SHALLOW = ("--depth", 1, "--steps", 3)

BOTH, BACKWARD = ["forward", "backward"], ["backward"]


class Faults(msgspec.Struct):
    """What the tests read of the outcome."""

    exit_code: int
    verdict: str
    compared: int
    bitwise_equal: int
    places: dict[str, tuple[str, list[str]]]
    codes: dict[str, list[str]]
    kinds: dict[str, int]
    reasons: list[str]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The correct program on one rank, twelve blocks deep."""
    folder = tmp_path_factory.mktemp("recorded")
    return harness.record(folder / "a", harness.python(PROGRAM))


@pytest.fixture(scope="module")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The correct program on one rank, one block deep, for three steps."""
    folder = tmp_path_factory.mktemp("shallow")
    return harness.record(folder / "a", harness.python(PROGRAM, *SHALLOW))


def force(trace: Path, folder: Path, command: list[str], *options: str) -> Faults:
    """Replay a trace into a command and return the outcome."""
    report = folder / "report.json"
    asked = [str(harness.BIN / "trace"), "replay", str(trace), "--json", str(report), "-q", *options]
    done = harness.run([*asked, "--", *command], folder=folder)
    assert report.exists(), done.errors
    document = msgspec.json.decode(report.read_bytes())
    faulty = document["faulty"]
    return Faults(
        done.exit_code,
        document["verdict"],
        document["compared"],
        document["bitwise_equal"],
        {f["name"]: (f["part"], f["wrong_in"]) for f in faulty},
        {f["name"]: [cause["code"] for cause in f["causes"]] for f in faulty},
        document["forced"],
        [group["reason"] for group in document["not_forced"]],
    )


def planted(plant: str) -> list[str]:
    return harness.python(PROGRAM, "--plant", plant)


def test_a_correct_program_makes_of_its_own_trace_bit_by_bit_what_is_in_it(
    shallow: Path, tmp_path: Path
) -> None:
    found = force(shallow, tmp_path, harness.python(PROGRAM, *SHALLOW))
    assert (found.exit_code, found.verdict, found.places) == (0, "agrees", {})
    assert found.bitwise_equal == found.compared > 400
    assert found.reasons == []
    # in three steps: what nine modules are given and return; no gradient comes to the tokens
    assert found.kinds["activation"] == 3 * 2 * 10
    assert found.kinds["activation_grad"] == 3 * (2 * 10 - 2)


@pytest.mark.slow
def test_bugs_in_layers_3_and_9_are_both_named_in_one_run_and_nothing_else(
    recorded: Path, tmp_path: Path
) -> None:
    found = force(recorded, tmp_path, planted("3:forward,9:forward"))
    assert (found.exit_code, found.verdict) == (1, "mismatch")
    assert found.places == {"layers.3.up": ("module", BOTH), "layers.9.up": ("module", BOTH)}
    assert all(codes[0] == "scale.other" for codes in found.codes.values())


def test_each_of_seven_bugs_in_one_run_is_named_where_it_is(recorded: Path, tmp_path: Path) -> None:
    found = force(recorded, tmp_path, planted(ALL))
    assert found.places == {
        "layers.1": ("between", BACKWARD),  # a branch that backward does not reach
        "layers.3.up": ("module", BOTH),
        "layers.4.up": ("module", BOTH),
        "layers.6": ("between", BOTH),  # the residual add
        "layers.8.up": ("module", BACKWARD),
        "layers.10": ("between", BACKWARD),  # all that it returns is detached
        "layers.11.down": ("module", BACKWARD),  # of a tensor that no module returned
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "place"),
    [
        ("5:residual", {"layers.5": ("between", BOTH)}),
        ("5:backward", {"layers.5.up": ("module", BACKWARD)}),
        ("5:detach", {"layers.5": ("between", BACKWARD)}),
        ("5:cut-branch", {"layers.5": ("between", BACKWARD)}),
        ("5:forward,6:forward", {"layers.5.up": ("module", BOTH), "layers.6.up": ("module", BOTH)}),
    ],
)
def test_each_bug_alone_is_named(
    recorded: Path, tmp_path: Path, plant: str, place: dict[str, tuple[str, list[str]]]
) -> None:
    assert force(recorded, tmp_path, planted(plant)).places == place


@pytest.mark.slow
def test_what_one_rank_recorded_is_forced_under_tensor_parallelism(recorded: Path, tmp_path: Path) -> None:
    plain = harness.torchrun(2, PROGRAM, "--layout", "tp")
    found = force(recorded, tmp_path, plain)
    assert (found.exit_code, found.verdict, found.places) == (0, "agrees", {})
    assert found.reasons == ["it is a sum over ranks, of which no rank's part can be told"]
    found = force(recorded, tmp_path, [*plain, "--plant", "3:forward,6:residual,9:backward"], "--force")
    assert found.places == {
        "layers.3.up": ("module", BOTH),
        "layers.6": ("between", BOTH),
        "layers.9.up": ("module", BACKWARD),
    }


GRADIENTS = ("--force", "params,reduced_grads")


def on_ranks(ranks: int, layout: str, plant: str = "") -> list[str]:
    return harness.torchrun(ranks, PROGRAM, *SHALLOW, "--layout", layout, "--plant", plant)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("layout", ["fsdp", "zero", "by-hand"])
def test_gradients_of_one_rank_give_the_same_next_state_to_other_owners(
    shallow: Path, tmp_path: Path, ranks: int, layout: str
) -> None:
    found = force(shallow, tmp_path, on_ranks(ranks, layout), *GRADIENTS)
    assert (found.exit_code, found.verdict, found.places) == (0, "agrees", {})
    assert found.kinds == {"param": 45, "reduced_grad": 45}  # 15 parameters in three steps
    assert found.reasons == []


@pytest.mark.slow
def test_a_rank_that_updates_from_another_parameters_gradient_is_named(shallow: Path, tmp_path: Path) -> None:
    found = force(shallow, tmp_path, on_ranks(2, "by-hand", "other-gradient"), *GRADIENTS)
    assert found.places == {"layers.0.norm1.weight": ("gradients", [])}


@pytest.mark.slow
def test_a_parameter_taken_from_a_rank_that_does_not_own_it_is_named(shallow: Path, tmp_path: Path) -> None:
    found = force(shallow, tmp_path, on_ranks(2, "by-hand", "other-owner"), *GRADIENTS)
    assert found.places == {"layers.0.norm2.weight": ("update", [])}
    assert found.codes["layers.0.norm2.weight"][0] == "value.not_updated"


@pytest.mark.slow
def test_modules_that_recorded_parameters_do_not_fit_are_not_blamed(shallow: Path, tmp_path: Path) -> None:
    found = force(shallow, tmp_path, harness.python(PROGRAM, *SHALLOW, "--times", 3))
    assert (found.exit_code, found.verdict, found.places) == (1, "incomplete", {})
    assert "it is [32, 16] in the trace, [48, 16] here" in found.reasons


@pytest.mark.slow
def test_a_run_that_was_given_other_rows_is_not_forced_and_says_so(shallow: Path, tmp_path: Path) -> None:
    found = force(shallow, tmp_path, on_ranks(2, "zero"))
    assert set(found.reasons) == {"the run was given other rows than the recorded one in this microbatch"}
    assert found.kinds == {"param": 45}
    assert (found.exit_code, found.places) == (0, {})


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--force", "inputs"), "give its command behind --"),
        (("--force", "params", "--", "python", "-c", "pass"), "trained nothing that could be forced"),
        (("--force", "params", "--", "python", "-c", "pass"), "give the command that was recorded"),
        (("--force=what", "--", "python", "-c", "pass"), "'what' is not one of inputs"),
        (("--force", "what", "--", "python", "-c", "pass"), "'what' is not one of inputs"),
        (("--objective", "sum", "--", "python"), "--objective is of a replay without COMMAND"),
        (("--", "no-such-program-here"), "no-such-program-here: command not found"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_exit_code_2(
    shallow: Path, capfd: pytest.CaptureFixture[str], options: tuple[str, ...], words: str
) -> None:
    assert main.run(["replay", str(shallow), *options]) == 2
    said = capfd.readouterr().err
    assert words in said.splitlines()[-1]
    assert "Traceback" not in said
    assert ("recorded values" in said) == ("trained nothing" in said)  # told only where the command starts


def test_an_unknown_kind_before_the_trace_is_no_trace(
    shallow: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["replay", "--force", "what", str(shallow), "--", "python", "-c", "pass"]) == 2
    assert "'what' is not one of inputs, activation_grads" in capfd.readouterr().err
