"""What the figures of the verifier draw: kills as the trials say, and ratios that only the right way gets right."""

import pytest
from matplotlib.colors import to_hex

from figures import kill_matrix, timing
from figures.error_matrix import SKIPPED


def test_every_bug_has_a_killer_among_few_cases():
    """Each case is there for some bug, and each bug is killed by some case."""
    data = kill_matrix.data_kills()
    assert len(data.bugs) >= 12 and all(data.killers(bug) for bug in data.bugs)
    assert data.killers("numpy_head_mapping_modulo") == ["gqa"]
    assert "empty_rows" in data.killers("numpy_pivot") and "tile" not in data.killers("numpy_stale_V")


def test_a_cell_is_what_its_trial_ended_with():
    kills = {("a", "one"): "number", ("a", "two"): "", ("b", "one"): "nan"}
    (ax,) = kill_matrix.fig_kills(kill_matrix.Kills(["a", "b"], ["one", "two"], kills, "made up")).axes
    fills = [to_hex(c.get_facecolor()[0]).upper() for c in ax.collections]
    assert fills.count(kill_matrix.KILLED.upper()) == 2 and fills.count(SKIPPED.upper()) == 1
    texts = [text.get_text() for text in ax.texts]
    assert texts.count("nan") == 1 and texts.count("1") == 2 and "number" not in texts


@pytest.mark.parametrize("seed", range(1, 6))
def test_only_the_right_way_finds_the_true_ratio(seed):
    """Whatever the device draws. Each wrong way is off by more than a tenth and sure of it."""
    for way in timing.WAYS:
        found = way(seed)
        if found.why:
            assert abs(found.ratio.value / timing.TRUE - 1) > 0.1, found
            assert not found.ratio.low <= timing.TRUE <= found.ratio.high, found
        else:
            assert abs(found.ratio.value / timing.TRUE - 1) < 0.02, found


def test_the_right_intervals_hold_the_truth():
    held = [o.ratio.low <= timing.TRUE <= o.ratio.high for o in map(timing.in_turns, range(40))]
    assert sum(held) >= 34  # 38 are to be expected
