#line 2 "simd_width.metal"
// The width of a SIMD group as the device gives it; every kernel here is written for 32.
// sizes = 1 (a kernel needs an input); width [threads]. Grid: any number of threads.
width[thread_position_in_grid.x] = sizes[0] * int(threads_per_simdgroup);
