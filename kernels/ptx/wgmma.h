// wgmma (sm_90a): D (64 x N, FP32) (+)= A (64 x 16) B (16 x N), issued by the four warps of a warpgroup, run asynchronously. A descriptor
// says where B lies in shared memory, and where A lies unless it is in registers. D: warp w of the group holds rows 16w ... 16w+15; lane
// 4g+t holds columns 8j+2t and 8j+2t+1 of row g in d[4j] and d[4j+1], and of row g + 8 in d[4j+2] and d[4j+3]. In registers, A has the
// layout of mma.sync.
#pragma once
#include "math.h"

namespace strobe {

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Waits until at most kPending committed groups of this warpgroup are in flight.
template <int kPending> __device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Tells the compiler that the tensor cores have written new values to these registers here.
template <int N> __device__ __forceinline__ void registers_changed(float (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(x[i])::"memory");
}
template <int N> __device__ __forceinline__ void registers_changed(u32 (&x)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+r"(x[i])::"memory");
}

// Tiles in shared memory have rows of 64 elements (128 bytes), swizzled over 128 bytes, as the copy engine writes them. Wider tiles are
// blocks of 64 columns, one after another. base: a multiple of 1024.
// K-major: rows are the outer axis (M or N), columns the inner one. Eight rows take 1024 bytes.
__device__ __forceinline__ u64 descriptor_k_major(u32 base) { return (u64)((base & 0x3FFFF) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62; }
// MN-major: rows are the inner axis. block_bytes: the distance from one block of 64 columns to the next.
__device__ __forceinline__ u64 descriptor_mn_major(u32 base, u32 block_bytes) {
  return (u64)((base & 0x3FFFF) >> 4) | (u64)(block_bytes >> 4) << 16 | 64ull << 32 | 1ull << 62;
}
// Moves a descriptor on by `bytes`.
__device__ __forceinline__ u64 advance(u64 descriptor, u32 bytes) { return descriptor + (bytes >> 4); }
// A descriptor in two halves. The address, in the lower one, never carries into the upper one: at() takes fewer instructions than
// advance(), which matters beside products of few columns.
struct Descriptor {
  u32 low, high;
  __device__ __forceinline__ explicit Descriptor(u64 whole) : high((u32)(whole >> 32)) {
    asm volatile("mov.b32 %0, %1;" : "=r"(low) : "r"((u32)whole)); // the compiler knows no bits of it, and so does not take it apart again
  }
  __device__ __forceinline__ u64 at(u32 bytes) const {
    u64 x;
    asm("mov.b64 %0, {%1, %2};" : "=l"(x) : "r"(low + (bytes >> 4)), "r"(high));
    return x;
  }
};

// Wgmma<T, N> has shared<kAccumulate, kMnMajorA, kMnMajorB>(d, a, b) and registers<kAccumulate, kMnMajorB>(d, a, b). The first product of a
// sum is shared_anew<kMnMajorA>(d, a, b) or registers_anew<kMnMajorB>(d, a, b), which leave d's registers free until then. If d keeps its
// registers over a loop, the first product has kAccumulate = false instead.
template <class T, int N> struct Wgmma;

#define STROBE_OUT(io, i) io(d[i])
#define STROBE_OUT8(io, i)                                                                                                                 \
  STROBE_OUT(io, i), STROBE_OUT(io, i + 1), STROBE_OUT(io, i + 2), STROBE_OUT(io, i + 3), STROBE_OUT(io, i + 4), STROBE_OUT(io, i + 5),    \
      STROBE_OUT(io, i + 6), STROBE_OUT(io, i + 7)
#define STROBE_OUTS_16(io) STROBE_OUT8(io, 0)
#define STROBE_LIST_16 "{%0, %1, %2, %3, %4, %5, %6, %7}"
#define STROBE_OUTS_24(io) STROBE_OUT8(io, 0), STROBE_OUT(io, 8), STROBE_OUT(io, 9), STROBE_OUT(io, 10), STROBE_OUT(io, 11)
#define STROBE_LIST_24 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11}"
#define STROBE_OUTS_32(io) STROBE_OUT8(io, 0), STROBE_OUT8(io, 8)
#define STROBE_LIST_32 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}"
#define STROBE_OUTS_48(io) STROBE_OUT8(io, 0), STROBE_OUT8(io, 8), STROBE_OUT8(io, 16)
#define STROBE_LIST_48 "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23}"
#define STROBE_OUTS_64(io) STROBE_OUT8(io, 0), STROBE_OUT8(io, 8), STROBE_OUT8(io, 16), STROBE_OUT8(io, 24)
#define STROBE_LIST_64                                                                                                                     \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, "    \
  "%28, %29, %30, %31}"
#define STROBE_OUTS_80(io) STROBE_OUT8(io, 0), STROBE_OUT8(io, 8), STROBE_OUT8(io, 16), STROBE_OUT8(io, 24), STROBE_OUT8(io, 32)
#define STROBE_LIST_80                                                                                                                     \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, "    \
  "%28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39}"
#define STROBE_OUTS_96(io)                                                                                                                 \
  STROBE_OUT8(io, 0), STROBE_OUT8(io, 8), STROBE_OUT8(io, 16), STROBE_OUT8(io, 24), STROBE_OUT8(io, 32), STROBE_OUT8(io, 40)
#define STROBE_LIST_96                                                                                                                     \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, "    \
  "%28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47}"
#define STROBE_OUTS_112(io)                                                                                                                \
  STROBE_OUT8(io, 0), STROBE_OUT8(io, 8), STROBE_OUT8(io, 16), STROBE_OUT8(io, 24), STROBE_OUT8(io, 32), STROBE_OUT8(io, 40),              \
      STROBE_OUT8(io, 48)
#define STROBE_LIST_112                                                                                                                    \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, "    \
  "%28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, "     \
  "%54, %55}"
#define STROBE_OUTS_128(io)                                                                                                                \
  STROBE_OUT8(io, 0), STROBE_OUT8(io, 8), STROBE_OUT8(io, 16), STROBE_OUT8(io, 24), STROBE_OUT8(io, 32), STROBE_OUT8(io, 40),              \
      STROBE_OUT8(io, 48), STROBE_OUT8(io, 56)
#define STROBE_LIST_128                                                                                                                    \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, "    \
  "%28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, "     \
  "%54, %55, %56, %57, %58, %59, %60, %61, %62, %63}"
#define STROBE_OUTS_144(io)                                                                                                                \
  STROBE_OUT8(io, 0), STROBE_OUT8(io, 8), STROBE_OUT8(io, 16), STROBE_OUT8(io, 24), STROBE_OUT8(io, 32), STROBE_OUT8(io, 40),              \
      STROBE_OUT8(io, 48), STROBE_OUT8(io, 56), STROBE_OUT8(io, 64)
#define STROBE_LIST_144                                                                                                                    \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, "    \
  "%28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, "     \
  "%54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71}"
#define STROBE_OUTS_160(io)                                                                                                                \
  STROBE_OUT8(io, 0), STROBE_OUT8(io, 8), STROBE_OUT8(io, 16), STROBE_OUT8(io, 24), STROBE_OUT8(io, 32), STROBE_OUT8(io, 40),              \
      STROBE_OUT8(io, 48), STROBE_OUT8(io, 56), STROBE_OUT8(io, 64), STROBE_OUT8(io, 72)
#define STROBE_LIST_160                                                                                                                    \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, "    \
  "%28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, "     \
  "%54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79}"
#define STROBE_OUTS_176(io)                                                                                                                \
  STROBE_OUT8(io, 0), STROBE_OUT8(io, 8), STROBE_OUT8(io, 16), STROBE_OUT8(io, 24), STROBE_OUT8(io, 32), STROBE_OUT8(io, 40),              \
      STROBE_OUT8(io, 48), STROBE_OUT8(io, 56), STROBE_OUT8(io, 64), STROBE_OUT8(io, 72), STROBE_OUT8(io, 80)
#define STROBE_LIST_176                                                                                                                    \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, "    \
  "%28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, "     \
  "%54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "     \
  "%80, %81, %82, %83, %84, %85, %86, %87}"
#define STROBE_OUTS_192(io)                                                                                                                \
  STROBE_OUT8(io, 0), STROBE_OUT8(io, 8), STROBE_OUT8(io, 16), STROBE_OUT8(io, 24), STROBE_OUT8(io, 32), STROBE_OUT8(io, 40),              \
      STROBE_OUT8(io, 48), STROBE_OUT8(io, 56), STROBE_OUT8(io, 64), STROBE_OUT8(io, 72), STROBE_OUT8(io, 80), STROBE_OUT8(io, 88)
#define STROBE_LIST_192                                                                                                                    \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, "    \
  "%28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, "     \
  "%54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "     \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95}"
#define STROBE_OUTS_208(io)                                                                                                                \
  STROBE_OUT8(io, 0), STROBE_OUT8(io, 8), STROBE_OUT8(io, 16), STROBE_OUT8(io, 24), STROBE_OUT8(io, 32), STROBE_OUT8(io, 40),              \
      STROBE_OUT8(io, 48), STROBE_OUT8(io, 56), STROBE_OUT8(io, 64), STROBE_OUT8(io, 72), STROBE_OUT8(io, 80), STROBE_OUT8(io, 88),        \
      STROBE_OUT8(io, 96)
#define STROBE_LIST_208                                                                                                                    \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, "    \
  "%28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, "     \
  "%54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "     \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103}"
