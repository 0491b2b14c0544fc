// SPDX-License-Identifier: Apache-2.0
// Pickles that CPython 3.11 and torch 2.13 wrote, small ones written by hand, damaged ones, and
// large ones from the project's own pickler.
#include "layout/pickle_reader.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "layout/dict_of_tensors.h"
#include "layout/pickle_opcodes.h"
#include "testing/seed.h"

namespace fastpersist::layout {
namespace {

using Kind = PickleNode::Kind;
using namespace std::string_literals;

// pickle.dumps(value, N) of
// {'none': None, 't': True, 'f': False,
//  'ints': [0, 255, 256, 65536, -1, 2**31, -2**63, 2**63, -2**64, 10**40],
//  'floats': [1.5, -0, inf, -inf, nan, 5e-324], 'text': 'h\u00e9\u20ac\U0001f600\\n\n',
//  'bytes': b'\x00\xff\x80a', 'tuple': (1, (), (2, 3), (1, 2, 3, 4)), 'set': {7},
//  'frozen': frozenset({8}), 'complex': 1.5-2j, 'bytearray': bytearray(b'\xfe\x01'),
//  'empty': [b'', bytearray(), set(), {}, []], 'od': OrderedDict(a=1)}
constexpr std::string_view kPlain[] = {
    "286470300a566e6f6e650a70310a4e7356740a70320a4930310a7356660a70330a4930300a7356696e74730a7034"
    "0a286c70350a49300a61493235350a61493235360a614936353533360a61492d310a614c32313437343833363438"
    "4c0a614c2d393232333337323033363835343737353830384c0a614c393232333337323033363835343737353830"
    "384c0a614c2d31383434363734343037333730393535313631364c0a614c31303030303030303030303030303030"
    "303030303030303030303030303030303030303030303030304c0a617356666c6f6174730a70360a286c70370a46"
    "312e350a61462d302e300a6146696e660a61462d696e660a61466e616e0a614635652d3332340a61735674657874"
    "0a70380a5668e95c75323061635c5530303031663630305c75303035636e5c75303030610a70390a735662797465"
    "730a7031300a635f636f646563730a656e636f64650a7031310a28565c7530303030ff80610a7031320a566c6174"
    "696e310a7031330a747031340a527031350a73567475706c650a7031360a2849310a28742849320a49330a747031"
    "370a2849310a49320a49330a49340a747031380a747031390a73567365740a7032300a635f5f6275696c74696e5f"
    "5f0a7365740a7032310a28286c7032320a49370a61747032330a527032340a735666726f7a656e0a7032350a635f"
    "5f6275696c74696e5f5f0a66726f7a656e7365740a7032360a28286c7032370a49380a61747032380a527032390a"
    "7356636f6d706c65780a7033300a635f5f6275696c74696e5f5f0a636f6d706c65780a7033310a2846312e350a46"
    "2d322e300a747033320a527033330a73566279746561727261790a7033340a635f5f6275696c74696e5f5f0a6279"
    "746561727261790a7033350a286731310a2856fe010a7033360a6731330a747033370a527033380a747033390a52"
    "7034300a7356656d7074790a7034310a286c7034320a635f5f6275696c74696e5f5f0a62797465730a7034330a28"
    "74527034340a616733350a2874527034350a616732310a28286c7034360a747034370a527034380a612864703439"
    "0a61286c7035300a6173566f640a7035310a63636f6c6c656374696f6e730a4f726465726564446963740a703532"
    "0a2874527035330a56610a7035340a49310a73732e",
    "7d71002858040000006e6f6e6571014e58010000007471024930310a58010000006671034930300a580400000069"
    "6e747371045d7105284b004bff4d00014a000001004affffffff4c323134373438333634384c0a4c2d3932323333"
    "37323033363835343737353830384c0a4c393232333337323033363835343737353830384c0a4c2d313834343637"
    "34343037333730393535313631364c0a4c3130303030303030303030303030303030303030303030303030303030"
    "3030303030303030303030304c0a655806000000666c6f61747371065d710728473ff80000000000004780000000"
    "00000000477ff000000000000047fff0000000000000477ff8000000000000470000000000000001655804000000"
    "746578747108580d00000068c3a9e282acf09f98805c6e0a710958050000006279746573710a635f636f64656373"
    "0a656e636f64650a710b28580600000000c3bfc28061710c58060000006c6174696e31710d74710e52710f580500"
    "00007475706c657110284b0129284b024b03747111284b014b024b034b0474711274711358030000007365747114"
    "635f5f6275696c74696e5f5f0a7365740a7115285d71164b0761747117527118580600000066726f7a656e711963"
    "5f5f6275696c74696e5f5f0a66726f7a656e7365740a711a285d711b4b086174711c52711d5807000000636f6d70"
    "6c6578711e635f5f6275696c74696e5f5f0a636f6d706c65780a711f28473ff800000000000047c0000000000000"
    "0074712052712158090000006279746561727261797122635f5f6275696c74696e5f5f0a6279746561727261790a"
    "712328680b285803000000c3be017124680d7471255271267471275271285805000000656d70747971295d712a28"
    "635f5f6275696c74696e5f5f0a62797465730a712b2952712c68232952712d6815285d712e74712f5271307d7131"
    "5d71326558020000006f64713363636f6c6c656374696f6e730a4f726465726564446963740a7134295271355801"
    "0000006171364b0173752e",
    "80027d71002858040000006e6f6e6571014e5801000000747102885801000000667103895804000000696e747371"
    "045d7105284b004bff4d00014a000001004affffffff8a0500000080008a0800000000000000808a090000000000"
    "000080008a090000000000000000ff8a11000000000061f5b9abbfa45cc3f129631d655806000000666c6f617473"
    "71065d710728473ff8000000000000478000000000000000477ff000000000000047fff0000000000000477ff800"
    "0000000000470000000000000001655804000000746578747108580d00000068c3a9e282acf09f98805c6e0a7109"
    "58050000006279746573710a635f636f646563730a656e636f64650a710b580600000000c3bfc28061710c580600"
    "00006c6174696e31710d86710e52710f58050000007475706c657110284b01294b024b03867111284b014b024b03"
    "4b0474711274711358030000007365747114635f5f6275696c74696e5f5f0a7365740a71155d71164b0761857117"
    "527118580600000066726f7a656e7119635f5f6275696c74696e5f5f0a66726f7a656e7365740a711a5d711b4b08"
    "6185711c52711d5807000000636f6d706c6578711e635f5f6275696c74696e5f5f0a636f6d706c65780a711f473f"
    "f800000000000047c00000000000000086712052712158090000006279746561727261797122635f5f6275696c74"
    "696e5f5f0a6279746561727261790a7123680b5803000000c3be017124680d867125527126857127527128580500"
    "0000656d70747971295d712a28635f5f6275696c74696e5f5f0a62797465730a712b2952712c68232952712d6815"
    "5d712e85712f5271307d71315d71326558020000006f64713363636f6c6c656374696f6e730a4f72646572656444"
    "6963740a71342952713558010000006171364b0173752e",
    "80037d71002858040000006e6f6e6571014e5801000000747102885801000000667103895804000000696e747371"
    "045d7105284b004bff4d00014a000001004affffffff8a0500000080008a0800000000000000808a090000000000"
    "000080008a090000000000000000ff8a11000000000061f5b9abbfa45cc3f129631d655806000000666c6f617473"
    "71065d710728473ff8000000000000478000000000000000477ff000000000000047fff0000000000000477ff800"
    "0000000000470000000000000001655804000000746578747108580d00000068c3a9e282acf09f98805c6e0a7109"
    "58050000006279746573710a430400ff8061710b58050000007475706c65710c284b01294b024b0386710d284b01"
    "4b024b034b0474710e74710f58030000007365747110636275696c74696e730a7365740a71115d71124b07618571"
    "13527114580600000066726f7a656e7115636275696c74696e730a66726f7a656e7365740a71165d71174b086185"
    "71185271195807000000636f6d706c6578711a636275696c74696e730a636f6d706c65780a711b473ff800000000"
    "000047c00000000000000086711c52711d5809000000627974656172726179711e636275696c74696e730a627974"
    "6561727261790a711f4302fe0171208571215271225805000000656d70747971235d71242843007125681f295271"
    "2668115d71278571285271297d712a5d712b6558020000006f64712c63636f6c6c656374696f6e730a4f72646572"
    "6564446963740a712d2952712e580100000061712f4b0173752e",
    "800495b2010000000000007d94288c046e6f6e65944e8c017494888c016694898c04696e7473945d94284b004bff"
    "4d00014a000001004affffffff8a0500000080008a0800000000000000808a090000000000000080008a09000000"
    "0000000000ff8a11000000000061f5b9abbfa45cc3f129631d658c06666c6f617473945d9428473ff80000000000"
    "00478000000000000000477ff000000000000047fff0000000000000477ff8000000000000470000000000000001"
    "658c0474657874948c0d68c3a9e282acf09f98805c6e0a948c05627974657394430400ff8061948c057475706c65"
    "94284b01294b024b038694284b014b024b034b04749474948c03736574948f94284b07908c0666726f7a656e9428"
    "4b0891948c07636f6d706c6578948c086275696c74696e73948c07636f6d706c6578949394473ff8000000000000"
    "47c000000000000000869452948c096279746561727261799468158c096279746561727261799493944302fe0194"
    "859452948c05656d707479945d9428430094681c2952948f947d945d94658c026f64948c0b636f6c6c656374696f"
    "6e73948c0b4f726465726564446963749493942952948c0161944b0173752e",
    "800595aa010000000000007d94288c046e6f6e65944e8c017494888c016694898c04696e7473945d94284b004bff"
    "4d00014a000001004affffffff8a0500000080008a0800000000000000808a090000000000000080008a09000000"
    "0000000000ff8a11000000000061f5b9abbfa45cc3f129631d658c06666c6f617473945d9428473ff80000000000"
    "00478000000000000000477ff000000000000047fff0000000000000477ff8000000000000470000000000000001"
    "658c0474657874948c0d68c3a9e282acf09f98805c6e0a948c05627974657394430400ff8061948c057475706c65"
    "94284b01294b024b038694284b014b024b034b04749474948c03736574948f94284b07908c0666726f7a656e9428"
    "4b0891948c07636f6d706c6578948c086275696c74696e73948c07636f6d706c6578949394473ff8000000000000"
    "47c000000000000000869452948c0962797465617272617994960200000000000000fe01948c05656d707479945d"
    "9428430094960000000000000000948f947d945d94658c026f64948c0b636f6c6c656374696f6e73948c0b4f7264"
    "65726564446963749493942952948c0161944b0173752e",
};

// torch.save of an OrderedDict {'w': t, 'w.T': t.t()} with t of 2 x 3 floats and the attribute
// _metadata, as modules' state dicts have it. Protocols 2 and 5.
constexpr std::string_view kStateDict =
    "800263636f6c6c656374696f6e730a4f726465726564446963740a71002952710128580100000077710263746f72"
    "63682e5f7574696c730a5f72656275696c645f74656e736f725f76320a71032828580700000073746f7261676571"
    "0463746f7263680a466c6f617453746f726167650a71055801000000307106580300000063707571074b06747108"
    "514b004b024b038671094b034b0186710a8968002952710b74710c52710d5803000000772e54710e680328286804"
    "6805680668074b0674710f514b004b034b028671104b014b0386711189680029527112747113527114757d711558"
    "090000005f6d657461646174617116680029527117580000000071187d7119580700000076657273696f6e711a4b"
    "01737373622e";
constexpr std::string_view kStateDict5 =
    "800595f1000000000000008c0b636f6c6c656374696f6e73948c0b4f72646572656444696374949394295294288c"
    "0177948c0c746f7263682e5f7574696c73948c125f72656275696c645f74656e736f725f763294939428288c0773"
    "746f72616765948c05746f726368948c0c466c6f617453746f726167659493948c0130948c03637075944b067494"
    "514b004b024b0386944b034b018694896802295294749452948c03772e5494680728286808680b680c680d4b0674"
    "94514b004b034b0286944b014b03869489680229529474945294757d948c095f6d65746164617461946802295294"
    "8c00947d948c0776657273696f6e944b01737373622e";
// {'p': torch.nn.Parameter(torch.zeros(3))}
constexpr std::string_view kParameter =
    "80027d7100580100000070710163746f7263682e5f7574696c730a5f72656275696c645f706172616d657465720a"
    "710263746f7263682e5f7574696c730a5f72656275696c645f74656e736f725f76320a7103282858070000007374"
    "6f72616765710463746f7263680a466c6f617453746f726167650a71055801000000307106580300000063707571"
    "074b03747108514b004b038571094b0185710a8963636f6c6c656374696f6e730a4f726465726564446963740a71"
    "0b2952710c74710d52710e88680b2952710f877110527111732e";
// {'q': torch.zeros(4, 2).to(torch.float8_e4m3fn)}
constexpr std::string_view kFloat8 =
    "80027d7100580100000071710163746f7263682e5f7574696c730a5f72656275696c645f74656e736f725f76330a"
    "71022828580700000073746f72616765710363746f7263682e73746f726167650a556e747970656453746f726167"
    "650a71045801000000307105580300000063707571064b08747107514b004b044b028671084b024b018671098963"
    "636f6c6c656374696f6e730a4f726465726564446963740a710a2952710b63746f7263680a666c6f6174385f6534"
    "6d33666e0a710c74710d52710e732e";
// {'s': torch.Size([2, 3]), 'd': torch.float16, 'dev': torch.device('cpu')}
constexpr std::string_view kSize =
    "80027d710028580100000073710163746f7263680a53697a650a71024b024b038671038571045271055801000000"
    "64710663746f7263680a666c6f617431360a71075803000000646576710863746f7263680a6465766963650a7109"
    "5803000000637075710a85710b52710c752e";
// [torch.zeros(2, dtype=torch.complex64).conj()]
constexpr std::string_view kConjugate =
    "80025d710063746f7263682e5f7574696c730a5f72656275696c645f74656e736f725f76320a7101282858070000"
    "0073746f72616765710263746f7263680a436f6d706c6578466c6f617453746f726167650a710358010000003071"
    "04580300000063707571054b02747106514b004b028571074b018571088963636f6c6c656374696f6e730a4f7264"
    "65726564446963740a71092952710a7d710b5804000000636f6e6a710c887374710d52710e612e";
// An untyped storage of 24 bytes.
constexpr std::string_view kStorage =
    "800228580700000073746f72616765710063746f7263682e73746f726167650a556e747970656453746f72616765"
    "0a71015801000000307102580300000063707571034b18747104512e";
// collections.defaultdict(list, {1: 2}), protocol 4
constexpr std::string_view kDefaultDict =
    "8004953c000000000000008c0b636f6c6c656374696f6e73948c0b64656661756c74646963749493948c08627569"
    "6c74696e73948c046c697374949394859452944b014b02732e";

std::string FromHex(std::string_view hex) {
  const auto digit = [](char c) { return c <= '9' ? c - '0' : c - 'a' + 10; };
  std::string bytes;
  for (std::size_t i = 0; i + 1 < hex.size(); i += 2) {
    bytes.push_back(static_cast<char>(digit(hex[i]) * 16 + digit(hex[i + 1])));
  }
  return bytes;
}

PickleTree Read(std::string_view pickle) {
  auto tree = ReadPickle(pickle);
  EXPECT_TRUE(tree) << (tree ? "" : tree.error().Message());
  return tree ? *std::move(tree) : PickleTree{};
}

std::string ErrorOf(std::string_view pickle) {
  const auto tree = ReadPickle(pickle);
  EXPECT_FALSE(tree);
  if (tree) return "";
  EXPECT_EQ(tree.error().code, ErrorCode::kCorrupt);
  EXPECT_EQ(tree.error().operation, "read");
  EXPECT_EQ(tree.error().path, "");
  return tree.error().detail;
}

std::string Quoted(std::string_view text) {
  std::string out = "'";
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    out += byte < 0x20 || byte >= 0x7F ? fmt::format("\\x{:02x}", byte) : std::string(1, c);
  }
  return out + "'";
}

// A value in one line; of cyclic ones, the beginning.
class Shown {
 public:
  explicit Shown(const PickleTree& tree) : tree_(tree) {}

