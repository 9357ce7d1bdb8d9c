"""The cubin cache: names that no two kernels share and every process agrees on, files that are whole or absent."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from helpers_driver import array, pretend
from helpers_mutate import step_with

from flash_cuda import step5_tensor_core, step6_flash_v3
from flash_cuda.executors import cubin_cache, cubin_key, gpu
from flash_cuda.executors.assembler import Assembler, numba_type
from flash_cuda.executors.cubin_cache import Cubin
from flash_cuda.executors.cubin_key import NoName, name_of
from flash_cuda.parts import hopper_shapes

CUBIN = Cubin(bytes(range(256)) * 3, "entry")
STEPS = (
    "step0_standard", "step1_fused", "step2_flash_v1", "step3_flash_v2", "step4_causal", "step5_tensor_core",
    "step6_flash_v3", "general", "standard_tensor_core",
)  # fmt: skip
NAME_ALL = f"""
import importlib
import numpy as np
from flash_cuda.executors.assembler import Assembler, numba_type
from flash_cuda.backward import attention_backward
from flash_cuda.executors.cubin_key import name_of

class Names(Assembler):
    def launch(self, body, blocks, threads, args, shared=0):
        print(name_of(body, tuple(map(numba_type, args)), (9, 0, "a")))

X, lse = np.zeros((1, 2, 100, 64), np.float16), np.zeros((1, 2, 100), np.float32)
for step in {STEPS}:
    importlib.import_module("flash_cuda." + step).attention(X, X, X, causal=True, on=Names("sm_90a"))
for way in (True, False):
    attention_backward(X, X, X, X, lse, X, deterministic=way, on=Names("sm_90a"))
"""


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    """A cache of the test's own; sources count as they are now, whoever has edited one since the tests began."""
    monkeypatch.setenv("FLASHPROOF_CACHE", str(tmp_path / "cache"))
    now = {file: os.stat(file).st_mtime_ns for file in cubin_key.IMPORTED}
    monkeypatch.setattr(cubin_key, "IMPORTED", now)
    return tmp_path / "cache"


def test_what_is_stored_is_found(place):
    assert cubin_cache.load("k-1") is None and cubin_cache.store("k-1", CUBIN)
    assert cubin_cache.load("k-1") == CUBIN and cubin_cache.load("k-2") is None
    assert [path.name for path in place.iterdir()] == ["k-1.cubin"]  # nothing else is left lying
    assert place.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("damage", [
    lambda data: data[:-1],
    lambda data: data[: len(cubin_cache.FIRST_LINE)],
    lambda data: b"",
    lambda data: data[:-9] + b"X" + data[-8:],
    lambda data: data.replace(b"cubin 1", b"cubin 2"),
    lambda data: data.replace(b'"k-1"', b'"k-2"'),
    lambda data: data.replace(b'"sha256"', b'"sha255"'),
    lambda data: data.replace(b'{"name"', b'["name"'),
])  # fmt: skip
def test_what_is_damaged_counts_as_absent(place, damage):
    cubin_cache.store("k-1", CUBIN)
    file = place / "k-1.cubin"
    changed = damage(file.read_bytes())
    assert changed != file.read_bytes()
    file.write_bytes(changed)
    assert cubin_cache.load("k-1") is None and not file.exists()


def test_a_folder_open_to_others_is_left_alone(place):
    cubin_cache.store("k-1", CUBIN)
    place.chmod(0o777)
    assert cubin_cache.load("k-1") is None and not cubin_cache.store("k-2", CUBIN)
    place.chmod(0o755)
    assert cubin_cache.load("k-1") == CUBIN


def test_a_place_that_cannot_be_written_costs_nothing(place, monkeypatch):
    place.write_text("a file where the folder should be")
    assert not cubin_cache.store("k-1", CUBIN) and cubin_cache.load("k-1") is None
    place.unlink()

    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", full)
    assert not cubin_cache.store("k-1", CUBIN) and list(place.iterdir()) == []


