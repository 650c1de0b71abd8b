// wgmma: D (64 x N) (+)= A (64 x K) B (K x N) of a warpgroup, K 16, or 32 for FP8, in fp32. Each warp computes its own 16 rows by itself.
// Lane 4g + t of warp w holds columns 2t and 2t + 1 of every eight columns, in rows 16w + g and 16w + g + 8.
#include <charconv>
#include <cmath>
#include <cstring>

#include "async.h"
#include "tile.h"

namespace strobe::emulator {
namespace {

constexpr uint32_t kRows = 16, kMostDepth = 32; // rows of a warp; depth of an instruction of 8 bits
constexpr uint32_t kPiece = 16;                 // bytes that lie together, whatever the swizzle

struct Form {
  uint32_t columns, bytes, depth; // bytes of a number of A and B
  float (*to_float)(uint16_t);
  bool a_in_registers, mn_major_a, mn_major_b;
};
using SharedMatrix = float[kMostDepth][256];

// Where an operand lies in shared memory, in rows of 128 bytes that are swizzled.
struct Descriptor {
  uint32_t begin, leading, stride;
  explicit Descriptor(uint64_t bits)
      : begin(static_cast<uint32_t>(bits & 0x3FFF) << 4), leading(static_cast<uint32_t>(bits >> 16 & 0x3FFF) << 4),
        stride(static_cast<uint32_t>(bits >> 32 & 0x3FFF) << 4) {
    if (bits >> 62 != 1 || (bits >> 49 & 7) != 0)
      throw Fault("a wgmma descriptor whose swizzle is not 128 bytes wide from a multiple of 1024");
  }
};

// Reads the rows of A, or the columns of B, from `first` to first + count. A piece is 8 adjacent numbers.
void read(const Warp &warp, const Form &form, uint64_t bits, bool mn_major, uint32_t first, uint32_t count, SharedMatrix &x) {
  const Descriptor d(bits);
  auto piece = [&](uint32_t linear) {
    std::array<uint8_t, kPiece> stored;
    std::memcpy(stored.data(), warp.shared(swizzled(d.begin + linear), kPiece, kPiece, Access::kAsyncRead, 0), kPiece);
    std::array<uint16_t, kPiece> numbers{};
    for (uint32_t i = 0; i < kPiece / form.bytes; i++) std::memcpy(&numbers[i], &stored[i * form.bytes], form.bytes);
    return numbers;
  };
  if (d.begin % 1024 > (mn_major ? 0 : 96))
    throw Fault("a wgmma operand begins " + std::to_string(d.begin % 1024) + " bytes after a multiple of 1024");
  if (mn_major) {
    for (uint32_t k = 0; k < form.depth; k++)
      for (uint32_t n = 0; n < count; n += 8) {
        const uint32_t at = first + n;
        const auto halves = piece(at / 64 * d.leading + at % 64 * 2 + k / 8 * d.stride + k % 8 * 128);
        for (uint32_t i = 0; i < 8; i++) x[k][n + i] = form.to_float(halves[i]);
      }
  } else {
    for (uint32_t n = 0; n < count; n++)
      for (uint32_t k = 0; k < form.depth; k += kPiece / form.bytes) {
        const uint32_t at = first + n;
        const auto numbers = piece(at / 8 * d.stride + at % 8 * 128 + k * form.bytes);
        for (uint32_t i = 0; i < kPiece / form.bytes; i++) x[k + i][n] = form.to_float(numbers[i]);
      }
  }
}
void read(const Warp &warp, const Form &form, const std::vector<Operand> &registers, SharedMatrix &a) {
  for (uint32_t lane = 0; lane < kLanes; lane++)
    for (uint32_t i = 0; i < 4; i++) {
      const auto word = static_cast<uint32_t>(warp.value(registers[i], lane));
      const uint32_t each = 4 / form.bytes, row = lane / 4 + 8 * (i % 2), k = each * (lane % 4 + 4 * (i / 2));
      for (uint32_t n = 0; n < each; n++) a[k + n][row] = form.to_float(static_cast<uint16_t>(word >> 8 * form.bytes * n));
    }
}

// A sum as Hopper's tensor cores add FP8: all addends are cut off 13 bits below the leading bit of the largest.
float truncated_sum(const SharedMatrix &a, const SharedMatrix &b, uint32_t m, uint32_t n, uint32_t depth, float before) {
  float most = std::fabs(before);
  for (uint32_t k = 0; k < depth; k++) most = std::fmax(most, std::fabs(a[k][m] * b[k][n]));
  int exponent;
  std::frexp(most, &exponent); // most < 2^exponent
  const auto cut = [&](float x) {
    return std::isfinite(x) ? std::ldexp(std::trunc(std::ldexp(double(x), 14 - exponent)), exponent - 14) : x;
  };
  double sum = cut(before);
  for (uint32_t k = 0; k < depth; k++) sum += cut(a[k][m] * b[k][n]);
  return static_cast<float>(sum);
}

struct Sources {
  uint64_t a, b;
  bool accumulate;
  SharedMatrix in_registers; // A, if it lies in registers; read when the instruction is issued
};

void perform(const Warp &warp, const Form &form, const std::vector<Operand> &sums, const Sources &from) {
  SharedMatrix a_read, b;
  if (!form.a_in_registers) read(warp, form, from.a, form.mn_major_a, warp.index % 4 * kRows, kRows, a_read);
  read(warp, form, from.b, form.mn_major_b, 0, form.columns, b);
  const SharedMatrix &a = form.a_in_registers ? from.in_registers : a_read;
  float d[kRows][256] = {};
  auto at = [&](size_t i, uint32_t lane) -> float & { return d[lane / 4 + 8 * (i / 2 % 2)][i / 4 * 8 + lane % 4 * 2 + i % 2]; };
  if (from.accumulate)
    for (size_t i = 0; i < sums.size(); i++)
      for (uint32_t lane = 0; lane < kLanes; lane++) at(i, lane) = std::bit_cast<float>(warp.words(sums[i])[lane]);
  if (form.bytes == 1 && warp.block.grid.machine.few_bits) {
    for (uint32_t m = 0; m < kRows; m++)
      for (uint32_t n = 0; n < form.columns; n++) d[m][n] = truncated_sum(a, b, m, n, form.depth, d[m][n]);
  } else {
    for (uint32_t m = 0; m < kRows; m++)
      for (uint32_t k = 0; k < form.depth; k++)
        for (uint32_t n = 0; n < form.columns; n++) d[m][n] += a[k][m] * b[k][n];
  }
  for (size_t i = 0; i < sums.size(); i++)
    for (uint32_t lane = 0; lane < kLanes; lane++) warp.words(sums[i])[lane] = std::bit_cast<uint32_t>(at(i, lane));
}

// Operands: {sums}, A, the descriptor of B, whether to add to the sums, the signs of A and B, {whether A is MN-major,} whether B is.
Tile multiply(const Form &form, const Operands &operands) {
  return [=](Warp &warp, uint32_t lanes) {
    check_whole(lanes);
    const uint32_t accumulate = warp.predicate(operands[3]);
    if (accumulate && ~accumulate) throw Fault("wgmma: lanes differ in whether they add to the sums");
    auto from = std::make_shared<Sources>();
    from->b = warp.value(operands[2], 0), from->accumulate = accumulate;
    if (form.a_in_registers)
      read(warp, form, operands[1].parts, from->in_registers);
    else
      from->a = warp.value(operands[1], 0);
    if (warp.block.grid.machine.late)
      warp.async->products.push_back(
          {warp.async->product_groups, [form, from, &sums = operands[0].parts](const Warp &w) { perform(w, form, sums, *from); }});
    else
      perform(warp, form, operands[0].parts, *from);
  };
}
Tile commit() {
  return [](Warp &warp, uint32_t) { warp.async->product_groups++; };
}
Tile wait(uint64_t pending) {
  return [=](Warp &warp, uint32_t lanes) {
    check_whole(lanes);
    WarpAsync &async = *warp.async;
    const auto later = std::ranges::find_if(async.products, [&](const Product &p) { return p.group + pending >= async.product_groups; });
    for (auto p = async.products.begin(); p != later; ++p) p->perform(warp);
    async.products.erase(async.products.begin(), later);
  };
}

bool is_one(const Operand &o) { return o.kind == Operand::kImmediate && static_cast<int32_t>(o.value) == 1; }

Tile decode_product(std::string_view opcode, std::string_view shape, const Operands &operands) {
  Form form{};
  const char *end = std::from_chars(shape.data(), shape.data() + shape.size(), form.columns).ptr;
  const std::string_view types(end, static_cast<size_t>(shape.data() + shape.size() - end));
  form.bytes = 2;
  if (types == "k16.f32.f16.f16")
    form.to_float = from_half;
  else if (types == "k16.f32.bf16.bf16")
    form.to_float = from_bfloat;
  else if (types == "k32.f32.e4m3.e4m3")
    form.to_float = [](uint16_t x) { return from_half(half_of_e4m3(static_cast<uint8_t>(x))); }, form.bytes = 1;
  else
    unsupported(opcode);
  form.depth = 32 / form.bytes;
  form.a_in_registers = operands.size() > 1 && operands[1].kind == Operand::kVector;
  const size_t majors = form.bytes == 1 ? 0 : form.a_in_registers ? 1 : 2; // operands of 8 bits are K-major
  if (form.columns % 8 || form.columns > 256 || operands.size() != 6 + majors || operands[0].parts.size() != form.columns / 2 ||
      (form.a_in_registers && operands[1].parts.size() != 4) || !is_one(operands[4]) || !is_one(operands[5]))
    unsupported(opcode);
  form.mn_major_a = majors == 2 && operands[6].value;
  form.mn_major_b = majors && operands.back().value;
  return multiply(form, operands);
}

} // namespace

void products_end(Warp &warp) {
  if (!warp.async->products.empty()) throw Fault("a warp ends before it has waited for its wgmma");
}

Tile decode_wgmma(std::string_view opcode, const Operands &operands) {
  constexpr std::string_view kProduct = "wgmma.mma_async.sync.aligned.m64n";
  if (!opcode.starts_with("wgmma.")) return {};
  if (opcode.starts_with(kProduct)) return decode_product(opcode, opcode.substr(kProduct.size()), operands);
  if (opcode == "wgmma.fence.sync.aligned") return [](Warp &, uint32_t lanes) { check_whole(lanes); };
  if (opcode == "wgmma.commit_group.sync.aligned") return commit();
  if (opcode == "wgmma.wait_group.sync.aligned") return wait(operands[0].value);
  unsupported(opcode);
}

} // namespace strobe::emulator