  std::string Of(NodeId id) const {
    if (id == kNoNode) return "-";
    if (steps_ == kMostSteps) return "...";
    ++steps_;
    const PickleNode& node = tree_.at(id);
    const std::string text = Scalar(node) + Container(node) + Object(node);
    if (node.attributes == kNoNode) return text;
    return text + " with " + Of(node.attributes);
  }

 private:
  static std::string Scalar(const PickleNode& node) {
    switch (node.kind) {
      case Kind::kNone:
        return "None";
      case Kind::kBool:
        return node.integer != 0 ? "True" : "False";
      case Kind::kInt:
        return fmt::format("{}", node.integer);
      case Kind::kBigInt:
        return "big " + node.text;
      case Kind::kFloat:
        return fmt::format("{}", node.real);
      case Kind::kText:
        return Quoted(node.text);
      case Kind::kBytes:
        return "b" + Quoted(node.text);
      case Kind::kByteArray:
        return "bytearray " + Quoted(node.text);
      case Kind::kGlobal:
        return "global " + node.text;
      default:
        return "";
    }
  }

  std::string Container(const PickleNode& node) const {
    switch (node.kind) {
      case Kind::kList:
        return "[" + Items(node) + "]";
      case Kind::kTuple:
        return "(" + Items(node) + ")";
      case Kind::kSet:
        return "set{" + Items(node) + "}";
      case Kind::kFrozenSet:
        return "frozenset{" + Items(node) + "}";
      case Kind::kDict:
        return "{" + Items(node) + "}";
      case Kind::kOrderedDict:
        return "od{" + Items(node) + "}";
      case Kind::kSize:
        return "size(" + Items(node) + ")";
      case Kind::kComplex:
        return "complex(" + Items(node) + ")";
      default:
        return "";
    }
  }

