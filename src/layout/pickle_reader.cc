// SPDX-License-Identifier: Apache-2.0
#include "layout/pickle_reader.h"

#include <fmt/format.h>

#include <array>
#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "layout/pickle_machine.h"

namespace fastpersist::layout {
namespace {

using Kind = PickleNode::Kind;
using OpcodeTable = std::array<PickleOpcode, 256>;

// An opcode makes one node, two where its argument is one of its own.
constexpr std::size_t kMaxNodes = kNoNode - 4;

OpcodeTable MakeOpcodeTable() {
  OpcodeTable table{};
  for (const auto group : {PickleScalarOpcodes(), PickleContainerOpcodes(), PickleCallOpcodes()}) {
    for (const PickleOpcode& opcode : group) table[opcode.code] = opcode;
  }
  return table;
}

std::unexpected<Error> Corrupt(std::size_t byte, std::string_view opcode, std::string_view what) {
  Error error;
  error.code = ErrorCode::kCorrupt;
  error.operation = "read";
  error.detail = opcode.empty()
                     ? fmt::format("data.pkl, byte {}: {}", byte, what)
                     : fmt::format("data.pkl, byte {} (opcode {}): {}", byte, opcode, what);
  error.advice = "restore the file from a copy";
  return std::unexpected(std::move(error));
}

// Whether an imported name stands somewhere in the state as a value of its own. Those that are only
// called, or name the type of a storage or tensor, cannot be reached from the root.
bool HoldsGlobal(const PickleTree& tree) {
  std::vector<bool> seen(tree.nodes.size());
  std::vector<NodeId> open;
  const auto visit = [&](NodeId id) {
    if (id == kNoNode || seen[id]) return;
    seen[id] = true;
    open.push_back(id);
  };
  visit(tree.root);
  while (!open.empty()) {
    const PickleNode& node = tree.at(open.back());
    open.pop_back();
    if (node.kind == Kind::kGlobal) return true;
    for (const NodeId item : node.items) visit(item);
    visit(node.attributes);
    if (node.kind == Kind::kTensor || node.kind == Kind::kParameter) {
      visit(tree.tensors[node.detail].hooks);
      visit(tree.tensors[node.detail].metadata);
    }
  }
  return false;
}

}  // namespace

Result<PickleTree> ReadPickle(std::string_view pickle) {
  static const OpcodeTable table = MakeOpcodeTable();
  PickleMachine machine(pickle, FindUse(pickle, table));
  while (!machine.stopped()) {
    const std::size_t byte = machine.position();
    if (machine.left() == 0) return Corrupt(byte, "", "the pickle ends here, without STOP");
    std::string_view code;
    if (!machine.Take(1, code)) return Corrupt(byte, "", machine.failure());
    const PickleOpcode& opcode = table[static_cast<unsigned char>(code[0])];
    if (opcode.run == nullptr) {
      return Corrupt(byte, "",
                     fmt::format("0x{:02x} is no opcode", static_cast<unsigned char>(code[0])));
    }
    if (!opcode.run(machine)) return Corrupt(byte, opcode.name, machine.failure());
    if (machine.builder.tree.nodes.size() > kMaxNodes) {
      return Corrupt(byte, opcode.name, "the pickle has more values than can be numbered");
    }
  }
  if (machine.left() > 0) {
    const std::string what =
        machine.left() == 1 ? "1 byte follows the end of the pickle"
                            : fmt::format("{} bytes follow the end of the pickle", machine.left());
    return Corrupt(machine.position(), "", what);
  }
  PickleTree tree = std::move(machine.builder.tree);
  tree.opaque = tree.opaque || HoldsGlobal(tree);
  return tree;
}

}  // namespace fastpersist::layout
