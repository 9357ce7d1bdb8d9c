"""The command line: exit 0, 1 or 2; misuse is one line that names the argument, before anything runs."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from verify import runner, suite_file
from verify.__main__ import main, verbs
from verify.registry import ALL

ROW = "refimpl.step3_flash_v2"

MISUSE = {
    "runn": "verb: there is no 'runn'; did you mean 'run'?",
    "run extra": "unrecognized arguments: extra",
    "--kernels step3": "--kernels: there is no kernel 'step3'; did you mean",
    "--kernels quux": "--kernels: there is no kernel 'quux'; expected one of step0_standard",
    "--kernels ,": "--kernels: expected the name of a kernel, got ','",
    "--cases gqq": "--cases: there is no case 'gqq'; did you mean 'gqa'?",
    "--dtype int8": "--dtype: there is no storage type 'int8'; expected one of fp64, fp32, fp16, bf16",
    "--json /nowhere/at/all.json": "--json: expected a file in an existing folder, there is no /nowhere/at",
    "--html .": "--html: expected a file to write, . is a folder",
    "--dump pyproject.toml": "--dump: expected a folder to write, 'pyproject.toml' cannot be one",
    "--dump /proc/x": "--dump: expected a folder to write, '/proc/x' cannot be one",
    "--md -": "--md: expected the name of a file to write, got '-'",
    "--json same --md same": "--json, --html, --md: expected different files, got same twice",
    "--limit inf": "argument --limit: expected a number of seconds above 0 and up to a day, got 'inf'",
    "--limit 1e300": "argument --limit: expected a number of seconds above 0 and up to a day, got '1e300'",
    "bytes --json -": "--json: expected the name of a file to write, got '-'",
    "bench --dtype int8": "--dtype: there is no storage type 'int8'",
    "bench --d 300": "--d, --N: expected head dims up to 256",
    "bench --N 99999999999999999999": "--d, --N: expected head dims up to 256",
    "claims --id ,": "--id: expected the name of a entry",
    "--seed -1": "argument --seed: expected an integer of at least 0, got '-1'",
    "--limit soon": "argument --limit: expected a number of seconds above 0 and up to a day, got 'soon'",
    "--jobs 0": "argument --jobs: expected an integer of at least 1, got '0'",
    "--on tpu": "argument --on: invalid choice: 'tpu'",
    "--kernel step4_causal": "--kernel: step4_causal is one of ours; did you mean --kernels step4_causal?",
    "--kernel nowhere.py:attn": "--kernel: there is no file nowhere.py",
    "--kernel attn": "--kernel: expected path/to/file.py:function or one of sdpa:math, sdpa:flash, sdpa:cudnn",
    "--kernel sdpa:fast": "--kernel: expected sdpa:math|flash|cudnn|efficient, got 'sdpa:fast'",
    "--kernel triton-tutorial:06.py": "--kernel: expected triton-tutorial:FILE.py, there is no file '06.py'",
    "--kernel README.md --kernels oracle": "--kernels: names kernels of ours; leave it out with --kernel",
    "--kernel README.md --on gpu": "--on: where a kernel given by --kernel runs is its own choice; leave it out",
    "--arrays torch": "--arrays: goes with --kernel FILE.py:FUNC",
    "--backward": "--backward: goes with --kernel FILE.py:FUNC",
    "--small": "--small: goes with --kernel FILE.py:FUNC",
    "--kernel examples/numpy_attention.py --arrays tensorflow": "argument --arrays: invalid choice: 'tensorflow'",
    "--kernel examples/numpy_attention.py --cases gqq": "--cases: there is no case 'gqq'; did you mean 'gqa'?",
    "--kernel examples/numpy_attention.py --cases back_gqa": "--cases: all of these judge gradients; say --backward",
    "bytes --kernels oracle": "--kernels: there is no kernel with formulas 'oracle'",
    "exact --kernels step0_standard": "--kernels: there is no kernel with a state 'step0_standard'",
    "conformance": "the following arguments are required: FILE.json",
    "conformance nothing.json": "FILE.json: expected a file, there is none at nothing.json",
    "conformance pyproject.toml": "FILE: expected JSON, pyproject.toml is not",
    "conformance tests/data/conformance.json --cases A99": "--cases: there is no case in the file 'A99'",
}


@pytest.fixture
def nothing_runs(monkeypatch, request):
    """From the root, and with a runner that must not be reached."""
    monkeypatch.chdir(request.config.rootpath)
    monkeypatch.setattr(runner, "run", lambda *a, **k: pytest.fail("something ran"))


@pytest.mark.parametrize("line", MISUSE)
def test_misuse_is_one_line_and_exit_2(line, nothing_runs, capsys):
    assert main(line.split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"verify: {MISUSE[line]}") and err.count("\n") == 1


def test_a_nest_too_deep_for_the_reader_is_misuse(tmp_path, nothing_runs, capsys):
    (tmp_path / "deep.json").write_text("[" * 100_000)
    assert main(["conformance", str(tmp_path / "deep.json")]) == 2
    assert "expected JSON" in capsys.readouterr().err


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full on this system")
def test_a_full_disk_is_said_in_one_line(capsys):
    line = "--json /dev/full --kernels step3_flash_v2 --cases hand --dtype fp32"
    assert main(line.split()) == 2
    assert capsys.readouterr().err == "verify: output: No space left on device\n"


def test_a_gpu_that_is_not_there_is_misuse(nothing_runs, capsys, monkeypatch):
    monkeypatch.setattr("verify.executors.gpu_missing", lambda: "no CUDA GPU answers")
    assert main(["--on", "gpu"]) == 2
    assert capsys.readouterr().err == "verify: --on gpu: no CUDA GPU answers; leave it out to emulate\n"


def test_conformance_files_that_are_not_lists_of_cases(tmp_path, capsys):
    for text, said in (
        ("{}", "expected a list of cases"),
        ("[]", "expected a list of cases"),
        ('[{"id": "A"}]', "case 0 of"),
        ("[3]", "case 0 of"),
    ):
        (tmp_path / "file.json").write_text(text)
        assert main(["conformance", str(tmp_path / "file.json")]) == 2
        err = capsys.readouterr().err
        assert said in err and err.count("\n") == 1
        suite_file.load.cache_clear()


def test_a_run_writes_all_its_reports(tmp_path, capsys):
    files = [tmp_path / name for name in ("out.json", "out.html", "out.md")]
    options = [f"--{path.suffix[1:]}={path}" for path in files]
    assert main(["--kernels", f"{ROW},oracle", "--cases", "hand,gqa", "--dtype", "fp16,fp32", *options]) == 0
    made = json.loads(files[0].read_text())
    wanted = {(k, c, t) for k in (ROW, "oracle") for c in ("hand", "gqa") for t in ("fp32", "fp16")}
    assert {(r["kernel"], r["case"], r["dtype"]) for r in made["results"]} == wanted
    assert len(made["results"]) == len(wanted) and made["counts"]["pass"] == len(wanted)
    for result in made["results"]:
        assert result["verdict"] == "pass" and result["executor"] == "numpy" and result["size"]["B"] == 1
        for name in ("O", "lse"):
            metrics = result["outputs"][name]
            assert metrics["max_abs"] <= metrics["bound"] and metrics["plain"] <= metrics["apriori"]
    assert files[1].read_text().startswith("<!doctype html>") and "| oracle | fp16 | 2/2 |" in files[2].read_text()
    assert "Attention kernels against fp64" in capsys.readouterr().out


def test_json_on_standard_output_is_json_alone(capsys):
    assert main(["run", "--kernels", "oracle", "--cases", "hand", "--json", "-"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["counts"] == {"pass": 3, "fail": 0, "error": 0, "skip": 0} and err == ""


def test_a_failure_is_exit_1(monkeypatch, capsys):
    real = runner.run

    def failing(plan, progress):
        return [replace(r, verdict="fail", reason="made to") for r in real(plan, progress)]

    monkeypatch.setattr(runner, "run", failing)
    assert main(["--kernels", "oracle", "--cases", "hand", "--dtype", "fp32"]) == 1
    assert "FAIL  oracle hand fp32: made to" in capsys.readouterr().out


def test_a_run_in_which_everything_is_skipped_is_not_a_success(capsys):
    assert main(["--kernels", "step3_flash_v2", "--cases", "hand", "--dtype", "fp64"]) == 2
    assert "every run was skipped (stores fp32, fp16, bf16, not fp64)" in capsys.readouterr().err


@pytest.mark.parametrize("verb", verbs())
def test_every_verb_has_help(verb, capsys):
    with pytest.raises(SystemExit) as exit_:
        main([verb, "--help"])
    assert exit_.value.code == 0 and "options:" in capsys.readouterr().out


def test_help_lists_the_verbs(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {verb} " in out for verb in ("run", "doctor", "kernels", "bytes", "exact", "conformance"))


def test_kernels_prints_the_registry(capsys):
    assert main(["kernels", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [k["name"] for k in listed[:5]] == [
        "step0_standard",
        "step1_fused",
        "step2_flash_v1",
        "step3_flash_v2",
        "step4_causal",
    ]
    assert listed[0]["d_max"] == 256 and listed[0]["dtypes"] == ["fp32", "fp16", "bf16"]
    assert main(["kernels"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ALL) and "18.5.1" in out and "sm_75" in out


def test_doctor_says_what_works(capsys):
    assert main(["doctor", "--json"]) == 0
    checks = {check["what"]: check for check in json.loads(capsys.readouterr().out)}
    assert checks["emulator"]["state"] == "ok" and checks["fp64 truth"]["state"] == "ok"
    for check in checks.values():
        assert check["state"] in ("ok", "missing", "broken") and check["found"]
    assert main(["doctor"]) == 0
    assert "the hand case passes" in capsys.readouterr().out


def test_the_module_runs_as_a_program(tmp_path):
    """Once for real: exit status, and nothing but one line on standard error."""
    done = subprocess.run(
        [sys.executable, "-m", "verify", "--dtype", "int8"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2 and done.stdout == "" and "Traceback" not in done.stderr
    assert done.stderr.startswith("verify: --dtype: there is no storage type 'int8'") and done.stderr.count("\n") == 1
