// SPDX-License-Identifier: Apache-2.0
// The opcodes with which a pickle would import, call or look up things: they make nodes that say
// so. And those that frame the pickle.
#include <fmt/format.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "layout/pickle_machine.h"
#include "layout/pickle_rebuild.h"

namespace fastpersist::layout {
namespace {

using Kind = PickleNode::Kind;
using Machine = PickleMachine;
using Argument = PickleArgument;

constexpr std::uint64_t kHighestProtocol = 5;

// A node that may be called: an imported name, or what nobody here knows.
bool CheckCallable(Machine& machine, NodeId node) {
  const Kind kind = machine.builder.KindOf(node);
  if (kind == Kind::kGlobal || kind == Kind::kOpaque) return true;
  return machine.Fail("what it would call is no function or class");
}

bool PushAffordable(Machine& machine, NodeId node) {
  if (machine.builder.exhausted()) return machine.Fail("the pickle unfolds to far more than it is");
  return machine.Push(node);
}

bool PushCall(Machine& machine, NodeId callable, std::span<const NodeId> arguments) {
  if (!CheckCallable(machine, callable)) return false;
  return PushAffordable(machine, BuildCall(machine.builder, callable, arguments));
}

// Replaces a callable and its arguments on the stack by the result.
bool Call(Machine& machine) {
  NodeId arguments = kNoNode;
  NodeId callable = kNoNode;
  if (!machine.Pop(arguments) || !machine.Pop(callable)) return false;
  const Kind kind = machine.builder.KindOf(arguments);
  if (kind == Kind::kTuple || kind == Kind::kSize) {
    NodeId result = kNoNode;
    if (!PushCall(machine, callable, machine.builder.at(arguments).items)) return false;
    if (!machine.Top(result)) return false;
    RecycleArguments(machine.builder, arguments, result);
    return true;
  }
  // A subclass of tuple, for instance.
  if (kind == Kind::kOpaque) return PushCall(machine, callable, {&arguments, 1});
  return machine.Fail("the arguments are no tuple");
}

bool NewObjEx(Machine& machine) {
  NodeId keywords = kNoNode;
  if (!machine.Pop(keywords)) return false;
  const Kind kind = machine.builder.KindOf(keywords);
  if (kind != Kind::kDict && kind != Kind::kOpaque) {
    return machine.Fail("the keyword arguments are no dict");
  }
  if (kind == Kind::kDict && machine.builder.at(keywords).items.empty()) return Call(machine);
  NodeId arguments = kNoNode;
  NodeId callable = kNoNode;
  if (!machine.Pop(arguments) || !machine.Pop(callable)) return false;
  if (!CheckCallable(machine, callable)) return false;
  const NodeId both[] = {arguments, keywords};
  // No more of it than is kept: the same callable may be used many times.
  const std::string name =
      machine.builder.at(callable).text.substr(0, PickleBuilder::kLongestOpaque + 1);
  return PushAffordable(machine, machine.builder.Opaque(name, both));
}

bool PushGlobal(Machine& machine, std::string_view module, std::string_view name) {
  std::string text;
  text.reserve(module.size() + 1 + name.size());
  text.append(module).append(" ").append(name);
  return machine.Push(machine.builder.AddText(Kind::kGlobal, std::move(text)));
}

bool TakeGlobal(Machine& machine) {
  std::string_view module;
  std::string_view name;
  return machine.TakeLine(module) && machine.TakeLine(name) && PushGlobal(machine, module, name);
}

bool StackGlobal(Machine& machine) {
  NodeId name = kNoNode;
  NodeId module = kNoNode;
  if (!machine.Pop(name) || !machine.Pop(module)) return false;
  PickleBuilder& builder = machine.builder;
  if (!builder.Is(name, Kind::kText) || !builder.Is(module, Kind::kText)) {
    return machine.Fail("module and name are no text");
  }
  if (!builder.Charge(builder.at(module).text.size() + builder.at(name).text.size())) {
    return PushAffordable(machine, kNoNode);
  }
  return PushGlobal(machine, builder.at(module).text, builder.at(name).text);
}

// mark, class, arguments ...
bool Object(Machine& machine) {
  std::size_t count = 0;
  std::span<const NodeId> nodes;
  if (!machine.Unmark(count)) return false;
  if (count == 0) return machine.Fail("there is no class above the mark");
  if (!machine.Peek(count, nodes)) return false;
  const std::vector<NodeId> parts(nodes.begin(), nodes.end());
  machine.Drop(count);
  return PushCall(machine, parts.front(), std::span(parts).subspan(1));
}

bool Instance(Machine& machine) {
  std::size_t count = 0;
  std::span<const NodeId> nodes;
  if (!machine.Unmark(count) || !machine.Peek(count, nodes)) return false;
  const std::vector<NodeId> arguments(nodes.begin(), nodes.end());
  machine.Drop(count);
  NodeId callable = kNoNode;
  return TakeGlobal(machine) && machine.Pop(callable) && PushCall(machine, callable, arguments);
}

bool Build(Machine& machine) {
  NodeId state = kNoNode;
  NodeId object = kNoNode;
  if (!machine.Pop(state) || !machine.Top(object)) return false;
  PickleNode& node = machine.builder.at(object);
  if (node.kind != Kind::kOpaque && node.kind != Kind::kOrderedDict && node.kind != Kind::kTensor &&
      node.kind != Kind::kParameter) {
    return machine.Fail("what it would give attributes to cannot have any");
  }
  node.attributes = state;
  return true;
}

bool PersistentLine(Machine& machine) {
  std::string_view line;
  if (!machine.TakeLine(line)) return false;
  const NodeId id = machine.builder.AddText(Kind::kText, std::string(line));
  return PushAffordable(machine, BuildPersistent(machine.builder, id));
}

bool Persistent(Machine& machine) {
  NodeId id = kNoNode;
  if (!machine.Pop(id)) return false;
  return PushAffordable(machine, BuildPersistent(machine.builder, id));
}

template <unsigned kWidth>
bool Extension(Machine& machine) {
  std::uint64_t number = 0;
  if (!machine.TakeUnsigned(kWidth, number)) return false;
  if (number == 0 || number > INT32_MAX) return machine.Fail("an extension has a positive number");
  return PushAffordable(machine, machine.builder.Opaque(fmt::format("extension {}", number), {}));
}

bool Protocol(Machine& machine) {
  std::uint64_t protocol = 0;
  if (!machine.TakeUnsigned(1, protocol)) return false;
  if (protocol <= kHighestProtocol) return true;
  return machine.Fail(fmt::format("protocol {} is not known", protocol));
}

// Says how much to read ahead, which is all here.
bool Frame(Machine& machine) {
  std::uint64_t length = 0;
  if (!machine.TakeUnsigned(8, length)) return false;
  if (length <= machine.left()) return true;
  return machine.Fail(fmt::format("a frame of {} bytes, and {} are left", length, machine.left()));
}

bool OutOfBand(Machine& machine) {
  return machine.Fail("it refers to out-of-band buffers, which no file holds");
}

bool Stop(Machine& machine) {
  machine.Stop();
  return machine.Pop(machine.builder.tree.root);
}

constexpr PickleOpcode kOpcodes[] = {
    {'c', "GLOBAL", TakeGlobal, Argument::kTwoLines},
    {0x93, "STACK_GLOBAL", StackGlobal},
    {'R', "REDUCE", Call},
    {0x81, "NEWOBJ", Call},
    {0x92, "NEWOBJ_EX", NewObjEx},
    {'o', "OBJ", Object},
    {'i', "INST", Instance, Argument::kTwoLines},
    {'b', "BUILD", Build},
    {'P', "PERSID", PersistentLine, Argument::kLine},
    {'Q', "BINPERSID", Persistent},
    {0x82, "EXT1", Extension<1>, Argument::kOne},
    {0x83, "EXT2", Extension<2>, Argument::kTwo},
    {0x84, "EXT4", Extension<4>, Argument::kFour},
    {0x80, "PROTO", Protocol, Argument::kOne},
    {0x95, "FRAME", Frame, Argument::kEight},
    {0x97, "NEXT_BUFFER", OutOfBand},
    {0x98, "READONLY_BUFFER", OutOfBand},
    {'.', "STOP", Stop},
};

}  // namespace

std::span<const PickleOpcode> PickleCallOpcodes() { return kOpcodes; }

}  // namespace fastpersist::layout
