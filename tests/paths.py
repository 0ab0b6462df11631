"""Where the tests find the data that ships with the repository."""
from pathlib import Path

DATA = Path(__file__).parent / "data"
GOLDEN = DATA / "golden"
TEMPLATES = DATA / "templates"
# Others' data sets: beside the repository, if at all. Tests that need them skip where they are absent.
BENCHMARKS = Path(__file__).resolve().parents[2] / "shared" / "benchmarks"
