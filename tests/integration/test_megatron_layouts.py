"""A hand-written Megatron-style model: its layout is found without annotation, and the diff needs no more."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import BIN, TRAINING, Diffed, Finished, diff, on_ranks, record, run

MEGATRON = TRAINING / "megatron.py"

LEAVES = (
    "attn.qkv.weight", "attn.qkv.bias", "attn.proj.weight", "attn.proj.bias", "mlp.gate_up.weight",
    "mlp.gate_up.bias", "mlp.down.weight", "mlp.down.bias", "norm1.weight", "norm2.weight",
)  # fmt: skip
"""Every kind of parameter of a layer; beside them are embed.weight and norm.weight."""


def recorded(folder: Path, name: str, ranks: int, *arguments: object) -> Path:
    return record(folder / name, on_ranks(ranks, MEGATRON, *arguments), "--steps", "0-1")


def found(a: Path, b: Path) -> tuple[Path, Finished]:
    file = b.with_suffix(".toml")
    done = run([str(BIN / "trace"), "layout", str(a), str(b), "-o", str(file), "--force"])
    assert done.exit_code in {0, 1}, done.errors
    return file, done


def checked(file: Path, a: Path, b: Path) -> Finished:
    return run([str(BIN / "trace"), "layout", "--check", str(file), str(a), str(b)])


def rule_of(file: Path, name: str) -> str:
    """Return the ``dims`` of the first rule that names a parameter."""
    for block in file.read_text().split("[[rule]]")[1:]:
        lines = dict(line.split(" = ", 1) for line in block.splitlines() if " = " in line)
        if f'"{name}"' in lines["name"] and "kind" not in lines:
            return lines["dims"].strip('"')
    raise AssertionError(f"no rule for {name} in {file.read_text()}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("megatron")


@pytest.fixture(scope="module")
def one(folder: Path) -> Path:
    return recorded(folder, "one", 1, "--save", folder / "one.pt")


@pytest.fixture(scope="module")
def tp2(folder: Path, one: Path) -> Path:
    return recorded(folder, "tp2", 2, "--tp", 2, "--expect", folder / "one.pt")


@pytest.mark.slow
def test_the_layout_of_two_ranks_is_found_and_the_diff_needs_nothing_else(one: Path, tp2: Path) -> None:
    file, done = found(one, tp2)
    assert done.exit_code == 0, done.output
    dims = {leaf: rule_of(file, f"layers.{{n}}.{leaf}") for leaf in LEAVES}
    assert dims == {
        "attn.qkv.weight": "o[tp] i", "attn.qkv.bias": "o[tp]", "attn.proj.weight": "o i[tp]",
        "attn.proj.bias": "o same:tp", "mlp.gate_up.weight": "(o1|o2)[tp] i",
        "mlp.gate_up.bias": "(o1|o2)[tp]", "mlp.down.weight": "o i[tp]", "mlp.down.bias": "o same:tp",
        "norm1.weight": "o same:tp", "norm2.weight": "o same:tp",
    }  # fmt: skip
    assert rule_of(file, "embed.weight") == "o[tp] i"
    assert "valid = { o = 50 }" in file.read_text()
    assert checked(file, one, tp2).exit_code == 0
    assert_equivalent(diff(one, tp2, "--layout", str(file)))


@pytest.mark.slow
def test_a_swapped_block_is_reported_and_not_taken_for_layout(folder: Path, one: Path) -> None:
    planted = recorded(folder, "qkv", 2, "--tp", 2, "--plant", "qkv")
    file, done = found(one, planted)
    assert done.exit_code == 1
    swaps = [line for line in done.output.splitlines() if line.startswith("swap: ")]
    names = {f"layers.{n}.attn.qkv.{p}" for n in range(4) for p in ("weight", "bias")}
    assert {line.split()[1].rstrip(":") for line in swaps} == names
    assert "8:12 holds 12:16, 12:16 holds 8:12" in swaps[0]
    assert rule_of(file, "layers.{n}.attn.qkv.weight") == "o[tp] i"
    outcome = diff(one, planted, "--layout", str(file))
    assert outcome.exit_code == 1
    assert place(outcome)[:2] == ("init", "param")
    assert place(outcome)[2].startswith("layers.0.attn.qkv.")


MESHES = {
    "tp4": (4, ("--tp", 4)),
    "sp2": (2, ("--tp", 2, "--sp")),
    "pp2": (2, ("--pp", 2)),
    "tp2-sp-pp2": (4, ("--tp", 2, "--sp", "--pp", 2)),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MESHES)
def test_every_mesh_is_found(folder: Path, one: Path, name: str) -> None:
    ranks, arguments = MESHES[name]
    b = recorded(folder, name, ranks, *arguments, "--expect", folder / "one.pt")
    file, done = found(one, b)
    assert done.exit_code == 0, done.output
    assert checked(file, one, b).exit_code == 0
    assert_equivalent(diff(one, b, "--layout", str(file)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tp2", "tp2-pp2"])
def test_with_a_layout_file_no_checkpoint_is_needed(folder: Path, one: Path, name: str) -> None:
    ranks, arguments = {"tp2": (2, ("--tp", 2)), "tp2-pp2": (4, ("--tp", 2, "--pp", 2))}[name]
    file, _ = found(one, recorded(folder, f"{name}-found", ranks, *arguments))
    own, layout = (MEGATRON, "--own-seed"), ("--layout", str(file))
    alone = record(folder / f"{name}-alone", on_ranks(1, *own), "--adversarial")
    drawn = record(folder / f"{name}-drawn", on_ranks(ranks, *own, *arguments), "--adversarial", *layout)
    assert_equivalent(diff(alone, drawn))
    # and back: one rank begins where these ranks have begun
    back = record(folder / f"{name}-back", on_ranks(1, *own), "--init-from", str(drawn))
    assert_equivalent(diff(alone, back, "--exact"))


@pytest.mark.slow
def test_data_parallel_copies_of_a_mesh_are_found(folder: Path) -> None:
    one = recorded(folder, "two-batches", 1, "--batches", 2)
    b = recorded(folder, "tp2-dp2", 4, "--tp", 2, "--dp", 2)
    file, done = found(one, b)
    assert done.exit_code == 0, done.output
    assert 'data = ["dp"]' in file.read_text()
    assert_equivalent(diff(one, b, "--layout", str(file)))


@pytest.mark.slow
def test_biases_of_zeros_lie_as_their_first_update_says(folder: Path) -> None:
    one = recorded(folder, "one-constant", 1, "--constant")
    b = recorded(folder, "constant", 2, "--tp", 2, "--sp", "--constant")
    file, done = found(one, b)
    assert done.exit_code == 0, done.output
    leaves = [leaf for leaf in LEAVES if "bias" in leaf or "norm" in leaf]
    assert {leaf: rule_of(file, f"layers.{{n}}.{leaf}") for leaf in leaves} == {
        "attn.qkv.bias": "o[tp]", "attn.proj.bias": "o same:tp", "mlp.gate_up.bias": "(o1|o2)[tp]",
        "mlp.down.bias": "o same:tp", "norm1.weight": "o same:tp", "norm2.weight": "o same:tp",
    }  # fmt: skip
    assert_equivalent(diff(one, b, "--layout", str(file)))


PLANTS = {
    "gate-up": (("--tp", 2), ("init", "param", "layers.0.mlp.gate_up.")),
    "bias": (("--tp", 2), (0, "activation", "layers.0.attn.proj")),
    "norm-grads": (("--tp", 2, "--sp"), (0, "clipped_grad", "")),
    "tied": (("--pp", 2), (0, "clipped_grad", "embed.weight")),
}


@pytest.mark.slow
@pytest.mark.parametrize("plant", PLANTS)
def test_each_mistake_ends_at_its_boundary(folder: Path, one: Path, plant: str) -> None:
    arguments, (step, kind, name) = PLANTS[plant]
    right = recorded(folder, f"{plant}-right", 2, *arguments)
    planted = recorded(folder, f"{plant}-planted", 2, *arguments, "--plant", plant)
    file, _ = found(one, right)
    outcome = diff(one, planted, "--layout", str(file))
    assert outcome.exit_code == 1, outcome.summary()
    assert place(outcome)[:2] == (step, kind), outcome.summary()
    assert place(outcome)[2].startswith(name), outcome.summary()


@pytest.mark.slow
def test_a_sum_that_backward_forgot_is_a_doubt_and_no_layout(folder: Path, one: Path) -> None:
    planted = recorded(folder, "head-grads", 2, "--tp", 2, "--plant", "head-grads")
    file, done = found(one, planted)
    assert done.exit_code == 1
    doubts = [line for line in done.output.splitlines() if line.startswith("doubt: ")]
    assert any(line.startswith("doubt: norm out:") for line in doubts), done.output
    outcome = diff(one, planted, "--layout", str(file))
    assert place(outcome)[:3] == (0, "activation_grad", "norm"), outcome.summary()
    assert outcome.result.causes[0].code == "reduction.missing"


@pytest.mark.slow
def test_gradients_of_a_shared_key_that_are_not_summed_are_local(folder: Path) -> None:
    one = recorded(folder, "one-kv", 1, "--kv-heads", 1)
    right = recorded(folder, "kv", 2, "--tp", 2, "--kv-heads", 1)
    planted = recorded(folder, "kv-planted", 2, "--tp", 2, "--kv-heads", 1, "--plant", "kv")
    file, done = found(one, right)
    assert done.exit_code == 0, done.output
    assert rule_of(file, "layers.{n}.attn.qkv.weight") == "(o1[tp]|o2) i"
    assert_equivalent(diff(one, right, "--layout", str(file)))
    outcome = diff(one, planted, "--layout", str(file))
    assert outcome.exit_code == 1, outcome.summary()
    assert place(outcome)[:2] == (0, "local_grad"), outcome.summary()
    assert ".attn.qkv." in place(outcome)[2]


def place(outcome: Diffed) -> tuple[object, str, str]:
    first = outcome.result.first_divergent
    assert first is not None, outcome.summary()
    return first.where.step, first.where.kind, first.where.name


def assert_equivalent(outcome: Diffed) -> None:
    assert outcome.exit_code == 0, outcome.summary()
    assert outcome.result.coverage.complete