#define STROBE_OUTS_224(io)                                                                                                                \
  STROBE_OUT8(io, 0), STROBE_OUT8(io, 8), STROBE_OUT8(io, 16), STROBE_OUT8(io, 24), STROBE_OUT8(io, 32), STROBE_OUT8(io, 40),              \
      STROBE_OUT8(io, 48), STROBE_OUT8(io, 56), STROBE_OUT8(io, 64), STROBE_OUT8(io, 72), STROBE_OUT8(io, 80), STROBE_OUT8(io, 88),        \
      STROBE_OUT8(io, 96), STROBE_OUT8(io, 104)
#define STROBE_LIST_224                                                                                                                    \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, "    \
  "%28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, "     \
  "%54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "     \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, "     \
  "%105, %106, %107, %108, %109, %110, %111}"
#define STROBE_OUTS_240(io)                                                                                                                \
  STROBE_OUT8(io, 0), STROBE_OUT8(io, 8), STROBE_OUT8(io, 16), STROBE_OUT8(io, 24), STROBE_OUT8(io, 32), STROBE_OUT8(io, 40),              \
      STROBE_OUT8(io, 48), STROBE_OUT8(io, 56), STROBE_OUT8(io, 64), STROBE_OUT8(io, 72), STROBE_OUT8(io, 80), STROBE_OUT8(io, 88),        \
      STROBE_OUT8(io, 96), STROBE_OUT8(io, 104), STROBE_OUT8(io, 112)
