"""Lets torchvision be imported beside a CPU build of torch, whose native library it was not built for.

Python imports this at the start of each process that has the folder on its path. Operators that torchvision's
Python decorates are declared before its import; none is called for a text model.
"""

from __future__ import annotations

import os
import sys
from typing import Any

_SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_declared: list[Any] = []


class _BeforeTorchvision:
    """A finder of modules that finds none: it is asked before torchvision is imported."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "torchvision" and not _declared:
            import torch

            library = torch.library.Library("torchvision", "FRAGMENT")
            # They last as long as the library object.
            _declared.append(library)
            for operator in ("nms", "qnms"):
                library.define(operator + _SIGNATURE)


# A program of this environment, ninja, compiles SGLang's hash of pages, or finds that it is compiled.
_programs, _path = os.path.dirname(sys.executable), os.environ.get("PATH", "")
if _programs not in _path.split(os.pathsep):
    os.environ["PATH"] = os.pathsep.join((_programs, _path))
sys.meta_path.insert(0, _BeforeTorchvision())  # type: ignore[arg-type]
