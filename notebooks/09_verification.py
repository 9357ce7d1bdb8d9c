# %% [markdown]
# # 09 · How do you know that it is right?
#
# *The engineering part. A kernel that is wrong looks like one that is right, and a time that is wrong looks
# like any other number.*
#
# ## What you'll do
#
# Judge a kernel against truth, plant bugs and see which input finds them, take barriers out, and time a
# device whose times are known, wrongly and rightly.
#
# ## What you'll learn
#
# - why "allclose with 1e-3" is not a verdict, and what three numbers make one;
# - why a verifier has to be verified, and how;
# - that a test input is there for the bug that it kills;
# - how to get a ratio of two times that is worth printing.
#
# ## What you'll need
#
# Notebook 04 for the online softmax. No GPU: kernels are emulated, the clock is simulated, and what was
# measured on a GPU comes from `verify/records/`.

# %%
from fractions import Fraction
from inspect import getsource
from itertools import product

import numpy as np

from figures import error_matrix, kill_matrix, records, timing
from verify import barriers, judge, races, runner, tolerance
from verify.bench import limits
from verify.bench.stats import median_ranks, paired
from verify.calls import outputs
from verify.cases import DEFAULT
from verify.mutants import MUTANTS, Graft, trial
from verify.registry import CUDA
from verify.testing import check

# %% [markdown]
# ## 1 By hand
#
# The smallest check is one whose answer a person can work out: four rows of two small integers, and weights
# $2^s$ instead of $e^s$ (a scale of $\ln 2$), so that everything is a fraction.

# %%
problem = DEFAULT["hand"].build("fp32")
print("Q\n", problem.Q[0, 0], "\nK\n", problem.K[0, 0], "\nV\n", problem.V[0, 0], "\n", problem.options)
weights = [[Fraction(2) ** int(q @ k) for k in problem.K[0, 0]] for q in problem.Q[0, 0]]
by_hand = [
    [sum(w * Fraction(float(v)) for w, v in zip(row, column, strict=True)) / sum(row) for column in problem.V[0, 0].T]
    for row in weights
]
print("O", [[str(x) for x in row] for row in by_hand])

# %% [markdown]
# The kernel of step 3, thread by thread in the emulator, on the same input:

# %%
where = runner.placed("emulated", [16, 16], seed=0)
found = outputs(CUDA["step3_flash_v2"], problem, where)
off = max(abs(Fraction(float(o)) - x) for o, x in zip(found["O"].ravel(), np.ravel(by_hand), strict=True))
print(found["O"][0, 0], f"\nfurthest from the fractions: {float(off):.1e}")
assert off < 1e-6

# %% [markdown]
# A fine start, and it proves little. All of it fits one tile, so nothing is ever rescaled; no length is
# ragged; there is one head.
#
# ## 2 Three anchors
#
# On larger inputs the answer is not known as fractions, and no kernel gives it exactly. So how far off may
# it be? Comparing with a fixed number judges the input as much as the kernel. Three other numbers are known
# for each input:
#
# - **truth**: the definition, untiled, in fp64;
# - **the plain formula at the same precision**: how far three lines without any tiling are from truth, when
#   they round where a kernel has to round. Nobody can blame a kernel for that much;
# - **the a-priori bound**: what no order of summation can exceed, from $N$, $d$, the types and the largest
#   score.
#
# A kernel passes if its error is at most twice the plain formula's plus a floor:

# %%
print(f"factor {tolerance.FACTOR:g}; the floor for O:\n{getsource(tolerance.floor_O)}")

# %%
def step3(Q, K, V, *, scale, causal, align):
    placed = runner.placed("emulated", [16, 16], seed=1)
    return CUDA["step3_flash_v2"].attention()(Q, K, V, scale=scale, causal=causal, align=align, **placed)


