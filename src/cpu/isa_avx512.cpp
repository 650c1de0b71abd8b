#define STROBE_ISA avx512
#define STROBE_VECTOR_BYTES 64
#include "fma_table.h"
