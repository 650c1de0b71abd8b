#include "cuda/program/tensor_maps.h"

#include <algorithm>
#include <cstring>

#include "attention/text.h"
#include "cuda/driver/driver.h"

namespace strobe::cuda {

std::string unmapped(const char *argument, const View &view, int64_t columns) {
  if (!view) return {};
  if (reinterpret_cast<uintptr_t>(view.data) % 16) return text(argument, " does not lie on a 16-byte address");
  if (view.stride[3] != 1 && columns > 1) return text(argument, "'s columns do not lie side by side");
  constexpr const char *axes[] = {"batches", "heads", "rows"};
  for (int a = 0; a < 3; a++)
    if (view.stride[a] < 0 || view.stride[a] * bytes(view.dtype) % 16)
      return text(argument, "'s ", axes[a], " lie ", view.stride[a], " elements apart, no multiple of 16 bytes above 0");
  return {};
}

// How many rows a head has in Q (in K): those of all sequences if these are packed, those of a page if keys are paged.
static int64_t rows_of_queries(const Problem &p) { return p.varlen ? p.total_q : p.seqlen_q; }
static int64_t rows_of_keys(const Problem &p) { return p.page_size ? p.page_size : p.varlen ? p.total_k : p.seqlen_k; }

std::string broadcast_row(std::initializer_list<const View *> of_queries, std::initializer_list<const View *> of_keys, const Problem &p) {
  const auto has_one_row = [](const View *view) { return view->stride[2] == 0; };
  if ((rows_of_queries(p) > 1 && std::ranges::any_of(of_queries, has_one_row)) ||
      (rows_of_keys(p) > 1 && std::ranges::any_of(of_keys, has_one_row)))
    return "a row is broadcast over its sequence";
  return {};
}

namespace {

struct Request {
  const void *data; // a mark; null: no tensor
  uint64_t sizes[4], strides[3];
  uint32_t box, box_heads;
  DType dtype;
};
static_assert(sizeof(Request) <= sizeof(TensorMap));

Request request_in(const TensorMap &map) {
  Request request;
  std::memcpy(&request, &map, sizeof request);
  return request;
}

MappedOperand mapped(const View &view, int64_t columns, int64_t rows, int64_t heads, int64_t batch, int32_t box, int32_t box_heads = 1) {
  MappedOperand operand{};
  operand.head_step = view.stride[1] != 0, operand.batch_step = view.stride[0] != 0;
  columns = columns * bytes(view.dtype) / 2;                      // quantised numbers are copied as if they were of 16 bits
  const uint64_t unused = uint64_t((columns * 2 + 15) / 16 * 16); // the stride of an axis of size 1
  Request request{
      .data = view.data,
      .sizes = {uint64_t(columns), uint64_t(rows), uint64_t(operand.head_step ? heads : 1), uint64_t(operand.batch_step ? batch : 1)},
      .strides = {},
      .box = uint32_t(box),
      .box_heads = uint32_t(box_heads),
      .dtype = view.dtype};
  for (int a = 0; a < 3; a++) request.strides[a] = view.stride[2 - a] ? uint64_t(view.stride[2 - a] * bytes(view.dtype)) : unused; // bytes
  std::memcpy(&operand.map, &request, sizeof request);
  return operand;
}

} // namespace

MappedOperand mapped_queries(const Problem &p, const View &view, int64_t columns, int32_t box, int32_t box_heads) {
  return mapped(view, columns, rows_of_queries(p), p.heads, p.batch, box, box_heads);
}

MappedOperand mapped_keys(const Problem &p, const View &view, int64_t columns, int32_t box) {
  return mapped(view, columns, rows_of_keys(p), p.heads_kv, p.page_size ? p.pages : p.batch, box);
}

bool maps_bias(const Problem &p) { return p.bias && p.bias.dtype == p.dtype && unmapped("bias", p.bias, p.seqlen_k).empty(); }

MappedOperand mapped_bias(const Problem &p, int32_t box) {
  if (p.bias.stride[2] == 0) return mapped(p.bias, p.seqlen_k, 1, p.heads, p.batch, 1);
  return mapped(p.bias, p.seqlen_k, p.seqlen_q, p.heads, p.batch, box);
}

bool is_request(const TensorMap &map) { return request_in(map).data; }

void encode(TensorMap &map, const Addresses &addresses) {
  const Request r = request_in(map);
  const uint32_t boxes[4] = {64, r.box, r.box_heads, 1}, steps[4] = {1, 1, 1, 1};
  constexpr int kFloat16 = 6, kBfloat16 = 9, kSwizzle128 = 3, kPromote256 = 3;
  CUtensorMap encoded; // the driver's type may need a higher alignment than a kernel's arguments have
  check(driver()->cuTensorMapEncodeTiled(&encoded, r.dtype == DType::bf16 ? kBfloat16 : kFloat16, 4, addresses.of(r.data), r.sizes,
                                         r.strides, boxes, steps, 0, kSwizzle128, kPromote256, 0),
        "cuTensorMapEncodeTiled");
  static_assert(sizeof map == sizeof encoded);
  std::memcpy(&map, &encoded, sizeof map);
}

} // namespace strobe::cuda
