"""Gluon's barrier of all threads of a program, whose name changed between Triton 3.6 and 3.7."""

from __future__ import annotations

from triton.experimental.gluon import language as gl

thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
