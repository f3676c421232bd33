"""Kernels in C++, for CPUs: built with the package where there is a compiler, and chosen for the machine at run time."""
