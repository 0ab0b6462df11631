"""Where the tests find the data that ships with the repository."""
from pathlib import Path

DATA = Path(__file__).parent / "data"
GOLDEN = DATA / "golden"
TEMPLATES = DATA / "templates"