  std::string Object(const PickleNode& node) const {
    if (node.kind == Kind::kOpaque) return fmt::format("<{}: {}>", node.text, Items(node));
    if (node.kind == Kind::kStorage) {
      const PickleStorage& storage = tree_.storages.at(node.detail);
      EXPECT_EQ(storage.key, node.text);
      return fmt::format("storage({}, {}, {}, {})", storage.type, storage.key, storage.location,
                         storage.elements);
    }
    if (node.kind != Kind::kTensor && node.kind != Kind::kParameter) return "";
    const PickleTensor& tensor = tree_.tensors.at(node.detail);
    const std::string gradient =
        fmt::format("grad {}, hooks {}", tensor.requires_grad, Of(tensor.hooks));
    if (node.kind == Kind::kParameter) {
      EXPECT_EQ(tensor.storage, kNoNode);
      return fmt::format("parameter({}, {})", Items(node), gradient);
    }
    return fmt::format("tensor({} + {}, ({}), ({}), {}, {}{})", Of(tensor.storage), tensor.offset,
                       fmt::join(tensor.shape, ", "), fmt::join(tensor.strides, ", "), gradient,
                       tensor.dtype.empty() ? "" : tensor.dtype + ", ", Of(tensor.metadata));
  }

  std::string Items(const PickleNode& node) const {
    std::string text;
    for (const NodeId item : node.items) text += (text.empty() ? "" : ", ") + Of(item);
    return text;
  }

  static constexpr int kMostSteps = 2000;

