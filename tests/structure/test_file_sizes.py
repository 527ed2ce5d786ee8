"""No file grows past one reader's patience. `pytest -s tests/structure/test_file_sizes.py` prints the table."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("tokenspeed", "benchmarks", "tests")
AIM_LINES = 250
LIMIT_LINES = 500
KERNEL_LIMIT_LINES = 700


def limit_of(name: str) -> int:
    return KERNEL_LIMIT_LINES if name.startswith("tokenspeed/kernels/") else LIMIT_LINES


def line_counts() -> dict[str, int]:
    paths = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".c", ".h"))
    return {path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines()) for path in paths}


def report(counts: dict[str, int]) -> str:
    """The files above the aim, longest first, and the totals of each folder."""
    long = sorted(((lines, name) for name, lines in counts.items() if lines > AIM_LINES), reverse=True)
    rows = [f"{lines:6} of {limit_of(name)}  {name}" for lines, name in long]
    for folder in FOLDERS:
        mine = [lines for name, lines in counts.items() if name.startswith(folder + "/")]
        rows.append(f"{sum(mine):6} lines in {len(mine)} files of {folder}/")
    return "\n".join(rows)


def test_no_file_is_too_long():
    counts = line_counts()
    print("\n" + report(counts))
    assert len(counts) > 20, "the folders were not found"
    too_long = {name: lines for name, lines in counts.items() if lines > limit_of(name)}
    assert not too_long, f"split these, they are two rooms: {too_long}"
