"""The Python of docs/jax.md runs."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "jax.md"


def test_the_code_runs():
    names = {}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) >= 2
    for number, code in enumerate(blocks):
        exec(compile(code, f"jax.md, block {number}", "exec"), names)
    assert all(abs(x).max() > 0 for x in names["gradients"])
