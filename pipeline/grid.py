"""A grid of runs that differ in a few keys: one YAML file, one cell a name, each cell once a seed.

    run: launch/runs/quickstart.yaml      # run file that every cell starts from
    overrides: {drafter.block_size: 8}    # what all cells change of it
    cells:
      decay: {loss.credit: decay}         # the first cell is what the others are compared with
      dpace: {loss.credit: dpace}
    seeds: [0, 1]
    evaluate: {prompts: [heldout.jsonl]}

Cells of one seed start from the same weights and see the same samples, anchors and learning rates, since all of these
are functions of the seed: what differs between them is the cell's own keys.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from data_prep.errors import UserError
from pipeline.config import RunConfig, load_run


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class EvaluateSection(_Section):
    prompts: list[Path] = Field(default=[], description="files of test prompts, disjoint from the training prompts")
    limit: int | None = Field(None, ge=1, description="take the first so many conversations of every file")
    max_new_tokens: int = Field(64, ge=1, description="length limit of a response")
    dtype: str | None = Field(None, description="float32 or bfloat16; null: the device's")
    template_args: dict[str, Any] = Field(default={}, description="arguments of the chat template")
    ignore_eos: bool = Field(False, description="generate past the target's stop tokens")
    walk: bool = Field(True, description="greedy steps from batches; false: the drafting loop, with times")


class Grid(_Section):
    run: Path = Field(description="run file that every cell starts from")
    overrides: dict[str, Any] = Field(default={}, description="section.key: value, for all cells")
    cells: dict[str, dict[str, Any]] = Field(
        min_length=1, description="name: {section.key: value}; the first is the reference of all differences"
    )
    seeds: list[int] = Field(default=[0], min_length=1, description="every cell is run with each of them")
    ranks: int = Field(1, ge=1, description="processes that train a cell")
    evaluate: EvaluateSection = EvaluateSection()

    @field_validator("cells")
    @classmethod
    def _names_are_folders(cls, cells: dict) -> dict:
        if bad := [name for name in cells if not name.replace("-", "").replace("_", "").replace(".", "").isalnum()]:
            raise ValueError(f"cells {bad}: a name becomes a folder; use letters, digits, '-', '_' and '.'")
        return cells


@dataclass(frozen=True)
class Cell:
    """One run: a name, a seed, its folder, and what it changes of the run file."""

    name: str
    seed: int
    folder: Path
    overrides: list[str]
    run: RunConfig

    def __str__(self) -> str:
        return f"{self.name}, seed {self.seed}"


def read_grid(path: Path) -> Grid:
    """The grid in a YAML file. UserError names the key that is wrong."""
    if not path.is_file():
        raise UserError(f"grid file {path} does not exist; ready ones are in launch/grids/")
    try:
        return Grid.model_validate(yaml.safe_load(path.read_text()) or {})
    except yaml.YAMLError as error:
        raise UserError(f"grid file {path} is not valid YAML: {error}") from error
    except ValidationError as error:
        lines = [
            f"{'.'.join(map(str, e['loc'])) or 'grid'}: {e['msg']} (got {e['input']!r})"[:400] for e in error.errors()
        ]
        raise UserError(f"{path}: {'; '.join(lines)}; the keys are explained in pipeline/grid.py") from error


def cells_of(grid: Grid, out: Path, overrides: list[str]) -> list[Cell]:
    """All cells, seed by seed within a name; `overrides` (section.key=value) of the command line count for all. Every
    cell's configuration is checked here, before the first one is run."""
    cells = []
    said = {override.partition("=")[0] for override in overrides}
    for name, changes in grid.cells.items():
        if fixed := {"out", "seed"} & (said | set(grid.overrides) | set(changes)):
            raise UserError(
                f"{', '.join(sorted(fixed))} cannot be set for a cell: --out and the cell's name make its folder, the grid's"
                " `seeds` or --seeds its seed"
            )
        if lost := [key for key in changes if key in said]:
            raise UserError(f"{', '.join(lost)} is what cell {name} differs in; leave it out of the command line")
        for seed in grid.seeds:
            folder = out / name / f"seed{seed}"
            given = [f"{key}={json.dumps(value)}" for key, value in (grid.overrides | changes).items()]
            given += [*overrides, f"seed={seed}", f"out={json.dumps(str(folder))}"]
            try:
                cells.append(Cell(name, seed, folder, given, load_run(grid.run, given)))
            except UserError as error:
                raise UserError(f"cell {name}: {error}") from error
    return cells
