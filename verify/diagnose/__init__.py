"""Names the likeliest bug of a failing kernel: of many faulty fp64 references, the one that is wrong as it is."""
