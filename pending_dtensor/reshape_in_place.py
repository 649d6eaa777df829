"""Why a wrapper subclass that has views refuses to change its shape in place.

[Note: views are replayed]
After a write, autograd makes the node of each view of what was written to again. Of a plain tensor
it strides into the storage, whatever shape that is shown in. Of a wrapper subclass, which has none,
it repeats the ops that made the view: on the present shape of the base, if that was changed in
place, and without the change, if it was the view's own. The gradients come out wrong, silently
where the shapes happen to fit: after ``v = x.t(); x.t_()`` on a square ``x`` they are transposed.
"""

from __future__ import annotations

import torch


def refuse_if_autograd_knows_views(name: str, tensor: torch.Tensor, was_viewed: bool) -> None:
    """To be called before a wrapper subclass changes its shape in place.

    Args:
        name: of the op, such as ``transpose_``.
        tensor: the wrapper.
        was_viewed: whether it may have views.

    Raises:
        RuntimeError: it is a view, or may have some, while gradients are recorded.
    """
    is_view = tensor._is_view()
    if not (is_view or was_viewed) or not (tensor.requires_grad or torch.is_grad_enabled()):
        return
    found = "a view" if is_view else "one of which views were taken"
    raise RuntimeError(
        f"Expected a tensor without views to change the shape of in place, got {found} ({name} of "
        f"a {type(tensor).__name__} of shape {tuple(tensor.shape)}): autograd would make the views "
        f"again from the wrong shape, with wrong gradients. Make a new tensor, as "
        f"x = x.transpose(0, 1) does."
    )