#define STROBE_LIST_240                                                                                                                    \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, "    \
  "%28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, "     \
  "%54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "     \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, "     \
  "%105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119}"
#define STROBE_OUTS_256(io)                                                                                                                \
  STROBE_OUT8(io, 0), STROBE_OUT8(io, 8), STROBE_OUT8(io, 16), STROBE_OUT8(io, 24), STROBE_OUT8(io, 32), STROBE_OUT8(io, 40),              \
      STROBE_OUT8(io, 48), STROBE_OUT8(io, 56), STROBE_OUT8(io, 64), STROBE_OUT8(io, 72), STROBE_OUT8(io, 80), STROBE_OUT8(io, 88),        \
      STROBE_OUT8(io, 96), STROBE_OUT8(io, 104), STROBE_OUT8(io, 112), STROBE_OUT8(io, 120)
#define STROBE_LIST_256                                                                                                                    \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, "    \
  "%28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, "     \
  "%54, %55, %56, %57, %58, %59, %60, %61, %62, %63, %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "     \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, %96, %97, %98, %99, %100, %101, %102, %103, %104, "     \
  "%105, %106, %107, %108, %109, %110, %111, %112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, "   \
  "%127}"

// o0 ... o5: the numbers of the asm operands after those of d.
#define STROBE_WGMMA(T, NAME, N, o0, o1, o2, o3, o4, o5)                                                                                   \
  template <> struct Wgmma<T, N> {                                                                                                         \
    template <bool kAccumulate, int kMnMajorA = 0, int kMnMajorB = 0>                                                                      \
    static __device__ __forceinline__ void shared(float (&d)[N / 2], u64 a, u64 b) {                                                       \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #o2 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME          \
                   " " STROBE_LIST_##N ", %" #o0 ", %" #o1 ", p, 1, 1, %" #o3 ", %" #o4 ";\n}"                                             \
                   : STROBE_OUTS_##N("+f")                                                                                                 \
                   : "l"(a), "l"(b), "n"((int)kAccumulate), "n"(kMnMajorA), "n"(kMnMajorB));                                               \
    }                                                                                                                                      \
    template <int kMnMajorA> static __device__ __forceinline__ void shared_anew(float (&d)[N / 2], u64 a, u64 b) {                         \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME                 \
                   " " STROBE_LIST_##N ", %" #o0 ", %" #o1 ", p, 1, 1, %" #o2 ", 0;\n}"                                                    \
                   : STROBE_OUTS_##N("=f")                                                                                                 \
                   : "l"(a), "l"(b), "n"(kMnMajorA));                                                                                      \
    }                                                                                                                                      \
    template <int kMnMajorB> static __device__ __forceinline__ void registers_anew(float (&d)[N / 2], const u32 *a, u64 b) {               \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME                 \
                   " " STROBE_LIST_##N ", {%" #o0 ", %" #o1 ", %" #o2 ", %" #o3 "}, %" #o4 ", p, 1, 1, %" #o5 ";\n}"                       \
                   : STROBE_OUTS_##N("=f")                                                                                                 \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kMnMajorB));                                                  \
    }                                                                                                                                      \
    template <bool kAccumulate, int kMnMajorB> static __device__ __forceinline__ void registers(float (&d)[N / 2], const u32 *a, u64 b) {  \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #o5 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k16.f32." NAME "." NAME          \
                   " " STROBE_LIST_##N ", {%" #o0 ", %" #o1 ", %" #o2 ", %" #o3 "}, %" #o4 ", p, 1, 1, " STROBE_NEXT_##N ";\n}"            \
                   : STROBE_OUTS_##N("+f")                                                                                                 \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"((int)kAccumulate), "n"(kMnMajorB));                           \
    }                                                                                                                                      \
  };
