"""Triton kernels: portable (NVIDIA, AMD), tested on a CPU through Triton's interpreter, measured on an H200."""

REQUIRES = "triton"
