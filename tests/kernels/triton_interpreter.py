"""Switches Triton to its interpreter where there is no GPU. To be imported before anything that imports triton."""

from __future__ import annotations

import importlib.util
import os

import torch

HAS_TRITON = importlib.util.find_spec("triton") is not None

if HAS_TRITON and not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported first
    from triton.runtime import interpreter

    _patch_tensor = interpreter._patch_lang_tensor

    def _patch_tensor_for_numpy_2_4(tensor, scope):
        """Triton 3.6's interpreter makes loop bounds of one-element arrays, which numpy 2.4 refuses as integers."""
        _patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = _patch_tensor_for_numpy_2_4