#define STROBE_NEXT_16 "%14"
#define STROBE_NEXT_24 "%18"
#define STROBE_NEXT_32 "%22"
#define STROBE_NEXT_48 "%30"
#define STROBE_NEXT_64 "%38"
#define STROBE_NEXT_80 "%46"
#define STROBE_NEXT_96 "%54"
#define STROBE_NEXT_112 "%62"
#define STROBE_NEXT_128 "%70"
#define STROBE_NEXT_144 "%78"
#define STROBE_NEXT_160 "%86"
#define STROBE_NEXT_176 "%94"
#define STROBE_NEXT_192 "%102"
#define STROBE_NEXT_208 "%110"
#define STROBE_NEXT_224 "%118"
#define STROBE_NEXT_240 "%126"
#define STROBE_NEXT_256 "%134"
STROBE_WGMMA(f16, "f16", 16, 8, 9, 10, 11, 12, 13)
STROBE_WGMMA(bf16, "bf16", 16, 8, 9, 10, 11, 12, 13)
STROBE_WGMMA(f16, "f16", 24, 12, 13, 14, 15, 16, 17)
STROBE_WGMMA(bf16, "bf16", 24, 12, 13, 14, 15, 16, 17)
STROBE_WGMMA(f16, "f16", 32, 16, 17, 18, 19, 20, 21)
STROBE_WGMMA(bf16, "bf16", 32, 16, 17, 18, 19, 20, 21)
STROBE_WGMMA(f16, "f16", 48, 24, 25, 26, 27, 28, 29)
STROBE_WGMMA(bf16, "bf16", 48, 24, 25, 26, 27, 28, 29)
STROBE_WGMMA(f16, "f16", 64, 32, 33, 34, 35, 36, 37)
STROBE_WGMMA(bf16, "bf16", 64, 32, 33, 34, 35, 36, 37)
STROBE_WGMMA(f16, "f16", 80, 40, 41, 42, 43, 44, 45)
STROBE_WGMMA(bf16, "bf16", 80, 40, 41, 42, 43, 44, 45)
STROBE_WGMMA(f16, "f16", 96, 48, 49, 50, 51, 52, 53)
STROBE_WGMMA(bf16, "bf16", 96, 48, 49, 50, 51, 52, 53)
STROBE_WGMMA(f16, "f16", 112, 56, 57, 58, 59, 60, 61)
STROBE_WGMMA(bf16, "bf16", 112, 56, 57, 58, 59, 60, 61)
STROBE_WGMMA(f16, "f16", 128, 64, 65, 66, 67, 68, 69)
STROBE_WGMMA(bf16, "bf16", 128, 64, 65, 66, 67, 68, 69)
STROBE_WGMMA(f16, "f16", 144, 72, 73, 74, 75, 76, 77)
STROBE_WGMMA(bf16, "bf16", 144, 72, 73, 74, 75, 76, 77)
STROBE_WGMMA(f16, "f16", 160, 80, 81, 82, 83, 84, 85)
STROBE_WGMMA(bf16, "bf16", 160, 80, 81, 82, 83, 84, 85)
STROBE_WGMMA(f16, "f16", 176, 88, 89, 90, 91, 92, 93)
STROBE_WGMMA(bf16, "bf16", 176, 88, 89, 90, 91, 92, 93)
STROBE_WGMMA(f16, "f16", 192, 96, 97, 98, 99, 100, 101)
STROBE_WGMMA(bf16, "bf16", 192, 96, 97, 98, 99, 100, 101)
STROBE_WGMMA(f16, "f16", 208, 104, 105, 106, 107, 108, 109)
STROBE_WGMMA(bf16, "bf16", 208, 104, 105, 106, 107, 108, 109)
STROBE_WGMMA(f16, "f16", 224, 112, 113, 114, 115, 116, 117)
STROBE_WGMMA(bf16, "bf16", 224, 112, 113, 114, 115, 116, 117)
STROBE_WGMMA(f16, "f16", 240, 120, 121, 122, 123, 124, 125)
STROBE_WGMMA(bf16, "bf16", 240, 120, 121, 122, 123, 124, 125)
STROBE_WGMMA(f16, "f16", 256, 128, 129, 130, 131, 132, 133)
STROBE_WGMMA(bf16, "bf16", 256, 128, 129, 130, 131, 132, 133)

