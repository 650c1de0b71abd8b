target_sources(strobe_core PRIVATE
  ${CMAKE_CURRENT_LIST_DIR}/driver/device.cpp
  ${CMAKE_CURRENT_LIST_DIR}/driver/driver.cpp
  ${CMAKE_CURRENT_LIST_DIR}/driver/fork.cpp
  ${CMAKE_CURRENT_LIST_DIR}/driver/stream.cpp
  ${CMAKE_CURRENT_LIST_DIR}/compile/build.cpp
  ${CMAKE_CURRENT_LIST_DIR}/compile/cache.cpp
  ${CMAKE_CURRENT_LIST_DIR}/compile/headers.cpp
  ${CMAKE_CURRENT_LIST_DIR}/compile/info.cpp
  ${CMAKE_CURRENT_LIST_DIR}/compile/jit.cpp
  ${CMAKE_CURRENT_LIST_DIR}/compile/launch.cpp
  ${CMAKE_CURRENT_LIST_DIR}/compile/nvrtc.cpp
  ${CMAKE_CURRENT_LIST_DIR}/compile/own_file.cpp
  ${CMAKE_CURRENT_LIST_DIR}/compile/sha256.cpp
  ${CMAKE_CURRENT_LIST_DIR}/program/addresses.cpp
  ${CMAKE_CURRENT_LIST_DIR}/program/arguments.cpp
  ${CMAKE_CURRENT_LIST_DIR}/program/engine.cpp
  ${CMAKE_CURRENT_LIST_DIR}/program/part.cpp
  ${CMAKE_CURRENT_LIST_DIR}/program/passes.cpp
  ${CMAKE_CURRENT_LIST_DIR}/program/prediction.cpp
  ${CMAKE_CURRENT_LIST_DIR}/program/prewarm.cpp
  ${CMAKE_CURRENT_LIST_DIR}/program/program.cpp
  ${CMAKE_CURRENT_LIST_DIR}/program/tensor_maps.cpp
  ${CMAKE_CURRENT_LIST_DIR}/program/tuning.cpp
  ${CMAKE_CURRENT_LIST_DIR}/families/engines.cpp
  ${CMAKE_CURRENT_LIST_DIR}/families/ladder.cpp
  ${CMAKE_CURRENT_LIST_DIR}/families/mma.cpp
  ${CMAKE_CURRENT_LIST_DIR}/families/mma_backward.cpp
  ${CMAKE_CURRENT_LIST_DIR}/families/simt.cpp
  ${CMAKE_CURRENT_LIST_DIR}/families/sm90.cpp
  ${CMAKE_CURRENT_LIST_DIR}/families/sm90_backward.cpp
  ${CMAKE_CURRENT_LIST_DIR}/families/sm90_backward_forms.cpp
  ${CMAKE_CURRENT_LIST_DIR}/families/sm90_backward_work.cpp
  ${CMAKE_CURRENT_LIST_DIR}/families/sm90_mask.cpp
  ${CMAKE_CURRENT_LIST_DIR}/families/sm90_tiles.cpp
  ${CMAKE_CURRENT_LIST_DIR}/families/tf32.cpp)

# Writes a C++ file that holds every header below the folders given, under its name there.
function(strobe_embed_headers output)
  set(list "")
  set(files "")
  foreach(root IN LISTS ARGN)
    file(GLOB_RECURSE names CONFIGURE_DEPENDS RELATIVE ${root} ${root}/*.h)
    foreach(name IN LISTS names)
      list(APPEND files ${root}/${name})
      string(APPEND list "${name}=${root}/${name}\n")
    endforeach()
  endforeach()
  file(CONFIGURE OUTPUT ${output}.txt CONTENT "${list}" @ONLY)
  add_custom_command(
    OUTPUT ${output}
    COMMAND ${CMAKE_COMMAND} -D LIST=${output}.txt -D OUTPUT=${output} -P ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/compile/embed.cmake
    DEPENDS ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/compile/embed.cmake ${output}.txt ${files}
    COMMENT "Embedding the headers of kernels/"
    VERBATIM)
endfunction()

strobe_embed_headers(${PROJECT_BINARY_DIR}/kernel_headers.cpp ${PROJECT_SOURCE_DIR}/kernels)
target_sources(strobe_core PRIVATE ${PROJECT_BINARY_DIR}/kernel_headers.cpp)
