"""Tensor parallel styles that overlap communication with computation: change one import line."""

from parallel_styles.mc2_styles import MC2ColwiseParallel, MC2RowwiseParallel
from parallel_styles.parallelize import parallelize_module
from parallel_styles.prepare_module import (
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
)
from parallel_styles.styles import ColwiseParallel, RowwiseParallel, SequenceParallel

__all__ = [
    "ColwiseParallel",
    "MC2ColwiseParallel",
    "MC2RowwiseParallel",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "SequenceParallel",
    "parallelize_module",
]
