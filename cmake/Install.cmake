# SPDX-License-Identifier: Apache-2.0
# `cmake --install` makes find_package(fastpersist) work for other projects, and puts the command
# line program where it is found, with its manual page and its completion for bash.
include(CMakePackageConfigHelpers)

install(TARGETS fastpersist EXPORT fastpersist-targets
        LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR}
        ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR})
install(DIRECTORY include/fastpersist DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(EXPORT fastpersist-targets NAMESPACE fastpersist::
        DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/fastpersist)
configure_package_config_file(cmake/fastpersist-config.cmake.in
        ${PROJECT_BINARY_DIR}/fastpersist-config.cmake
        INSTALL_DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/fastpersist)
# Before 1.0 a minor version may break callers.
write_basic_package_version_file(${PROJECT_BINARY_DIR}/fastpersist-config-version.cmake
        COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/fastpersist-config.cmake
              ${PROJECT_BINARY_DIR}/fastpersist-config-version.cmake
        DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/fastpersist)

if(FASTPERSIST_CLI)
  install(TARGETS fastpersist_cli RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
  install(FILES docs/man/fastpersist.1 DESTINATION ${CMAKE_INSTALL_MANDIR}/man1)
  install(FILES scripts/completion/fastpersist.bash RENAME fastpersist
          DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions)
endif()
