"""The public fault reports that are about options, through our own tiles: forward and backward in fp64."""

from pathlib import Path

import pytest

from refimpl import masks, scores, step4_causal, varlen
from refimpl.backward import attention_backward
from refimpl.mask_tensor import boolean
from refimpl.philox import Dropout
from refimpl.tiling import Tile
from verify import suite_file

CASES = suite_file.load(Path(__file__).parents[1] / "data" / "conformance.json")
IDS = [f"A{n:02}" for n in (1, 3, 4, 8, 9, 10, 11, 14, 15, 16, 17, 18, 21, 22, 23, 24, 25)]
OUTPUTS = {"out", "lse", "dq", "dk", "dv", "dbias"}
TILE = Tile(4, 4)


def call(task):
    """Outputs by the file's names."""
    x, params = task.arrays, task.params
    options = {"scale": params["scale"], "causal": params.get("causal", False), "tile": TILE}
    options |= {"align": params.get("causal_align", "bottom_right"), "rules": []}
    if "window_left" in params or "window_right" in params:
        options["rules"].append(masks.window(params.get("window_left"), params.get("window_right")))
    if "softcap" in params:
        options["rules"].append(scores.softcap(params["softcap"]))
    if "alibi_slopes" in params:
        options["rules"].append(scores.alibi(params["alibi_slopes"]))
    if "bias" in x:
        options["rules"].append(scores.bias(x["bias"]))
    if "mask" in x:
        options["rules"].append(boolean(x["mask"]))
    if "keep_mask" in x:
        options["dropout"] = Dropout(params["dropout_p"], keep=x["keep_mask"])
    module, where, ends = step4_causal, attention_backward, ()
    if "cu_seqlens_q" in x:
        module, where, ends = varlen, varlen.attention_backward, (x["cu_seqlens_q"], x["cu_seqlens_k"])
    O, lse = module.attention(x["q"], x["k"], x["v"], *ends, **options)
    outputs = {"out": O, "lse": lse}
    if "dO" in x:
        back = where(x["q"], x["k"], x["v"], O, lse, x["dO"], *ends, dbias="bias" in x, **options)
        outputs |= dict(zip(("dq", "dk", "dv", "dbias"), back, strict=False))
    return outputs


@pytest.mark.parametrize("name", IDS)
def test_case(name, agree):
    """Each array that a case expects, within its fp64 tolerance."""
    for task in suite_file.tasks(CASES[name]):
        got, wanted = call(task), next(x for x in task.expected if "error" not in x)
        assert "out" in wanted
        for key in OUTPUTS & wanted.keys():
            y = wanted[key]
            agree((got[key],), (suite_file.build(y) if isinstance(y, dict) else y,), CASES[name]["tol"]["fp64"])
