target_sources(strobe_core PRIVATE
  ${CMAKE_CURRENT_LIST_DIR}/arguments.cpp
  ${CMAKE_CURRENT_LIST_DIR}/build.cpp
  ${CMAKE_CURRENT_LIST_DIR}/cache.cpp
  ${CMAKE_CURRENT_LIST_DIR}/device.cpp
  ${CMAKE_CURRENT_LIST_DIR}/driver.cpp
  ${CMAKE_CURRENT_LIST_DIR}/engine.cpp
  ${CMAKE_CURRENT_LIST_DIR}/engines.cpp
  ${CMAKE_CURRENT_LIST_DIR}/fork.cpp
  ${CMAKE_CURRENT_LIST_DIR}/headers.cpp
  ${CMAKE_CURRENT_LIST_DIR}/info.cpp
  ${CMAKE_CURRENT_LIST_DIR}/jit.cpp
  ${CMAKE_CURRENT_LIST_DIR}/json.cpp
  ${CMAKE_CURRENT_LIST_DIR}/ladder.cpp
  ${CMAKE_CURRENT_LIST_DIR}/launch.cpp
  ${CMAKE_CURRENT_LIST_DIR}/mma.cpp
  ${CMAKE_CURRENT_LIST_DIR}/mma_backward.cpp
  ${CMAKE_CURRENT_LIST_DIR}/nvrtc.cpp
  ${CMAKE_CURRENT_LIST_DIR}/own_file.cpp
  ${CMAKE_CURRENT_LIST_DIR}/prediction.cpp
  ${CMAKE_CURRENT_LIST_DIR}/rows.cpp
  ${CMAKE_CURRENT_LIST_DIR}/sha256.cpp
  ${CMAKE_CURRENT_LIST_DIR}/simt.cpp
  ${CMAKE_CURRENT_LIST_DIR}/sm90.cpp
  ${CMAKE_CURRENT_LIST_DIR}/sm90_backward.cpp
  ${CMAKE_CURRENT_LIST_DIR}/stream.cpp
  ${CMAKE_CURRENT_LIST_DIR}/tensor_maps.cpp
  ${CMAKE_CURRENT_LIST_DIR}/tf32.cpp
  ${CMAKE_CURRENT_LIST_DIR}/tile_gradient.cpp
  ${CMAKE_CURRENT_LIST_DIR}/tuning.cpp)

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
    COMMAND ${CMAKE_COMMAND} -D LIST=${output}.txt -D OUTPUT=${output} -P ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/embed.cmake
    DEPENDS ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/embed.cmake ${output}.txt ${files}
    COMMENT "Embedding the headers of kernels/"
    VERBATIM)
endfunction()

strobe_embed_headers(${PROJECT_BINARY_DIR}/kernel_headers.cpp ${PROJECT_SOURCE_DIR}/kernels)
target_sources(strobe_core PRIVATE ${PROJECT_BINARY_DIR}/kernel_headers.cpp)
