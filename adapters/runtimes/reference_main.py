"""The program of the reference runtime, run by its path in a process of its own.

    GPULEDGER_API_KEY=... python -I -S reference_main.py PORT CONFIGURATION

CONFIGURATION is the JSON of `ReferenceConfig`. Nothing but the standard library is imported, and its own parts
(reference_server.py): so it starts at once, and is small before it holds anything.
"""

import asyncio
import json
import os
import sys

if __name__ == "__main__":
    # The folder that the package is in. It comes last: no name of ours, or beside us, hides one of the library's.
    sys.path.append(os.path.abspath(os.path.join(os.path.dirname(__file__), *(os.pardir,) * 3)))
    from gpuledger.adapters.runtimes.reference_server import Server

    asyncio.run(Server(json.loads(sys.argv[2]), os.environ["GPULEDGER_API_KEY"]).run(int(sys.argv[1])))
    # At once, as whoever is killed ends: what it holds goes with it, not piece by piece before it.
    os._exit(0)