// FP8: A (64 x 32) and B (32 x N) of E4M3, both K-major. The sums keep some 14 bits, though D is FP32 (sm90/forward/eight_bits.h). A step
// of 32 columns takes as many bytes as one of 16 columns of 16 bits.
#define STROBE_WGMMA_E4M3(N, o0, o1, o2, o3, o4, o5)                                                                                       \
  template <> struct Wgmma<e4m3, N> {                                                                                                      \
    template <bool kAccumulate, int kMnMajorA = 0> static __device__ __forceinline__ void shared(float (&d)[N / 2], u64 a, u64 b) {        \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #o2 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3"               \
                   " " STROBE_LIST_##N ", %" #o0 ", %" #o1 ", p, 1, 1;\n}"                                                                 \
                   : STROBE_OUTS_##N("+f")                                                                                                 \
                   : "l"(a), "l"(b), "n"((int)kAccumulate));                                                                               \
    }                                                                                                                                      \
    template <int kMnMajorB> static __device__ __forceinline__ void registers_anew(float (&d)[N / 2], const u32 *a, u64 b) {               \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, 0, 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3"                      \
                   " " STROBE_LIST_##N ", {%" #o0 ", %" #o1 ", %" #o2 ", %" #o3 "}, %" #o4 ", p, 1, 1;\n}"                                 \
                   : STROBE_OUTS_##N("=f")                                                                                                 \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));                                                                  \
    }                                                                                                                                      \
    template <bool kAccumulate, int kMnMajorB> static __device__ __forceinline__ void registers(float (&d)[N / 2], const u32 *a, u64 b) {  \
      asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #o5 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N "k32.f32.e4m3.e4m3"               \
                   " " STROBE_LIST_##N ", {%" #o0 ", %" #o1 ", %" #o2 ", %" #o3 "}, %" #o4 ", p, 1, 1;\n}"                                 \
                   : STROBE_OUTS_##N("+f")                                                                                                 \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"((int)kAccumulate));                                           \
    }                                                                                                                                      \
  };
