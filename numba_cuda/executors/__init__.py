"""Where a body is run: compiled on a GPU, emulated on a CPU, or only assembled; and the memory that it meets there."""
