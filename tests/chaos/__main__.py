"""`python -m tests.chaos --minutes 20 --seed 7`: real models, real kills, and a verdict. `make chaos` runs it.

Exit status: 0 all checks hold; 1 some does not, and the folder of the run stays; 2 it could not be run.
"""

from __future__ import annotations

import argparse
import json
import secrets
import shutil
import signal
import sys
from pathlib import Path

from rich.console import Console

from gpuledger.tools.example_models import ExampleError

from . import report
from .run import Chaos
from .scene import TooLittleMemory, prepare


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    for number in (signal.SIGTERM, signal.SIGINT):
        # Also where it was started in the background: what it has started ends with it.
        signal.signal(number, _break_off)
    console = Console(highlight=False, soft_wrap=True)
    seed: int = options.seed if options.seed is not None else secrets.randbelow(10**6)
    folder: Path = (options.folder / f"seed-{seed}").resolve()
    again = f"python -m tests.chaos --minutes {options.minutes:g} --seed {seed}" + (" --few" if options.few else "")
    console.print(f"chaos: {again}")
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "state").mkdir(parents=True, mode=0o700)
    try:
        scene = prepare(folder, few=options.few)
    except (TooLittleMemory, ExampleError) as error:
        console.print(f"chaos cannot be run here: {error}")
        return 2
    (folder / "gpuledger.yaml").write_text(json.dumps(scene.config), "utf-8")
    chaos = Chaos(scene, seed, options.minutes * 60, options.rate, console.print)
    try:
        chaos.run()
    except BaseException as error:
        console.print(f"chaos: the run broke off ({error!r}); again: {again}; what is left: {folder}")
        raise
    report.tell(chaos, console)
    written = folder.with_suffix(".json")
    written.write_text(json.dumps(report.document(chaos), indent=1), "utf-8")
    if not chaos.passed:
        console.print(f"chaos: FAILED; again: {again}; what is left: {folder}, {written}")
        return 1
    if not options.keep:
        shutil.rmtree(folder)
    console.print(f"chaos: passed, seed {seed}; {written}")
    return 0


def _break_off(number: int, _: object) -> None:
    raise SystemExit(128 + number)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=20.0, help="how long the storm lasts (20)")
    parser.add_argument("--seed", type=int, help="what everything is drawn from; drawn itself when absent")
    parser.add_argument("--rate", type=float, default=3.0, help="requests a second, on average (3)")
    parser.add_argument("--few", action="store_true", help="fewer models, for a short run")
    parser.add_argument("--keep", action="store_true", help="keep the folder of the run when all is well, too")
    parser.add_argument("--folder", type=Path, default=Path("var/chaos"), help="where runs are kept (var/chaos)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
