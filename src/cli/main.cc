// SPDX-License-Identifier: Apache-2.0
// The program `fastpersist`.
#include "cli/app.h"

int main(int argc, char** argv) { return fastpersist::cli::Run(argc, argv); }
