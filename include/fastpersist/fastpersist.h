// SPDX-License-Identifier: Apache-2.0
// The public C++ interface of FastPersist in one include.
#pragma once

#include "fastpersist/checkpointer.h"
#include "fastpersist/error.h"
#include "fastpersist/file.h"
#include "fastpersist/options.h"
#include "fastpersist/save.h"
#include "fastpersist/save_info.h"
#include "fastpersist/state.h"
#include "fastpersist/version.h"
