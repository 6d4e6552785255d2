"""The counter-based generator of a common start: numbers of (key, counter), specified in ``docs/start.md``.

All arithmetic is modulo 2^64, in torch's int64, so that masks are drawn where the tensor is.
"""

from __future__ import annotations

import torch

GOLDEN = 0x9E3779B97F4A7C15
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_FNV_OFFSET, _FNV_PRIME = 0xCBF29CE484222325, 0x100000001B3
_MASK = (1 << 64) - 1


def mix(number: int) -> int:
    """Return the scrambled 64-bit number: one output of splitmix64 with ``number`` as its state."""
    number = (number + GOLDEN) & _MASK
    number = ((number ^ number >> 30) * _FIRST) & _MASK
    number = ((number ^ number >> 27) * _SECOND) & _MASK
    return number ^ number >> 31


def mix_all(numbers: torch.Tensor) -> torch.Tensor:
    """Return ``mix`` of every element of an int64 tensor, as 64-bit patterns."""
    numbers = numbers + signed(GOLDEN)
    numbers = (numbers ^ _shifted(numbers, 30)) * signed(_FIRST)
    numbers = (numbers ^ _shifted(numbers, 27)) * signed(_SECOND)
    return numbers ^ _shifted(numbers, 31)


def text_number(text: str) -> int:
    """Return the 64-bit FNV-1a hash of a text's UTF-8 bytes."""
    number = _FNV_OFFSET
    for byte in text.encode():
        number = ((number ^ byte) * _FNV_PRIME) & _MASK
    return number


def key_of(seed: int, *words: int | str) -> int:
    """Return the key of a stream: the seed, then each word folded in, in order."""
    key = mix(seed & _MASK)
    for word in words:
        key = mix(key ^ (text_number(word) if isinstance(word, str) else word & _MASK))
    return key


def uniform(key: int, counters: torch.Tensor) -> torch.Tensor:
    """Return numbers in [0, 1) (float64, multiples of 2^-53) for int64 counters of any shape."""
    return fractions(mix_all(counters + signed(key)))


def fractions(patterns: torch.Tensor) -> torch.Tensor:
    """Return the upper 53 bits of 64-bit patterns as numbers in [0, 1), float64."""
    return _shifted(patterns, 11).to(torch.float64) * 2.0**-53


def signed(number: int) -> int:
    """Return the int64 of the same 64 bits."""
    number &= _MASK
    return number - (1 << 64) if number >> 63 else number


def _shifted(numbers: torch.Tensor, count: int) -> torch.Tensor:
    """Shift right and fill with zeros; torch's own shift repeats the sign."""
    return (numbers >> count) & ((1 << 64 - count) - 1)
