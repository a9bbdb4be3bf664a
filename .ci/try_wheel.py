"""Try the built wheel where nothing of the checkout is: an empty environment, another folder, one plan."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parents[1]


def main() -> None:
    """Install `dist/*.whl` and plan a case of the vectors with it; an exception when anything differs."""
    (wheel,) = (CHECKOUT / "dist").glob("*.whl")
    cases = json.loads((CHECKOUT / "tests/vectors/plans.json").read_bytes())
    case = next(case for case in cases if case["expect"]["verdict"] == "ADMIT")
    with tempfile.TemporaryDirectory(prefix="gpuledger wheel ") as folder:
        place = Path(folder)
        venv.create(place / "venv", with_pip=True)
        run(place, "venv/bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", str(wheel))
        for name in ("state", "request"):
            (place / f"{name}.json").write_text(json.dumps(case[name]))
        question = ("venv/bin/gpuledger", "plan", "--state", "state.json", "--request", "request.json")
        found = json.loads(run(place, *question, "--json"))["verdict"]
        if found != case["expect"]["verdict"]:
            sys.exit(f"the wheel plans {found}, expected {case['expect']['verdict']}")
        print(run(place, *question))
    print(f"{wheel.name}: installed and planned {found}, as expected")


def run(place: Path, *command: str) -> str:
    """The standard output of a command that must succeed."""
    return subprocess.run(command, cwd=place, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    main()
