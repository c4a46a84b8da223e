"""What a model takes and how fast it would be, from its configuration alone: before a download, on any machine.

Sizes come from the table of names, memory from the engine's own plan. Speeds are estimates: their formulas are in
`speed`, the hit rates behind them in `hits`, the assumptions about machines in `machines`.
"""
