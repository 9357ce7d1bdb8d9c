"""The examples: the right ones pass, the wrong ones fail for what they say is wrong with them."""

import difflib
import re
from pathlib import Path

import pytest

from verify.cases import DEFAULT
from verify.diagnose import in_examples
from verify.executors import gpu_missing
from verify.foreign import arrays
from verify.foreign import probe as foreign_probe
from verify.foreign import run as foreign_run
from verify.foreign.spec import Spec

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "examples"
CASES = ("tile", "tile_plus_1", "causal_113x203", "empty_rows", "gqa", "all_negative")
# Those in which the bug shows; the others pass.
SEEN = {"numba": {"tile_plus_1", "gqa"}, "triton": {"all_negative"}, "cupy": {"gqa"}}
PAIRS = ("numpy", "numba", "triton", "cupy")


def missing(name):
    """Why an example cannot run here, or None."""
    needed = {"triton": ("torch", "triton")}.get(name, (name,))
    for package in needed:
        if not arrays.find_spec(package):
            return f"{package} is not installed"
    return gpu_missing() if name == "cupy" else None


def judged(name, cases, small=True, backward=False):
    """Verdicts by case, with nothing probed."""
    library = name.split("_")[0]
    spec = Spec(f"{FOLDER / name}.py:attn", backward=backward)
    facts = foreign_probe.Facts(arrays={"triton": "torch"}.get(library, library), small=small)
    plan = foreign_run.Plan(spec, facts, tuple(DEFAULT[case] for case in cases), ("fp32",), jobs=1)
    results = [one.result for one in foreign_run.run(plan)]
    assert not any(r.verdict == "error" for r in results), [r.reason for r in results]
    return {r.case: r.verdict for r in results}


@pytest.mark.parametrize("name", PAIRS)
def test_right_and_wrong_differ_by_what_the_wrong_one_says(name):
    """One line of code, and the docstring that owns up to it."""
    right, wrong = (FOLDER.joinpath(f"{name}_attention{end}.py").read_text().splitlines() for end in ("", "_wrong"))
    changed = [line for line in difflib.ndiff(right, wrong) if line[:2] in ("- ", "+ ")]
    assert len(changed) == 4 and sum(line[2:5] == '"""' for line in changed) == 2
    assert "with a bug: " in wrong[0] and "bug" not in right[0]


@pytest.mark.parametrize("name", PAIRS)
def test_right_one_passes(name):
    if reason := missing(name):
        pytest.skip(reason)
    assert judged(f"{name}_attention", CASES) == dict.fromkeys(CASES, "pass")


@pytest.mark.parametrize("name", SEEN)
def test_wrong_one_fails_where_its_bug_shows(name):
    if reason := missing(name):
        pytest.skip(reason)
    results = judged(f"{name}_attention_wrong", CASES)
    assert {case for case, verdict in results.items() if verdict != "pass"} == SEEN[name]


def test_wrong_numpy_example_fails_beyond_one_tile():
    """Its tile of 64 is longer than the small shapes: the full ones are needed, and a row of growing N has them."""
    results = judged("numpy_attention_wrong", ("square", "tile", "tile_plus_1"), small=False)
    assert results == {"square": "fail", "tile": "pass", "tile_plus_1": "fail"}


CUDA_SOURCES = ("cupy_attention.py", "cupy_attention_wrong.py", *(bug for bug in in_examples.EXAMPLES
                                                                   if bug.file == "cupy_attention.py"))  # fmt: skip


@pytest.mark.parametrize("name", CUDA_SOURCES, ids=lambda name: getattr(name, "bug", name))
def test_cuda_sources_compile(name):
    """CuPy hands them to NVRTC, which needs no GPU and knows neither math.h nor a reader's good will."""
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason="no NVRTC: install the cu13 extra")
    headers = pytest.importorskip("cuda.pathfinder").find_nvidia_header_directory("cudart")
    text = FOLDER.joinpath(getattr(name, "file", name)).read_text()
    for old, new in getattr(name, "edits", ()):
        text = text.replace(old, new)
    source = re.search(r'SOURCE = r"""(.*?)"""', text, re.DOTALL)[1]
    for stored in dict(re.findall(r'"(float\d\d)": "(\w+)"', text)).values():
        options = ["--gpu-architecture=sm_90", f"-I{headers}", f"-DSTORED={stored}"]
        status, program = nvrtc.nvrtcCreateProgram(source.encode(), b"attention.cu", 0, [], [])
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        log = bytearray(nvrtc.nvrtcGetProgramLogSize(program)[1])
        nvrtc.nvrtcGetProgramLog(program, log)
        assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS, log.decode()


def test_gradients_of_the_numpy_example():
    cases = ("back_empty_rows", "back_gqa")
    assert judged("numpy_attention", cases, small=False, backward=True) == dict.fromkeys(cases, "pass")


def test_nothing_of_ours_uses_the_examples():
    """They are others' code: the library does not import them, and they do not import it."""
    for folder in ("refimpl", "numba_cuda", "verify", "figures"):
        for path in (ROOT / folder).rglob("*.py"):
            assert "import examples" not in path.read_text() and "from examples" not in path.read_text()
    for path in FOLDER.glob("*.py"):
        assert not any(f"{name}" in path.read_text() for name in ("import verify", "refimpl", "flash_cuda"))