print("case          dtype      error      plain      bound   a priori   blog's limit  verdict")
for case, dtype in product(("square", "logits_x10", "late_max"), ("fp32", "fp16", "bf16")):
    result = check(step3, case, dtype=dtype)
    O = result.outputs["O"]
    fixed = "none" if O.fixed is None else f"{O.fixed:g}"
    print(f"{case:13} {dtype:5} {O.max_abs:10.1e} {O.plain:10.1e} {O.bound:10.1e} {O.apriori:10.1e}", end="")
    print(f"{fixed:>15}  {result.verdict}")
    assert result.verdict == "pass" and O.max_abs <= O.bound

# %% [markdown]
# Read the bounds down the column: they differ by orders of magnitude between types, and between inputs of
# one type. A fixed limit that lets bf16 pass is blind in fp32. The judge does not only look at O: `lse` is
# held to bounds of its own, NaN always fails, and no input may have changed.
#
# All cases and all kernels, as the newest run on a GPU found them:

# %%
error_matrix.fig_kernels(error_matrix.data_kernels())

# %% [markdown]
# ## 3 Verifying the verifier
#
# A matrix without red is what a perfect kernel gives, and what a judge gives that never fails anything. To
# tell them apart one needs kernels that are known to be wrong. The project plants them itself: a *mutant* is
# one small edit of the shipped source, applied to a copy in memory.

# %%
print(len(MUTANTS), "mutants,", sum(m.in_numba for m in MUTANTS.values()), "in the kernels' own bodies; one of them:")
mutant = MUTANTS["O_not_rescaled"]
print(mutant.about)
for edit in mutant.edits:
    print(f"  {edit.path}, {edit.function}:\n    - {edit.old.strip()}\n    + {edit.new.strip()}")

# %% [markdown]
# `python -m verify mutants` runs all of them against all cases in all types. Here is a part that takes
# seconds: bugs in the NumPy steps, which share their data flow with the kernels.

# %%
kills = kill_matrix.data_kills()
kill_matrix.fig_kills(kills)

# %% [markdown]
# **Rows.** A bug that forgets to rescale is seen by anything with two tiles and a maximum that grows. A wrong
# head mapping is seen by one of these cases alone. Without such a case the judge would be blind to a bug that
# real kernels have had, and no test of correct kernels would notice.
#
# **Columns.** So each case is there for some bug. Which few cases would kill all of these?

# %%
assert kills.killers("numpy_head_mapping_modulo") == ["gqa"]
left = set(kills.bugs)
while left:
    case = max(kills.cases, key=lambda c: len({b for b in left if kills.kills.get((b, c))}))
    dead = {bug for bug in left if kills.kills.get((bug, case))}
    assert dead, "a bug that no case kills"
    left -= dead
    print(f"{case:16} kills {len(dead):2} more, {len(left):2} left")

# %% [markdown]
# A handful of cases, each of another kind, do what hundreds of random ones of one kind cannot: a random
# square input never has an empty row, a shared head, or a NaN behind the mask.
#
# The same with bugs in the kernels' bodies, emulated. The last column is what a common check says: random numbers
# in [0, 1), a size that tiles divide, no mask, equal heads, and a fixed limit of 2e-2 on O.

# %%
bugs = ("O_not_rescaled", "alpha_inverted", "max_starts_at_0", "last_ragged_tile_dropped",
        "diagonal_one_short", "lse_base_2", "head_mapping_modulo")  # fmt: skip
for name in bugs:
    mutant, seen = MUTANTS[name], []
    graft, cases = Graft(mutant.edits), iter(trial.cases_for(mutant))
    while len(seen) < 2:
        run = trial.attempt(graft, mutant.through, next(cases), "fp32", tile=mutant.tile)
        seen += [f"{run.case} ({run.kill})"] if run.kill else []
    fixed = "LIVES" if kill_matrix.fixed_limit(name) else "killed"
    print(f"{name:25} default cases: {', '.join(seen):48} fixed limit: {fixed}")

# %% [markdown]
# ## 4 Right by luck
#
# A missing barrier is another kind of bug: the answer may be right, today, on this GPU. The emulator runs a
# block's threads in any order, and remembers who touched what since the last barrier. Take each barrier out
# of step 3, one at a time:

