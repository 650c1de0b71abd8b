#include "attention/attention.h"

namespace strobe {

const char *name(DType type) {
  switch (type) {
  case DType::none:
    return "none";
  case DType::f32:
    return "float32";
  case DType::f16:
    return "float16";
  case DType::bf16:
    return "bfloat16";
  case DType::f64:
    return "float64";
  case DType::boolean:
    return "bool";
  case DType::i32:
    return "int32";
  case DType::i64:
    return "int64";
  case DType::i8:
    return "int8";
  case DType::e4m3:
    return "float8_e4m3fn";
  case DType::e5m2:
    return "float8_e5m2";
  case DType::i4x2:
    return "uint8";
  }
  return "unknown";
}

int64_t bytes(DType type) {
  switch (type) {
  case DType::none:
    return 0;
  case DType::boolean:
  case DType::i8:
  case DType::e4m3:
  case DType::e5m2:
  case DType::i4x2:
    return 1;
  case DType::f16:
  case DType::bf16:
    return 2;
  case DType::f32:
  case DType::i32:
    return 4;
  case DType::f64:
  case DType::i64:
    return 8;
  }
  return 0;
}

} // namespace strobe
