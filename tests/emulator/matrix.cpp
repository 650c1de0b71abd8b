// Matrices of 8 rows and columns of 16 bits in a warp's registers: lane 4r + t holds the elements 2t and 2t + 1 of row r. mma.sync
// multiplies them.
#include <cstring>

#include "tile.h"

namespace strobe::emulator {
namespace {

using Matrix = uint16_t[8][8];

void to_registers(const Matrix &m, bool transposed, uint32_t *words) {
  for (uint32_t lane = 0; lane < kLanes; lane++) {
    const uint32_t r = lane / 4, c = lane % 4 * 2;
    words[lane] = transposed ? m[c][r] | uint32_t(m[c + 1][r]) << 16 : m[r][c] | uint32_t(m[r][c + 1]) << 16;
  }
}
void from_registers(const uint32_t *words, bool transposed, Matrix &m) {
  for (uint32_t lane = 0; lane < kLanes; lane++) {
    const uint32_t r = lane / 4, c = lane % 4 * 2;
    (transposed ? m[c][r] : m[r][c]) = static_cast<uint16_t>(words[lane]);
    (transposed ? m[c + 1][r] : m[r][c + 1]) = static_cast<uint16_t>(words[lane] >> 16);
  }
}
// Lane 8i + r gives the address of row r of matrix i.
std::byte *row(const Warp &warp, const Operand &address, size_t i, uint32_t r, Access access) {
  return warp.shared(warp.value(address, static_cast<uint32_t>(8 * i + r)), sizeof(uint16_t[8]), 16, access, 1);
}

Tile load(const std::vector<Operand> &registers, const Operand &address, bool transposed) {
  return [=](Warp &warp, uint32_t lanes) {
    check_whole(lanes);
    Matrix m[4];
    for (size_t i = 0; i < registers.size(); i++)
      for (uint32_t r = 0; r < 8; r++) std::memcpy(m[i][r], row(warp, address, i, r, Access::kRead), sizeof m[i][r]);
    for (size_t i = 0; i < registers.size(); i++) to_registers(m[i], transposed, warp.words(registers[i]));
  };
}
Tile store(const std::vector<Operand> &registers, const Operand &address, bool transposed) {
  return [=](Warp &warp, uint32_t lanes) {
    check_whole(lanes);
    for (size_t i = 0; i < registers.size(); i++) {
      Matrix m;
      from_registers(warp.words(registers[i]), transposed, m);
      for (uint32_t r = 0; r < 8; r++) std::memcpy(row(warp, address, i, r, Access::kWrite), m[r], sizeof m[r]);
    }
    warp.block.grid.changes++;
  };
}
Tile transpose(const Operand &to, const Operand &from) {
  return [=](Warp &warp, uint32_t lanes) {
    check_whole(lanes);
    Matrix m;
    from_registers(warp.words(from), true, m);
    to_registers(m, false, warp.words(to));
  };
}

using ToFloat = float (*)(uint16_t);
float from_tf32(uint32_t bits) { return std::bit_cast<float>(bits & 0xFFFFE000); }

// D (16 x 8) = A (16 x kInner) B (kInner x 8) + C. A and B have 16 bits: a register holds two elements that are adjacent on the inner axis.
template <uint32_t kInner, ToFloat to_float> struct Pairs {
  static constexpr uint32_t kDepth = kInner, kRegistersA = kInner / 4, kRegistersB = kInner / 8;
  static void read_a(uint32_t lane, uint32_t i, uint32_t word, float (&a)[16][16]) {
    float *at = &a[lane / 4 + 8 * (i % 2)][lane % 4 * 2 + 8 * (i / 2)];
    at[0] = to_float(static_cast<uint16_t>(word)), at[1] = to_float(static_cast<uint16_t>(word >> 16));
  }
  static void read_b(uint32_t lane, uint32_t i, uint32_t word, float (&b)[16][8]) {
    const uint32_t k = lane % 4 * 2 + 8 * i, n = lane / 4;
    b[k][n] = to_float(static_cast<uint16_t>(word)), b[k + 1][n] = to_float(static_cast<uint16_t>(word >> 16));
  }
};
struct Tf32 {
  static constexpr uint32_t kDepth = 8, kRegistersA = 4, kRegistersB = 2;
  static void read_a(uint32_t lane, uint32_t i, uint32_t word, float (&a)[16][16]) {
    a[lane / 4 + 8 * (i % 2)][lane % 4 + 4 * (i / 2)] = from_tf32(word);
  }
  static void read_b(uint32_t lane, uint32_t i, uint32_t word, float (&b)[16][8]) { b[lane % 4 + 4 * i][lane / 4] = from_tf32(word); }
};

template <class Kind> Tile multiply(std::string_view opcode, const Operands &operands) {
  if (operands.size() != 4 || operands[0].parts.size() != 4 || operands[1].parts.size() != Kind::kRegistersA ||
      operands[2].parts.size() != Kind::kRegistersB || operands[3].parts.size() != 4)
    unsupported(opcode);
  return [=](Warp &warp, uint32_t lanes) {
    check_whole(lanes);
    float a[16][16], b[16][8], d[16][8]; // only kDepth of the inner axis are used
    auto at = [&](uint32_t i, uint32_t lane) -> float & { return d[lane / 4 + 8 * (i / 2)][lane % 4 * 2 + i % 2]; };
    for (uint32_t lane = 0; lane < kLanes; lane++) {
      for (uint32_t i = 0; i < Kind::kRegistersA; i++)
        Kind::read_a(lane, i, static_cast<uint32_t>(warp.value(operands[1].parts[i], lane)), a);
      for (uint32_t i = 0; i < Kind::kRegistersB; i++)
        Kind::read_b(lane, i, static_cast<uint32_t>(warp.value(operands[2].parts[i], lane)), b);
      for (uint32_t i = 0; i < 4; i++) at(i, lane) = std::bit_cast<float>(static_cast<uint32_t>(warp.value(operands[3].parts[i], lane)));
    }
    for (auto m = 0; m < 16; m++)
      for (uint32_t k = 0; k < Kind::kDepth; k++)
        for (auto n = 0; n < 8; n++) d[m][n] += a[m][k] * b[k][n];
    for (uint32_t i = 0; i < 4; i++)
      for (uint32_t lane = 0; lane < kLanes; lane++) warp.words(operands[0].parts[i])[lane] = std::bit_cast<uint32_t>(at(i, lane));
  };
}

} // namespace

Tile decode_matrix(std::string_view opcode, const Operands &operands) {
  auto is = [&](std::string_view name) { return opcode == name; };
  if (is("ldmatrix.sync.aligned.m8n8.x2.shared.b16") || is("ldmatrix.sync.aligned.m8n8.x4.shared.b16"))
    return load(operands[0].parts, operands[1], false);
  if (is("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16")) return load(operands[0].parts, operands[1], true);
  if (is("stmatrix.sync.aligned.m8n8.x4.shared.b16")) return store(operands[1].parts, operands[0], false);
  if (is("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16")) return store(operands[1].parts, operands[0], true);
  if (is("movmatrix.sync.aligned.m8n8.trans.b16")) return transpose(operands[0], operands[1]);
  if (is("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32")) return multiply<Pairs<16, from_half>>(opcode, operands);
  if (is("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32")) return multiply<Pairs<16, from_bfloat>>(opcode, operands);
  if (is("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32")) return multiply<Pairs<8, from_half>>(opcode, operands);
  if (is("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32")) return multiply<Tf32>(opcode, operands);
  for (std::string_view family : {"ldmatrix.", "stmatrix.", "movmatrix.", "mma."})
    if (opcode.starts_with(family)) unsupported(opcode);
  return {};
}

} // namespace strobe::emulator
