"""The sets of values with which the chart is rendered in tests."""

from typing import Any

NPU = {
    "image": {"repository": "registry.example/pdserve", "tag": "ascend", "pullSecrets": [{"name": "registry"}]},
    "model": {"path": "/models/Qwen3-8B", "name": "qwen", "volume": {"persistentVolumeClaim": {"claimName": "models"}}},
    "device": {
        "type": "npu", "annotation": "huawei.com/Ascend910", "ipFrom": "vnic",
        "hostPaths": ["/usr/local/Ascend/driver", "/usr/local/sbin/npu-smi", "/etc/hccn.conf"],
    },
    "prefill": {
        "replicas": 2, "devices": 4, "hostNetwork": True, "schedulerName": "volcano",
        "podAnnotations": {"huawei.com/schedule_minAvailable": "1"},
        "podLabels": {"ring-controller.atlas": "ascend-910b"},
        "nodeSelector": {"accelerator-type": "module-910b-8"},
        "tolerations": [{"key": "npu", "operator": "Exists", "effect": "NoSchedule"}],
    },
    "decode": {"replicas": 3, "devices": 2, "resources": {"requests": {"cpu": 8}, "limits": {"memory": "64Gi"}}},
}  # fmt: skip
GPU = {
    "device": {"type": "cuda"},
    "model": {"path": "/models/m", "volume": {"hostPath": {"path": "/data/models"}}},
    "prefill": {"devices": 2},
    "args": ["--max-model-len=4096", "--dtype=bfloat16"],
    "env": [{"name": "NCCL_DEBUG", "value": "WARN"}],
    "instance": {"probe": "http"},
    "workload": "LeaderWorkerSet",
}
PLATFORM = {
    "table": {"platform": {"enabled": True, "volume": {"configMap": {"name": "rank-table"}}}},
    "model": {"path": "/models/m", "volume": {"persistentVolumeClaim": {"claimName": "models"}}},
}
KUBEINFER = {
    "table": {
        "platform": {
            "enabled": True, "volume": {"configMap": {"name": "rank-table"}}, "dialect": "kubeinfer", "numPrefill": 1,
        }
    },
    "clusterSecret": {"existing": "mine"},
}  # fmt: skip
VLLM_ASCEND = {
    "table": {
        "platform": {
            "enabled": True, "volume": {"configMap": {"name": "rank-table"}}, "dialect": "vllm-ascend",
            "devicesPerInstance": 2, "apiServer": "pdserve",
        }
    },
}  # fmt: skip
MONITORED = {
    "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
    "podDisruptionBudget": {"enabled": False},
    "scheduler": {
        "service": {"type": "LoadBalancer", "annotations": {"example.com/internal": "true"}},
        "affinity": {"nodeAffinity": {}},
    },
}
_PROMETHEUS = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
CLOSED: dict[str, Any] = {
    "networkPolicy": {
        "enabled": True,
        "clients": [{"podSelector": {"matchLabels": {"app": "web"}}}, {"ipBlock": {"cidr": "10.0.0.0/8"}}],
        "monitoring": [_PROMETHEUS],
    },
    "tls": {"enabled": True, "existing": "pdserve-tls"},
    "instance": {"probe": "http"},
}  # fmt: skip
RAY = {"ray": {"enabled": True}, "args": ["--max-model-len=2048"]}
RAY_NPU = {"ray": {"enabled": True, "devicesPerWorker": 8}, **{key: NPU[key] for key in ("model", "device")}}

ALL: dict[str, dict[str, Any]] = {
    "its own": {}, "npu": NPU, "gpu": GPU, "platform": PLATFORM, "kubeinfer": KUBEINFER, "vllm-ascend": VLLM_ASCEND,
    "monitored": MONITORED, "closed": CLOSED, "ray": RAY, "ray-npu": RAY_NPU,
}  # fmt: skip
