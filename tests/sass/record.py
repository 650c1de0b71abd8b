"""Run by tree.py in a tree's own Python: asks for the kernels of every call of `strobe prewarm`. Usage: record.py ARCH CALLS.json"""

import json
import os
import sys
from pathlib import Path

try:
    from strobe_tools.cli.prewarm import jobs
except ModuleNotFoundError:  # earlier trees have it in strobe.cli
    from strobe.cli.prewarm import jobs

order = Path(os.environ["STROBE_RECORD"]) / "order"  # the recorder adds a line for every kernel
order.touch()
calls: dict[str, list[str]] = {}
for job in jobs([int(sys.argv[1])], None, None, None):
    before = order.stat().st_size
    job.run()
    if compiled := order.read_text()[before:].split():
        calls[str(job)] = compiled
Path(sys.argv[2]).write_text(json.dumps(calls, indent=0))