  const PickleTree& tree_;
  mutable int steps_ = 0;
};

std::string Show(std::string_view pickle) {
  const PickleTree tree = Read(pickle);
  return Shown(tree).Of(tree.root);
}

TEST(PickleReader, ReadsPlainValuesOfEveryProtocol) {
  const std::string expected =
      "{'none', None, 't', True, 'f', False, 'ints', [0, 255, 256, 65536, -1, 2147483648, "
      "-9223372036854775808, big 9223372036854775808, big -18446744073709551616, big "
      "10000000000000000000000000000000000000000], 'floats', [1.5, -0, inf, -inf, nan, "
      "5e-324], 'text', 'h\\xc3\\xa9\\xe2\\x82\\xac\\xf0\\x9f\\x98\\x80\\n\\x0a', 'bytes', "
      "b'\\x00\\xff\\x80a', 'tuple', (1, (), (2, 3), (1, 2, 3, 4)), 'set', set{7}, 'frozen', "
      "frozenset{8}, 'complex', complex(1.5, -2), 'bytearray', bytearray '\\xfe\\x01', "
      "'empty', [b'', bytearray '', set{}, {}, []], 'od', od{'a', 1}}";
  for (std::size_t protocol = 0; protocol < std::size(kPlain); ++protocol) {
    const PickleTree tree = Read(FromHex(kPlain[protocol]));
    EXPECT_EQ(Shown(tree).Of(tree.root), expected) << "protocol " << protocol;
    EXPECT_FALSE(tree.opaque) << "protocol " << protocol;
  }
}

TEST(PickleReader, ReadsAStateDict) {
  for (const std::string_view hex : {kStateDict, kStateDict5}) {
    const PickleTree tree = Read(FromHex(hex));
    EXPECT_EQ(Shown(tree).Of(tree.root),
              "od{'w', tensor(storage(torch FloatStorage, 0, cpu, 6) + 0, (2, 3), (3, 1), grad "
              "false, hooks od{}, -), 'w.T', tensor(storage(torch FloatStorage, 0, cpu, 6) + 0, "
              "(3, 2), (1, 3), grad false, hooks od{}, -)} with {'_metadata', od{'', {'version', "
              "1}}}");
    EXPECT_FALSE(tree.opaque);
    EXPECT_EQ(tree.storages.size(), 2U);
    EXPECT_EQ(tree.tensors.size(), 2U);
  }
}

TEST(PickleReader, ReadsParametersAndNewDtypes) {
  EXPECT_EQ(Show(FromHex(kParameter)),
            "{'p', parameter(tensor(storage(torch FloatStorage, 0, cpu, 3) + 0, (3), (1), grad "
            "false, hooks od{}, -), grad true, hooks od{})}");
  const PickleTree tree = Read(FromHex(kFloat8));
  EXPECT_EQ(Shown(tree).Of(tree.root),
            "{'q', tensor(storage(torch.storage UntypedStorage, 0, cpu, 8) + 0, (4, 2), (2, 1), "
            "grad false, hooks od{}, float8_e4m3fn, -)}");
  EXPECT_FALSE(tree.opaque);
}

TEST(PickleReader, ReadsStoragesMetadataAndSizes) {
  EXPECT_EQ(Show(FromHex(kConjugate)),
            "[tensor(storage(torch ComplexFloatStorage, 0, cpu, 2) + 0, (2), (1), grad false, "
            "hooks od{}, {'conj', True})]");
  EXPECT_EQ(Show(FromHex(kStorage)), "storage(torch.storage UntypedStorage, 0, cpu, 24)");
  const PickleTree tree = Read(FromHex(kSize));
  EXPECT_EQ(Shown(tree).Of(tree.root),
            "{'s', size(2, 3), 'd', global torch float16, 'dev', <torch device: 'cpu'>}");
  EXPECT_TRUE(tree.opaque);
}

TEST(PickleReader, SaysWhetherAGlobalIsAValue) {
  EXPECT_TRUE(Read("]ctorch\nfloat16\na."s).opaque);
  EXPECT_FALSE(Read("]ctorch\nfloat16\n0K\1a."s).opaque);
  EXPECT_TRUE(Read("ctorch\nSize\n."s).opaque);
}

TEST(PickleReader, SharesNodesAsTheMemoSays) {
  for (const std::string& pickle : {"(lp0\ng0\na."s, "\x80\x02]q\0h\0a."s, "\x80\x04]\x94h\0a."s,
                                    "]r\xff\xff\xff\xffj\xff\xff\xff\xff"s
                                    "a."s}) {
    const PickleTree tree = Read(pickle);
    ASSERT_EQ(tree.at(tree.root).items.size(), 1U);
    EXPECT_EQ(tree.at(tree.root).items[0], tree.root);
    EXPECT_FALSE(tree.opaque);
  }
  const PickleTree twice = Read("](]2e."s);
  ASSERT_EQ(twice.at(twice.root).items.size(), 2U);
  EXPECT_EQ(twice.at(twice.root).items[0], twice.at(twice.root).items[1]);
}

TEST(PickleReader, NumbersTheMemoAsThePicklerDoes) {
  // MEMOIZE takes the number of entries, wherever they are.
  EXPECT_EQ(Show("K\7r\0\0\0\x7f\x30K\x08q\1"
                 "0K\x09\x94"
                 "0h\2."s),
            "9");
  EXPECT_EQ(Show("K\7q\5"
                 "0K\x08q\5"
                 "0h\5."s),
            "8");
  EXPECT_EQ(Show("(K\1r\x88\x13\0\0K\2p5000\ng5000\nj\x88\x13\0\0t."s), "(1, 2, 2, 2)");
}

TEST(PickleReader, ReadsTheFormsOfOldPicklers) {
  EXPECT_EQ(Show("S'a\\'\\x41\\101\\n\\q\\\\'\n."s), "b'a'AA\\x0a\\q\\'");
  EXPECT_EQ(Show("S\"\"\n."s), "b''");
  EXPECT_EQ(Show("U\3abc."s), "b'abc'");
  EXPECT_EQ(Show("T\2\0\0\0ab."s), "b'ab'");
  EXPECT_EQ(Show("V\\u0041\\\\u0041\\U0001f600\xe9\n."s),
            "'A\\\\u0041\\xf0\\x9f\\x98\\x80\\xc3\\xa9'");
  EXPECT_EQ(Show("V\\ud800\n."s), "'\\xed\\xa0\\x80'");
  EXPECT_EQ(Show("X\3\0\0\0\xed\xa0\x80."s), "'\\xed\\xa0\\x80'");
  EXPECT_EQ(Show("I-12\n."s), "-12");
  EXPECT_EQ(Show("L123L\n."s), "123");
  EXPECT_EQ(Show("(I01\nI00\nd."s), "{True, False}");
  EXPECT_EQ(Show("(K\1K\2icollections\nCounter\n."s), "<collections Counter: 1, 2>");
  EXPECT_EQ(Show("(cm\nC\nK\1o}b."s), "<m C: 1> with {}");
  EXPECT_EQ(Show("(K\1K\2"
                 "1N."s),
            "None");
  EXPECT_EQ(Show("(0N."s), "None");
}

TEST(PickleReader, ReadsIntegersOfAnyLength) {
  EXPECT_EQ(Show("\x8a\0."s), "0");
  EXPECT_EQ(Show("\x8a\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff."s), "-1");
  EXPECT_EQ(Show("\x8a\x09\xff\xff\xff\xff\xff\xff\xff\xff\0."s), "big 18446744073709551615");
  EXPECT_EQ(Show("\x8b\x09\0\0\0\0\0\0\0\0\0\0\x80\xff."s), "-9223372036854775808");
  EXPECT_EQ(Show("\x8a\x09\0\0\0\0\0\0\0\0\1."s), "big 18446744073709551616");
  const std::string digits(2000, '7');
  EXPECT_EQ(Show("L" + digits + "L\n."), "big " + digits);
  EXPECT_EQ(Show("\x8b\xe8\3\0\0"s + std::string(999, '\0') + "\1.").size(), 4U + 2406U);
  EXPECT_EQ(Show("\x8b\xe9\3\0\0"s + std::string(1000, '\0') + "\1."), "<int of 1001 bytes: >");
  EXPECT_EQ(Show("L" + std::string(3000, '7') + "\n."), "<int of 3000 digits: >");
}

TEST(PickleReader, KeepsWhatUnknownObjectsAreMadeOf) {
  EXPECT_EQ(Show(FromHex(kDefaultDict)), "<collections defaultdict: global builtins list, 1, 2>");
  EXPECT_EQ(Show("cm\nC\n)\x81}b."s), "<m C: > with {}");
  EXPECT_EQ(Show("cm\nC\n)\x81K\1a(K\2K\3e."s), "<m C: 1, 2, 3>");
  EXPECT_EQ(Show("cm\nC\nK\1\x85}\x92."s), "<m C: 1>");
  EXPECT_EQ(Show("cm\nC\nK\1\x85}K\2K\3s\x92."s), "<m C: (1), {2, 3}>");
  EXPECT_EQ(Show("cos\nsystem\nX\2\0\0\0ls\x85R."s), "<os system: 'ls'>");
  EXPECT_EQ(Show("cm\nf\n)RK\1\x85R)R."s), "<result of m f: >");
  EXPECT_EQ(Show("\x82\7."s), "<extension 7: >");
  EXPECT_EQ(Show("\x84\0\1\0\0)R."s), "<result of extension 256: >");
  EXPECT_EQ(Show("Pabc\n."s), "<persistent id: 'abc'>");
  EXPECT_EQ(Show("K\1Q."s), "<persistent id: 1>");
  const std::string name(500, 'n');
  const PickleTree tree = Read("c" + name + "\nx\n)R.");
  EXPECT_EQ(tree.at(tree.root).text, std::string(200, 'n') + "...");
}

// A tensor with these arguments after its storage, which is of four elements.
std::string TensorPickle(std::string_view function, std::string_view arguments,
                         std::string_view elements = "K\4") {
  return fmt::format(
      "ctorch._utils\n{}\n((X\7{}storagectorch\nFloatStorage\nX\1{}0X\3{}cpu{}tQ{}tR.", function,
      "\0\0\0"s, "\0\0\0"s, "\0\0\0"s, elements, arguments);
}

TEST(PickleReader, ReadsEveryVersionOfTheTensorFunction) {
  const std::string storage = "tensor(storage(torch FloatStorage, 0, cpu, 4) + 1, (2), (1), ";
  EXPECT_EQ(Show(TensorPickle("_rebuild_tensor", "K\1K\2\x85K\1\x85")),
            storage + "grad false, hooks -, -)");
  EXPECT_EQ(Show(TensorPickle("_rebuild_tensor_v2", "K\1K\2\x85K\1\x85\x88N")),
            storage + "grad true, hooks None, -)");
  EXPECT_EQ(Show(TensorPickle("_rebuild_tensor_v2", "K\1K\2\x85K\1\x85\x88NN")),
            storage + "grad true, hooks None, -)");
  EXPECT_EQ(Show(TensorPickle("_rebuild_tensor_v3", "K\1K\2\x85K\1\x85\x89Nctorch\nuint16\n")),
            storage + "grad false, hooks None, uint16, -)");
  EXPECT_EQ(Show(TensorPickle("_rebuild_tensor_v3", "K\1K\2\x85K\1\x85\x89Nctorch\nuint16\n}")),
            storage + "grad false, hooks None, uint16, {})");
  EXPECT_EQ(Show(TensorPickle("_rebuild_tensor", "K\0))"s)),
            "tensor(storage(torch FloatStorage, 0, cpu, 4) + 0, (), (), grad false, hooks -, -)");
}

TEST(PickleReader, ArgumentsThatDoNotFitMakeATensorOpaque) {
  using namespace std::string_view_literals;
  const std::string many = "(" + std::string(65 * 2, 'N') + "t";
  for (const auto& [function, arguments] : std::vector<std::pair<std::string, std::string>>{
           {"_rebuild_tensor", "K\1K\2\x85"},
           {"_rebuild_tensor", "K\1K\2\x85K\1\x85N"},
           {"_rebuild_tensor", "J\xff\xff\xff\xffK\2\x85K\1\x85"},
           {"_rebuild_tensor", "K\1J\xff\xff\xff\xff\x85K\1\x85"},
           {"_rebuild_tensor", "K\1K\2\x85J\xff\xff\xff\xff\x85"},
           {"_rebuild_tensor", "K\1K\2\x85)"},
           {"_rebuild_tensor", "NK\2\x85K\1\x85"},
           {"_rebuild_tensor", "K\1NK\1\x85"},
           {"_rebuild_tensor", "K\1\x88\x85K\1\x85"},
           {"_rebuild_tensor", "K\1" + many + many},
           {"_rebuild_tensor_v2", "K\1K\2\x85K\1\x85"},
           {"_rebuild_tensor_v2", "K\1K\2\x85K\1\x85NN"},
           {"_rebuild_tensor_v2", "K\1K\2\x85K\1\x85\x89NK\1"},
           {"_rebuild_tensor_v2", "K\1K\2\x85K\1\x85\x89NNN"},
           {"_rebuild_tensor_v3", "K\1K\2\x85K\1\x85\x89N"},
           {"_rebuild_tensor_v3", "K\1K\2\x85K\1\x85\x89NN"},
           {"_rebuild_tensor_v3", "K\1K\2\x85K\1\x85\x89Ncm\nuint16\n"},
           {"_rebuild_parameter", ""},
           {"_rebuild_parameter", "\x88N"},
       }) {
    const PickleTree tree = Read(TensorPickle(function, arguments));
    EXPECT_EQ(tree.at(tree.root).kind, Kind::kOpaque) << function << " " << Quoted(arguments);
    EXPECT_EQ(tree.at(tree.root).text, "torch._utils " + function);
    EXPECT_TRUE(tree.opaque);
  }
}

TEST(PickleReader, PersistentIdsOfOtherFormsAreOpaque) {
  const std::string good = "(X\7\0\0\0storagecm\nT\nX\1\0\0\0kX\3\0\0\0cpuK\4tQ."s;
  EXPECT_EQ(Show(good), "storage(m T, k, cpu, 4)");
  EXPECT_EQ(Show("(U\7storagecm\nT\nU\1kU\3cpuK\4tQ."s), "storage(m T, k, cpu, 4)");
  for (const auto& bad : {
           "(X\7\0\0\0storagFcm\nT\nX\1\0\0\0kX\3\0\0\0cpuK\4tQ."s,
           "(X\7\0\0\0storageNX\1\0\0\0kX\3\0\0\0cpuK\4tQ."s,
           "(X\7\0\0\0storagecm\nT\nK\1X\3\0\0\0cpuK\4tQ."s,
           "(X\7\0\0\0storagecm\nT\nX\1\0\0\0kNK\4tQ."s,
           "(X\7\0\0\0storagecm\nT\nX\1\0\0\0kX\3\0\0\0cpuJ\xff\xff\xff\xfftQ."s,
           "(X\7\0\0\0storagecm\nT\nX\1\0\0\0kX\3\0\0\0cpuK\4NtQ."s,
           "(X\7\0\0\0storagecm\nT\nX\1\0\0\0kX\3\0\0\0cpuK\4lQ."s,
       }) {
    const PickleTree tree = Read(bad);
    EXPECT_EQ(tree.at(tree.root).kind, Kind::kOpaque) << Quoted(bad);
    EXPECT_EQ(tree.at(tree.root).text, "persistent id");
    EXPECT_TRUE(tree.storages.empty());
  }
}

TEST(PickleReader, ReadsContainersMadeByCalls) {
  EXPECT_EQ(Show("ccollections\nOrderedDict\n](]K\1aK\2a(K\3K\4le\x85R."s), "od{1, 2, 3, 4}");
  EXPECT_EQ(Show("ccollections\nOrderedDict\n](K\1e\x85R."s), "<collections OrderedDict: [1]>");
  EXPECT_EQ(Show("ctorch\nSize\n)R."s), "size()");
  EXPECT_EQ(Show("ctorch\nSize\n]N\x61\x85R."s), "<torch Size: [None]>");
  EXPECT_EQ(Show("cbuiltins\nset\n(K\1K\2t\x85R."s), "set{1, 2}");
  EXPECT_EQ(Show("cbuiltins\nset\nN\x85R."s), "<builtins set: None>");
  EXPECT_EQ(Show("cbuiltins\ncomplex\nK\1K\2\x86R."s), "<builtins complex: 1, 2>");
  EXPECT_EQ(Show("c_codecs\nencode\nX\2\0\0\0\xc4\x80U\6latin1\x86R."s),
            "<_codecs encode: '\\xc4\\x80', b'latin1'>");
  EXPECT_EQ(Show("c_codecs\nencode\nX\1\0\0\0aU\4utf8\x86R."s), "<_codecs encode: 'a', b'utf8'>");
  EXPECT_EQ(Show("cbuiltins\nbytearray\nC\1a\x85R."s), "bytearray 'a'");
  EXPECT_EQ(Show("\x8f(K\1K\2\x90."s), "set{1, 2}");
}

TEST(PickleReader, SaysWhatIsWrongAndWhere) {
  const std::vector<std::pair<std::string, std::string>> cases{
      {"", "data.pkl, byte 0: the pickle ends here, without STOP"},
      {"N", "data.pkl, byte 1: the pickle ends here, without STOP"},
      {"\xff", "data.pkl, byte 0: 0xff is no opcode"},
      {".", "data.pkl, byte 0 (opcode STOP): the stack is empty"},
      {"N..", "data.pkl, byte 2: 1 byte follows the end of the pickle"},
      {"N.abc", "data.pkl, byte 2: 3 bytes follow the end of the pickle"},
      {"NNNR.", "data.pkl, byte 3 (opcode REDUCE): the arguments are no tuple"},
      {"N)R.", "data.pkl, byte 2 (opcode REDUCE): what it would call is no function or class"},
      {")R.", "data.pkl, byte 1 (opcode REDUCE): the stack is empty"},
      {"N(R.", "data.pkl, byte 2 (opcode REDUCE): a mark, or too little, is on the stack"},
      {"(.", "data.pkl, byte 1 (opcode STOP): the stack is empty"},
      {"t.", "data.pkl, byte 0 (opcode TUPLE): there is no mark on the stack"},
      {"N\x86.", "data.pkl, byte 1 (opcode TUPLE2): a mark, or too little, is on the stack"},
      {"(Nd.", "data.pkl, byte 2 (opcode DICT): a key has no value"},
      {"}(Nu.", "data.pkl, byte 3 (opcode SETITEMS): a key has no value"},
      {")Na.", "data.pkl, byte 2 (opcode APPEND): what it would fill is no such container"},
      {"}Na.", "data.pkl, byte 2 (opcode APPEND): what it would fill is no such container"},
      {"]NNs.", "data.pkl, byte 3 (opcode SETITEM): what it would fill is no such container"},
      {"](N\x90.", "data.pkl, byte 3 (opcode ADDITEMS): what it would fill is no such container"},
      {"Na.", "data.pkl, byte 1 (opcode APPEND): a mark, or too little, is on the stack"},
      {"]Nb.", "data.pkl, byte 2 (opcode BUILD): what it would give attributes to cannot have any"},
      {"h\1.", "data.pkl, byte 0 (opcode BINGET): nothing has the number 1 in the memo"},
      {"g-1\n.", "data.pkl, byte 0 (opcode GET): it is no number"},
      {"q\1.", "data.pkl, byte 0 (opcode BINPUT): the stack is empty"},
      {"X\5\0\0\0abc"s,
       "data.pkl, byte 0 (opcode BINUNICODE): it needs 5 more bytes and 3 are left"},
      {"\x8e\xff\xff\xff\xff\xff\xff\xff\xff.",
       "data.pkl, byte 0 (opcode BINBYTES8): it needs 18446744073709551615 more bytes and 1 are "
       "left"},
      {"T\xff\xff\xff\xff.", "data.pkl, byte 0 (opcode BINSTRING): its length is negative"},
      {"\x8b\xff\xff\xff\xff.", "data.pkl, byte 0 (opcode LONG4): its length is negative"},
      {"I12", "data.pkl, byte 0 (opcode INT): its line does not end"},
      {"I012\n.", "data.pkl, byte 0 (opcode INT): it is no decimal number"},
      {"I\n.", "data.pkl, byte 0 (opcode INT): it is no decimal number"},
      {"L0x12\n.", "data.pkl, byte 0 (opcode LONG): it is no decimal number"},
      {"F1.5x\n.", "data.pkl, byte 0 (opcode FLOAT): it is no number"},
      {"Sabc\n.", "data.pkl, byte 0 (opcode STRING): its quotes or escapes are not whole"},
      {"S'\\'\n.", "data.pkl, byte 0 (opcode STRING): its quotes or escapes are not whole"},
      {"S'\\x4'\n.", "data.pkl, byte 0 (opcode STRING): its quotes or escapes are not whole"},
      {"V\\u12\n.", "data.pkl, byte 0 (opcode UNICODE): its quotes or escapes are not whole"},
      {"V\\U00110000\n.", "data.pkl, byte 0 (opcode UNICODE): its quotes or escapes are not whole"},
      {"\x80\x06N.", "data.pkl, byte 0 (opcode PROTO): protocol 6 is not known"},
      {"\x95\5\0\0\0\0\0\0\0N."s,
       "data.pkl, byte 0 (opcode FRAME): a frame of 5 bytes, and 2 are left"},
      {"NN\x93.", "data.pkl, byte 2 (opcode STACK_GLOBAL): module and name are no text"},
      {"(o.", "data.pkl, byte 1 (opcode OBJ): there is no class above the mark"},
      {"cm\nC\n)N\x92.", "data.pkl, byte 7 (opcode NEWOBJ_EX): the keyword arguments are no dict"},
      {"\x82\0."s, "data.pkl, byte 0 (opcode EXT1): an extension has a positive number"},
      {"\x97.",
       "data.pkl, byte 0 (opcode NEXT_BUFFER): it refers to out-of-band buffers, which no file "
       "holds"},
      {"N\x98.",
       "data.pkl, byte 1 (opcode READONLY_BUFFER): it refers to out-of-band buffers, which no file "
       "holds"},
  };
  for (const auto& [pickle, expected] : cases) EXPECT_EQ(ErrorOf(pickle), expected) << pickle;
}

std::vector<std::string> WrittenByOthers() {
  std::vector<std::string> pickles;
  for (const std::string_view hex : kPlain) pickles.push_back(FromHex(hex));
  for (const std::string_view hex :
       {kStateDict, kStateDict5, kParameter, kFloat8, kSize, kConjugate, kStorage, kDefaultDict}) {
    pickles.push_back(FromHex(hex));
  }
  return pickles;
}

// Every reference of a tree leads to something.
void ExpectWhole(const PickleTree& tree) {
  const auto is_node = [&](NodeId id) { return id < tree.nodes.size(); };
  ASSERT_TRUE(is_node(tree.root));
  for (const PickleNode& node : tree.nodes) {
    for (const NodeId item : node.items) ASSERT_TRUE(is_node(item));
    ASSERT_TRUE(node.attributes == kNoNode || is_node(node.attributes));
    if (node.kind == Kind::kStorage) {
      ASSERT_LT(node.detail, tree.storages.size());
    }
    if (node.kind != Kind::kTensor && node.kind != Kind::kParameter) continue;
    ASSERT_LT(node.detail, tree.tensors.size());
    const PickleTensor& tensor = tree.tensors[node.detail];
    ASSERT_EQ(tensor.shape.size(), tensor.strides.size());
    ASSERT_GE(tensor.offset, 0);
    if (node.kind == Kind::kTensor) {
      ASSERT_EQ(tree.at(tensor.storage).kind, Kind::kStorage);
    }
  }
}

// DUP and POP in front of STOP change nothing but that tuples are not reused.
std::string WithoutReuse(std::string pickle) {
  pickle.insert(pickle.size() - 1, "20");
  return pickle;
}

TEST(PickleReader, ReusedTuplesLeaveNoTrace) {
  for (const std::string& pickle : WrittenByOthers()) {
    EXPECT_EQ(Show(pickle), Show(WithoutReuse(pickle)));
  }
  // Size, arguments and persistent id are asked for again.
  const std::string pickle =
      "(ctorch._utils\n_rebuild_tensor\nq\1((U\7storagecm\nT\nU\1kU\3cpuK\4tq\2QK\0"
      "K\2\x85q\3K\1\x85tq\4RK\6K\7\x86h\2h\3h\4t."s;
  EXPECT_EQ(Show(pickle),
            "(tensor(storage(m T, k, cpu, 4) + 0, (2), (1), grad false, hooks -, -), (6, 7), "
            "(b'storage', global m T, b'k', b'cpu', 4), (2), (storage(m T, k, cpu, 4), 0, (2), "
            "(1)))");
  EXPECT_LT(Read(FromHex(kStateDict)).nodes.size(),
            Read(WithoutReuse(FromHex(kStateDict))).nodes.size());
}

TEST(PickleReader, EveryTruncationIsFound) {
  for (const std::string& pickle : WrittenByOthers()) {
    for (std::size_t size = 0; size < pickle.size(); ++size) {
      // A copy of exactly that size, so that a sanitizer sees any byte read behind it.
      const std::vector<char> cut(pickle.begin(),
                                  pickle.begin() + static_cast<std::ptrdiff_t>(size));
      EXPECT_FALSE(ReadPickle({cut.data(), cut.size()})) << size << " of " << pickle.size();
    }
  }
}

TEST(PickleReader, SurvivesEveryFlippedBit) {
  for (const std::string& pickle : WrittenByOthers()) {
    for (std::size_t bit = 0; bit < 8 * pickle.size(); ++bit) {
      std::vector<char> damaged(pickle.begin(), pickle.end());
      damaged[bit / 8] = static_cast<char>(damaged[bit / 8] ^ (1 << (bit % 8)));
      const auto tree = ReadPickle({damaged.data(), damaged.size()});
      if (tree) ExpectWhole(*tree);
    }
  }
}

TEST(PickleReader, SurvivesRandomMutations) {
  const fastpersist::testing::Seed seed;
  fastpersist::testing::Random random(seed.value());
  using fastpersist::testing::Between;
  const std::vector<std::string> pickles = WrittenByOthers();
  for (int round = 0; round < 20'000; ++round) {
    std::string pickle = pickles[Between(random, 0, pickles.size() - 1)];
    for (std::uint64_t edits = Between(random, 1, 8); edits > 0; --edits) {
      const std::size_t at = Between(random, 0, pickle.size() - 1);
      const std::string& other = pickles[Between(random, 0, pickles.size() - 1)];
      const std::size_t from = Between(random, 0, other.size() - 1);
      switch (Between(random, 0, 3)) {
        case 0:
          pickle[at] = static_cast<char>(Between(random, 0, 255));
          break;
        case 1:
          pickle.insert(at, other, from, Between(random, 1, 20));
          break;
        case 2:
          pickle.replace(at, Between(random, 0, 9), other, from, Between(random, 0, 9));
          break;
        default:
          pickle.erase(at, pickle.size() > 20 ? Between(random, 1, 5) : 0);
      }
    }
    const std::vector<char> exact(pickle.begin(), pickle.end());
    const auto tree = ReadPickle({exact.data(), exact.size()});
    if (!tree) continue;
    ExpectWhole(*tree);
    const PickleTree other = Read(WithoutReuse(pickle));
    ASSERT_EQ(Shown(*tree).Of(tree->root), Shown(other).Of(other.root)) << Quoted(pickle);
  }
}

TEST(PickleReader, ReadsListsOfAnyDepth) {
  constexpr std::size_t kDepth = 1'000'000;
  const PickleTree tree = Read(std::string(kDepth, ']') + std::string(kDepth - 1, 'a') + ".");
  std::size_t depth = 1;
  NodeId node = tree.root;
  for (; !tree.at(node).items.empty(); ++depth) node = tree.at(node).items[0];
  EXPECT_EQ(depth, kDepth);
  const PickleTree tuples = Read(")" + std::string(kDepth, '\x85') + ".");
  EXPECT_EQ(tuples.nodes.size(), kDepth + 1);
}

TEST(PickleReader, SharedItemsDoNotUnfold) {
  std::string pickle = "]";
  for (int i = 0; i < 10'000; ++i) pickle += "2\x86";
  const PickleTree tree = Read(pickle + ".");
  EXPECT_EQ(tree.nodes.size(), 10'001U);
}

TEST(PickleReader, CopiesThatOutgrowThePickleAreRefused) {
  const std::string text(100'000, 'n');
  const std::string length = "\xa0\x86\1\0"s;
  const std::string items = "(" + std::string(100'000, 'N') + "tq\1" + "0";
  const std::vector<std::pair<std::string, std::string>> cases{
      // The same list as many sets, sizes, dicts; the same text as many bytes, names, storages.
      {"cbuiltins\nset\nq\0000"s + items, "h\0h\1\x85R"s},
      {"ctorch\nSize\nq\0000"s + "(" + std::string(200'000, 'K') + "tq\1" + "0", "h\0h\1\x85R"s},
      {"ccollections\nOrderedDict\nq\0000("s + std::string(100'000, ')') + "tq\1" + "0",
       "h\0h\1\x85R"s},
      {"cbuiltins\nbytes\nq\0000B"s + length + text + "q\1" + "0", "h\0h\1\x85R"s},
      {"X"s + length + text + "q\1" + "0", "h\1h\1\x93"s},
      {"cm\nC\nq\0000(X\7\0\0\0storageh\0X"s + length + text + "X\3\0\0\0cpuK\4tq\1"s + "0",
       "h\1Q"s},
      {"c"s + text + "\nC\nq\1" + "0", "h\1)R"s},
  };
  for (const auto& [prefix, copy] : cases) {
    std::string pickle = prefix;
    for (int i = 0; i < 2000; ++i) pickle += copy + "0";
    pickle += "N.";
    const auto tree = ReadPickle(pickle);
    if (copy == "h\1)R"s) {  // The name is cut.
      EXPECT_TRUE(tree);
      continue;
    }
    // OrderedDict stops at its first pair, which is none, but pays for all of them.
    ASSERT_FALSE(tree) << prefix.substr(0, 20);
    EXPECT_TRUE(tree.error().detail.ends_with("the pickle unfolds to far more than it is"))
        << tree.error().detail;
  }
}

TEST(PickleReader, ALargeMemoNumberTakesNoMemoryByItself) {
  std::string pickle;
  for (std::uint32_t i = 1; i <= 1000; ++i) {
    pickle += "Np" + fmt::format("{}", std::uint64_t{18'000'000'000'000'000'000U} + i) + "\n0";
    pickle += "Nr\xf0\xff\xff\xff"s + "0";
  }
  EXPECT_EQ(Show(pickle + "K\1p4294967296\ng4294967296\n."), "1");
}

TEST(PickleReader, ReadsWhatTheProjectWrites) {
  constexpr std::size_t kTensors = 10'000;
  const std::vector<float> data(6 * kTensors);
  State state;
  for (std::size_t i = 0; i < kTensors; ++i) {
    const auto added =
        state.Add(fmt::format("layer.{}.weight", i),
                  {.data = data.data() + 6 * i, .dtype = DType::kFloat32, .shape = {2, 3}});
    ASSERT_TRUE(added) << added.error().Message();
  }
  std::string arena;
  const auto records = DictOfTensorsRecords(state, 64, arena);
  ASSERT_EQ(records.front().name, "data.pkl");
  const auto body = records.front().body;
  const PickleTree tree = Read({reinterpret_cast<const char*>(body.data()), body.size()});
  EXPECT_FALSE(tree.opaque);
  ASSERT_EQ(tree.tensors.size(), kTensors);
  const PickleNode& root = tree.at(tree.root);
  ASSERT_EQ(root.kind, Kind::kDict);
  ASSERT_EQ(root.items.size(), 2 * kTensors);
  for (std::size_t i = 0; i < kTensors; ++i) {
    EXPECT_EQ(tree.at(root.items[2 * i]).text, fmt::format("layer.{}.weight", i));
    const PickleNode& node = tree.at(root.items[2 * i + 1]);
    ASSERT_EQ(node.kind, Kind::kTensor);
    const PickleTensor& tensor = tree.tensors[node.detail];
    EXPECT_EQ(tensor.shape, (std::vector<std::int64_t>{2, 3}));
    EXPECT_EQ(tree.at(tensor.storage).text, fmt::format("{}", i));
  }
}

TEST(PickleReader, ReadsEveryIntegerOfThePickler) {
  const fastpersist::testing::Seed seed;
  fastpersist::testing::Random random(seed.value());
  std::vector<std::int64_t> values;
  PickleOpcodes opcodes;
  opcodes.EmptyList();
  opcodes.Mark();
  for (int i = 0; i < 10'000; ++i) {
    const auto shift = fastpersist::testing::Between(random, 0, 63);
    values.push_back(static_cast<std::int64_t>(random()) >> shift);
    opcodes.Int(values.back());
  }
  opcodes.Appends();
  const PickleTree tree = Read(std::move(opcodes).Finish());
  const PickleNode& root = tree.at(tree.root);
  ASSERT_EQ(root.items.size(), values.size());
  for (std::size_t i = 0; i < values.size(); ++i) {
    EXPECT_EQ(tree.at(root.items[i]).integer, values[i]);
  }
}

}  // namespace
}  // namespace fastpersist::layout
