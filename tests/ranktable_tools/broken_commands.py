"""Every input that table commands other than lint refuse, as data."""

from collections.abc import Mapping

from ranktable_tools import guide
from tests.docs.broken_input import Broken, Command
from tests.ranktable_tools.broken_inputs import with_value
from tests.ranktable_tools.documents import A, B, device, group, grouped, kubeinfer, local, modelarts, server

_GEN = ("gen", "--ip", A, "--device-type", "cpu")
_SHARED = ("--prefill-server-list=0", "--decode-server-list=0", "--share-devices")
_PART_A = grouped(group(0, server(A)), group(1, server(A, 4, 5)))
_PART_B = grouped(group(2, server(B, 6, 7)))
_MERGE = ("merge", "--global-ranktable-list", "a.json", "b.json")
_JOIN = ("merge-local", "--local-ranktable-list", "a.json", "b.json")

COMMANDS = (
    Broken("gen: nothing to generate", None, {}, _GEN),
    Broken("gen: a device in both lists", None, {}, (*_GEN, "--prefill-server-list=4,5", "--decode-server-list=5,6")),
    Broken("gen: one GPU in two instances that no port distinguishes", None, {}, (*_GEN, *_SHARED)),
    Broken("gen: an NPU in two instances", None, {}, ("gen", "--ip", A, "--device-type=npu", *_SHARED)),
    Broken("gen: two files of one name", None, {}, (*_GEN, "--prefill-server-list", "1,23", "12,3")),
    Broken("gen: no device ids", None, {}, (*_GEN, "--prefill-server-list", "4,five")),
    Broken("gen: a device id of 20 digits", None, {}, (*_GEN, "--prefill-server-list", "4", "1" * 20)),
    Broken("gen: no folder, as a variable that is not set gives it", None, {}, (*_GEN, "--api-server", "--save-dir=")),
    Broken(
        "gen: a file of that name is there, of other devices",
        None,
        {f"local_ranktable_{A}_123.json": local(server(A, 1, 23))},
        (*_GEN, "--decode-server-list", "12,3"),
    ),
    Broken("gen: an empty list", None, {}, (*_GEN, "--prefill-server-list", "", "--decode-server-list=5")),
    Broken("gen: a masked address", None, {}, ("gen", "--ip", "10.**.**.18", "--api-server")),
    Broken("gen: an owner that is not a user", None, {}, (*_GEN, "--api-server", "--owner=-1")),
    Broken("gen: a link-local address without its interface", None, {}, ("gen", "--ip", "fe80::1", "--api-server")),
    Broken("a typo in a command", None, {"t.json": modelarts()}, ("lnit", "t.json")),
    Broken("a typo in a flag", None, {"t.json": modelarts()}, ("lint", "t.json", "--strickt")),
    Broken("merge: one table", None, {"a.json": _PART_A}, _MERGE[:3]),
    Broken("merge: one table twice", None, {"a.json": _PART_A}, (*_MERGE[:3], "a.json")),
    Broken("merge: a local table", None, {"a.json": _PART_A, "b.json": local()}, _MERGE),
    Broken("merge: two schedulers", None, {"a.json": _PART_A, "b.json": modelarts()}, _MERGE),
    Broken("merge: no scheduler", None, {"a.json": grouped(group(1, server(A, 4))), "b.json": _PART_B}, _MERGE),
    Broken("merge: no decode instance", None, {"a.json": _PART_A, "b.json": grouped(group(1, server(B, 6)))}, _MERGE),
    Broken(
        "merge: one device in two files", None, {"a.json": _PART_A, "b.json": grouped(group(2, server(A, 5)))}, _MERGE
    ),
    Broken(
        "merge: an input would be overwritten",
        None,
        {"global_ranktable_merge.json": _PART_A, "b.json": _PART_B},
        ("merge", "--global-ranktable-list", "global_ranktable_merge.json", "b.json"),
    ),
    Broken("merge-local: one table", None, {"a.json": local()}, _JOIN[:3]),
    Broken("merge-local: a global table", None, {"a.json": local(), "b.json": modelarts()}, _JOIN),
    Broken("merge-local: the scheduler's table", None, {"a.json": local(), "b.json": local(server(A))}, _JOIN),
    Broken(
        "merge-local: one device in two files",
        None,
        {"a.json": local(), "b.json": local(server(B, 7))},
        _JOIN,
    ),
    Broken(
        "convert: to a dialect that is only read",
        None,
        {"t.json": modelarts()},
        ("convert", "t.json", "--to", "mindie"),
    ),
    Broken("convert: to an unknown dialect", None, {"t.json": modelarts()}, ("convert", "t.json", "--to", "yaml")),
    Broken("convert: prefill is not named", None, {"t.json": kubeinfer()}, ("convert", "t.json", "--to", "modelarts")),
    Broken(
        "convert: an instance over two servers",
        None,
        {"t.json": kubeinfer()},
        ("convert", "t.json", "--to", "modelarts", "--num-prefill", "2"),
    ),
    Broken(
        "convert: several instances to HCCL", None, {"t.json": modelarts()}, ("convert", "t.json", "--to", "hccl-1.0")
    ),
    Broken(
        "convert: an instance that does not exist",
        None,
        {"t.json": modelarts()},
        ("convert", "t.json", "--to", "hccl-1.0", "--instance", "decode-1"),
    ),
    Broken(
        "convert: no super pods to write",
        None,
        {"t.json": modelarts()},
        ("convert", "t.json", "--to", "hccl-1.2", "--instance", "prefill-0"),
    ),
    Broken(
        "convert: two files of one name",
        None,
        {
            "t.json": modelarts(
                prefill=[server(A, 1, 2)],
                decode=[with_value(server(A, 1), "device.0", device("12", "198.51.100.99", 0))],
            )
        },
        ("convert", "t.json", "--to", "modelarts", "--save-dir", "out"),
    ),
    Broken(
        "show: a table with a mistake", None, {"t.json": with_value(modelarts(), "version", "9")}, ("show", "t.json")
    ),
    Broken(
        "diff: a global and a local table",
        None,
        {"g.json": modelarts(), "l.json": local()},
        ("diff", "g.json", "l.json"),
    ),
)

