// SPDX-License-Identifier: Apache-2.0
// The opcodes that make and fill containers, and those that only move things between the stack and
// the memo.
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>
#include <system_error>

#include "layout/pickle_machine.h"

namespace fastpersist::layout {
namespace {

using Kind = PickleNode::Kind;
using Machine = PickleMachine;
using Argument = PickleArgument;

template <Kind kKind>
bool Empty(Machine& machine) {
  return machine.Push(machine.builder.Add(kKind));
}

bool EmptyTuple(Machine& machine) { return machine.Push(machine.builder.EmptyTuple()); }

template <Kind kKind>
bool TakeTop(Machine& machine, std::size_t count) {
  std::span<const NodeId> items;
  if (!machine.Peek(count, items)) return false;
  if (kKind == Kind::kDict && count % 2 != 0) return machine.Fail("a key has no value");
  const NodeId node = machine.builder.AddItems(kKind, items);
  machine.Drop(count);
  return machine.Push(node);
}

template <std::size_t kCount>
bool TupleOf(Machine& machine) {
  return TakeTop<Kind::kTuple>(machine, kCount);
}

template <Kind kKind>
bool SinceMark(Machine& machine) {
  std::size_t count = 0;
  return machine.Unmark(count) && TakeTop<kKind>(machine, count);
}

// What may be filled by which opcodes. Objects of unknown classes may be lists, dicts or sets, and
// keep what they would be given.
bool TakesItems(Kind kind) { return kind == Kind::kList || kind == Kind::kOpaque; }
bool TakesPairs(Kind kind) {
  return kind == Kind::kDict || kind == Kind::kOrderedDict || kind == Kind::kOpaque;
}
bool TakesMembers(Kind kind) { return kind == Kind::kSet || kind == Kind::kOpaque; }

// Moves the count topmost nodes into the container below them.
template <bool (*kTakes)(Kind)>
bool Fill(Machine& machine, std::size_t count) {
  std::span<const NodeId> nodes;
  if (!machine.Peek(count + 1, nodes)) return false;
  PickleNode& container = machine.builder.at(nodes.front());
  if (!kTakes(container.kind)) return machine.Fail("what it would fill is no such container");
  const auto added = nodes.subspan(1);
  container.items.insert(container.items.end(), added.begin(), added.end());
  machine.Drop(count);
  return true;
}

bool Append(Machine& machine) { return Fill<TakesItems>(machine, 1); }
bool SetItem(Machine& machine) { return Fill<TakesPairs>(machine, 2); }

bool Appends(Machine& machine) {
  std::size_t count = 0;
  return machine.Unmark(count) && Fill<TakesItems>(machine, count);
}

bool SetItems(Machine& machine) {
  std::size_t count = 0;
  if (!machine.Unmark(count)) return false;
  if (count % 2 != 0) return machine.Fail("a key has no value");
  return Fill<TakesPairs>(machine, count);
}

bool AddItems(Machine& machine) {
  std::size_t count = 0;
  return machine.Unmark(count) && Fill<TakesMembers>(machine, count);
}

bool Mark(Machine& machine) {
  machine.Mark();
  return true;
}

bool PopMark(Machine& machine) {
  std::size_t count = 0;
  if (!machine.Unmark(count)) return false;
  machine.Drop(count);
  return true;
}

// A mark counts as an item here, as in CPython.
bool Pop(Machine& machine) {
  std::size_t count = 0;
  if (machine.IsMarkOnTop()) return machine.Unmark(count);
  NodeId node = kNoNode;
  return machine.Pop(node);
}

bool Dup(Machine& machine) {
  NodeId node = kNoNode;
  return machine.Top(node) && machine.Push(node);
}

bool TakeNumberLine(Machine& machine, std::uint64_t& number) {
  std::string_view line;
  if (!machine.TakeLine(line)) return false;
  const auto parsed = std::from_chars(line.begin(), line.end(), number);
  if (parsed.ec != std::errc{} || parsed.ptr != line.end()) return machine.Fail("it is no number");
  return true;
}

bool PutLine(Machine& machine) {
  std::uint64_t number = 0;
  return TakeNumberLine(machine, number) && machine.Put(number);
}

bool GetLine(Machine& machine) {
  std::uint64_t number = 0;
  return TakeNumberLine(machine, number) && machine.Get(number);
}

template <unsigned kWidth>
bool Put(Machine& machine) {
  std::uint64_t number = 0;
  return machine.TakeUnsigned(kWidth, number) && machine.Put(number);
}

template <unsigned kWidth>
bool Get(Machine& machine) {
  std::uint64_t number = 0;
  return machine.TakeUnsigned(kWidth, number) && machine.Get(number);
}

bool Memoize(Machine& machine) { return machine.Put(machine.memo_count()); }

constexpr PickleOpcode kOpcodes[] = {
    {']', "EMPTY_LIST", Empty<Kind::kList>},
    {'}', "EMPTY_DICT", Empty<Kind::kDict>},
    {0x8F, "EMPTY_SET", Empty<Kind::kSet>},
    {')', "EMPTY_TUPLE", EmptyTuple},
    {'l', "LIST", SinceMark<Kind::kList>},
    {'d', "DICT", SinceMark<Kind::kDict>},
    {'t', "TUPLE", SinceMark<Kind::kTuple>},
    {0x91, "FROZENSET", SinceMark<Kind::kFrozenSet>},
    {0x85, "TUPLE1", TupleOf<1>},
    {0x86, "TUPLE2", TupleOf<2>},
    {0x87, "TUPLE3", TupleOf<3>},
    {'a', "APPEND", Append},
    {'e', "APPENDS", Appends},
    {'s', "SETITEM", SetItem},
    {'u', "SETITEMS", SetItems},
    {0x90, "ADDITEMS", AddItems},
    {'(', "MARK", Mark},
    {'0', "POP", Pop},
    {'1', "POP_MARK", PopMark},
    {'2', "DUP", Dup},
    {'p', "PUT", PutLine, Argument::kLine},
    {'q', "BINPUT", Put<1>, Argument::kOne},
    {'r', "LONG_BINPUT", Put<4>, Argument::kFour},
    {0x94, "MEMOIZE", Memoize},
    {'g', "GET", GetLine, Argument::kLine},
    {'h', "BINGET", Get<1>, Argument::kOne},
    {'j', "LONG_BINGET", Get<4>, Argument::kFour},
};

}  // namespace

std::span<const PickleOpcode> PickleContainerOpcodes() { return kOpcodes; }

}  // namespace fastpersist::layout