def test_the_place_is_the_users_choice(monkeypatch, tmp_path):
    for off in ("", "0", "off", "OFF"):
        monkeypatch.setenv("FLASHPROOF_CACHE", off)
        assert cubin_cache.folder() is None and not cubin_cache.store("k-1", CUBIN)
        assert cubin_cache.load("k-1") is None
    monkeypatch.delenv("FLASHPROOF_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cubin_cache.folder() == tmp_path / "flashproof"
    monkeypatch.setenv("HOME", str(tmp_path))
    for unset in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", unset)
        assert cubin_cache.folder() == tmp_path / ".cache" / "flashproof"
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as where there is no home
    assert cubin_cache.folder() is None


def test_the_least_recently_used_go(place, monkeypatch):
    for k in range(4):
        cubin_cache.store(f"k-{k}", CUBIN)
        os.utime(place / f"k-{k}.cubin", (k, k))
    assert cubin_cache.load("k-0")  # used: now the newest
    size = (place / "k-0.cubin").stat().st_size
    monkeypatch.setattr(cubin_cache, "LIMIT_BYTES", 3 * size)
    cubin_cache.store("k-4", CUBIN)
    assert sorted(path.stem for path in place.iterdir()) == ["k-0", "k-3", "k-4"]


def names(process_seed):
    """The names of all kernels, in a process of its own."""
    env = os.environ | {"PYTHONHASHSEED": str(process_seed)}
    done = subprocess.run([sys.executable, "-c", NAME_ALL], env=env, capture_output=True, text=True)
    return done.stdout.split(), done.stderr


def test_every_process_gives_the_same_names():
    """All kernels have one, whatever order sets and hashes come in."""
    (first, problem), (second, _) = names(1), names(2)
    assert first == second and not problem
    assert [name.split("-")[0] for name in first[:3]] == ["step0_scores", "step0_softmax", "step0_output"]
    assert len(set(first)) > len(STEPS) and all(len(name.split("-")[1]) == 40 for name in first)


def made(step=step5_tensor_core, **changes):
    """(body, signature) of a step at d = 64, with some arguments of its factory changed."""
    if step is step6_flash_v3:
        return step.make_kernel(hopper_shapes.SHAPES[64], "fp16", **changes), (numba_type(1),)
    given = {"shape": step.SHAPES[64], "D": 64, "dtype": "fp16", "fill": "whole"} | changes
    return step.make_kernel(**given), (numba_type(1),)


def test_whatever_makes_another_kernel_makes_another_name():
    body, signature = made()
    base = name_of(body, signature, (9, 0, "a"), 13000)
    bounded = step5_tensor_core.SHAPES[64]._replace(blocks=2)
    others = [
        name_of(body, (numba_type(1.0),), (9, 0, "a"), 13000),
        name_of(body, signature, (9, 0), 13000),
        name_of(body, signature, (9, 0, "a"), 12090),
        *(name_of(*made(**change), (9, 0, "a"), 13000) for change in (
            {"dtype": "bf16"}, {"fill": "padded"}, {"late_scale": False}, {"D": 96}, {"shape": bounded})),
        *(name_of(*made(step6_flash_v3, **change), (9, 0, "a"), 13000) for change in ({}, {"capped": True})),
    ]  # fmt: skip
    assert len({base, *others}) == 1 + len(others)
    assert name_of(body, signature, (9, 0, "a"), 13000) == base


def test_a_routine_two_closures_away_counts():
    """A constant in the closure of a device function that a device function calls."""
    from numba import cuda

    def kernel(constant, option):
        @cuda.jit(device=True, inline=option)
        def inner(x):
            return x + constant

        @cuda.jit(device=True)
        def outer(x):
            return inner(x)

        def body(x):
            x[0] = outer(x[0])

        return body

    ways = (1, "never"), (2, "never"), (1, "always"), (True, "never")
    found = {name_of(kernel(*way), (), (8, 0)) for way in ways}
    assert len(found) == len(ways)
    assert name_of(kernel(1, "never"), (), (8, 0)) in found


def test_the_order_of_a_set_does_not_count():
    """Two sets of the same numbers, which come in another order as these share a place in the table."""
    one, other = frozenset([0, 8]), frozenset([8, 0])
    assert list(one) != list(other)
    walks = [cubin_key.Walk() for _ in range(3)]
    for walk, value in zip(walks, (one, other, frozenset([0, 9])), strict=True):
        walk.add(value)
    digests = [walk.digest.hexdigest() for walk in walks]
    assert digests[0] == digests[1] != digests[2]


def test_the_compiler_and_its_environment_count(monkeypatch):
    body, signature = made()
    base = name_of(body, signature, (9, 0, "a"))
    cubin_key.compiler.cache_clear()
    monkeypatch.setenv("NUMBA_OPT", "1")
    changed = name_of(body, signature, (9, 0, "a"))
    cubin_key.compiler.cache_clear()
    monkeypatch.setattr(cubin_key.metadata, "version", lambda package: "0")
    assert len({base, changed, name_of(body, signature, (9, 0, "a"))}) == 3
    cubin_key.compiler.cache_clear()
    monkeypatch.undo()
    assert name_of(body, signature, (9, 0, "a")) == base


def test_a_compiler_of_no_known_version_makes_no_name(monkeypatch):
    monkeypatch.setattr(cubin_key, "PACKAGES", ("not-a-package-of-anyone",))
    cubin_key.compiler.cache_clear()
    with pytest.raises(NoName, match="no version of not-a-package-of-anyone"):
        name_of(*made(), (9, 0, "a"))


def test_what_was_changed_has_no_name(monkeypatch):
    """Copies of modules in memory, as mutants have; a source edited since; what cannot be written down."""
    body, signature = made()
    copy = step_with("step5_tensor_core", ("live = int32(", "live = int32(0 * "))
    with pytest.raises(NoName, match=r"module .*step5_tensor_core.* is not the one that was imported"):
        name_of(copy.make_kernel(step5_tensor_core.SHAPES[64], 64, "fp16", "whole"), signature, (9, 0, "a"))
    thing = object()

    def strange(x):
        x[0] = thing

    with pytest.raises(NoName, match=r"a builtins.object is part of it"):
        name_of(strange, (), (8, 0))
    cubin_key.contents.cache_clear()
    monkeypatch.setitem(cubin_key.IMPORTED, cubin_key.__file__, 0)
    with pytest.raises(NoName, match="was changed after it was imported"):
        name_of(body, signature, (9, 0, "a"))


class Compiler:
    """In the place of the compiler: counts."""

    def __init__(self, code=b"code"):
        self.code, self.calls = code, 0

    def __call__(self, body, signature, cc):
        self.calls += 1
        assert cc == (9, 0, "a")
        return Cubin(self.code, body.__name__)


def run(monkeypatch, compiler):
    """A process that launches one kernel: (the compiler, the driver)."""
    driver = pretend(monkeypatch)
    monkeypatch.setattr(gpu, "compile_cubin", compiler)

    def body(x, n):
        x[0] = n

    gpu.kernel_for(body, (array(16, (4,), np.float32), 3))
    gpu.kernel_for(body, (array(32, (5,), np.float32), 4))
    return driver


def test_a_second_process_does_not_compile(monkeypatch, place):
    first, second = Compiler(b"first"), Compiler(b"second")
    assert run(monkeypatch, first).loaded == [b"first"] and first.calls == 1
    assert run(monkeypatch, second).loaded == [b"first"] and second.calls == 0
    (file,) = place.iterdir()
    assert file.name.startswith("body-")
    file.write_bytes(file.read_bytes()[:-1])
    assert run(monkeypatch, second).loaded == [b"second"] and second.calls == 1  # damaged, and made good again
    assert run(monkeypatch, first).loaded == [b"second"] and first.calls == 1


def test_a_cubin_that_the_driver_refuses_is_compiled_anew(monkeypatch, place):
    run(monkeypatch, Compiler(b"code"))
    (file,) = place.iterdir()
    cubin_cache.store(file.stem, Cubin(b"bad", "body"))
    again = Compiler(b"anew")
    assert run(monkeypatch, again).loaded == [b"anew"] and again.calls == 1
    assert cubin_cache.load(file.stem).code == b"anew"


def test_without_a_cache_every_process_compiles(monkeypatch, place):
    monkeypatch.setenv("FLASHPROOF_CACHE", "off")
    for _ in range(2):
        compiler = Compiler()
        run(monkeypatch, compiler)
        assert compiler.calls == 1
    assert not place.exists()


def test_a_file_is_what_it_says(place):
    """No pickle, nothing that is run here: a line, JSON, the cubin."""
    cubin_cache.store("k-1", CUBIN)
    first, head, code = (place / "k-1.cubin").read_bytes().split(b"\n", 2)
    assert first == b"flashproof cubin 1" and code == CUBIN.code
    assert json.loads(head)["entry"] == "entry"


def test_what_is_compiled_for_a_device_is_what_is_assembled_offline():
    """The cubin of the GPU's path and that of the offline checks: the same bytes."""
    from flash_cuda.executors import assembler

    def body(x, n):
        x[0] = n * 2

    signature = tuple(map(numba_type, (np.zeros(3, np.float32), 3)))
    offline, _ = assembler.assemble(body, signature, {"sm_90a": (9, 0, "a")})["sm_90a"]
    with assembler._pretend_device((9, 0)):
        found = assembler.compile_cubin(body, signature, (9, 0, "a"))
    assert len(found.code) == len(offline) and found.entry.encode() in found.code
    assert assembler.resources(found.code) == assembler.resources(offline)
    assert Assembler("sm_90a").ccs["sm_90a"] == (9, 0, "a")
