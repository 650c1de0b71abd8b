# Each instruction set is one file compiled for it; the CPU picks at run time (engine.cpp).
set(strobe_kernel_flags -ffp-contract=fast -fno-trapping-math -fno-math-errno -fno-exceptions -fno-rtti)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # These flags are GCC's -O3 without clones of functions and split loops, which take half as much compile time again and make no faster
  # code.
  foreach(flag -O2 -ftree-vectorize -fvect-cost-model=dynamic)
    list(APPEND strobe_kernel_flags $<$<CONFIG:Release>:${flag}>)
  endforeach()
  list(APPEND strobe_kernel_flags -Wno-maybe-uninitialized) # GCC bug 105593: in its own AVX-512 intrinsics
endif()
function(strobe_instruction_set name)
  set(file ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/isa_${name}.cpp)
  target_sources(strobe_core PRIVATE ${file})
  set_source_files_properties(${file} PROPERTIES COMPILE_OPTIONS "${strobe_kernel_flags};${ARGN}")
endfunction()

if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
  set(avx512 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mfma -mf16c -mprefer-vector-width=512)
  strobe_instruction_set(baseline)
  strobe_instruction_set(avx2 -mavx2 -mfma -mf16c)
  if(STROBE_SANITIZE AND NOT STROBE_SANITIZE STREQUAL "address") # the other sets are the same templates, and take GCC minutes with UBSan
    set_source_files_properties(${CMAKE_CURRENT_LIST_DIR}/engine.cpp PROPERTIES COMPILE_DEFINITIONS STROBE_UP_TO_AVX2)
  else()
    strobe_instruction_set(avx512 ${avx512})
    strobe_instruction_set(avx512bf16 ${avx512} -mavx512bf16)
    strobe_instruction_set(amx ${avx512} -mavx512bf16) # AMX's own instructions are inline assembly
  endif()
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "aarch64|arm64|ARM64")
  strobe_instruction_set(neon)
else()
  strobe_instruction_set(baseline)
endif()