LOOKING = (
    Broken("watch: no table", None, {}, ("watch", "gone.json")),
    Broken("watch: no interval", None, {"t.json": modelarts()}, ("watch", "t.json", "--interval", "0")),
    Broken("watch: an end in the past", None, {"t.json": modelarts()}, ("watch", "t.json", "--for=-1")),
    Broken("doctor: two global tables", None, {"a.json": modelarts(), "b.json": modelarts()},
           ("doctor", "a.json", "b.json")),
    Broken("doctor: a table that does not exist", None, {}, ("doctor", "gone.json")),
    Broken("doctor: more than a link should carry", None, {}, ("doctor", "--mib", "2000")),
    Broken("doctor: no time for the checks", None, {}, ("doctor", "--timeout", "0")),
    Broken("doctor: no address of a scheduler", None, {}, ("doctor", "--url", "ftp://10.0.0.18")),
)  # fmt: skip

_GUIDE = Command(guide.main, "-ERROR: ")


def _guide_command(what: str, *words: str) -> Broken:
    return Broken(what, None, {"a.json": _PART_A, "b.json": _PART_B}, words, _GUIDE)


GUIDE = (
    _guide_command("gen: nothing to generate", "--mode", "gen", "--ip", A, "--device-type=cpu"),
    _guide_command("gen: a table to merge", "--mode", "gen", "--global-ranktable-list", "a.json", "b.json"),
    _guide_command("gen: a typo in a flag", "--mode", "gen", "--prefil-server-list", "4,5"),
    _guide_command("merge: no table", "--mode", "merge"),
    _guide_command("merge: one table", "--mode", "merge", "--global-ranktable-list", "a.json"),
    _guide_command(
        "merge: --api-server", "--mode=merge", "--global-ranktable-list", "a.json", "b.json", "--api-server"
    ),
    _guide_command("merge-local: one table", "--mode", "merge-local", "--local-ranktable-list", "a.json"),
)

SECTIONS: Mapping[str, tuple[Broken, ...]] = {
    "`ranktable gen`, `merge`, `convert`, `show`, `diff`": COMMANDS,
    "`ranktable watch`, `doctor`": LOOKING,
    "`pd_ranktable_tools.py`": GUIDE,
}
