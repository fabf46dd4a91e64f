"""Gives the declaration texts of this folder to cffi: `python -m cffi.gen_src exec-python cdef/build.py _native.c`.

The same texts are included by native/stratampi.h, so a prototype that drifts from its definition is a compile error. Only the
wait hook is declared here: `extern "Python"` is cffi's own syntax, not C.
"""

from pathlib import Path

from cffi import FFI

TEXTS = ("status", "setting", "world", "heap", "layout", "coll", "request", "array")
HERE = Path(__file__).resolve().parent

ffibuilder = FFI()
for text in TEXTS:
    ffibuilder.cdef((HERE / f"{text}.h").read_text(encoding="utf-8"))
ffibuilder.cdef('extern "Python" int smpi_py_hook(void);')
ffibuilder.set_source("stratampi._native", '#include "stratampi.h"')
