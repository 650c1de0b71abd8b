"""Strobe's FP8 forward beside cuDNN's (nvidia-cudnn-frontend) and Strobe's own bf16, alternating in one process.

python fp8_cudnn.py [--rounds 30] [--dims 64,128,192/128,256] [--check]   (--check: results against float64 first)
cuDNN writes O in FP8 on Hopper; Strobe in bfloat16, which is twice the bytes."""

import argparse
import math
from functools import partial

import torch

import strobe

FP8 = torch.float8_e4m3fn


def stored(x):
    scale = x.abs().amax().float() / 448  # per tensor, as cuDNN takes it
    return (x.float() / scale).to(FP8), scale


def cudnn_call(q, k, v, scales, causal):
    import cudnn

    e4m3, f32 = cudnn.data_type.FP8_E4M3, cudnn.data_type.FLOAT
    handle = cudnn.create_handle()
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
    graph = cudnn.pygraph(io_data_type=e4m3, intermediate_data_type=f32, compute_data_type=f32, handle=handle)
    ins = [graph.tensor(name=n, dim=list(x.shape), stride=list(x.stride()), data_type=e4m3) for n, x in zip("qkv", (q, k, v), strict=True)]
    ones = [graph.tensor(name=f"s{i}", dim=[1] * 4, stride=[1] * 4, data_type=f32) for i in range(6)]
    o, _, amax_s, amax_o = graph.sdpa_fp8(
        q=ins[0],
        k=ins[1],
        v=ins[2],
        descale_q=ones[0],
        descale_k=ones[1],
        descale_v=ones[2],
        descale_s=ones[3],
        scale_s=ones[4],
        scale_o=ones[5],
        attn_scale=1 / math.sqrt(q.shape[-1]),
        use_causal_mask=causal,
        generate_stats=False,
        name="sdpa",
    )
    out = torch.empty(*q.shape[:-1], v.shape[-1], device="cuda", dtype=FP8)
    o.set_output(True).set_dim(list(out.shape)).set_stride(list(out.stride())).set_data_type(e4m3)
    amax = [torch.empty(1, 1, 1, 1, device="cuda") for _ in range(2)]
    for x in (amax_s, amax_o):
        x.set_output(True).set_dim([1] * 4).set_stride([1] * 4).set_data_type(f32)
    graph.validate(), graph.build_operation_graph(), graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support(), graph.build_plans()
    values = [*scales, torch.tensor(1 / 256), torch.tensor(256.0), torch.tensor(64.0)]  # descale_s, scale_s, scale_o
    pack = (
        dict(zip(ins, (q, k, v), strict=True))
        | {t: x.reshape(1, 1, 1, 1).cuda() for t, x in zip(ones, values, strict=True)}
        | {o: out, amax_s: amax[0], amax_o: amax[1]}
    )
    space = torch.empty(graph.get_workspace_size(), device="cuda", dtype=torch.uint8)
    return lambda: (graph.execute(pack, space, handle=handle), out)[1]


def times(calls, rounds):
    spans = {name: [] for name in calls}
    for call in calls.values():
        for _ in range(3):
            call()
    for _ in range(rounds):
        for name, call in calls.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record(), call(), end.record()
            spans[name].append((begin, end))
    torch.cuda.synchronize()
    return {name: sorted(a.elapsed_time(b) for a, b in each)[rounds // 2] for name, each in spans.items()}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--dims", default="64,128,192/128,256")
    parser.add_argument("--check", action="store_true")
    how = parser.parse_args()
    torch.manual_seed(0)
    for dims in how.dims.split(","):
        d, dv = (int(x) for x in (dims.split("/") * 2)[:2])
        heads = 2048 // max(d if d == dv else dv, 64)
        for causal in (False, True):
            for s in (2048, 8192, 16384):
                b = 16384 // s
                half = [torch.randn(b, heads, s, w, device="cuda", dtype=torch.bfloat16) for w in (d, d, dv)]
                (q, a), (k, c), (v, e) = map(stored, half)
                given = {"q_scale": a, "k_scale": c, "v_scale": e, "causal": causal}
                calls = {
                    "fp8": partial(strobe.attention, q, k, v, **given),
                    "bf16": partial(strobe.attention, *half, causal=causal),
                }
                try:
                    calls["cudnn"] = cudnn_call(q, k, v, (a, c, e), causal)
                    calls["cudnn"]()
                except Exception as refused:
                    calls.pop("cudnn", None)
                    print("cudnn:", str(refused).splitlines()[0][:100])
                if how.check and s == 2048:
                    rows = [0, s // 2, s - 1]
                    ref, _ = strobe.reference(
                        q[:1, :1].cpu(),
                        k[:1, :1].cpu(),
                        v[:1, :1].cpu(),
                        rows=rows,
                        causal=causal,
                        **{n: x.cpu() for n, x in given.items() if n != "causal"},
                    )
                    for name, call in calls.items():
                        found = call()[0, 0, rows].double().cpu() / (64 if name == "cudnn" else 1)
                        off = found - ref[0, 0, rows]
                        relative = off.pow(2).mean().sqrt() / ref[0, 0, rows].pow(2).mean().sqrt()
                        print(f"  {name}: rms of error / rms of O {float(relative):.4f}")
                flop = 2.0 * b * heads * s * s * (d + dv) * (0.5 if causal else 1)
                found = times(calls, how.rounds)
                rate = {name: flop / t / 1e9 for name, t in found.items()}
                print(
                    dims,
                    "causal" if causal else "full",
                    s,
                    {n: round(r) for n, r in rate.items()},
                    "x bf16",
                    round(rate["fp8"] / rate["bf16"], 3),
                    "x cudnn",
                    round(rate["fp8"] / rate.get("cudnn", math.inf), 3),
                    flush=True,
                )


main()
