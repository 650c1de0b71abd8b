"""Installs the one wheel of a folder into an environment that has nothing else, and computes with it. Usage: tests/wheel.py FOLDER"""

import re
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"

PROOF = """
import sys
import numpy as np
import strobe
rng = np.random.default_rng(0)
q, k, v, dout = (rng.standard_normal((1, 2, 65, 16)).astype(np.float32) for _ in range(4))
out, lse = strobe.attention(q, k, v, causal=True, return_lse=True)
gradients = strobe.attention_backward(dout, q, k, v, out, lse, causal=True)
reference, _ = strobe.reference(q, k, v, causal=True)
assert abs(out - reference).max() <= 1e-6 * abs(reference).max()
assert gradients.dq.shape == q.shape
assert "torch" not in sys.modules
"""

# A command's message if its extra was not installed.
WITHOUT_EXTRAS = {
    "bench": "torch: pip install 'torch>=2.4'",
    "bench gpu": "torch: pip install 'torch>=2.4'",
    "bench ladder": "torch: pip install 'torch>=2.4'",
    "figures": "torch and matplotlib: pip install 'torch>=2.4' 'matplotlib>=3.7'",
    "train": "torch and tokenizers and matplotlib: pip install 'torch>=2.4' 'tokenizers>=0.15' 'matplotlib>=3.7'",
    "tune": "torch: pip install 'torch>=2.4'",
}


def main(folder: Path) -> None:
    (wheel,) = folder.glob("*.whl")
    assert "manylinux" in wheel.name, wheel.name
    assert "-cp310-abi3-" in wheel.name, f"{wheel.name}: not one wheel for every CPython from 3.10 on"
    size = wheel.stat().st_size
    (said,) = re.findall(r"One wheel of ([\d.]+) MB", README.read_text())
    assert abs(size - float(said) * 1e6) < 0.2e6, f"{wheel.name}: {size} bytes; README says {said} MB"
    with tempfile.TemporaryDirectory() as place:
        venv.create(place, with_pip=True)
        python = Path(place) / "bin" / "python"
        subprocess.run([python, "-m", "pip", "install", "--quiet", "numpy", wheel], check=True)
        subprocess.run([python, "-c", PROOF], check=True, cwd=place)
        command = Path(place) / "bin" / "strobe"
        subprocess.run([command, "check"], check=True, stdout=subprocess.DEVNULL)
        for name, needed in WITHOUT_EXTRAS.items():
            refused = subprocess.run([command, *name.split()], check=False, capture_output=True, text=True)
            assert (refused.returncode, refused.stderr) == (2, f"strobe {name} needs {needed}\n"), refused
    print(f"{wheel.name}: {size} bytes, installs and computes without PyTorch")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
