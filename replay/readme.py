"""The page that a packed case carries: what fails, on what, how to see it, and what was left out."""

from __future__ import annotations

import msgspec

from tensortrace.replay.archive import SIDES
from tensortrace.replay.case import Case, Packed

_FAILS = {"divergent", "mismatch"}


def readme(case: Case, *, name: str) -> str:
    """Return the page, in Markdown; ``name`` is the archive's."""
    expected = msgspec.json.format(msgspec.json.encode(case.expected), indent=2).decode()
    return "\n".join([
        f"# {'What fails' if case.expected.verdict in _FAILS else 'What holds'}",
        "",
        _block(case.expected.headline),
        "",
        _about(case),
        "",
        "## See it",
        "",
        _block(f"pip install tensortrace\ntrace replay {name}"),
        "",
        "Neither the training code nor the machine that it ran on is needed. The exit code is 0 where the "
        "verdict is the one below, 1 where it is another, 2 where the archive cannot be read.",
        "",
        _block(expected, "json"),
        "",
        "## On what",
        "",
        *(_line(side, packed) for side, packed in zip(SIDES, case.traces, strict=False)),
        "",
        f"Packed by tensortrace {case.packed_by}.",
        "",
        "## What is inside",
        "",
        *(f"- `{line}`" for line in _contents(case)),
        "",
        "Unpacked, each folder is a trace: `trace show a`"
        + (", `trace diff a b`" if case.of == "diff" else "")
        + ". `zstd -d` makes a safetensors file of a segment.",
        "",
        "## What was left out",
        "",
        *(f"- {line}" for line in _left_out(case)),
        "",
    ])  # fmt: skip


def _about(case: Case) -> str:
    if case.of == "diff":
        return (
            "Two recorded training runs were compared: `a` is the reference, `b` the candidate. The line "
            "above names the first boundary of a step where they part, and the cause that was tested."
        )
    return (
        "One recorded training run was held against what its own recorded inputs give. The line above says "
        "what came of it."
    )


def _line(side: str, packed: Packed) -> str:
    versions = ", ".join(
        f"{name} {packed.versions[name]}"
        for name in ("torch", "python", "tensortrace")
        if name in packed.versions
    )
    ranks = f"{packed.world_size} rank{'s' * (packed.world_size != 1)}"
    name = f" ({_plain(packed.name)})" if packed.name else ""
    return f"- `{side}`{name}: {ranks}, recorded with {versions or 'unknown versions'}"


def _contents(case: Case) -> list[str]:
    return [
        "README.md", "case.json", *(f"expect{number}.toml" for number in range(case.asked.rules)),
        *(
            f"{side}/trace.json, {side}/rank*/rank.json, index.jsonl, seg*.safetensors.zst"
            for side in SIDES[: len(case.traces)]
        ),
    ]  # fmt: skip


def _left_out(case: Case) -> list[str]:
    found = [
        f"of `{side}`: {packed.recorded - packed.boundaries} of {packed.recorded} boundaries"
        + (f", and the values of {packed.without_values} more" if packed.without_values else "")
        + (f"; only a part of {packed.cut} more" if packed.cut else "")
        + (": the verdict is the same without them" if packed.recorded > packed.boundaries else "")
        for side, packed in zip(SIDES, case.traces, strict=False)
    ]
    return [*found, *(f"removed on request: {text}" for text in case.removed)] + (
        [] if case.removed else ["nothing else: names of hosts, paths and command lines are as recorded"]
    )


def _block(text: str, language: str = "text") -> str:
    return f"```{language}\n{text.replace('```', '` ` `')}\n```"


def _plain(text: str) -> str:
    return text.replace("`", "'")
