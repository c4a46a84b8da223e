"""What is wrong with some files, told as one error: a line a finding, at most ten, then how many more."""

from k3mlx.errors import K3Error, ModelFilesError

LINES_MAX = 10


class Findings:
    """A count of findings that keeps the text of the first ten only: damaged files may hold millions."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.count = 0

    def add(self, line: str) -> None:
        if len(self.lines) < LINES_MAX:
            self.lines.append(line)
        self.count += 1

    def extend(self, other: "Findings") -> None:
        self.lines = (self.lines + other.lines)[:LINES_MAX]
        self.count += other.count

    def raise_if_any(self, kind: type[K3Error] = ModelFilesError, advice: str = "") -> None:
        if self.count:
            more = self.count - len(self.lines)
            error = kind("\n".join(self.lines + ([f"and {more} more"] if more else [])))
            error.advice = advice
            raise error
