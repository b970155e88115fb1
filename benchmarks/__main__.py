"""Run all benchmarks: `python -m benchmarks` prints a table and writes _build/benchmarks.json."""

from __future__ import annotations

import importlib
import json
import pkgutil
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import benchmarks

COLUMNS = ("chapter", "task", "size", "ours", "other", "time", "ratio", "spread", "errors")


def main(target: Path = Path("_build/benchmarks.json")) -> None:
    """Collect the rows of every module that has `rows`, one thread for both sides."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    rows = []
    names = [info.name for info in pkgutil.iter_modules(benchmarks.__path__)]
    for name in names:
        if name == "__main__":
            continue
        module = importlib.import_module(f"benchmarks.{name}")
        if hasattr(module, "rows"):
            rows.extend(module.rows())
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(rows, indent=1) + "\n")
    table = Table(*COLUMNS, title="Ours against the other way (one thread)")
    for row in rows:
        table.add_row(
            row["chapter"],
            row["task"],
            row["size"],
            f"{row['ours_s']:.3g} s",
            row["other"],
            f"{row['other_s']:.3g} s",
            f"{row['ratio']:.3g}x",
            f"{row['spread']:.0%}",
            f"{row['ours_error']:.1e} / {row['other_error']:.1e}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
