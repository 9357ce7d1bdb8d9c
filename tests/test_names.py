"""The folder numba_cuda/ must not shadow NVIDIA's package of that name."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROBE = (
    "import numba.cuda, numba_cuda, flash_cuda, pathlib;"
    "print(numba.cuda.implementation);"
    "print(pathlib.Path(numba_cuda.__file__).parent);"
    "print(pathlib.Path(list(flash_cuda.__path__)[0]))"
)

darwin = pytest.mark.skipif(sys.platform == "darwin", reason="numba-cuda has no wheel for macOS")


def test_folder_has_no_init():
    """An __init__.py would turn numba.cuda into the deprecated built-in target, silently."""
    assert (ROOT / "numba_cuda").is_dir()
    assert not (ROOT / "numba_cuda" / "__init__.py").exists()


@darwin
def test_target_is_nvidias():
    """Under pytest, numba.cuda is NVIDIA's target and flash_cuda is importable."""
    from numba import cuda

    import flash_cuda

    assert cuda.implementation == "NVIDIA"
    assert Path(next(iter(flash_cuda.__path__))) == ROOT / "numba_cuda"


@darwin
@pytest.mark.parametrize("where", ["root", "elsewhere"])
@pytest.mark.parametrize("how", ["-c", "script", "-m"])
def test_target_in_a_fresh_process(where, how, tmp_path):
    """The same from the root and elsewhere, by `-c`, by a script's path and by `-m`."""
    cwd = ROOT if where == "root" else tmp_path
    script = tmp_path / "probe_names.py"
    script.write_text(PROBE)
    command = {"-c": ["-c", PROBE], "script": [str(script)], "-m": ["-m", "probe_names"]}[how]
    env = None
    if how == "-m":
        # From the root `-m` puts the root first on the path, as `python -m verify` does.
        import os

        env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, *command], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    target, nvidia, ours = done.stdout.split("\n")[:3]
    assert target == "NVIDIA"
    assert "site-packages" in nvidia
    assert Path(ours) == ROOT / "numba_cuda"
