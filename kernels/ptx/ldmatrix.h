// Access to shared memory by 32-bit addresses. ldmatrix loads four 8x8 matrices of 16-bit elements; lane 8i + r gives the address of row r
// of matrix i.
#pragma once
#include "../attention/base.h"

namespace strobe {

__device__ __forceinline__ u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void ldmatrix(u32 (&x)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address));
}
// Loads two matrices; lanes 0 to 15 give the addresses of their rows.
__device__ __forceinline__ void ldmatrix(u32 (&x)[2], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];" : "=r"(x[0]), "=r"(x[1]) : "r"(address));
}
__device__ __forceinline__ void ldmatrix_transposed(u32 (&x)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "r"(address));
}
// Stores four matrices to the addresses from which ldmatrix() would load them.
__device__ __forceinline__ void stmatrix(u32 address, const u32 (&x)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}
// stmatrix() with each matrix transposed.
__device__ __forceinline__ void stmatrix_transposed(u32 address, const u32 *x) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x[0]), "r"(x[1]), "r"(x[2]),
               "r"(x[3])
               : "memory");
}
// Transposes an 8x8 matrix in a warp's registers. Lane 4r + t holds columns 2t and 2t + 1 of row r.
__device__ __forceinline__ u32 transposed(u32 x) {
  u32 y;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
  return y;
}

__device__ __forceinline__ void store_shared(u32 address, u32 x) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}
__device__ __forceinline__ void store_shared(u32 address, const u32 (&x)[4]) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
}
template <int kOffset> __device__ __forceinline__ void load_shared(float (&x)[4], u32 address) {
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4 + %5];"
               : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
               : "r"(address), "n"(kOffset)
               : "memory");
}
__device__ __forceinline__ void store_shared(u32 address, const float (&x)[4]) {
  asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]) : "memory");
}
__device__ __forceinline__ void load_shared(u32 (&x)[4], u32 address) {
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];" : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(address) : "memory");
}
__device__ __forceinline__ u32 load_shared(u32 address) {
  u32 x;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(address) : "memory");
  return x;
}
// Loads a byte from memory that nothing writes during the launch.
__device__ __forceinline__ u32 load_global_byte(const u8 *address) {
  u32 x;
  asm volatile("ld.global.nc.u8 %0, [%1];" : "=r"(x) : "l"(address) : "memory");
  return x;
}
// The same for a number. The compiler does not move the load to where its result is used.
__device__ __forceinline__ float load_global_now(const float *address) {
  float x;
  asm volatile("ld.global.nc.f32 %0, [%1];" : "=f"(x) : "l"(address));
  return x;
}
__device__ __forceinline__ void store_global(void *address, u32 x, u32 y) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(address), "r"(x), "r"(y) : "memory");
}
// Stores x and y if at < end, without a branch.
__device__ __forceinline__ void store_global_below(int at, int end, void *address, u32 x, u32 y) {
  asm volatile("{\n.reg .pred p;\nsetp.lt.s32 p, %0, %1;\n@p st.global.v2.b32 [%2], {%3, %4};\n}" ::"r"(at), "r"(end), "l"(address), "r"(x),
               "r"(y)
               : "memory");
}
__device__ __forceinline__ void load_shared(float (&x)[2], u32 address) {
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(x[0]), "=f"(x[1]) : "r"(address) : "memory");
}
__device__ __forceinline__ void store_shared(u32 address, const float (&x)[2]) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(x[0]), "f"(x[1]) : "memory");
}
__device__ __forceinline__ void load_shared(u32 &x, u32 &y, u32 address) {
  asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(x), "=r"(y) : "r"(address) : "memory");
}
__device__ __forceinline__ float load_shared_float(u32 address) {
  float x;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(x) : "r"(address) : "memory");
  return x;
}
__device__ __forceinline__ void store_global(void *address, const u32 (&x)[4]) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
}

} // namespace strobe
