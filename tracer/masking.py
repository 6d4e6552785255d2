"""Replaces credentials in command lines and values before they are written down."""

from __future__ import annotations

import re
from collections.abc import Sequence

MASK = "***"

_SECRET = "token|secret|passw(?:or)?d|pwd|credential|api[-_]?key|access[-_]?key|private[-_]?key|auth"  # noqa: S105
_SECRET_NAME = rf"[\w.-]*(?:{_SECRET})[\w.-]*"
_ASSIGNED = re.compile(rf"((?:--?)?{_SECRET_NAME}\s*[=:]\s*)(.+)", re.IGNORECASE | re.DOTALL)
_FLAG = re.compile(rf"--?{_SECRET_NAME}", re.IGNORECASE)
_TUNABLE = re.compile(
    r"--?[\w.-]*(?:tokens|tokenizer|token[-_](?:len|count|id|type)|author)[\w.-]*", re.IGNORECASE
)
_URL_USER = re.compile(r"(\w[\w+.-]*://)[^/\s@]+@")
_URL_QUERY = re.compile(rf"([?&]{_SECRET_NAME}=)[^&\s#]+", re.IGNORECASE)
_KNOWN_TOKEN = re.compile(
    r"\b(?:hf_|ghp_|gho_|ghs_|github_pat_|sk-|xox[abp]-|AKIA|glpat-|wandb_v1_)[\w-]{12,}"
)


def mask_arguments(command: Sequence[str]) -> tuple[str, ...]:
    """Return a command line with every credential replaced by ``MASK``.

    Known are options with a telling name (``--api-key X``, ``--password=X``, ``WANDB_API_KEY=X``), user
    names and passwords in URLs, telling query parameters, and tokens of well-known forms.
    """
    masked: list[str] = []
    value_is_secret = False
    for argument in command:
        masked.append(MASK if value_is_secret and not argument.startswith("-") else mask(argument))
        value_is_secret = bool(_FLAG.fullmatch(argument)) and not _TUNABLE.fullmatch(argument)
    return tuple(masked)


def mask(text: str) -> str:
    """Return one argument or value with credentials replaced by ``MASK``."""
    name = re.split(r"[=:]", text, maxsplit=1)[0]
    assigned = None if _TUNABLE.fullmatch(name.strip()) else _ASSIGNED.fullmatch(text)
    if assigned and "://" not in assigned[1]:
        return assigned[1] + MASK
    text = _URL_USER.sub(rf"\1{MASK}@", text)
    text = _URL_QUERY.sub(rf"\1{MASK}", text)
    return _KNOWN_TOKEN.sub(MASK, text)
