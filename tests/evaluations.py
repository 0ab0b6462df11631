"""What tests of the evaluation share: launch scripts as modules, the golden pair, and reports without their times."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "tests/data/golden/qwen3"
CASES = json.loads((GOLDEN / "generate.json").read_text())
TIMES = ("speedup", "speedup_over_generate", "tokens_per_second", "seconds")


def script(name: str) -> ModuleType:
    """launch/NAME.py as a module; launch is no package, nothing imports it but its test."""
    spec = importlib.util.spec_from_file_location(f"launch_{name}", ROOT / f"launch/{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def write_lines(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def golden_prompts(path: Path, count: int = 6) -> Path:
    return write_lines(path, [{"prompt_token_ids": case["prompt"]} for case in CASES[:count]])


def arguments(prompts, out, *more, target=GOLDEN / "target", drafter=GOLDEN / "drafter") -> list[str]:
    return [
        str(a)
        for a in (
            "--target",
            target,
            "--drafter",
            drafter,
            "--prompts",
            prompts,
            "--out",
            out,
            "--dtype",
            "float32",
            *more,
        )
    ]


def report_of(out: Path) -> dict:
    return json.loads((out / "report.json").read_text())


def without_times(report: dict) -> dict:
    """What must not depend on when and how often the run was interrupted."""
    return {k: without_times(v) if isinstance(v, dict) else v for k, v in report.items() if k not in TIMES}
