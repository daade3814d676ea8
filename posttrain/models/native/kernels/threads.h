// What is needed of OpenMP's library, which torch has loaded. Its header is not: clang is often installed without.
#pragma once

extern int omp_get_thread_num(void);
extern int omp_get_num_threads(void);
