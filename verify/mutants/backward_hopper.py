"""Bugs of the backward pass on Hopper: dS on its way between warpgroups, products read too early, what is forgotten."""

from verify.mutants.mutant import Edit, Mutant

OPS, KERNELS = "numba_cuda/parts/hopper_gradient_ops.py", "numba_cuda/backward_hopper_kernels.py"
STEP = "backward_hopper"  # the kernel
CASES = ("back_gqa", "back_square")


def _backward(name, about, path, function, old, new, **more):
    edits = (Edit(path, function, old, new),)
    return Mutant(name, about, "18.6", "tensor cores", edits, through="step6_flash_v3", dtypes=("fp16", "bf16"),
                  first=CASES, **more)


ENTRIES = (
    _backward(
        "dS_without_its_swizzle", "dS is written in plain order, and the product that reads it undoes a swizzle",
        OPS, "share_gradient", "uint32(128 * row_in_tile + ((row_in_tile & 7) << 4) + 4 * (lane & 3))",
        "uint32(128 * row_in_tile + 4 * (lane & 3))",
    ),
    _backward(
        "dS_not_handed_over", "no fence between a thread's stores of dS and the product that reads them",
        KERNELS, STEP, "                        proxy_fence()\n", "", by_order=True,
    ),
    _backward(
        "dP_read_in_flight", "dS is made of dP while the product that computes it runs",
        KERNELS, STEP, "wait_dP(dP)", "pass",
    ),
    _backward(
        "hopper_V_not_waited_for", "the product dP reads V before the copy engine has brought it",
        KERNELS, STEP, "ptx.mbarrier_wait(V_bar, uint32(0))", "pass", by_order=True,
        bug="copies_not_waited_for",
    ),
    _backward(
        "hopper_D_missing", "of one in four elements of dP, D is not subtracted",
        OPS, "gradient", "S[4 * n] * (dP[4 * n] - pair[0])", "S[4 * n] * dP[4 * n]", bug="D_missing",
    ),
    _backward(
        "hopper_lse_of_the_neighbour", "a lane's second query takes the lse of its first",
        OPS, "weigh", "ex2(S[4 * n + 1] * scale_log2 - pair[1])", "ex2(S[4 * n + 1] * scale_log2 - pair[0])",
        bug="lse_of_the_first_column",
    ),
    _backward(
        "hopper_weights_swapped", "the two weights of a register change places on their way into dV",
        OPS, "pack_weights", "packed(S[32 * half + 2 * n], S[32 * half + 2 * n + 1])",
        "packed(S[32 * half + 2 * n + 1], S[32 * half + 2 * n])", bug="P_pairs_swapped",
    ),
    _backward(
        "hopper_dK_not_scaled", "dK is not multiplied by the scale",
        KERNELS, STEP, "grad.multiply(dK_acc, scale, NO)", "pass", bug="scale_missing_in_dK",
    ),
)  # fmt: skip
