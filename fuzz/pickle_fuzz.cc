// SPDX-License-Identifier: Apache-2.0
// Fuzzes ReadPickle, and the walk over the tree that it makes, with bare pickles. Archives rarely
// let a changed pickle pass their checksum, so this target finds what contents_fuzz cannot.
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "contents_walk.h"
#include "layout/torch_tensors.h"

namespace {

using namespace fastpersist;  // NOLINT(google-build-using-namespace): the whole program

void CheckTree(const layout::PickleTree& tree) {
  const auto exists = [&](layout::NodeId id) { return id < tree.nodes.size(); };
  fuzz::Require(exists(tree.root), "the root exists");
  for (const layout::PickleNode& node : tree.nodes) {
    for (const layout::NodeId item : node.items) fuzz::Require(exists(item), "items exist");
    fuzz::Require(node.attributes == layout::kNoNode || exists(node.attributes),
                  "attributes exist");
    using Kind = layout::PickleNode::Kind;
    if (node.kind == Kind::kStorage) {
      fuzz::Require(node.detail < tree.storages.size(), "a storage has its details");
    }
    if (node.kind == Kind::kTensor || node.kind == Kind::kParameter) {
      fuzz::Require(node.detail < tree.tensors.size(), "a tensor has its details");
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view pickle(reinterpret_cast<const char*>(data), size);
  auto tree = layout::ReadPickle(pickle);
  if (!tree) {
    fuzz::WalkError(tree.error());
    return 0;
  }
  CheckTree(*tree);
  layout::Contents contents;
  contents.pickle = pickle;
  contents.tree = std::move(*tree);
  // Storages that make some of the views fit.
  for (const char* key : {"0", "1", "2", "3"}) {
    contents.storages.push_back({.name = std::string("data/") + key, .size = 24});
  }
  if (auto read = layout::ReadStateTensors(contents, "fuzzed.pt"); !read) {
    fuzz::WalkError(read.error());
    return 0;
  }
  contents.storages.clear();
  for (layout::StoredTensor& tensor : contents.tensors) tensor.storage = layout::kNoStorage;
  fuzz::WalkContents(testing::MemorySource(std::string_view()), std::move(contents));
  return 0;
}
