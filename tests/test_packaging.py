"""What is declared installs: conda's list matches pip's, every package is listed, a wheel works elsewhere."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

# Names that differ between the two registries; None: no counterpart is needed.
CONDA_NAME = {"matplotlib": "matplotlib-base", "PyYAML": "pyyaml"}
# cuda-toolkit's extras on one side, conda-forge's single packages on the other.
TOOLKIT = {
    "cccl": "cuda-cccl",
    "cudart": "cuda-cudart",
    "nvcc": "cuda-nvcc",
    "nvrtc": "cuda-nvrtc",
    "nvvm": "cuda-nvvm",
}


def run(*command, cwd=ROOT, env=None) -> subprocess.CompletedProcess:
    """Run a command and capture what it says."""
    command = [str(part) for part in command]
    return subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)


def split(requirement: str) -> tuple[str, set[str], str]:
    """(name, extras, sorted version clauses) of a requirement, its marker left out."""
    name, extras, versions = re.fullmatch(
        r"([A-Za-z0-9_.-]+?)\s*(?:\[(.*?)\])?\s*((?:[<>=!~].*)?)", requirement.split(";")[0].strip()
    ).groups()
    clauses = sorted(v.strip() for v in versions.split(",") if v)
    return name, set((extras or "").replace(" ", "").split(",")) - {""}, ",".join(clauses)


def conda_packages() -> dict[str, str]:
    """Name -> sorted version clauses, as environment.yml states them."""
    listed = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    return {name: versions for name, _, versions in (split(p) for p in listed if isinstance(p, str))}


def test_environment_yml_is_in_step():
    """Every pip requirement of the base, cu13, dev and notebooks sets has the same range under conda."""
    extras = PROJECT["project"]["optional-dependencies"]
    wanted: dict[str, str] = {"python": PROJECT["project"]["requires-python"] + ",<3.15"}
    sets = [PROJECT["project"]["dependencies"], *(extras[k] for k in ("cu13", "test", "dev", "notebooks"))]
    for requirement in (r for s in sets for r in s):
        name, parts, versions = split(requirement)
        if name == "flashproof":
            continue
        if name == "cuda-toolkit":
            wanted["cuda-version"] = versions.replace("==", "=").removesuffix(".*")
            wanted |= {TOOLKIT[part]: "" for part in parts}
        elif name == "nvidia-nvjitlink":
            wanted["libnvjitlink"] = ""  # cuda-version holds it at 13.0
        else:
            wanted[CONDA_NAME.get(name, name)] = versions
    wanted["python"] = ",".join(sorted(wanted["python"].split(",")))
    listed = conda_packages()
    assert listed.pop("pip") == ""
    assert listed == wanted


def test_every_package_folder_is_listed():
    """A new sub-package that setuptools is not told of would be missing from the wheel."""
    folder = {"flash_cuda": "numba_cuda"}
    listed = {
        "/".join(folder.get(part, part) for part in name.split("."))
        for name in PROJECT["tool"]["setuptools"]["packages"]
    }
    found = {
        path.parent.relative_to(ROOT).as_posix()
        for top in ("refimpl", "numba_cuda", "verify", "figures")
        for path in (ROOT / top).rglob("*.py")
        if path.relative_to(ROOT).parts[:2] != ("figures", "out")
    }
    assert listed == found


def test_makefile_names_real_extras():
    """The Makefile asks pip for extras that exist."""
    extras = set(PROJECT["project"]["optional-dependencies"])
    for cuda in ("none", "cu12", "cu13"):
        done = run("make", "-n", "test", f"CUDA={cuda}", "VENV=absent")
        asked = re.search(r'-e "\.\[(.*?)\]"', done.stdout)
        assert done.returncode == 0 and asked, done.stderr
        assert set(asked[1].split(",")) <= extras


@pytest.mark.parametrize(
    ("serves", "verify_extras", "test_extras"),
    [
        ("12.4", "[cu12]", "[test,cu12,notebooks]"),
        ("13.0", "[cu13]", "[dev,notebooks]"),
        ("11.4", "", "[dev,notebooks]"),
        (None, "", "[dev,notebooks]"),
    ],
)
def test_makefile_asks_the_driver(tmp_path, serves, verify_extras, test_extras):
    """CUDA packages by what the driver serves; one that is too old for a GPU run, or none, still verifies."""
    says = f"| NVIDIA-SMI 1.2  Driver Version: 1.2  CUDA Version: {serves} |" if serves else "no driver"
    (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho '{says}'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    assert f'-e ".{verify_extras}"' in run("make", "-n", "verify", "VENV=absent", env=env).stdout
    assert f'-e ".{test_extras}"' in run("make", "-n", "test", "VENV=absent", env=env).stdout


def test_makefile_refuses_an_old_python(tmp_path):
    """An interpreter that is too old: one line that says what is needed and what was found."""
    old = tmp_path / "python3.8"
    old.write_text('#!/bin/sh\n[ "$1" = --version ] && echo "Python 3.8.18" && exit 0\nexit 1\n')
    old.chmod(0o755)
    done = run("make", "verify", f"PYTHON={old}", f"VENV={tmp_path / 'venv'}")
    assert done.returncode != 0
    assert "needs Python 3.11 to 3.14" in done.stdout and "Python 3.8.18" in done.stdout
    assert not (tmp_path / "venv").exists()


@pytest.mark.slow
def test_wheel_works_elsewhere(tmp_path):
    """The wheel, unpacked away from the repository, brings its data and runs `verify doctor`."""
    pip = [sys.executable, "-m", "pip", "--quiet"]
    # From a copy, as setuptools leaves its build folder in the source and would find old files there.
    source = tmp_path / "source"
    for name in ("refimpl", "numba_cuda", "verify", "figures"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "out"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    done = run(*pip, "wheel", "--no-deps", "--wheel-dir", tmp_path, source)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("flashproof-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert "flash_cuda/__init__.py" not in names and not any(n.startswith("numba_cuda/") for n in names)
    data = [p for top in ("verify", "figures") for ext in ("json", "mplstyle") for p in (ROOT / top).rglob(f"*.{ext}")]
    assert {p.relative_to(ROOT).as_posix() for p in data} <= names

    site = tmp_path / "site"
    done = run(*pip, "install", "--no-deps", "--target", site, wheel)
    assert done.returncode == 0, done.stderr
    # A path entry comes ahead of site-packages, and so of this repository's editable install.
    env = {**os.environ, "PYTHONPATH": str(site)}
    modules = "verify", "refimpl.oracle", "flash_cuda.launch", "figures"
    probe = f"import json, sys, {', '.join(modules)}; print(json.dumps([sys.modules[m].__file__ for m in {modules}]))"
    done = run(sys.executable, "-c", probe, cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    assert all(Path(place).is_relative_to(site) for place in json.loads(done.stdout))
    done = run(sys.executable, "-m", "verify", "doctor", cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
