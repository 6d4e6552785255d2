"""What the help of each command ends with: examples to copy, and what its exit codes mean."""

from __future__ import annotations

from inspect import cleandoc
from typing import NamedTuple

import click


class Manual(NamedTuple):
    """The end of one command's help.

    ``examples`` are lines of a shell that hold 78 columns, a comment before each command says
    what it is for.
    """

    examples: str
    exit_codes: dict[str, str]


TROUBLE = {"2": "trouble: one line on stderr says what"}
DONE = {"0": "done"} | TROUBLE

MANUALS: dict[str, Manual] = {
    "trace": Manual(
        """
        # record a run that is right, and one that is doubted
        trace record -o runs/one -- python train.py
        trace record -o runs/two -- torchrun --nproc-per-node 2 train.py
        # name the first boundary where they part, and the cause
        trace diff runs/one runs/two
        """,
        {"0": "it holds; after `record` the recorded command's own code", "1": "it doesn't"}
        | TROUBLE
        | {"130": "interrupted"},
    ),
    "record": Manual(
        """
        # all steps on all ranks
        trace record -o runs/one -- torchrun --nproc-per-node 2 train.py
        # gradients of the first three steps alone
        trace record -o runs/one --steps 0-2 --kinds local_grad,clipped_grad -- \\
            python train.py
        # of a long run the last 8 steps before a number stops being finite
        trace record -o runs/long --keep-last 8 --trigger nonfinite -- \\
            python train.py
        # how much would it be?
        trace record -o runs/one --dry-run -- python train.py
        """,
        {
            "any": "COMMAND's own; 128+n where signal n ended it",
            "2": "it trained nothing that could be recorded, or trouble",
        },
    ),
    "watch": Manual(
        """
        # while it runs
        trace watch runs/one
        # one look, for a script
        trace watch runs/one --once --json
        # say sooner which rank the others wait for
        trace watch runs/one --hang-after 10
        """,
        {"0": "the recording has ended, however it did; with --once always"}
        | TROUBLE
        | {"130": "interrupted"},
    ),
    "diff": Manual(
        """
        # the candidate against the reference
        trace diff runs/one runs/two
        # judged by the noise of another run of the reference's code
        trace diff runs/one runs/two --floor runs/again
        # parameters alone, everything that was found as JSON
        trace diff runs/one runs/two --kinds param --json diff.json
        # annotations of a pull request, and a step's summary
        trace diff runs/one runs/two --format github
        # a run that was saved and went on
        trace diff --resume runs/full runs/first runs/resumed
        """,
        {"0": "equivalent", "1": "divergent or incomplete"} | TROUBLE,
    ),
    "report": Manual(
        """
        # a comparison as one HTML file
        trace report runs/one runs/two -o report.html
        # one trace alone
        trace report runs/one -o one.html
        """,
        {"0": "written, whatever the verdict"} | TROUBLE,
    ),
    "replay": Manual(
        """
        # is the run what its own inputs give?
        trace replay runs/one
        # which modules err by themselves?
        trace replay runs/one -- python train.py
        # a case that `trace pack` made
        trace replay case.zip
        """,
        {
            "0": "agrees; of a packed case: its verdict is the one that it states",
            "1": "a mismatch, or the trace is not whole; of a packed case: another verdict",
        }
        | TROUBLE,
    ),
    "pack": Manual(
        """
        # what fails in a comparison, with a test that replays it
        trace pack runs/one runs/two -o case.zip --pytest test_case.py
        # what fails in one run, without who recorded it where
        trace pack runs/one -o case.zip --redact
        """,
        {"0": "packed"} | TROUBLE,
    ),
    "validate": Manual(
        """
        # this commit against main
        trace validate --base main -o /tmp/v -- \\
            torchrun --nproc-per-node 2 train.py
        # the checkout as it stands, on one rank and on two
        trace validate --base main --snapshot --matrix n=1,2 -o /tmp/v -- \\
            torchrun --nproc-per-node {n} train.py
        """,
        {"0": "equivalent", "1": "not"} | TROUBLE | {"130": "interrupted; the same command goes on"},
    ),
    "layout": Manual(
        """
        # find where b's ranks hold parts of a's tensors, and compare with it
        trace layout runs/one runs/two -o layout.toml
        trace diff runs/one runs/two --layout layout.toml
        # does a layout fit?
        trace layout runs/one runs/two --check layout.toml
        """,
        {"0": "every parameter has a rule, or the layout fits", "1": "not so, or parts are swapped"}
        | TROUBLE,
    ),
    "show": Manual(
        """
        # what is in a trace
        trace show runs/one
        # its modules, two levels deep
        trace show runs/one --depth 2
        # the parameters of one block after step 3
        trace show runs/one --kind param --name 'blocks.0.*' --step 3
        # one tensor with its values
        trace show runs/one --kind param --name norm.weight --step 3 --values
        """,
        DONE,
    ),
    "export": Manual(
        """
        # parameters after step 3, put together from all ranks
        trace export runs/two -o w.safetensors --format safetensors \\
            --kind param --step 3
        # for https://ui.perfetto.dev
        trace export runs/two -o two.json --format chrome
        # how far two runs are apart at each boundary, over the steps
        trace export runs/one runs/two -o logs --format tensorboard
        """,
        {"0": "written"} | TROUBLE,
    ),
    "check": Manual(
        """
        # is every byte what was recorded?
        trace check runs/one
        # in a script
        trace check -q runs/one && trace compact runs/one
        """,
        {"0": "intact", "1": "damaged or incomplete"} | TROUBLE,
    ),
    "compact": Manual(
        """
        # fast
        trace compact runs/one
        # as far as possible
        trace compact --compress best runs/one
        """,
        DONE,
    ),
    "env": Manual(
        """
        # for a bug report
        trace env
        # as a trace holds it
        trace env --json
        """,
        DONE,
    ),
    "completion": Manual(
        """
        # bash
        trace completion bash > ~/.trace-complete.bash
        echo '. ~/.trace-complete.bash' >> ~/.bashrc
        # zsh: a folder that stands in $fpath before compinit runs
        trace completion zsh > ~/.zfunc/_trace
        # fish
        trace completion fish > ~/.config/fish/completions/trace.fish
        """,
        DONE,
    ),
}
"""By the name of the command; ``trace`` is all of them."""


def write(formatter: click.HelpFormatter, name: str) -> None:
    """Write the examples of a command, then its exit codes."""
    manual = MANUALS[name]
    with formatter.section("Examples"):
        for line in cleandoc(manual.examples).splitlines():
            formatter.write(" " * formatter.current_indent + line + "\n")
    with formatter.section("Exit codes"):
        formatter.write_dl(list(manual.exit_codes.items()))
