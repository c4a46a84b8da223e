"""What `k3mlx bench` measures: the whole model, its parts, whether the figures can be trusted, and their comparison.

A file a measurement; `result.py` is the form of what they find, `tables.py`, `plots.py` and `page.py` show it. No
figure is anything but a measurement of this run. Printing and options are `k3mlx/cli/bench.py`.
"""
