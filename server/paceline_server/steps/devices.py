"""Peak FLOP/s of devices by the name that the driver reports."""

from __future__ import annotations

import re

# Dense BF16 tensor operations per second of one device, without sparsity; FP16 for V100 and T4,
# which have no BF16. The first pattern that matches counts. Sources: NVIDIA's datasheets, which
# give twice the dense value "with sparsity" from Ampere on; AMD's datasheet of the MI300X. Checked
# against torchtitan (`tools/utils.py`, `get_peak_flops`), which rounds them.
_PEAKS = tuple(
    (re.compile(rf"(?<![A-Z0-9]){pattern}(?![A-Z0-9])", re.IGNORECASE), peak)
    for pattern, peak in (
        (r"GB[23]00", 2.5e15),  # GB200 and GB300 NVL72, per GPU
        (r"B[23]00", 2.25e15),  # HGX B200 and B300, per GPU
        (r"GH200", 989.5e12),
        (r"H200 NVL", 835.5e12),
        (r"H200", 989.5e12),
        (r"H[18]00 NVL", 835.5e12),
        (r"H[18]00 PCIe", 756.5e12),
        (r"H[18]00", 989.5e12),
        (r"H20", 148e12),
        (r"A[18]00", 312e12),
        (r"A30", 165e12),
        (r"A40", 149.7e12),
        (r"A10", 125e12),
        (r"L40S", 362e12),
        (r"L40", 181e12),
        (r"L4", 121e12),
        (r"V100-PCIE", 112e12),
        (r"V100", 125e12),
        (r"T4", 65e12),
        (r"MI300X", 1307.4e12),
    )
)


def peak_flops(name: str) -> float | None:
    """Return the dense BF16 FLOP/s of a device; None if it is not known."""
    return next((peak for pattern, peak in _PEAKS if pattern.search(name)), None)
