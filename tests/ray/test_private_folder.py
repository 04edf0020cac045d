"""Private folders are removed by their owner or, if it was killed, by the next one."""

import subprocess
import sys
from pathlib import Path

from pdserve.ray_cluster.private_folder import PrivateFolder, sweep

_OWNER = """
import sys
from pathlib import Path
from pdserve.ray_cluster.private_folder import PrivateFolder
folder = PrivateFolder(Path(sys.argv[1]))
print(folder.path, flush=True)
sys.stdin.read()
"""


def test_a_private_folder_has_mode_0700_and_is_removed_completely(tmp_path: Path) -> None:
    folder = PrivateFolder(tmp_path)
    (folder.path / "secret").write_text("x")

    assert folder.path.stat().st_mode & 0o777 == 0o700
    folder.close()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_use_is_kept_and_that_of_a_killed_process_removed(tmp_path: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-P", "-c", _OWNER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with owner:
        assert owner.stdout is not None
        path = Path(owner.stdout.readline().strip())
        sweep(tmp_path)
        assert path.exists()
        owner.kill()

    sweep(tmp_path)
    assert not path.exists()


def test_foreign_folders_are_kept(tmp_path: Path) -> None:
    (tmp_path / "pdserve-ray-begun").mkdir()
    (tmp_path / "pdserve-ray-file").write_text("")
    (tmp_path / "other").mkdir()

    sweep(tmp_path)

    assert len(list(tmp_path.iterdir())) == 3
