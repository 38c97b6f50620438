"""Measurements that a user can repeat: long documents over the tiers, the tree, decoding. `python -m
strata.bench`.

Whatever is compared is measured in turn, in one process, on the same threads; results are medians, and
every bound is printed beside its value. A measurement that did not measure what it says, such as a host hit
that came from the device, is an error, never a number.
"""
