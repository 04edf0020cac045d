"""The writer: merges all parts into one table and keeps it up to date in a ConfigMap."""

from dataclasses import dataclass

from ranktable_tools.kube.api import KubeApi, KubeError
from ranktable_tools.kube.merging import ClusterSize, decide
from ranktable_tools.kube.names import TABLE_KEY

_TRIES = 5


@dataclass(frozen=True, slots=True)
class ConfigMapNames:
    """The ConfigMaps of the parts and of the table, and the labels of the cluster's pods."""

    parts: str
    table: str
    selector: str


class Writer:
    """Reads parts and pods, and writes the table if it has changed. Keeps no state between turns."""

    def __init__(self, api: KubeApi, places: ConfigMapNames, wanted: ClusterSize) -> None:
        self._api, self._places, self._wanted = api, places, wanted

    def turn(self) -> list[str]:
        """Read once and write changes; return lines for the log. Raises KubeError."""
        for _ in range(_TRIES):
            try:
                return self._try_write()
            except KubeError as error:
                if error.status != 409:
                    raise
        raise KubeError(f"ConfigMap {self._places.table}: written by others {_TRIES} times in a row", 409)

    def _try_write(self) -> list[str]:
        # Read the pods last, so that the part of a pod that is gone by then is not used.
        table = self._api.config_map(self._places.table)
        parts = self._api.config_map(self._places.parts).data
        pods = self._api.pods(self._places.selector)
        current = table.data.get(TABLE_KEY)
        decision = decide(parts, pods, current, self._wanted)
        if decision.text == current:
            return list(decision.notes)
        self._api.replace(table, {**table.data, TABLE_KEY: decision.text})
        return [*decision.notes, f"wrote ConfigMap {self._places.table}: {decision.description}"]
