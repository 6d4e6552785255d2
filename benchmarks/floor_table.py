"""Print how many times the floor of n runs another run of identical code exceeds once in a million.

    python benchmarks/floor_table.py

The squared distance of a run from the reference is taken as χ² of m degrees of freedom: the number of
independent numbers in its noise. Where x² of the new run and the n of the floor are alike, the factor f is
that of
P(x > f · max(x₁ … xₙ)) = ∫ p(x²) F(x²/f²)ⁿ d(x²) = 1e-6. ``diff/floors.py`` has it, rounded up.
"""

from __future__ import annotations

import math

import numpy as np

CHANCE = 1e-6
RUNS = (1, 2, 3, 4, 6, 8, 12, 16, 24)
NUMBERS = (1, 2, 4, 8)


def below(square: np.ndarray, numbers: int) -> np.ndarray:
    """Return the distribution function of χ² of 1 or an even number of degrees of freedom."""
    if numbers == 1:
        return np.array([math.erf(math.sqrt(x / 2)) for x in square])
    half = square / 2
    series = sum(half**k / math.factorial(k) for k in range(numbers // 2))
    tail = sum(half**k / math.factorial(k) for k in range(numbers // 2, numbers // 2 + 6))
    # 1 − e^(−h)·series loses all digits for small h, where the next terms are what is left
    return np.where(half < 1e-2, np.exp(-half) * tail, 1 - np.exp(-half) * series)


def chance(factor: float, runs: int, numbers: int) -> float:
    """Return the probability that a run exceeds ``factor`` times the worst of ``runs`` others."""
    square = np.exp(np.linspace(math.log(1e-9), math.log(400), 20_001))
    log = (numbers / 2 - 1) * np.log(square) - square / 2
    density = np.exp(log - numbers / 2 * math.log(2) - math.lgamma(numbers / 2))
    within = below(square / factor**2, numbers) ** runs
    return float(np.trapezoid(density * within * square, np.log(square)))


def factor(runs: int, numbers: int) -> float:
    """Return the factor that is exceeded with probability ``CHANCE``."""
    low, high = 1.0, 1e7
    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if chance(middle, runs, numbers) > CHANCE else (low, middle)
    return high


def main() -> None:
    """Print the table."""
    print("runs   " + "".join(f"{f'm = {m}':>12}" for m in NUMBERS))
    for runs in RUNS:
        print(f"{runs:4}   " + "".join(f"{factor(runs, numbers):12.4g}" for numbers in NUMBERS))


if __name__ == "__main__":
    main()
