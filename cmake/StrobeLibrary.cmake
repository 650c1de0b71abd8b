# libstrobe and the files that `cmake --install` installs for find_package(strobe).
include(CMakePackageConfigHelpers)

add_library(strobe $<TARGET_OBJECTS:strobe_core>)
add_library(strobe::strobe ALIAS strobe)
target_include_directories(strobe PUBLIC $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/include> $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>)
target_compile_features(strobe INTERFACE c_std_99)
target_link_libraries(strobe PRIVATE Threads::Threads ${CMAKE_DL_LIBS} $<BUILD_INTERFACE:strobe_options>)
set_target_properties(strobe PROPERTIES VERSION ${PROJECT_VERSION} SOVERSION ${PROJECT_VERSION_MAJOR} LINKER_LANGUAGE CXX)

if(BUILD_SHARED_LIBS AND CMAKE_SYSTEM_NAME STREQUAL "Linux")
  set(exports ${PROJECT_SOURCE_DIR}/cmake/strobe.map)
  target_link_options(strobe PRIVATE -Wl,--version-script=${exports} -Wl,--no-undefined-version)
  set_target_properties(strobe PROPERTIES LINK_DEPENDS ${exports})
  # The sanitizers' runtime must see the program's own libstdc++.
  if(NOT STROBE_SANITIZE)
    target_link_options(strobe PRIVATE -static-libstdc++ -static-libgcc)
  endif()
endif()

set(package ${CMAKE_INSTALL_LIBDIR}/cmake/strobe)
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/strobeConfig.cmake.in ${PROJECT_BINARY_DIR}/strobeConfig.cmake
                              INSTALL_DESTINATION ${package})
write_basic_package_version_file(${PROJECT_BINARY_DIR}/strobeConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(TARGETS strobe EXPORT strobeTargets)
install(EXPORT strobeTargets NAMESPACE strobe:: DESTINATION ${package})
install(FILES ${PROJECT_BINARY_DIR}/strobeConfig.cmake ${PROJECT_BINARY_DIR}/strobeConfigVersion.cmake DESTINATION ${package})
install(DIRECTORY ${PROJECT_SOURCE_DIR}/include/strobe DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
