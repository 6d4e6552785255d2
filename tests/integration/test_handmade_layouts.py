"""A decoder in hand-made parts is its whole under a layout file, whatever names it has and how it is fused.

The parts: virtual pipeline stages, tensor and sequence parallelism, QKV interleaved by groups, gate and up
fused, a padded vocabulary split over ranks. The whole has another framework's names and separate projections.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness import BIN, TRAINING, diff, python, run, torchrun

pytestmark = pytest.mark.slow

HANDMADE = TRAINING / "handmade.py"

MISTAKES = {
    "qkv": (0, "activation", "layers.0.self_attn.o_proj", "in.0"),
    "gate-up": (0, "activation", "layers.0.mlp.down_proj", "in.0"),
    "chunks": (-1, "param", "layers.1.input_layernorm.weight", "model"),
    "padding": (0, "activation", "loss", "out"),
    "norms": (0, "clipped_grad", "norm.weight", "grad"),
    "embedding": (0, "activation", "embed_tokens", "out"),
    "shards": (-1, "param", "layers.0.self_attn.k_proj.weight", "model"),
}


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("handmade")
    for command in (python(HANDMADE, folder), torchrun(4, HANDMADE, folder, "right", *MISTAKES)):
        done = run(command)
        assert done.exit_code == 0, done.errors
    return folder


def test_the_parts_are_the_whole(traces: Path) -> None:
    outcome = diff(traces / "one", traces / "right")
    assert outcome.exit_code == 0, outcome.summary()
    assert outcome.result.coverage.complete
    assert not [note for note in outcome.result.notes if "paired by order" in note]
    assert outcome.result.coverage.by_kind["local_grad"] == 2 * (4 * 9 + 3), "each parameter of the whole"


def test_the_file_fits(traces: Path) -> None:
    file = TRAINING / "layouts" / "handmade.toml"
    command = [str(BIN / "trace"), "layout", "--check", str(file), str(traces / "one"), str(traces / "right")]
    done = run(command)
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_mistake_is_told_where_it_acts_first(traces: Path, mistake: str) -> None:
    outcome = diff(traces / "one", traces / mistake)
    first = outcome.result.first_divergent
    assert outcome.exit_code == 1
    assert first is not None, outcome.summary()
    step = -1 if first.where.step == "init" else first.where.step
    assert (step, first.where.kind, first.where.name, first.where.slot) == MISTAKES[mistake]
