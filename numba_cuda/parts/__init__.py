"""What kernels are built from: routines of a tile, rules, shapes; each step says which of them it takes."""
