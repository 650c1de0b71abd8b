strobe_sources(driver
  driver/device.cpp
  driver/driver.cpp
  driver/fork.cpp
  driver/stream.cpp
  compile/build.cpp
  compile/cache.cpp
  compile/headers.cpp
  compile/info.cpp
  compile/jit.cpp
  compile/launch.cpp
  compile/nvrtc.cpp
  compile/own_file.cpp
  compile/sha256.cpp)
strobe_sources(program
  program/addresses.cpp
  program/ahead.cpp
  program/arguments.cpp
  program/captured.cpp
  program/dequantise.cpp
  program/engine.cpp
  program/lists.cpp
  program/queries.cpp
  program/mask_blocks.cpp
  program/part.cpp
  program/passes.cpp
  program/prediction.cpp
  program/prewarm.cpp
  program/program.cpp
  program/tensor_maps.cpp
  program/tuning.cpp)
# Families define different types with the same names, above all Config. So no unity group has files of two families, and files outside
# groups are compiled one by one.
strobe_sources(sm90
  families/engines.cpp
  families/sm90.cpp
  families/sm90_mask.cpp
  families/sm90_tiles.cpp)
strobe_sources(sm90_backward
  families/sm90_backward.cpp
  families/sm90_backward_forms.cpp
  families/sm90_backward_work.cpp)
target_sources(strobe_core PRIVATE
  ${CMAKE_CURRENT_LIST_DIR}/families/ladder.cpp
  ${CMAKE_CURRENT_LIST_DIR}/families/mma.cpp
  ${CMAKE_CURRENT_LIST_DIR}/families/mma_backward.cpp
  ${CMAKE_CURRENT_LIST_DIR}/families/simt.cpp
  ${CMAKE_CURRENT_LIST_DIR}/families/sm90_latent.cpp
  ${CMAKE_CURRENT_LIST_DIR}/families/tf32.cpp)

# Writes a C++ file that holds every header below the given folders, under its name there.
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
