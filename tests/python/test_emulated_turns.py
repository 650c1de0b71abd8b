"""On the emulated GPU, tiles wait for a turn that never comes, because the transpose of the block lists contradicts the lists. (That is
illegal, but device memory is not checked before a call.) The call ends, and writes only within its results."""

from __future__ import annotations

import pytest

from emulated import ROOT, output

# The lists say that each query tile sees all keys; their transpose says that no query sees the first keys.
CALL = """
import sys, torch, strobe, device
engine, dtype = sys.argv[1], getattr(torch, sys.argv[2])
torch.manual_seed(0)
q, k, v, dout = (torch.randn(1, 16, 256, 32).to(dtype) for _ in range(4))
full = strobe.BlockMask(*(torch.tensor(x, dtype=torch.int32) for x in ([[[0, 2, 4]]], [0, 1, 0, 1])), 256, 256, 128, 128)
torn = strobe.BlockMask(full.rows, full.cols, 256, 256, 128, 128)
torn.rows_t = torch.tensor([[[0, 0, 2]]], dtype=torch.int32)
with device.running_on(engine):
    out, lse = strobe.attention(q, k, v, return_lse=True, block_mask=full, engine=engine)
    def gradients(mask):
        return strobe.attention_backward(dout, q, k, v, out, lse, block_mask=mask, engine=engine, deterministic=True)
    right, found = gradients(full), gradients(torn)
for x, y in ((found.dk, right.dk), (found.dv, right.dv)):
    assert not x[:, :, :128].any()
    assert torch.equal(x[:, :, 128:], y[:, :, 128:])
assert found.dq.isfinite().all()
print("ended")
"""


@pytest.mark.parametrize(("engine", "dtype"), [("cuda-simt", "float32"), ("cuda-mma", "float16")])
def test_lists_that_contradict_their_transpose(engine, dtype, tmp_path):
    edit = tmp_path / "impatient.edit"
    [line] = [line for line in (ROOT / "kernels" / "device" / "turns.h").read_text().splitlines() if "1 << 24" in line]
    impatient = line.replace("1 << 24", "1 << 8")  # the emulator takes a long wait for a deadlock
    edit.write_text(f"device/turns.h\nA wait for a turn gives up soon.\n-{line}\n+{impatient}\n")
    sms = "1"  # there are many more blocks than run at a time
    assert output(CALL, engine, dtype, SMS=sms, EDIT=str(edit)) == "ended\n"
