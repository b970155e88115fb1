"""Execute one chapter with papermill, in a process of its own: `python -m mhabook_lib.book.worker`.

The job and its outcome are JSON files; the folder of the job is private to it, so that nothing a
failing or killed chapter leaves behind can be taken for a result.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import nbformat


def execute(job: dict[str, Any]) -> dict[str, Any]:
    """Run the notebook `source.ipynb` of the job's folder; what happened, as plain data."""
    import papermill
    from nbclient.exceptions import CellTimeoutError, DeadKernelError
    from papermill.exceptions import PapermillExecutionError

    folder = Path(job["folder"])
    out = folder / "out"
    out.mkdir()
    os.environ["MHABOOK_OUTPUT"] = str(out)
    executed = out / f"{job['slug']}.ipynb"
    bar = {"desc": job["slug"], "position": job["position"], "unit": "cell", "leave": False}
    bar["file"] = screen(folder / "worker.log")
    started = time.perf_counter()
    try:
        papermill.execute_notebook(
            folder / "source.ipynb",
            executed,
            parameters=job["parameters"],
            kernel_name="python3",
            language="python",
            cwd=folder,
            execution_timeout=job["time_limit"],
            progress_bar=bar if job["progress"] else False,
        )
    except PapermillExecutionError as error:
        place = running_cell(executed)
        return place | {"error": last_line(f"{error.ename}: {error.evalue}")} | log(error)
    except CellTimeoutError as error:
        said = f"still running after {job['time_limit']} s; raise the limit with --time-limit"
        return running_cell(executed) | {"error": said} | log(error)
    except DeadKernelError as error:
        said = "the kernel died (out of memory, or killed from outside)"
        return running_cell(executed) | {"error": said} | log(error)
    return {
        "seconds": round(time.perf_counter() - started, 2),
        "peak_memory_mb": peak_memory_mb(),
    }


def screen(log: Path):
    """The terminal for the progress bar alone: what kernels say there goes to the log."""
    terminal = os.fdopen(os.dup(2), "w")
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    return terminal


def running_cell(path: Path) -> dict[str, Any]:
    """Number (among the code cells, from 1) and first line of the cell that did not finish."""
    cells = nbformat.read(path, as_version=4).cells if path.exists() else []
    number, last = 0, {"cell": None, "code": ""}
    for cell in cells:
        if cell.cell_type != "code":
            continue
        injected = "injected-parameters" in cell.metadata.get("tags", [])
        number += not injected
        status = cell.metadata.get("papermill", {})
        if status.get("start_time"):
            first = cell.source.strip().splitlines()[0] if cell.source.strip() else ""
            last = {"cell": number, "code": first}
        if status.get("exception"):
            break
    return last


def last_line(text: str) -> str:
    lines = [line for line in str(text).strip().splitlines() if line.strip()]
    return lines[0] if lines else "unknown error"


def log(error: Exception) -> dict[str, str]:
    return {"log": str(error)}


def peak_memory_mb() -> int:
    """Largest memory of the kernel, which is the only child of this process."""
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return round(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / unit)


def main(path: str) -> None:
    job = json.loads(Path(path).read_text())
    warnings.filterwarnings("ignore", module="papermill|nbclient|traitlets|jupyter_client|zmq")
    outcome = execute(job)
    Path(job["folder"], "outcome.json").write_text(json.dumps(outcome))


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except KeyboardInterrupt:
        sys.exit(130)
