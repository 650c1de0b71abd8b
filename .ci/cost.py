#!/usr/bin/env python3
"""What the library costs to compile, in units of one fixed file: so that drift is seen, on any machine.

.ci/run makes this program CCACHE_PREFIX: ccache then calls it with each compiler's command that it does not know the result of. It runs the
command and adds its processor seconds to the file that $STROBE_COST names. Without arguments it adds up the objects of the library there,
divides by the seconds of tests/cpp/main.cpp (a header of another project, which does not change), and exits with 1 if that is more than
MOST.
"""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

MOST = 55.0  # 43 measured on an EPYC (GCC 12)
FIXED = "doctest_main.dir/"  # one object
LIBRARY = "strobe_core.dir/"
ROOT = Path(__file__).parents[1]
BUILD = ROOT / "build" / "cpp"
FOLDERS = (str(BUILD), str(ROOT / "build" / "python"))  # the same objects, of which ccache has to compile those that come first


def compile_and_note(command: list[str]) -> int:
    status = subprocess.run(command, check=False).returncode
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    if "-o" in command and "-c" in command:
        line = json.dumps({"folder": str(Path.cwd()), "object": command[command.index("-o") + 1], "seconds": used.ru_utime + used.ru_stime})
        with Path(os.environ["STROBE_COST"]).open("a") as file:
            file.write(line + "\n")
    return status


def check() -> int:
    lines = map(json.loads, Path(os.environ["STROBE_COST"]).read_text().splitlines())
    noted = {x["object"].rpartition("CMakeFiles/")[2]: x["seconds"] for x in lines if x["folder"] in FOLDERS}
    wanted = [x["output"].rpartition("CMakeFiles/")[2] for x in json.loads((BUILD / "compile_commands.json").read_text())]
    library = [name for name in wanted if name.startswith(LIBRARY)]
    known = [name for name in library if name in noted]
    fixed = next((seconds for name, seconds in noted.items() if name.startswith(FIXED)), None)
    if fixed is None or len(known) < len(library):
        print(f"not measured: {len(library) - len(known)} of {len(library)} objects, or that of tests/cpp/main.cpp, came out of ccache")
        return 0
    cost = sum(noted[name] for name in library) / fixed
    for name in sorted(library, key=noted.__getitem__)[:-6:-1]:
        print(f"{noted[name]:8.1f} s  {name.removeprefix(LIBRARY)}")
    print(f"the library takes {cost:.1f} times as long to compile as tests/cpp/main.cpp ({fixed:.1f} s); accepted is {MOST:g}")
    return int(cost > MOST)


if __name__ == "__main__":
    sys.exit(compile_and_note(sys.argv[1:]) if sys.argv[1:] else check())