STROBE_WGMMA_E4M3(64, 32, 33, 34, 35, 36, 37)
STROBE_WGMMA_E4M3(96, 48, 49, 50, 51, 52, 53)
STROBE_WGMMA_E4M3(128, 64, 65, 66, 67, 68, 69)
STROBE_WGMMA_E4M3(160, 80, 81, 82, 83, 84, 85)
STROBE_WGMMA_E4M3(192, 96, 97, 98, 99, 100, 101)
STROBE_WGMMA_E4M3(256, 128, 129, 130, 131, 132, 133)

#undef STROBE_WGMMA_E4M3
#undef STROBE_WGMMA
#undef STROBE_OUTS_16
#undef STROBE_LIST_16
#undef STROBE_NEXT_16
#undef STROBE_OUTS_24
#undef STROBE_LIST_24
#undef STROBE_NEXT_24
#undef STROBE_OUTS_32
#undef STROBE_LIST_32
#undef STROBE_NEXT_32
#undef STROBE_OUTS_48
#undef STROBE_LIST_48
#undef STROBE_NEXT_48
#undef STROBE_OUTS_64
#undef STROBE_LIST_64
#undef STROBE_NEXT_64
#undef STROBE_OUTS_80
#undef STROBE_LIST_80
#undef STROBE_NEXT_80
#undef STROBE_OUTS_96
#undef STROBE_LIST_96
#undef STROBE_NEXT_96
#undef STROBE_OUTS_112
#undef STROBE_LIST_112
#undef STROBE_NEXT_112
#undef STROBE_OUTS_128
#undef STROBE_LIST_128
#undef STROBE_NEXT_128
#undef STROBE_OUTS_144
#undef STROBE_LIST_144
#undef STROBE_NEXT_144
#undef STROBE_OUTS_160
#undef STROBE_LIST_160
#undef STROBE_NEXT_160
#undef STROBE_OUTS_176
#undef STROBE_LIST_176
#undef STROBE_NEXT_176
#undef STROBE_OUTS_192
#undef STROBE_LIST_192
#undef STROBE_NEXT_192
#undef STROBE_OUTS_208
#undef STROBE_LIST_208
#undef STROBE_NEXT_208
#undef STROBE_OUTS_224
#undef STROBE_LIST_224
#undef STROBE_NEXT_224
#undef STROBE_OUTS_240
#undef STROBE_LIST_240
#undef STROBE_NEXT_240
#undef STROBE_OUTS_256
#undef STROBE_LIST_256
#undef STROBE_NEXT_256
#undef STROBE_OUT8
#undef STROBE_OUT

} // namespace strobe
