"""Figure 5, calibration and sketch: what copies cost the computing beside them."""

from __future__ import annotations

from strata.simulate.figures.drawing import Drawing, Form, Panel, Series, bar, exactly
from strata.simulate.figures.study import Study, plain

CAPTION = (
    "Calibration: what the constants say, nothing is measured. The paper varies the thread blocks of its I/O kernel "
    "beside a prefill and a decode pass on an H200; its choice of two blocks is the one that the constants hold: 48 "
    "GB/s, less than 5 % of prefill, 10 % of decode. More blocks are not modelled. The copy engine is assumed to cost "
    "nothing."
)
HARDWARE = "h200"


def draw(study: Study) -> Drawing:
    """Bandwidth and slow-downs of each way to copy, from the table."""
    copies = plain(study.table["hardware"][HARDWARE])["copies"]
    bandwidth = [bar(name, exactly(copy["to_device"] / 1e9)) for name, copy in copies.items()]
    shares = [
        Series(phase, [bar(name, exactly(copy[f"{phase}_share"])) for name, copy in copies.items()])
        for phase in ("prefill", "decode")
    ]
    return Drawing(
        [
            Panel("load bandwidth", "way of copying", "GB/s", [Series(HARDWARE, bandwidth)], Form.BARS),
            Panel("speed lost beside a copy", "way of copying", "share of the speed", shares, Form.BARS),
        ]
    )