# %%
module, case = "flash_cuda.step3_flash_v2", "causal_113x203"
for k in range(barriers.barriers(module)):
    seen = races.seen_without("step3_flash_v2", [case], "fp16", module, k, "emulated")
    print(f"barrier {k}: {seen['watched'].split(':')[0]}; unwatched, in other orders: {seen['bits, emulated']}")
    assert all(seen.values())
assert races.orders("step3_flash_v2", case, "fp16") is None
print(f"with all of them: the same bits in the natural and {races.SEEDS} other orders")

# %% [markdown]
# On a GPU, where one cannot choose the order, `python -m verify races` repeats runs, fills shared memory with
# NaN before them, puts some warps to sleep at barriers, and asks `compute-sanitizer` where it is there.
#
# ## 5 Timing, wrong and right
#
# Now two kernels that are right, and the question which is faster. Here a simulated device helps, since its
# times are known: ours takes 0.100 ms with a cold cache and theirs 0.110. Theirs is launched quickly, ours is
# not; ours gains much from a warm cache, theirs does not; and the device slows down as it gets warm.

# %%
print(f"ours {timing.OURS}\ntheirs {timing.THEIRS}\ntrue ratio {timing.TRUE:.2f}")
outcomes, held = timing.data_ways(), timing.held()
for outcome, times in zip(outcomes, held, strict=True):
    print(f"{outcome.way:24} {outcome.ratio}   holds it on {times:2} of 100 devices   {outcome.why}")
assert held[:-1] == [0, 0, 0, 0] and held[-1] >= 90

# %%
timing.fig_ways(outcomes)

# %% [markdown]
# Four ways give four answers, from six times slower to almost twice as fast, and each with a tight interval:
# *repeating a wrong measurement makes it precise, not right.*
#
# 1. A launch returns before the kernel has run. The **host's clock** around it times the launch.
# 2. **Events** are the device's own clock. But an idle device passes the first one at once and then waits for
#    the host. The device has to be kept busy until all is queued.
# 3. **A warm cache** is a legitimate question, if it is said. Run after run on the same inputs asks it silently.
# 4. **One after the other** gives the second one a hotter, slower chip.
#
# The fifth way, right on about as many devices as a 95 % interval promises, runs them in turns, A B, B A, ...
# with the cache flushed each time, and takes the median of the ratios within rounds:

# %%
rng = np.random.default_rng(9)
drift = 1 + 0.3 * np.linspace(0, 1, 24)
ours = 0.100 * drift * np.exp(0.01 * rng.standard_normal(24))
theirs = 0.110 * drift * np.exp(0.01 * rng.standard_normal(24))
print(f"ours scatters by {np.std(ours) / np.mean(ours):.0%}, the ratio within a round by {np.std(theirs / ours):.1%}")
print(f"median of paired ratios {paired(ours, theirs)}")

# %% [markdown]
# The interval needs no normal distribution. Each ratio is below the true median with probability 1/2, so the
# number that are is binomial, and the k-th smallest and k-th largest enclose the median with a probability
# that can be counted. It also says how many rounds are too few:

# %%
for n in (5, 6, 12, 24):
    ranks = median_ranks(n)
    print(n, "rounds:", "no 95 % interval" if ranks is None else f"from number {ranks[0] + 1} to number {ranks[1] + 1}")
skewed = 1 + 0.05 * (rng.exponential(size=(4000, 24)) - np.log(2))
low, high = np.sort(skewed, axis=1)[:, list(median_ranks(24))].T
print(f"on 4000 samples of a skewed distribution it held the true median in {np.mean((low <= 1) & (high >= 1)):.1%}")
assert np.mean((low <= 1) & (high >= 1)) > 0.94

# %% [markdown]
# ## 6 Faster than light
#
# Whatever went wrong, one check is left. A kernel that computes attention has to do its operations and to
# read its inputs, and a chip has limits. A time below both cannot be true:

