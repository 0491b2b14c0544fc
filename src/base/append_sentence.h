// SPDX-License-Identifier: Apache-2.0
// Several things to say become one line.
#pragma once

#include <string>
#include <string_view>

namespace fastpersist::base {

/// Adds a sentence without a final period to text, after "; " if there is one already. An empty one
/// adds nothing.
inline void AppendSentence(std::string& text, std::string_view sentence) {
  if (sentence.empty()) return;
  if (!text.empty()) text += "; ";
  text += sentence;
}

}  // namespace fastpersist::base
