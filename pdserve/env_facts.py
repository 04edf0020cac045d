"""Facts about this machine for a bug report: software, hardware, limits, and a fixed list of variables."""

import platform
import resource
import sys
from collections.abc import Iterator, Mapping
from urllib.parse import urlsplit

from devices.table import KINDS
from pdserve import __version__
from ranktable_tools.core_quota import core_quota
from ranktable_tools.doctor.machine import Machine
from ranktable_tools.doctor.versions import package_version, stack_facts

PACKAGES = (
    "torch", *(package for kind in KINDS.values() for package in kind.traits.packages),
    "transformers", "tokenizers", "safetensors", "numpy", "grpcio", "protobuf", "ray", "fastapi", "starlette",
    "uvicorn", "pydantic", "pyyaml", "orjson", "jinja2", "prometheus-client", "xxhash", "gguf", "llguidance",
    "mooncake-transfer-engine-non-cuda",
)  # fmt: skip
VARIABLES = (
    "GLOBAL_RANK_TABLE_FILE_PATH", "RANK_TABLE_FILE_PATH", "NODE_PORTS", "USE_OPENAI", "RANK_TABLE_FILE",
    "LLM_TOOLS_PATH", "PDSERVE_SECRET_FILE", "PDSERVE_RUN_DIR", "PDSERVE_CACHE_DIR", "PDSERVE_PYTHON",
    "ASCEND_RT_VISIBLE_DEVICES", "ASCEND_VISIBLE_DEVICES", "ASCEND_HOME_PATH", "ASCEND_LAUNCH_BLOCKING",
    "TASK_QUEUE_ENABLE", "PYTORCH_NPU_ALLOC_CONF", "HCCN_TOOL_PATH", "HCCL_IF_IP", "HCCL_SOCKET_IFNAME",
    "HCCL_IF_BASE_PORT", "HCCL_BUFFSIZE", "HCCL_CONNECT_TIMEOUT", "HCCL_EXEC_TIMEOUT", "HCCL_OP_EXPANSION_MODE",
    "CUDA_VISIBLE_DEVICES", "PYTORCH_CUDA_ALLOC_CONF", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME",
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "TORCH_DEVICE_BACKEND_AUTOLOAD", "no_proxy", "NO_PROXY",
)  # fmt: skip
"""The only variables shown."""
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")
_CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16", "i8mm", "sve")
_MAX_CHARS = 500

Section = Mapping[str, str]


def machine_facts(machine: Machine) -> dict[str, Section]:
    """Return the sections in display order, each with names and values."""
    return {
        "software": dict(_software_facts(machine)),
        "hardware": dict(_hardware_facts(machine)),
        "limits": dict(_limit_facts(machine)),
        "packages": {name: version for name in PACKAGES if (version := package_version(name)) is not None},
        "environment": dict(_variable_facts(machine.environ)),
    }


def _software_facts(machine: Machine) -> Iterator[tuple[str, str]]:
    yield "pdserve", __version__
    yield "python", f"{platform.python_implementation()} {platform.python_version()}"
    yield "system", f"{_os_name(machine)}, {platform.system()} {platform.release()}, {' '.join(platform.libc_ver())}"
    yield "container", "yes" if machine.in_container else "no"
    yield from stack_facts(machine).items()


def _hardware_facts(machine: Machine) -> Iterator[tuple[str, str]]:
    cpu = _fields(machine.text("/proc/cpuinfo"))
    flags = (cpu.get("flags") or cpu.get("Features") or "").split()
    yield "architecture", platform.machine()
    yield "cpu", cpu.get("model name") or cpu.get("CPU part") or "-"
    yield "cpu flags", " ".join(flag for flag in _CPU_FLAGS if flag in flags) or "-"
    yield "cores", f"{len(machine.cores)} usable"
    memory = _fields(machine.text("/proc/meminfo"))
    yield "memory", f"{memory.get('MemTotal', '-')}, {memory.get('MemAvailable', '-')} available"
    yield "device kind", machine.kind
    yield "devices", ",".join(machine.devices) or "-"


def _limit_facts(machine: Machine) -> Iterator[tuple[str, str]]:
    for name, limit in (("open files", resource.RLIMIT_NOFILE), ("locked memory", resource.RLIMIT_MEMLOCK)):
        soft, hard = (_format_limit(value) for value in resource.getrlimit(limit))
        yield name, f"{soft}, at most {hard}"
    quota = core_quota(machine.root)
    yield "cpu quota", "-" if quota is None else f"{quota:g} cores"
    yield "memory limit", (machine.text("/sys/fs/cgroup/memory.max") or "-").strip()
    yield "python flags", "safe path" if sys.flags.safe_path else "-"


def _variable_facts(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for name in VARIABLES:
        if name in environ:
            yield name, environ[name][:_MAX_CHARS]
    for lower in _PROXIES:
        for name in (lower, lower.upper()):
            if environ.get(name):
                yield name, _host_of(environ[name])


def _host_of(url: str) -> str:
    """Return host and port of a proxy URL: the user info before the @ is secret."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        return f"{parts.hostname}:{parts.port}" if parts.port else f"{parts.hostname}"
    except ValueError:
        return "set"


def _os_name(machine: Machine) -> str:
    lines = (machine.text("/etc/os-release") or "").splitlines()
    named = dict(line.partition("=")[::2] for line in lines)
    return named.get("PRETTY_NAME", "-").strip('"')


def _fields(text: str | None) -> dict[str, str]:
    """Return the `name : value` lines of a /proc file; the first of each name."""
    fields: dict[str, str] = {}
    for line in (text or "").splitlines():
        name, colon, value = line.partition(":")
        if colon:
            fields.setdefault(name.strip(), value.strip())
    return fields


def _format_limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)
