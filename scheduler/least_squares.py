"""Least squares without negative coefficients, from normal equations, in plain Python."""


def solve_not_negative(matrix: list[list[float]], target: list[float]) -> list[float]:
    """Coefficients of `matrix` · x = `target` (symmetric, a few terms); none is below zero.

    The most negative one is dropped and the rest solved again, until none is. Terms that never occurred get 0.0.
    """
    size = len(target)
    active = [i for i in range(size) if matrix[i][i] > 0.0]
    while active:
        found = _solve([[matrix[i][j] for j in active] for i in active], [target[i] for i in active])
        worst = min(range(len(active)), key=found.__getitem__)
        if found[worst] >= 0.0:
            solution = [0.0] * size
            for i, value in zip(active, found, strict=True):
                solution[i] = value
            return solution
        del active[worst]
    return [0.0] * size


def _solve(matrix: list[list[float]], target: list[float]) -> list[float]:
    """Gaussian elimination with pivoting, a hair of ridge so that terms that say the same do not divide by zero."""
    size = len(target)
    rows = [[*line, value] for line, value in zip(matrix, target, strict=True)]
    for i in range(size):
        rows[i][i] *= 1.0 + 1e-9
    for i in range(size):
        pivot = max(range(i, size), key=lambda r: abs(rows[r][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        for r in range(i + 1, size):
            factor = rows[r][i] / rows[i][i]
            for j in range(i, size + 1):
                rows[r][j] -= factor * rows[i][j]
    for i in reversed(range(size)):
        rest = sum(rows[i][j] * rows[j][size] for j in range(i + 1, size))
        rows[i][size] = (rows[i][size] - rest) / rows[i][i]
    return [row[size] for row in rows]
