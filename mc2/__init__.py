"""Matmuls that run in one kernel with their collective: two fused rules, and the layer for them."""

from mc2.cost_model import CostModel, use_cost_model
from mc2.errors import MC2ConstraintError
from mc2.fused_check import assert_fused
from mc2.kernels import available_kernels, reasons_not_supported
from mc2.linear import MC2Linear
from mc2.measured_cost_model import measure_cost_model

__all__ = [
    "CostModel",
    "MC2ConstraintError",
    "MC2Linear",
    "assert_fused",
    "available_kernels",
    "measure_cost_model",
    "reasons_not_supported",
    "use_cost_model",
]