# %%
light = limits.speed_of_light("NVIDIA H200", max_sm_mhz=1980)
print(f"at most {light.tflops:,.0f} TFLOP/s and {light.gb_per_s:,} GB/s ({light.source})")
for N, ms in ((1024, 0.002), (16384, 3.7), (16384, 2.0)):
    work = limits.work(DEFAULT["square"].full._replace(B=1, Hq=16, Hk=16, Nq=N, Nk=N, d=128, dv=128), False, "fp16")
    said = limits.too_fast(ms, work, light)
    print(f"N = {N:5}, {ms} ms: {work.tflops(ms):6,.0f} TFLOP/s, {work.gb_per_s(ms):6,.0f} GB/s: {said or 'possible'}")

# %% [markdown]
# Operations are counted by visible pairs, $4 d$ for each forward, so that a causal kernel gets no credit for
# what it skips. Bytes are the least that can move. With a warm cache only the operations count, and of what
# is written as much as the L2 holds may still be there.
#
# What was measured, with the kernels of steps 0 to 4: far from light, and how far from one another in one
# record. The ninetieth percentile beside the median says whether a time is one number or several.

# %%
points = [p for p in records.times() if p.dtype == "fp16" and p.has(Nq=4096, d=64) and not p.causal]
print(points[0].device if points else "no record of times")
for p in points:
    print(f"{p.kernel:15} median {p.median_ms:8.3f} ms, P90 {p.p90_ms / p.median_ms - 1:+.1%}, {p.tflops:5.1f} TFLOP/s")
    shape = DEFAULT["square"].full._replace(B=1, Hq=16, Hk=16, Nq=4096, Nk=4096, d=64, dv=64)
    assert limits.too_fast(p.median_ms, limits.work(shape, False, "fp16"), light) is None

# %% [markdown]
# ## Exercises
#
# 1. Which of the mutants above would `np.allclose(O, truth, atol=1e-3)` on the case `square` have let live?
# 2. `one_token` has one query and one key. Which of the bugs in the matrix can it see? Predict, then run.
# 3. A kernel takes 0.08 ms and its launch 0.12 ms, on a device that writes its 256 MiB in 0.065 ms. How many
#    flushes does the clock need in front of it? See `timing.Clock.give_start`.
# 4. Two kernels' ratio is 1.004 with an interval from 0.998 to 1.011. Which is faster?
#
# <details><summary>Solutions</summary>
#
# 1. Those of which the cell below says so: all that `square` does not reach.
# 2. With one key every weight is 1, whatever the scores: what rescales, maps or masks has nothing to get wrong.
#    What loses the only tile, or weighs it without its maximum, shows. The cell below prints which.
# 3. The head start has to be twice the launch: three flushes more than the two that are always there.
# 4. That is not known. What is known is that neither is faster by more than about 1 %, which for most
#    purposes is the better answer.
#
# </details>

# %%
problem = DEFAULT["square"].build("fp32")
truth = judge.reference(problem).anchors["O"].truth
alone = kill_matrix.matrix(kills.bugs, ["one_token"])
for bug in kills.bugs:
    mutant = MUTANTS[bug]
    (outputs,), _ = trial.produced(Graft(mutant.edits), mutant.through, problem, mutant.tile)
    by_allclose = "lives" if np.allclose(outputs["O"], truth, atol=1e-3) else "killed"
    print(f"{bug:28} allclose on square: {by_allclose:8} one_token: {alone.kills.get((bug, 'one_token')) or '-'}")
print(f"{int(2 * 0.12 / 0.065)} flushes more than two")

# %% [markdown]
# ## Sources
#
# - Dao-AILab/flash-attention, `tests/test_flash_attn.py`: a kernel's error bounded by a multiple of the plain
#   formula's at the same precision.
# - Jia, Harman, "An analysis and survey of the development of mutation testing", IEEE TSE 2011.
# - Conover, *Practical Nonparametric Statistics*, 1999, section 3.2: intervals of a median from the sign test.
# - Kalibera, Jones, "Rigorous benchmarking in reasonable time", ISMM 2013.
# - In this repository: `verify/tolerance.py`, `verify/mutants/`, `verify/barriers.py`, `verify/timing.py`,
#   `verify/bench/stats.py`, `verify/bench/limits.py`.
