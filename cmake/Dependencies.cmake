# SPDX-License-Identifier: Apache-2.0
# One library a job (docs/adr/0002-dependencies.md). Found through pkg-config or CMake, never fetched.
find_package(Threads REQUIRED)
find_package(fmt REQUIRED)
find_package(nlohmann_json REQUIRED)
find_package(PkgConfig REQUIRED)
pkg_check_modules(URING REQUIRED IMPORTED_TARGET liburing)
pkg_check_modules(ISAL REQUIRED IMPORTED_TARGET libisal)
find_library(AIO_LIBRARY aio REQUIRED)
find_path(AIO_INCLUDE_DIR libaio.h REQUIRED)
find_package(ZLIB REQUIRED)

add_library(fastpersist_dependencies INTERFACE)
target_link_libraries(fastpersist_dependencies INTERFACE PkgConfig::URING PkgConfig::ISAL
                                                         ${AIO_LIBRARY} fmt::fmt-header-only
                                                         nlohmann_json::nlohmann_json ZLIB::ZLIB)
target_include_directories(fastpersist_dependencies INTERFACE ${AIO_INCLUDE_DIR})
